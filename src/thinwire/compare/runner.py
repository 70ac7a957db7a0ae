"""Compare strategies: the same task, data order, initial weights and seeds for each, one run after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from thinwire.comm.world import find_world
from thinwire.common.files import scratch_folder
from thinwire.common.messages import print_line
from thinwire.compare import baseline
from thinwire.compare.comparison import Comparison, Job, open_comparison
from thinwire.compare.display import Display
from thinwire.compare.files import read_summary
from thinwire.compare.finish import check_failures, print_results, write_results
from thinwire.compare.machine_lock import machine_lock
from thinwire.compare.results import Results
from thinwire.config import RunConfig
from thinwire.errors import RunError, Stopped, ThinwireError
from thinwire.launch.agent import start_ranks
from thinwire.launch.failures import WorldLost
from thinwire.launch.launcher import stopped_by_signals
from thinwire.run.network import network
from thinwire.run.records import RunFolder

Start = Callable[[RunConfig, Path], object]  # does a run on all ranks; progress goes to the file


def compare(specs: list[str], options: dict[str, Any]) -> Results | None:
    """Run every strategy with every seed, print a table, write results.json and report.html.

    `options` are those that the user gave on the command line, by name. The runs are done by the world that torchrun,
    srun or mpirun made, whose ranks other than 0 get None; without one, by ranks that are started here.
    """
    world = find_world()
    if world is not None and world.size > 1:
        from thinwire.compare.in_world import compare_in_world

        return compare_in_world(specs, options, world)
    with stopped_by_signals():
        return do_comparison(lambda: open_comparison(specs, options), own_ranks)


@contextmanager
def own_ranks(comparison: Comparison) -> Iterator[Start]:
    """Ranks that are started on this machine, on hosts with a link if that is asked for."""
    with network(comparison.config) as lab:
        yield lambda config, progress_file: start_ranks(config, lab, progress_file)


def do_comparison(
    make: Callable[[], Comparison], ranks: Callable[[Comparison], AbstractContextManager[Start]]
) -> Results:
    """Do a comparison, when no other one runs on this machine, and report it."""
    make()  # report mistakes before waiting for the lock
    with machine_lock():
        comparison = make()  # again: while waiting, another comparison may have taken the folder
        run_jobs(comparison, ranks)
        results = write_results(comparison)
        print_results(results)
        check_failures(comparison, results)
        return results


def run_jobs(comparison: Comparison, ranks: Callable[[Comparison], AbstractContextManager[Start]]) -> None:
    """Do every job that is not finished, then those of the baseline, if it is to be run.

    A job that fails is recorded, and the others go on.
    """
    comparison.save()
    kept = f"what is finished is kept. To go on: {comparison.resume_command}"
    try:
        with ranks(comparison) as start, scratch_folder() as scratch:
            may_follow = comparison.baseline is None
            display = Display(comparison.jobs, comparison.results, scratch / "progress.json", may_follow)
            with display.shown():
                _run_unfinished(comparison, comparison.jobs, start, display)
                if comparison.baseline is None and (more := comparison.decide_baseline()):
                    display.add(more)
                    _run_unfinished(comparison, more, start, display)
    except (Stopped, KeyboardInterrupt):
        write_results(comparison)
        raise Stopped(f"stopped; {kept}") from None
    except WorldLost as error:
        write_results(comparison)
        raise RunError(f"{error}; {kept}") from None
    decision = comparison.baseline
    if decision is not None and not decision.run and decision.seconds is not None:
        print_line(baseline.left_out_message(decision, comparison.resume_command))


def _run_unfinished(comparison: Comparison, jobs: list[Job], start: Start, display: Display) -> None:
    for job in jobs:
        if not comparison.is_finished(job):
            display.begin(job)
            _run(comparison, job, start, display.progress_file)
            display.end()


def _run(comparison: Comparison, job: Job, start: Start, progress_file: Path) -> None:
    """Do one job; if it fails, keep its error in the comparison."""
    run = RunFolder(comparison.folder / job.place)
    comparison.errors.pop(job.place, None)
    try:
        config = comparison.config.run(job.spec, job.seed, run.path, resume=run.config.exists())
        if not config.resume:
            RunFolder.new(config)
        start(config, progress_file)
        read_summary(run.summary)
    except (Stopped, WorldLost):
        raise
    except ThinwireError as error:
        comparison.errors[job.place] = str(error)
    except Exception as error:
        comparison.errors[job.place] = f"{type(error).__name__}: {error}"
    comparison.save()
