"""Compare strategies: the same task, data order, initial weights and seeds for each, one run after the other."""

from __future__ import annotations

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
from thinwire.errors import Stopped, ThinwireError, UsageError
from thinwire.launch.agent import start_ranks
from thinwire.launch.launcher import stopped_by_signals
from thinwire.netlab import Lab
from thinwire.run.network import network
from thinwire.run.records import RunFolder


def compare(specs: list[str], options: dict[str, Any]) -> Results:
    """Run every strategy with every seed, print a table, write results.json and report.html.

    `options` are those that the user gave on the command line, by name.
    """
    world = find_world()
    if world is not None and world.size > 1:
        raise UsageError("compare starts ranks on this machine; run it alone, not under torchrun, srun or mpirun")
    open_comparison(specs, options)  # report mistakes before waiting for the lock
    with stopped_by_signals(), machine_lock():
        comparison = open_comparison(
            specs, options
        )  # again: while waiting, another comparison may have taken the folder
        run_jobs(comparison)
        results = write_results(comparison)
        print_results(results)
        check_failures(comparison, results)
        return results


def run_jobs(comparison: Comparison) -> None:
    """Do every job that is not finished, then those of the baseline, if it is to be run.

    A job that fails is recorded, and the others go on.
    """
    comparison.save()
    try:
        with network(comparison.config) as lab, scratch_folder() as scratch:
            may_follow = comparison.baseline is None
            display = Display(comparison.jobs, comparison.results, scratch / "progress.json", may_follow)
            with display.shown():
                _run_unfinished(comparison, comparison.jobs, lab, display)
                if comparison.baseline is None and (more := comparison.decide_baseline()):
                    display.add(more)
                    _run_unfinished(comparison, more, lab, display)
    except (Stopped, KeyboardInterrupt):
        write_results(comparison)
        raise Stopped(f"stopped; what is finished is kept. To go on: {comparison.resume_command}") from None
    decision = comparison.baseline
    if decision is not None and not decision.run and decision.seconds is not None:
        print_line(baseline.left_out_message(decision, comparison.resume_command))


def _run_unfinished(comparison: Comparison, jobs: list[Job], lab: Lab | None, display: Display) -> None:
    for job in jobs:
        if not RunFolder(comparison.folder / job.place).summary.exists():
            display.begin(job)
            _run(comparison, job, lab, display.progress_file)
            display.end()


def _run(comparison: Comparison, job: Job, lab: Lab | None, progress_file: Path) -> None:
    """Do one job; if it fails, keep its error in the comparison."""
    run = RunFolder(comparison.folder / job.place)
    comparison.errors.pop(job.place, None)
    try:
        config = comparison.config.run(job.spec, job.seed, run.path, resume=run.config.exists())
        if not config.resume:
            RunFolder.new(config)
        start_ranks(config, lab, progress_file)
        read_summary(run.summary)
    except Stopped:
        raise
    except ThinwireError as error:
        comparison.errors[job.place] = str(error)
    except Exception as error:
        comparison.errors[job.place] = f"{type(error).__name__}: {error}"
    comparison.save()
