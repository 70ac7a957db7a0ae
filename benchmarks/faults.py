"""Real faults at random times in runs of every strategy; what each run then does, and whether anything is left behind.

    python benchmarks/faults.py --out FILE [--count 200] [--seed 0] [--lanes 3] [--only TEXT …] [--again]
    python benchmarks/faults.py --out FILE --list | --short
    python benchmarks/faults.py --render

A cell is a strategy, a fault and a seed. The seed decides when the fault happens: while ranks start, in training,
while a checkpoint is written, or while the ranks leave. The run with the fault, and if it ended the same command again
with --resume=auto, must give the files of an undisturbed run, bit for bit. FILE gets each cell's result when it is
there, and another call does the cells that are missing. --again repeats those with a problem, and those that an earlier
revision did. --short is for tests: six faults after the start, with shorter pauses. --render draws docs/reliability.md
from docs/reliability.json. Runs need root or user namespaces, and gcc.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

import faults_render  # noqa: E402
from conditions import Found, conditions, revision, today, write_json  # noqa: E402
from faults_box import Box, Ended, Running  # noqa: E402
from faults_kinds import FAULTS, RATE_MBIT, changing_links, clock_env, truncate_newest  # noqa: E402

from tests import programs  # noqa: E402
from thinwire.common.formats import format_seconds  # noqa: E402
from thinwire.errors import Stopped  # noqa: E402
from thinwire.launch.launcher import stopped_by_signals  # noqa: E402
from thinwire.run.records import read_rows  # noqa: E402

RANKS = 3
STRATEGIES = [
    "data_parallel", "data_parallel(reducer=error_feedback(maxnorm(bits=4)))",
    "data_parallel(reducer=powersgd(rank=2))", "alone", "local_sgd", "diloco(every=4, fragments=2)",
    "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=1)", "ab(sync_every=3, warmup=1, cutoff=0.7)",
    "ist(local_steps=8)", "local_parallel(blocks=3)", "pipeline(blocks=3)",
    "sequence([ab(cutoff=0.7), data_parallel(reducer=maxnorm(bits=4))])", "auto",
]  # fmt: skip
PHASES = {"start": 0.2, "training": 0.4, "saving": 0.2, "leaving": 0.2}  # when a fault happens, and how often
NUM_CHECKPOINTS = 9  # that a run writes: every 5 of 42 steps
SHORT = {  # six faults with two strategies
    "data_parallel": (
        "kill -9 of a rank",
        "kill -9 of the launcher",
        "disk full at a checkpoint",
        "newest checkpoint cut off",
    ),
    "diloco(every=4, fragments=2)": ("a rank stopped for 20 s", "link down for 10 s"),
}
SHORT_PAUSES = 0.1  # of a fault's seconds
ATTEMPTS = 4  # a fault that comes after the run's end is tried again at another time
HANG_SECONDS, HANG_TIMES = 120.0, 5.0  # a run that takes so much longer than the undisturbed one waits for ever


class Cell(NamedTuple):
    """One fault in one run."""

    strategy: str
    fault: str
    seed: int

    @property
    def key(self) -> str:
        """What names it in the results."""
        return f"{self.strategy} | {self.fault} | {self.seed}"


class Moment(NamedTuple):
    """When a fault happens: in a phase, after a part of it; or at the beginning of a checkpoint."""

    phase: str
    part: float

    def wait(self, run: Running, out: Path, times: Found, of_ranks: bool, deadline: float) -> bool:
        """Wait for it; False if the run has ended before."""
        seen: set[str] = set()

        def checkpoints() -> int:
            seen.update(path.name for path in out.glob("checkpoints/step-*"))
            return len(seen)

        if self.phase == "start":
            if of_ranks and not run.wait_until(run.ranks, deadline):
                return False
            begin, length = run.seconds(), times["start"] - times["ranks"] if of_ranks else times["start"]
        elif self.phase == "training":
            run.wait_until((out / "config.toml").exists, deadline)
            begin, length = run.seconds(), times["training"]
        elif self.phase == "saving":
            number = 1 + int(self.part * NUM_CHECKPOINTS)
            return run.wait_until(lambda: checkpoints() >= number, deadline)
        else:
            run.wait_until((out / "summary.json").exists, deadline)
            begin, length = run.seconds(), times["leaving"]
        run.wait_until(lambda: run.seconds() >= begin + self.part * length, deadline)
        return not run.has_ended()


@dataclass
class Matrix:
    """The results file, which threads add to, and the undisturbed runs."""

    path: Path
    data: Found
    short: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.reference_locks: dict[str, threading.Lock] = {}

    def add(self, key: str, found: Found) -> None:
        """Add the result of a cell."""
        with self.lock:
            self.data["cells"][key] = found
            write_json(self.path, self.data)

    def reference(self, strategy: str, on_links: bool) -> Found:
        """The undisturbed run of a strategy: what its files hold, and how long it took."""
        key = f"{strategy} | {'links' if on_links else 'loopback'}"
        with self.lock:
            own = self.reference_locks.setdefault(key, threading.Lock())
        with own:
            if self.data["undisturbed"].get(key, {}).get("revision") != revision():
                found = {**undisturbed(strategy, on_links, self.short), "revision": revision()}
                with self.lock:
                    self.data["undisturbed"][key] = found
                    write_json(self.path, self.data)
            return dict(self.data["undisturbed"][key])


@contextmanager
def box() -> Iterator[Box]:
    """A box in a new folder, which is removed."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        with closing(Box(folder / "b")) as made:
            yield made
    finally:
        shutil.rmtree(folder)


def settings(place: Box, strategy: str, on_links: bool, short: bool = False) -> list[str]:
    """The arguments of `thinwire train`. On links every rank has a host of its own."""
    about = {
        "--task": "faults_task:noisy", "--strategy": strategy, "--checkpoint-every": 5,
        "--ranks": 2 if short else RANKS, "--out": place.disk / "run",
    }  # fmt: skip
    if on_links:
        about["--link"] = f"{RATE_MBIT}mbit"
    return [str(word) for pair in about.items() for word in pair]


def content(out: Path) -> Found:
    """What must be equal: the hash of every file of weights, and what each line of metrics.jsonl says of training."""
    files = sorted(out.glob("*.safetensors"))
    names = ("step", "epoch", "train_loss", "test_loss", "test_accuracy")
    return {
        "weights": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "rows": json.dumps([[row.get(name) for name in names] for row in read_rows(out / "metrics.jsonl")]),
    }


def undisturbed(strategy: str, on_links: bool, short: bool) -> Found:
    """Two runs without a fault: one that starts Python, one from a process that has imported torch. They are equal.

    If `short`, the second alone.
    """
    found = {}
    for name, quick in (("python", False), ("quick", True))[short:]:
        with box() as place:
            times = _undisturbed_times(place, settings(place, strategy, on_links, short), quick)
            found[name] = {"times": times, **content(place.disk_seen / "run")}
    for name in ("weights", "rows"):
        if any(one[name] != found["quick"][name] for one in found.values()):
            raise SystemExit(f"two undisturbed runs of {strategy} differ in their {name}: {found}")
    return {**found["quick"], "times": {name: one["times"] for name, one in found.items()}}


def _undisturbed_times(place: Box, given: list[str], quick: bool) -> Found:
    """When a run's ranks are there, when training starts, how long it takes, how long ranks leave; and all of it."""
    out, at = place.disk_seen / "run", {}
    with place.run(given, {}, quick) as run:
        run.wait_until(run.ranks, HANG_SECONDS)
        at["ranks"] = run.seconds()
        for name, file in (("start", out / "config.toml"), ("summary", out / "summary.json")):
            run.wait_until(file.exists, HANG_SECONDS)
            at[name] = run.seconds()
        ended = run.end(2 * HANG_SECONDS)
    if ended.code != 0 or ended.left:
        raise SystemExit(f"an undisturbed run, {given}, ended with {ended}")
    at |= {"training": at["summary"] - at["start"], "leaving": ended.seconds - at["summary"], "all": ended.seconds}
    return {name: round(value, 2) for name, value in at.items()}


def perform(cell: Cell, matrix: Matrix) -> Found:
    """Do a cell: the fault, if necessary the rest of the run, and the comparison."""
    reference = matrix.reference(cell.strategy, FAULTS[cell.fault].on_links)
    for attempt in range(ATTEMPTS):
        with box() as place:
            found = _attempt(cell, place, reference, random.Random(f"{cell.key} | {attempt}"), matrix.short)
        if found["did"]:
            return {**found, "date": today(), "revision": revision()}
    return {"result": "came too late", "problems": [], "date": today(), "revision": revision()}


def _attempt(cell: Cell, place: Box, reference: Found, choose: random.Random, short: bool) -> Found:
    fault, out = FAULTS[cell.fault], place.disk_seen / "run"
    phases = dict(PHASES) if not fault.ends_run or "launcher" in cell.fault else {"training": 0.6, "saving": 0.4}
    if short:
        phases.pop("start", None)
        fault = fault._replace(seconds=SHORT_PAUSES * fault.seconds)
    moment = Moment(choose.choices(list(phases), list(phases.values()))[0], round(choose.random(), 3))
    restarts = ["--restarts", "1"] if cell.fault == "kill -9 of a rank" and choose.random() < 0.5 else []
    given = settings(place, cell.strategy, fault.on_links, short)
    quick = moment.phase != "start" and not fault.clock
    times = reference["times"]["quick" if quick else "python"]
    hang_seconds = HANG_SECONDS / 4 if short else HANG_SECONDS
    env, deadline = clock_env(place) if fault.clock else {}, hang_seconds + HANG_TIMES * times["all"] + fault.seconds
    is_cut = "cut off" in cell.fault
    with place.run([*given, *restarts], env, quick) as run:
        has_come = moment.wait(run, out, times, "launcher" not in cell.fault, deadline)
        if is_cut:
            has_come = has_come and run.wait_until(lambda: any(out.glob("checkpoints/*/*.json")), deadline)
        at = run.seconds()
        did = fault.inject(run, choose, fault.seconds) if has_come else ""
        ended = run.end(deadline)
    if is_cut:
        did = did and truncate_newest(place, out, choose)
    all_ended, seconds, left = [ended], ended.seconds, list(ended.left)
    if did and ended.code not in (0, None):
        with place.run([*given, "--resume=auto"], env, quick=not fault.clock) as run:
            all_ended.append(run.end(deadline))
        seconds, left = seconds + all_ended[1].seconds, left + all_ended[1].left
    if fault.ends_run and not is_cut and ended.code == 0:
        did = ""  # the run had ended before
    problems = found_problems(cell, did, all_ended, content(out) if did else {}, reference) if did else []
    if did and not problems:
        left += place.files_left(out)
    about = {"problems": problems + [f"left behind: {one}" for one in left], "message": message_of(all_ended[0])}
    about = json.loads(json.dumps(about).replace(f"{place.folder}/", ""))  # a folder of this machine
    return {
        "moment": moment._asdict(), "did": did, "result": result_of(all_ended), "restarts": len(restarts) // 2,
        **about, "seconds": round(seconds, 1), "lost_seconds": round(seconds - times["all"], 1),
        "ended_after_seconds": round(ended.seconds - at, 1),
    }  # fmt: skip


def result_of(ended: Sequence[Ended]) -> str:
    """What the run did: it went on by itself, or ended and was resumed."""
    return "went on" if ended[0].code == 0 else "ended, and was resumed"


def message_of(ended: Ended) -> str:
    """The message with which a run ended."""
    lines = [line for line in ended.text.splitlines() if line.startswith("thinwire:")]
    return lines[-1].removeprefix("thinwire: ") if ended.code and lines else ""


def found_problems(cell: Cell, did: str, all_ended: Sequence[Ended], found: Found, reference: Found) -> list[str]:
    """What is not as promised: hangs, unclear ends, wrong weights and records."""
    fault, first, last = FAULTS[cell.fault], all_ended[0], all_ended[-1]
    problems = []
    if any(ended.code is None for ended in all_ended):
        return [f"hang: {last.text[-2000:]}"]
    if first.code and "launcher" not in cell.fault:
        killed = re.findall(r"process \d+", did)
        missing = [word for word in (fault.says, *killed) if word not in message_of(first)]
        if first.code != 1 or missing or "Traceback" in first.text:
            problems.append(f"unclear end: code {first.code}, without {missing}: {first.text[-2000:]}")
    if last.code != 0:
        return [*problems, f"not resumed: code {last.code}: {last.text[-2000:]}"]
    if "cut off" in cell.fault and "is damaged" not in last.text:
        problems.append(f"unclear: nothing is said of the damage: {last.text[-2000:]}")
    for name in ("weights", "rows"):
        if found[name] != reference[name]:
            problems.append(f"wrong {name}: {found[name]}")
    return problems


def chosen_cells(count: int, first_seed: int, only: Sequence[str]) -> list[Cell]:
    """The first `count` cells, seed after seed: every strategy with every fault, in a random order."""
    found: list[Cell] = []
    for seed in range(first_seed, first_seed + count):
        some = [Cell(strategy, fault, seed) for strategy in STRATEGIES for fault in FAULTS]
        some = [cell for cell in some if all(text in cell.key for text in only)]
        random.Random(seed).shuffle(some)
        found += some
        if len(found) >= count or not some:
            break
    return found[:count]


def short_cells(seed: int) -> list[Cell]:
    """Those of --short."""
    return [Cell(strategy, fault, seed) for strategy, faults in SHORT.items() for fault in faults]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BENCHMARKS.parent / "docs" / "reliability.json")
    parser.add_argument("--count", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--lanes", type=int, default=3, help="cells that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no cell begins later")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cells whose key contains all of these")
    parser.add_argument("--again", action="store_true", help="also those with a problem, and of other revisions")
    parser.add_argument("--short", action="store_true", help="six faults, for tests")
    parser.add_argument("--list", action="store_true", help="show the cells and run nothing")
    parser.add_argument("--render", action="store_true", help="draw docs/reliability.md; run nothing")
    options = parser.parse_args()
    if options.render:
        faults_render.draw(BENCHMARKS.parent / "docs")
        return
    saved = json.loads(options.out.read_text()) if options.out.exists() else {"cells": {}, "undisturbed": {}}
    matrix = Matrix(options.out, {**saved, **conditions("cpu")}, options.short)
    cells = short_cells(options.seed) if options.short else chosen_cells(options.count, options.seed, options.only)

    def is_done(cell: Cell) -> bool:
        found = saved["cells"].get(cell.key)
        good = found and not found["problems"] and found["result"] != "came too late"
        return bool(good and found["revision"] == revision()) if options.again else bool(found)

    todo = [cell for cell in cells if not is_done(cell)]
    if options.list:
        print("\n".join(f"{'to do' if cell in todo else 'done':>6}  {cell.key}" for cell in cells))
    elif todo:
        with closing_server():
            run_cells(todo, matrix, options.lanes, time.monotonic() + 60 * options.minutes)
    print(faults_render.summary(matrix.data))


@contextmanager
def closing_server() -> Iterator[None]:
    """The process that starts quick runs."""
    server = programs.start_server()
    try:
        yield
    finally:
        server.communicate(timeout=20)


def run_cells(todo: Sequence[Cell], matrix: Matrix, lanes: int, deadline: float) -> None:
    """Run cells on some threads; a line each. Ctrl-C and SIGTERM end what runs, and its results do not count.

    `programs.start_server` has been called.
    """
    begin, seconds = time.monotonic(), []
    subprocess.run([*programs.PYTHON, "-m", "thinwire", "--version"], check=True, stdout=subprocess.DEVNULL)
    stopped = threading.Event()

    def one(cell: Cell) -> None:
        if time.monotonic() > deadline or stopped.is_set():
            return
        start = time.monotonic()
        found = perform(cell, matrix)
        if stopped.is_set():
            return
        matrix.add(cell.key, found)
        seconds.append(time.monotonic() - start)
        left = (len(todo) - len(seconds)) * statistics.mean(seconds) / lanes
        so_far = f"{len(seconds)}/{len(todo)}, {format_seconds(time.monotonic() - begin)}, about {format_seconds(left)}"
        verdict = "; ".join(text[:300] for text in found["problems"]) or found["result"]
        print(f"{so_far} left:  {cell.key} | {found.get('moment', {}).get('phase', '')}: {verdict}", flush=True)

    with changing_links(), ThreadPoolExecutor(lanes) as pool, stopped_by_signals():
        try:
            for done in [pool.submit(one, cell) for cell in todo]:
                done.result()
        except BaseException:
            stopped.set()
            for place in list(Box.all):
                place.end_processes()
            raise


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this in the background ignores it
    try:
        main()
    except (KeyboardInterrupt, Stopped):
        sys.exit("stopped; the next call goes on")
