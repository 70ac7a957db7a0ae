"""Accuracy on CIFAR-10, table by table: runs what is missing of a table, in as many calls as it takes.

    python benchmarks/cifar10/run.py ab --data DIR --out DIR2 [--minutes 9] [--seeds 2] [--tune] [--epochs 30]
                                        [--scale full|small] [--device auto|cpu|cuda] [--unpack FILE] [--pack FILE]
                                        [--only TEXT …] [--lanes 4]
    python benchmarks/cifar10/run.py ab --out DIR2 --list
    python benchmarks/cifar10/run.py --out DIR2 --render

A table is one of tables.py, or all. Each of its cells is a run of thinwire in a folder of its own below DIR2/cells;
results go to DIR2/results.json. The model is tested once, when the run ends. --tune runs the table, and further
candidates, on training images that are held out: for choosing settings; its results are not on the page.

With --minutes, a cell begins if it fits into what is left of them, the longest first. When none fits, the next one
runs until an epoch's end, and goes on from its checkpoint in the next call. --lanes 4 runs four cells at a time, which
fills a GPU that one cell does not; what they print goes to DIR2/logs. --only picks the cells whose row, as --list shows
it, or whose key contains one of the texts; of several texts, the first one's cells run first. Where the machine is lost
between calls, --pack writes results and checkpoints to FILE.0, FILE.1, … (8 of 16 MiB at most), and --unpack reads them
into an empty DIR2; see packing.py for what fits. Cells in a copy of docs/results.json as DIR2/results.json count as
finished.
--render adds the results to docs/results.json and draws docs/results.md. THINWIRE_REVISION names the revision where
there is no git. Hosts need root, or user namespaces.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))

from cifar10 import packing, render  # noqa: E402
from cifar10.cells import Cell, cells  # noqa: E402
from cifar10.results import START_SECONDS, Results, label, record  # noqa: E402
from cifar10.stopping import stopped_in_time  # noqa: E402
from cifar10.tables import SCALES, TABLES  # noqa: E402

from thinwire.common.formats import format_seconds  # noqa: E402
from thinwire.compare.files import read_summary  # noqa: E402
from thinwire.errors import RunError, Stopped, ThinwireError  # noqa: E402
from thinwire.launch.launcher import launch, stopped_by_signals  # noqa: E402
from thinwire.run.records import RunFolder, is_free  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--data", type=Path, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells; what is there is continued")
    parser.add_argument("--scale", choices=list(SCALES), default="full", help="small: small models on a CPU")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for the whole call; 0 = run nothing")
    parser.add_argument("--seeds", type=int, help="runs of each row; default: those of the scale")
    parser.add_argument("--epochs", type=int, help="default: those of the scale, which the page shows")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="these, by row or key, in this order")
    parser.add_argument("--lanes", type=int, default=1, help="cells that run at the same time")
    parser.add_argument("--tune", action="store_true", help="test on held-out training images; also candidates")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--list", action="store_true", help="show the cells and run nothing")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="first read what --pack wrote, if --out is empty")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="at the end write FILE.0, FILE.1, …")
    parser.add_argument("--parts", type=int, default=8, help="most files of --pack")
    parser.add_argument("--part-mib", type=float, default=16.0, help="most MiB of such a file")
    parser.add_argument("--render", action="store_true", help="draw docs/results.md with these results; run nothing")
    options = parser.parse_args()
    if options.tune and options.scale == "small":
        parser.error("--tune is for the full scale: the page shows the small one's results on held-out images")
    if options.unpack and is_free(options.out):
        packing.unpack(options.unpack, options.out)
    call = Call(options)
    if options.render:
        render.add_and_draw(call.results, BENCHMARKS.parent / "docs")
    elif options.list:
        call.show()
    elif options.minutes > 0:
        if options.data is None:
            parser.error("--data is missing: the folder of the CIFAR-10 files")
        call.run_all()
    if options.pack:
        for name in packing.pack(options.out, call.begun(), options.pack, options.parts, options.part_mib):
            print(f"the checkpoint of {name} does not fit: it will begin anew")


class Call:
    """One call of this program: the cells of its tables, and the time that it has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        self.deadline = time.monotonic() + 60 * options.minutes
        self.results = Results(self.out / "results.json")
        self.tried: set[str] = set()  # keys of cells that were begun in this call
        self.failed: set[str] = set()
        self.cells = self.of_tables(TABLES if options.table == "all" else [options.table])

    def of_tables(self, names: Iterable[str]) -> list[Cell]:
        """The cells of some tables, each once: tables share cells."""
        options, seeds = self.options, self.options.seeds or SCALES[self.options.scale].seeds
        found = [one for n in names for one in cells(n, options.scale, seeds, options.epochs, options.tune)]
        chosen = [c for text in options.only for c in found if text in f"{label(c)}, seed {c.seed} {c.key}"]
        return list({cell.key: cell for cell in chosen}.values())

    def estimate(self, cell: Cell) -> float:
        """Seconds that the rest of a cell will take."""
        return self.results.estimate(cell, self.out)

    def has_begun(self, cell: Cell) -> bool:
        """Whether a cell has a checkpoint to go on from, and no result."""
        steps = packing.complete_steps(cell.folder(self.out), cell.row.ranks)
        return bool(steps) and not self.results.finished(cell)

    def begun(self) -> list[tuple[RunFolder, int]]:
        """The folders of cells of all tables that have begun, with their number of ranks."""
        return [(cell.folder(self.out), cell.row.ranks) for cell in self.of_tables(TABLES) if self.has_begun(cell)]

    def show(self) -> None:
        """Print every cell, its state, and how long it took or will take."""
        for cell in self.cells:
            result = self.results.finished(cell)
            state = f"{result['accuracy']:.2f} %" if result else "begun" if self.has_begun(cell) else "to do"
            seconds = result["seconds"] if result else self.estimate(cell)
            print(
                f"{state:>8}  {'' if result else 'about '}{format_seconds(seconds):>8}  {label(cell)}, seed {cell.seed}"
            )
        left = sum(self.estimate(cell) for cell in self.cells if not self.results.finished(cell))
        print(f"about {format_seconds(left)} left")

    def run_all(self) -> None:
        """Run cells until all are finished or the time is over."""
        with stopped_by_signals():
            if self.options.lanes > 1:
                self.run_lanes()
            else:
                while cell := self.next_cell():
                    self.run(cell)
        left = [cell for cell in self.cells if not self.results.finished(cell)]
        print(f"{len(self.cells) - len(left)} of {len(self.cells)} cells are finished, {len(self.failed)} failed")

    def run_lanes(self) -> None:
        """Run several cells at a time, each in a process of its own that writes to a log of its own."""
        running: dict[BaseProcess, Cell] = {}
        try:
            while True:
                while len(running) < self.options.lanes and (cell := self.next_cell()):
                    process = multiprocessing.get_context("fork").Process(target=self.run_in_lane, args=(cell,))
                    process.start()
                    running[process] = cell
                if not running:
                    return
                wait([process.sentinel for process in running])
                for process in [one for one in running if one.exitcode is not None]:
                    self.say_end_of(running.pop(process), process.exitcode or 0)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.join()

    def run_in_lane(self, cell: Cell) -> None:
        """In a process of its own: run a cell. The exit code is 1 if it failed."""
        log = self.out / "logs" / f"{cell.key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            self.run(cell)
        except Stopped as stopped:
            sys.exit(str(stopped))
        sys.exit(1 if self.failed else 0)

    def say_end_of(self, cell: Cell, exit_code: int) -> None:
        """Print how a cell of a lane ended."""
        self.results.read()
        result = self.results.finished(cell)
        if exit_code:
            self.failed.add(cell.key)
        ended = f"{result['accuracy']:.2f} %, {format_seconds(result['seconds'])}" if result else "stopped in time"
        print(f"{label(cell)}, seed {cell.seed}: {'failed, see logs' if exit_code else ended}", flush=True)

    def next_cell(self) -> Cell | None:
        """The cell to run now: of those that fit, one that has begun, or the longest; else one to begin or continue.

        Cells that --only picks have an order already.
        """
        left = self.deadline - time.monotonic()
        cells = [c for c in self.cells if not self.results.finished(c) and c.key not in self.tried]
        if len(self.options.only) == 1:
            cells.sort(key=lambda cell: (not self.has_begun(cell), -self.estimate(cell)))
        fitting = [cell for cell in cells if self.estimate(cell) <= left]
        some_epochs = [cell for cell in cells if self.estimate(cell) / 5 + START_SECONDS <= left]
        cell = next(iter(fitting + some_epochs), None)
        if cell:
            self.tried.add(cell.key)
            print(f"{label(cell)}, seed {cell.seed}: about {format_seconds(self.estimate(cell))}", flush=True)
        return cell

    def run(self, cell: Cell) -> None:
        """Run a cell, or the rest of it, until the time is over."""
        folder, config = cell.folder(self.out), cell.config(self.options.data, self.out, self.options.device)
        try:
            with stopped_in_time(folder, config, self.deadline) as watch:
                launch(config)
        except Stopped:
            if not watch.has_stopped:
                raise
            print("stopped in time; the next call goes on with it")
            self.deadline = time.monotonic()
        except ThinwireError as error:
            print(f"failed: {error}")
            self.failed.add(cell.key)
            if isinstance(error, RunError):  # else it cannot be run with this version
                self.results.add({"key": cell.key, "row": label(cell), "scale": cell.scale, "failed": str(error)})
        else:
            gpu = "cuda" if "gpu" in (summary := read_summary(folder.summary))["versions"] else "cpu"
            self.results.add(record(cell, summary, gpu))
            shutil.rmtree(folder.checkpoints)
            for model in folder.path.glob("*.safetensors"):
                model.unlink()


if __name__ == "__main__":
    try:
        main()
    except Stopped:
        sys.exit("stopped; the next call goes on")
