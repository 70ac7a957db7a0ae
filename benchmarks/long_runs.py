"""Does anything grow in a long run? Memory, threads, descriptors, groups, objects and files, over 10,000 steps.

    python benchmarks/long_runs.py [--steps 10000] [--only NAME …] [--out long-runs.json] [--resume]
    python benchmarks/long_runs.py --render docs

Each strategy trains a tiny model on 2 ranks (daso on 4), as `thinwire train` does: a test and a checkpoint every 500
steps, a row of metrics every 100. The run is stopped after 500 steps and resumed; the process that resumes it trains
the rest. tw.attach and tw.rounds run in a loop that saves and loads their state every 500 steps, and ends and begins
the exchange every 1,000. After every 1,000 steps each rank looks at its own process. The first 2,000 steps are warm-up:
what grows there is what a run fills once. Growth is that from the first sample after it to the last, per 1,000 steps,
of the rank where it is largest. A run is flat if in its last 3,000 steps no count grows (of objects, by at most 5 per
1,000 steps) and memory by at most 128 KiB per 1,000 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import NamedTuple

import long_runs_render
from conditions import Found, command, conditions, write_json
from long_runs_rank import EPOCH_STEPS, SAMPLE_EVERY, STOP_AT, attached, in_rounds, trained

from thinwire.config import RunConfig
from thinwire.errors import RunError, Stopped
from thinwire.launch.agent import start_ranks

FIRST_STEPS = 500  # after which the first process of a run is stopped


class Case(NamedTuple):
    """What is trained for long."""

    name: str
    spec: str = ""  # empty for a loop of one's own
    ranks: int = 2


CASES = [
    Case("data_parallel", "data_parallel(reducer=error_feedback(maxnorm(bits=4)), bucket_mb=0.001)"),
    Case("data_parallel, powersgd", "data_parallel(reducer=powersgd(rank=1))"),
    Case("alone", "alone"),
    Case("local_sgd", "local_sgd(every=8)"),
    Case("diloco", "diloco(every=16, fragments=2, wait=2)"),
    Case("daso", "daso(ranks_per_node=2, warmup_epochs=2, cooldown_epochs=2)", 4),
    Case("ab", "ab(group_size=1, cutoff=0.5, sync_every=100, warmup=100, rebound=10, climb=10)"),
    Case("ist", "ist(local_steps=16)"),
    Case("local_parallel", "local_parallel(window=2, microbatches=2)"),
    Case("pipeline", "pipeline(microbatches=2)"),
    Case("sequence", "sequence([local_sgd, ab(group_size=1, cutoff=0.5), data_parallel])"),
    Case("auto", "auto(loss_allowed=0)"),
    Case("tw.attach"),
    Case("tw.rounds"),
]
BY_NAME = {case.name: case for case in CASES}
PROGRAMS = {"tw.attach": attached, "tw.rounds": in_rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--only", nargs="+", default=list(BY_NAME), choices=list(BY_NAME), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("long-runs.json"))
    parser.add_argument("--resume", action="store_true", help="run what is missing in --out")
    parser.add_argument("--render", type=Path, metavar="FOLDER", help="write the table of this folder's page")
    options = parser.parse_args()
    if options.render:
        long_runs_render.render(options.render)
        return
    if options.steps < 2 * EPOCH_STEPS or options.steps % EPOCH_STEPS:
        parser.error(f"--steps {options.steps}; possible: {2 * EPOCH_STEPS} or more, in multiples of {EPOCH_STEPS}")
    if options.out.exists() and not options.resume:
        parser.error(f"{options.out} has results already; --resume adds to them, another --out begins anew")
    results = json.loads(options.out.read_text()) if options.out.exists() else {**conditions("cpu"), "rows": []}
    if options.out.exists() and command() not in results["command"]:
        results["command"] += f"\n{command()}"
    done = {row["name"] for row in results["rows"] if "failed" not in row and row["steps"] == options.steps}
    get_temp_dir()  # that of multiprocessing is removed later than ours
    with tempfile.TemporaryDirectory(prefix="long-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # of the ranks: what they leave there is counted
        measure_all([name for name in options.only if name not in done], options, results)
    long_runs_render.show(results)


def measure_all(names: Sequence[str], options: argparse.Namespace, results: Found) -> None:
    """Run cases one after the other, and write the results after each."""
    for number, name in enumerate(names, 1):
        row = measured(BY_NAME[name], options.steps)
        results["rows"] = [one for one in results["rows"] if one["name"] != name] + [row]
        write_json(options.out, results)
        print(f"{number} of {len(names)} {long_runs_render.row_summary(row)}", flush=True)


def measured(case: Case, steps: int) -> Found:
    """Run a case; returns its samples by rank, or why it failed."""
    row: Found = {"name": case.name, "spec": case.spec, "ranks": case.ranks, "steps": steps}
    every = 1000 if steps >= 5000 else EPOCH_STEPS
    os.environ[SAMPLE_EVERY] = str(every)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(case, steps, Path(folder))
        except Stopped:
            raise SystemExit("stopped; --resume runs what is missing") from None
        except RunError as error:
            return {**row, "failed": str(error)}
        samples = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    return {**row, "seconds": round(time.monotonic() - begin, 1), "samples": samples}


def run(case: Case, steps: int, folder: Path) -> None:
    """Train to the end, and on the way stop and resume a run of thinwire's own."""
    settings: Found = {
        "task": f"long_runs_rank:tiny(ranks={case.ranks})", "ranks": case.ranks, "steps": steps, "out": folder / "run",
        "checkpoint_every": 500, "test_every": "500steps", "log_every": 100, "device": "cpu",
    }  # fmt: skip
    if not case.spec:
        start_ranks(RunConfig(**settings), None, folder / "progress", PROGRAMS[case.name])
        return
    config = RunConfig(strategy=case.spec, **settings)
    os.environ[STOP_AT] = str(FIRST_STEPS)
    try:
        start_ranks(config, None, folder / "progress", trained)
    except RunError as error:
        if "in order to be resumed" not in str(error):
            raise
    finally:
        del os.environ[STOP_AT]
    start_ranks(config.model_copy(update={"resume": True}), None, folder / "progress", trained)


if __name__ == "__main__":
    main()
