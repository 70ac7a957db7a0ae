"""Ranks are killed and started at random while an elastic run goes on, on hosts with a slow link.

    python benchmarks/elastic.py --minutes 10 --epochs 110 --model 'mlp(width=512, depth=3)' --out docs/elastic.json

Every 20 s one of four ranks is killed (-9), or one is started in a free place. Undisturbed runs of other seeds show how
much the loss varies by itself. At the end the recorded membership is run again, and compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from thinwire import netlab
from thinwire.netlab import Host

PLACES, LEAST, PORT = 4, 2, 29400
THINWIRE = [sys.executable, "-m", "thinwire"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass
class Rank:
    """A process of a run, and where it writes."""

    process: subprocess.Popen[Any]
    folder: Path
    place: int


@dataclass
class Run:
    """An elastic run whose ranks are processes on hosts, or on this machine."""

    settings: argparse.Namespace
    seed: int
    folder: Path
    address: str
    hosts: list[Host | None]
    ranks: list[Rank] = field(default_factory=list)

    def start(self, place: int, min_ranks: int = 1) -> Rank:
        """Start a rank in a place."""
        out = self.folder / f"rank-{len(self.ranks)}"
        command = [
            *THINWIRE, "train", "--elastic", self.address, "--min-ranks", str(min_ranks), "--out", str(out),
            "--strategy", self.settings.strategy, "--model", self.settings.model, "--epochs", str(self.settings.epochs),
            "--seed", str(self.seed), "--test-every", "0", "--patience", self.settings.patience, "--lr", "0.05",
        ]  # fmt: skip
        log, host = (self.folder / f"{out.name}.log").open("w"), self.hosts[place]
        options: dict[str, Any] = {
            "stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "env": ENV,
            "start_new_session": True,
        }  # fmt: skip
        process = subprocess.Popen(command, **options) if host is None else host.start(command, **options)
        self.ranks.append(Rank(process, out, place))
        return self.ranks[-1]

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.process.poll() is None]

    def finished(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.process.poll() == 0]

    def end(self) -> None:
        """Kill what is left."""
        for rank in self.living():
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()


def result_of(run: Run) -> tuple[Path, dict[str, Any]]:
    """The folder and the summary of a rank that finished."""
    done = run.finished()
    if not done:
        raise SystemExit(f"no rank finished; see the logs in {run.folder}")
    folder = done[0].folder
    return folder, json.loads((folder / "summary.json").read_text())


def undisturbed(settings: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """A run that nothing happens to; its numbers do not depend on the link, so it has none."""
    folder.mkdir()
    run = Run(settings, seed, folder, f"127.0.0.1:{PORT + seed}", [None] * PLACES)
    try:
        for place in range(PLACES):
            run.start(place, min_ranks=PLACES)
        while run.living():
            time.sleep(0.2)
        _, summary = result_of(run)
        return {"seed": seed, **{key: summary[key] for key in ("test_accuracy", "test_loss", "rounds", "samples")}}
    finally:
        run.end()


def disturbed(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run in which ranks are killed and started at random, and its replay."""
    folder.mkdir()
    chance, events = random.Random(settings.seed), []
    with netlab.hosts(PLACES, settings.link) as lab:
        run = Run(settings, settings.seed, folder, f"{lab[0].address}:{PORT}", list(lab))
        try:
            for place in range(PLACES):
                run.start(place, min_ranks=PLACES)
            time.sleep(settings.every)  # until all have started
            begin, next_at = time.monotonic(), time.monotonic()
            while run.living() and not run.finished():
                if time.monotonic() >= next_at and time.monotonic() - begin < 60 * settings.minutes:
                    next_at += settings.every
                    events.append({"second": round(time.monotonic() - begin), **disturb(run, chance)})
                    print(events[-1], flush=True)
                time.sleep(0.2)
            seconds = time.monotonic() - begin
            for rank in run.living():
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(60)
        finally:
            run.end()
    kept, summary = result_of(run)
    again = subprocess.run([*THINWIRE, "replay", str(kept)], env=ENV, capture_output=True, text=True)
    print(again.stdout, again.stderr)
    logs = "".join((folder / f"{rank.folder.name}.log").read_text() for rank in run.ranks)
    rows = [json.loads(line) for line in (kept / "membership.jsonl").read_text().splitlines()]
    sent = {row["purpose"]: 0 for row in summary["sent_by_this_rank"]}
    for row in summary["sent_by_this_rank"]:
        sent[row["purpose"]] += row["wire_bytes"]
    return {
        **{key: summary[key] for key in ("test_accuracy", "test_loss", "rounds", "samples", "samples_lost")},
        "seconds": round(seconds), "kills": sum("killed" in event for event in events),
        "joins": sum("started" in event for event in events), "came_back": logs.count("it comes again as a new rank"),
        "rounds_with_a_loss": sum(bool(row["lost"]) for row in rows),
        "ranks_let_in": sum(len(row["joined"]) for row in rows),
        "replay_is_equal": again.returncode == 0, "replay": again.stdout.strip() or again.stderr.strip()[-300:],
        "sent_by_one_rank": sent, "events": events,
    }  # fmt: skip


def disturb(run: Run, chance: random.Random) -> dict[str, Any]:
    """Kill a rank, or start one in a free place."""
    living = run.living()
    free = sorted(set(range(PLACES)) - {rank.place for rank in living})
    if free and (len(living) <= LEAST or chance.random() < 0.5):
        rank = run.start(chance.choice(free))
        return {"started": rank.place}
    rank = chance.choice(living)
    rank.process.send_signal(signal.SIGKILL)
    rank.process.wait()
    return {"killed": rank.place}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=20, help="seconds between two disturbances")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5, help="undisturbed runs")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbed run")
    parser.add_argument("--link", default="50mbit")
    parser.add_argument("--patience", default="20s")
    parser.add_argument("--strategy", default="diloco(every=4)")
    parser.add_argument("--model", default="mlp(width=256, depth=3)")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    shown = {key: str(value) for key, value in vars(settings).items() if key != "out"}
    before = json.loads(settings.out.read_text()) if settings.out is not None and settings.out.exists() else {}
    known = before["undisturbed"] if before.get("settings") == shown else []  # what happens to ranks does not matter
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        one = disturbed(settings, Path(folder) / "disturbed")
        print({key: value for key, value in one.items() if key != "events"}, flush=True)
        others = known
        for seed in range(len(known), settings.seeds):
            others.append(undisturbed(settings, seed, Path(folder) / f"undisturbed-{seed}"))
            print(others[-1], flush=True)
    losses = [other["test_loss"] for other in others]
    mean, spread = statistics.mean(losses), statistics.stdev(losses)
    reach = float(student.ppf(0.975, len(losses) - 1)) * spread * (1 + 1 / len(losses)) ** 0.5
    found = {
        "settings": shown, "disturbed": one,
        "undisturbed": others, "loss_expected": [mean - reach, mean + reach],
        "loss_within_noise": mean - reach <= one["test_loss"] <= mean + reach,
    }  # fmt: skip
    print(table(found))
    if settings.out is not None:
        settings.out.write_text(json.dumps(found, indent=1) + "\n")


def table(found: dict[str, Any]) -> str:
    """What was found, as Markdown."""
    one, others = found["disturbed"], found["undisturbed"]
    low, high = found["loss_expected"]
    accuracies = [other["test_accuracy"] for other in others]
    rows = [
        ("duration", f"{one['seconds'] / 60:.1f} min, {one['rounds']} rounds"),
        ("ranks killed (-9), ranks started", f"{one['kills']}, {one['joins']}"),
        ("rounds in which a rank was lost", str(one["rounds_with_a_loss"])),
        ("ranks that were given up although they lived, and came again", str(one["came_back"])),
        ("samples lost with their ranks", f"{one['samples_lost']} of {one['samples']}"),
        ("test loss", f"{one['test_loss']:.4f}; undisturbed: {low:.4f} to {high:.4f} (95 %, {len(others)} seeds)"),
        ("test accuracy", f"{one['test_accuracy']:.2f}; undisturbed: {min(accuracies):.2f} to {max(accuracies):.2f}"),
        ("replay of the record equal bit for bit", "yes" if one["replay_is_equal"] else "no"),
    ]  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    main()
