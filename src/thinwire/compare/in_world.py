"""A comparison on the ranks of a world that torchrun, srun or mpirun made: rank 0 leads, the others do as it says."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from thinwire.comm.addresses import AUTO
from thinwire.comm.world import World
from thinwire.common.messages import print_line
from thinwire.compare.comparison import Comparison, WorldShape, open_comparison
from thinwire.compare.results import Results
from thinwire.compare.runner import Start, do_comparison
from thinwire.errors import Stopped, ThinwireError, UsageError
from thinwire.launch.launcher import check_machine, stopped_by_signals
from thinwire.launch.world_ranks import LAST_SECONDS, WorldRanks
from thinwire.run.network import LinkReport
from thinwire.run.tables import measured_words

OWN = ("data", "iface", "secret_file")  # options that may differ between machines
MET = {"iface": AUTO, "secret_file": None}  # how ranks meet if nothing else is said
NOT_HERE = ("ranks", "nodes", "link")  # options that are about ranks which thinwire starts itself


def compare_in_world(specs: list[str], options: dict[str, Any], world: World) -> Results | None:
    """Do a comparison as one rank of a world. Rank 0 gets the results; the others get None, or end with its code."""
    iface, secret_file = str(options.get("iface", AUTO)), options.get("secret_file")
    check_machine(iface, secret_file, world)
    with stopped_by_signals():
        ranks = WorldRanks(world, iface, secret_file, options.get("patience"))
        shared = {name: str(value) for name, value in sorted(options.items()) if name not in OWN}
        asked = ranks.gather([specs, shared])
        if world.rank == 0:
            return _lead(ranks, specs, options, asked)
        own = {name: str(options[name]) for name in OWN if options.get(name) is not None}
        _follow(ranks, {**MET, **own})
        return None


def _follow(ranks: WorldRanks, own: dict[str, Any]) -> None:
    """Do what rank 0 says, and end as it does, without a message of one's own."""
    try:
        code = ranks.follow(own)
        with suppress(Stopped):  # the launcher stops the others once it sees that rank 0 has failed
            time.sleep(LAST_SECONDS if code else 0)
    except (Stopped, KeyboardInterrupt) as stopped:
        ranks.leave(str(stopped) or "stopped by SIGINT")
        code = Stopped.exit_code
    except Exception as error:
        ranks.leave(f"{type(error).__name__}: {error}")
        raise
    if code:
        sys.exit(code)


def _lead(ranks: WorldRanks, specs: list[str], options: dict[str, Any], asked: list[Any]) -> Results:
    code = 1
    try:
        _check(ranks.world, options, asked)
        shape = WorldShape(launcher=ranks.world.launcher, ranks_by_node=list(Counter(ranks.nodes).values()))
        results = do_comparison(
            lambda: open_comparison(specs, _restarted(options), shape), lambda comparison: _ranks(ranks, comparison)
        )
        code = 0
        return results
    except ThinwireError as error:
        code = error.exit_code
        raise
    except KeyboardInterrupt:
        code = Stopped.exit_code
        raise
    finally:
        ranks.end(code)


def _check(world: World, options: dict[str, Any], asked: list[Any]) -> None:
    for name in NOT_HERE:
        if name in options:
            raise UsageError(
                f"--{name} is about ranks that thinwire starts on this machine, and {world.launcher} has started "
                f"{world.size} ranks; leave out --{name}, or run thinwire compare without {world.launcher}"
            )
    others = [rank for rank, one in enumerate(asked) if one != asked[0]]
    if others:
        raise UsageError(f"ranks {others} were given other strategies or options than rank 0; give all the same")


def _restarted(options: dict[str, Any]) -> dict[str, Any]:
    """The options; if the launcher has started the ranks again, what they have done is resumed.

    Interface and secret are not those of the comparison which is resumed: the ranks have met without knowing it.
    """
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and "out" in options
    found = {**options, "resume": True} if again else options
    return {**MET, **found} if found.get("resume") else found


@contextmanager
def _ranks(ranks: WorldRanks, comparison: Comparison) -> Iterator[Start]:
    """The ranks of the world, once the link between its nodes is measured."""
    link = LinkReport()
    may_run = comparison.baseline is None or any(not comparison.is_finished(job) for job in comparison.jobs)
    if len(set(ranks.nodes)) > 1 and may_run:
        link = LinkReport(
            *ranks.run(comparison.config.run("", 0, comparison.folder, False), link, None, "measure_link")
        )
        print_line(measured_words([{"nodes": len(set(ranks.nodes)), **link.summary_fields}]))
    yield lambda config, progress_file: ranks.run(config, link, progress_file)
