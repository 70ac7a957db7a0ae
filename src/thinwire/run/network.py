"""The network of a run: the hosts and the link that the config asks for, or a warning that there are none."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thinwire import netlab
from thinwire.comm.addresses import AUTO, addresses_of
from thinwire.comm.secret import read_secret
from thinwire.comm.world import find_world, place
from thinwire.common.formats import format_rate
from thinwire.common.messages import print_line
from thinwire.config import RunConfig
from thinwire.errors import RunError, UsageError

# Between real nodes, as it is; as asked for; measured otherwise; no link was made.
LinkState = Literal["measured", "shaped", "off", "not shaped"]
MOST_PASSED_FILES = 253  # the most that one process can pass to another in a message (SCM_MAX_FD)
MEASURE_SECONDS = 2.0  # at most, for the link between nodes of a world that exists
FILES, FILES_PER_RANK = 40, 7  # the most open files in the launcher, and for each rank: measured, with a margin


class LinkReport(NamedTuple):
    """What the launcher knows of the network that a run is on."""

    on_hosts: bool = False  # ranks are on netlab's hosts, whose counters count nothing else
    state: LinkState | None = None
    rate_mbit: float | None = None  # measured
    latency_ms: float | None = None

    @property
    def summary_fields(self) -> dict[str, Any]:
        """Its fields of summary.json."""
        rate, latency = self.rate_mbit, self.latency_ms
        measured = {"rate_mbit": rate, "latency_ms": latency} if rate is not None else None
        return {"link_state": self.state, "link_measured": measured}

    def combined_with(self, before: LinkState | None) -> LinkReport:
        """The report of a run that was resumed: the worse of both states."""
        order: list[LinkState | None] = [None, "measured", "shaped", "off", "not shaped"]
        return self._replace(state=max(self.state, before, key=order.index))


def check_ranks(ranks: int) -> None:
    """Raise UsageError for more ranks than this machine can start."""
    by_start = (MOST_PASSED_FILES - 4) // 2  # each rank is given both ends of a pipe for every rank, and 4 files
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_limit = by_start if limit == resource.RLIM_INFINITY else max(1, (limit - FILES) // FILES_PER_RANK)
    if ranks <= min(by_start, by_limit):
        return
    needed = FILES + FILES_PER_RANK * min(ranks, by_start)
    raised = f" (with at most {limit} open files; ulimit -n {needed} allows more)" if by_limit < by_start else ""
    raise UsageError(
        f"--ranks {ranks}: one machine starts {min(by_start, by_limit)} at most{raised}; for more, start them on "
        "several machines with torchrun or srun, or try the method on threads of one process: tw.simulate in Python"
    )


def check_network(config: RunConfig) -> None:
    """Raise UsageError for numbers of ranks or hosts, an interface or a link that are not possible."""
    check_ranks(config.ranks or 1)
    if config.iface != AUTO:
        addresses_of(config.iface)
    read_secret(config.secret_file)
    if config.link is not None:
        netlab.parse_link(config.link)
    if config.nodes is None and config.link is None:
        return
    option = "--link" if config.link is not None else "--nodes"
    ranks = config.ranks or 1
    if config.iface != AUTO:
        raise UsageError(
            f"--iface {config.iface}, but the hosts of {option} have a network of their own; leave out one"
        )
    if ranks == 1:
        raise UsageError(f"{option} is about several ranks, and there is one; try --ranks 4")
    if config.nodes == 1 and config.link is not None:
        raise UsageError("--link joins nodes, and --nodes 1 puts all ranks on one; try --nodes 2")
    place(ranks, config.nodes or ranks)


@contextmanager
def network(config: RunConfig) -> Iterator[netlab.Lab | None]:
    """The hosts that a config asks for; None if it asks for none or, unless it is strict, if they cannot be made."""
    if config.nodes is None and config.link is None:
        yield None
        return
    with ExitStack() as stack:
        lab = None
        try:
            lab = stack.enter_context(netlab.hosts(config.nodes or config.ranks or 1, config.link))
            if lab.untaken:
                print_line(
                    f"warning: hosts keep this machine's {', '.join(lab.untaken)}: times may differ on other machines"
                )
        except netlab.NotAllowed as error:
            if config.strict:
                raise
            print_line(f"warning: {error}. The run continues without: times are not shaped")
        yield lab


def check_link(lab: netlab.Lab | None, config: RunConfig) -> LinkReport:
    """Measure the link; if it is off, print a warning or, with a strict config, raise RunError."""
    if lab is None:
        return LinkReport(state="not shaped" if config.link is not None else None)
    if lab.link is None:
        return LinkReport(on_hosts=True)
    measured = lab.measure()
    if measured.is_off(lab.link):
        measured = lab.measure()  # the machine may have been busy for a moment
    report = LinkReport(True, "off" if measured.is_off(lab.link) else "shaped", *measured)
    if report.state == "off":
        found = f"{format_rate(measured.rate_mbit)} Mbit/s and {measured.latency_ms:.2f} ms were measured"
        message = f"--link {config.link}, but {found}"
        if config.strict:
            raise RunError(f"{message}; the machine may be too busy or too slow for it: try a slower link")
        print_line(f"warning: {message}")
    return report


def measure_link(config: RunConfig, link: LinkReport, progress_file: Path | None = None) -> list[Any]:
    """The link between the nodes of the world that this process is in, as a LinkReport in JSON. Collective."""
    from thinwire.comm.join import join
    from thinwire.comm.link_probe import measure_ring
    from thinwire.run.startup import use_device

    with join(None, config.patience, use_device(config, find_world()), config.iface, config.secret_file) as comm:
        found = measure_ring(comm, MEASURE_SECONDS)
        return list(LinkReport(False, "measured", *found) if found and len(set(comm.nodes)) > 1 else LinkReport())
