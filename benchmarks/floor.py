"""How close does each method come to what its wire allows? Measured steps against compute and wire floor, in one run.

    python benchmarks/floor.py [--device auto|cpu|cuda] [--links 1gbit 10gbit none 100mbit] [--only PART …]
                               [--out speed.json] [--resume [--stale]] [--minutes M] [--seconds 4] [--ranks 4]
    python benchmarks/floor.py --render docs

Ranks are on hosts of their own, one each, joined by the link; for daso there are two on each host. `none` is the
loopback interface. For each row, the table has what the busiest rank sends in a step (by the ledger), the wire floor
(bytes of the busiest host ÷ nominal rate), and the time of a step: the median over rounds of whole periods. Before and
after each row, a loop written by hand computes the same without exchange on all ranks at once. The bound is
max(compute, floor), or compute + floor where a method blocks. All rows are measured on 1gbit, the main ones on the
other links; `--only` takes rows whose name is one of its words, or contains one that is no row's name, on each link. A
row that fails is shown with its reason.

Each row is added to the file when it is done, with its date and the revision of the code. `--resume` measures what is
missing there, `--resume --stale` also what is of another revision. `--render docs` draws docs/speed.md and its pictures
from docs/speed-gpu.json and docs/speed-cpu.json. Hosts need root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import floor_render
from conditions import Found, chosen_kernels, command, hardware, revision, today, versions
from floor_processes import free_ports, started, threads_of, why
from floor_results import LINKS, Results
from floor_rows import BY_NAME, Row, by_hosts, selected

from thinwire import kernels, netlab
from thinwire.errors import UsageError

DEFAULTS = {"cuda": ("resnet18", 128), "cpu": ("mlp(width=1024, depth=3)", 16)}  # model, and batch of a rank
ROW_LIMIT_SECONDS, START_LIMIT_SECONDS = 150, 90  # without a result for this long, a row has failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["1gbit", "10gbit", "none", "100mbit"])
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of rows; 'trainer' is one of them")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", help="a name from 'thinwire list models'")
    parser.add_argument("--batch-size", type=int, help="of a rank")
    parser.add_argument("--seconds", type=float, default=4.0, help="to measure each row, after its warm-up")
    parser.add_argument("--minutes", type=float, default=60.0, help="for everything; then what was found is shown")
    parser.add_argument("--out", type=Path, help="default: speed-gpu.json or speed-cpu.json")
    parser.add_argument("--resume", action="store_true", help="measure what is missing in --out")
    parser.add_argument("--stale", action="store_true", help="with --resume: also what is of another revision")
    parser.add_argument("--render", type=Path, metavar="FOLDER", help="draw the page in this folder, measure nothing")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stale and not options.resume:
        parser.error("--stale is for --resume")
    check(options, parser)
    try:
        if options.job:
            run_job(json.loads(options.job.read_text()))
        elif options.render:
            floor_render.render(options.render)
        else:
            measure_all(options)
    except UsageError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("stopped; --resume measures what is missing", file=sys.stderr)
        sys.exit(130)


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse numbers that are not above zero, and words that no row has in its name."""
    for name in ("ranks", "batch_size", "seconds", "minutes"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}; possible: more than 0")
    known = [*BY_NAME, "trainer"]
    for word in options.only:
        if not any(word in name for name in known):
            parser.error(f"--only {word}: no row has that in its name; possible: {', '.join(known)}")


def run_job(job: Found) -> None:
    """In a process of its own: measure the trainer alone, or be one rank."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "case" in job:
        from floor_trainer import CASES, measure_case

        case = next(case for case in CASES[job["device"]] if case.name == job["case"])
        found = measure_case(case, torch.device(job["device"], 0), Path(job["folder"]))
        Path(job["folder"], "row-0.json").write_text(json.dumps(found))
    else:
        from floor_rank import measure_rows

        measure_rows(job)


class Measuring:
    """The measurements of one command."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        self.device = results.data["device"]
        self.end = time.monotonic() + 60 * options.minutes
        self.num_left, self.took = 0, [5.0 + options.seconds]  # rows, and seconds of each so far

    def job(self, **more: object) -> Found:
        """What every process must know."""
        same = {key: self.results.data[key] for key in ("device", "model", "batch_size")}
        return {**same, "budget": self.options.seconds, "limit": ROW_LIMIT_SECONDS, **more}

    def stamp(self, ranks: int) -> Found:
        """The conditions of one measurement, with so many ranks."""
        same = {"date": today(), "revision": revision(), "threads": threads_of(ranks), "seconds": self.options.seconds}
        return same | chosen_kernels()

    def add_row(self, found: Found) -> None:
        """Add a row to the results."""
        self.results.add_row({**found, **self.stamp(self.options.ranks)})

    def say(self, text: str) -> None:
        """One line about what is done, with the time that is left."""
        self.num_left -= 1
        left = self.num_left * sum(self.took) / len(self.took)
        print(f"{text}   [{self.num_left} left, about {left / 60:.1f} minutes]", flush=True)

    def rows(self, link: str, rows: list[Row], lab: Sequence[netlab.Host] | None) -> None:
        """Measure rows on hosts that exist. When one fails, the ranks are started again for those after it."""
        while rows and time.monotonic() < self.end:
            with tempfile.TemporaryDirectory() as folder:
                job = self.job(link=link, rows=[row.name for row in rows], ports=free_ports(len(rows)), folder=folder)
                done, reason = self._watch(job, lab)
            rows = rows[done:]
            if reason and rows:
                self.add_row({"link": link, "row": rows[0].name, "failed": reason})
                self.say(f"{link}: {rows[0].name} failed: {reason}")
                rows = rows[1:]

    def _watch(self, job: Found, lab: Sequence[netlab.Host] | None) -> tuple[int, str]:
        """Start the ranks and add their results; returns how many rows were done, and why not all of them."""
        folder, done, since = Path(job["folder"]), 0, time.monotonic()
        with started(job, self.options.ranks, lab) as processes:
            while done < len(job["rows"]):
                time.sleep(0.1)
                if (folder / f"row-{done}.json").exists():
                    found = json.loads((folder / f"row-{done}.json").read_text())
                    self.add_row(found)
                    self.took.append(time.monotonic() - since)
                    self.say(f"{found['link']}: {found['row']}: {floor_render.row_summary(found)}")
                    done, since = done + 1, time.monotonic()
                elif time.monotonic() > self.end:
                    return done, ""
                elif any(process.poll() for process in processes):
                    time.sleep(1)  # for what the others write
                    return done, why(folder)
                elif time.monotonic() - since > ROW_LIMIT_SECONDS + (0 if done else START_LIMIT_SECONDS):
                    return done, f"no result after {time.monotonic() - since:.0f} s"
            with suppress(subprocess.TimeoutExpired):  # all results are here already
                for process in processes:
                    process.wait(START_LIMIT_SECONDS)
        return done, ""

    def trainer(self, name: str) -> None:
        """Measure the trainer alone with one model."""
        with (
            tempfile.TemporaryDirectory() as folder,
            started(self.job(case=name, folder=folder), 1, None) as (process,),
        ):
            try:
                process.wait(max(1.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return
            file = Path(folder, "row-0.json")
            found = json.loads(file.read_text()) if file.exists() else {"name": name, "failed": why(Path(folder))}
        self.results.add_trainer({**found, **self.stamp(1)})
        self.say(f"trainer alone: {name}: {found.get('failed') or floor_render.trainer_summary(found)}")


def measure_all(options: argparse.Namespace) -> None:
    """Measure everything that was asked for, and show the tables."""
    about = facts(options)
    out = options.out or Path("speed-gpu.json" if about["device"] == "cuda" else "speed-cpu.json")
    results = Results(out, about, options.resume)
    measuring = Measuring(options, results)
    wanted = revision() if options.stale else None  # None: any
    cases = [name for name in trainer_names(about["device"], options.only) if not results.has_trainer(name, wanted)]
    rows = {link: selected(link, options.only, about["device"]) for link in options.links}
    rows = {link: [row for row in own if not results.has_row(link, row.name, wanted)] for link, own in rows.items()}
    measuring.num_left = len(cases) + sum(map(len, rows.values()))
    print(
        f"{measuring.num_left} measurements, about {measuring.num_left * measuring.took[0] / 60:.0f} minutes",
        flush=True,
    )
    for name in cases:
        if time.monotonic() < measuring.end:
            measuring.trainer(name)
    for link, own in rows.items():
        for hosts, part in by_hosts(own, options.ranks, link).items():
            on_link(measuring, link, hosts, part)
    floor_render.show(results.data)
    print(f"results in {out}")


def on_link(measuring: Measuring, link: str, hosts: int, rows: list[Row]) -> None:
    """Make the hosts, measure the link, and measure rows on it."""
    if not hosts:
        measuring.rows(link, rows, None)
        return
    try:
        with netlab.hosts(hosts, link) as lab:
            measuring.results.add_rate(link, hosts, lab.measure().rate_mbit)
            measuring.rows(link, rows, lab)
    except netlab.NotAllowed as error:
        for row in rows:
            measuring.add_row({"link": link, "row": row.name, "failed": str(error)})
        measuring.say(f"{link}: {error}")


def trainer_names(device: str, only: list[str]) -> list[str]:
    """The cases of the trainer alone; with --only, all of them if it has the word trainer."""
    from floor_trainer import CASES

    return [case.name for case in CASES[device]] if not only or "trainer" in only else []


def facts(options: argparse.Namespace) -> Found:
    """What the results depend on."""
    import torch
    from floor_loops import make_model

    kernels.check_choice()
    has_gpu = torch.cuda.is_available()
    device = options.device if options.device != "auto" else "cuda" if has_gpu else "cpu"
    if device == "cuda" and not has_gpu:
        sys.exit("--device cuda, but torch finds no GPU here; use --device cpu")
    model, batch_size = DEFAULTS[device]
    model = options.model or model
    return {
        "date": today(),
        "commands": [command()],
        "device": device,
        "hardware": hardware(device),
        "versions": versions(),
        "model": model,
        "parameters": sum(p.numel() for p in make_model(model).parameters()),
        "batch_size": options.batch_size or batch_size,
        "ranks": options.ranks,
        **chosen_kernels(),
    }


if __name__ == "__main__":
    main()
