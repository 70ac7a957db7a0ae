"""Predicted against measured: seconds and bytes of every strategy on links and worlds that nothing was fitted to.

python benchmarks/plan_check.py --json docs/plan-check.json    # about 6 minutes on 2 cores
python benchmarks/plan_check.py --render                       # the table in docs/plan.md, from docs/plan-check.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from thinwire import netlab
from thinwire.comm.world import place
from thinwire.config import RunConfig
from thinwire.netlab import parse_link
from thinwire.plan.machine import measure_machine
from thinwire.plan.predict import Epochs, predict_epochs
from thinwire.plan.recorded_run import record_run
from thinwire.plan.timing import time_steps
from thinwire.plan.wire import Wire, lab_frames
from thinwire.plan.workload import TaskWorkload
from thinwire.tasks.loading import load_task

DOCS = Path(__file__).parent.parent / "docs"
SPECS = [
    "data_parallel", "data_parallel(reducer=maxnorm)", "data_parallel(reducer=maxnorm(bits=4))",
    "data_parallel(reducer=powersgd(rank=4))", "data_parallel(reducer=global_randk)", "local_sgd(every=4)",
    "diloco(every=4)", "diloco(every=8, fragments=4)", "daso(warmup_epochs=1, cooldown_epochs=1)", "ab(cutoff=0.3)",
    "ist(local_steps=4)", "local_parallel(blocks=2)", "pipeline(blocks=2)",
]  # fmt: skip
SETTINGS = {"task": "synthetic", "batch_size": 64, "lr": 0.05, "optimizer": "sgd", "epochs": 4}
EPOCHS, STEPS, SKIPPED = 4, 8, 1  # the first epoch makes connections, and is not counted
SECONDS_BOUND, BYTES_BOUND = 0.10, 0.01


class World(NamedTuple):
    """A link of each node, ranks and nodes, and a model."""

    link: str
    ranks: int
    nodes: int
    width: int

    def __str__(self) -> str:
        return f"{self.link} {self.ranks}x{self.nodes} width {self.width}"

    @property
    def settings(self) -> dict:
        return {**SETTINGS, "model": f"mlp(width={self.width}, depth=3)"}


WORLDS = [
    World("20mbit", 2, 2, 384), World("300mbit", 2, 2, 384), World("300mbit", 2, 2, 1024),
    World("100mbit,10ms", 2, 2, 384), World("100mbit", 3, 3, 384), World("100mbit", 4, 2, 384),
    World("300mbit", 4, 2, 1024),
]  # fmt: skip


def measured(world: World, specs: list[str]) -> dict[str, dict]:
    """Run the specs one after the other on hosts of a link."""
    case = json.dumps({"settings": world.settings, "specs": specs, "epochs": EPOCHS, "steps": STEPS})
    placed = place(world.ranks, world.nodes)
    with netlab.hosts(world.nodes, link=world.link) as hosts:
        processes = []
        for rank, node in enumerate(placed):
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world.ranks), "MASTER_ADDR": hosts[0].address,
                "LOCAL_RANK": str(placed[:rank].count(node)), "LOCAL_WORLD_SIZE": str(placed.count(node)),
                "MASTER_PORT": "29500", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, str(Path(__file__).with_name("plan_rank.py")), case]
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(hosts[node].start(command, env=env, stdout=out, text=True))
        assert processes[0].stdout is not None
        rows = [json.loads(line) for line in processes[0].stdout]
        for process in processes:
            process.wait(60)
    return {row["spec"]: row for row in rows}


def predicted(world: World, spec: str, wire: Wire) -> Epochs:
    """What the plan's engine says of the same run."""
    config = RunConfig(**world.settings)
    training = TaskWorkload(config, load_task(config.task, None, 0)).training(world.ranks, EPOCHS, STEPS)
    recorded = record_run(spec, training, place(world.ranks, world.nodes))
    return predict_epochs(recorded, time_steps(spec, training, recorded, 0.5), wire)


def wire_of(world: World) -> Wire:
    link, machine = parse_link(world.link), measure_machine(world.ranks)
    return Wire(
        link, lab_frames(link, link.latency_ms > 0), machine.cores, is_one_machine=True,
        hop_seconds=machine.hop_seconds, busy_hop_seconds=machine.busy_hop_seconds, slowdown=machine.slowdown,
    )  # fmt: skip


def compare(world: World, spec: str, guess: Epochs, real: dict) -> dict:
    """A row: sums over the epochs that count, of what was predicted and measured."""
    row: dict = {"strategy": spec, "world": str(world)}
    if "seconds" not in real:
        return {**row, "error": real.get("error", "did not run")}
    pairs = {
        "seconds": guess.seconds, "waiting": guess.waiting, "kernel": guess.kernel_between_bytes,
        "wire": guess.between_bytes,
    }  # fmt: skip
    for name, values in pairs.items():
        row[name] = [round(sum(values[SKIPPED:]), 4), round(sum(real[name][SKIPPED:]), 4)]
    row["off"] = {name: round(row[name][0] / row[name][1] - 1, 5) for name in ("seconds", "kernel", "wire")}
    return row


def show(row: dict) -> None:
    if "error" in row:
        print(f"{row['strategy']:44} {row['world']:28} {row['error']}", flush=True)
        return
    print(
        f"{row['strategy']:44} {row['world']:28} seconds {row['seconds'][0]:7.3f} {row['seconds'][1]:7.3f} "
        f"{row['off']['seconds']:+7.1%}   bytes {row['kernel'][0] / 1e6:8.3f} {row['kernel'][1] / 1e6:8.3f} MB "
        f"{row['off']['kernel']:+6.2%}   ledger {row['off']['wire']:+.2%}",
        flush=True,
    )


def render(found: dict) -> str:
    """The table of docs/plan.md: how far predictions are off, a row for each strategy and a column for each world."""
    rows = [row for row in found["rows"] if "off" in row]
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    within = sum(abs(row["off"]["seconds"]) <= SECONDS_BOUND for row in rows)
    bytes_within = sum(abs(row["off"]["kernel"]) <= BYTES_BOUND for row in rows)
    ledger = max(abs(row["off"]["wire"]) for row in rows)
    worst = max(rows, key=lambda row: abs(row["off"]["seconds"]))
    lines = [
        f"{found['date']}, {found['cores']} cores ({found['cpu']}), torch {found['torch']}, all hosts on one machine. "
        f"Of {len(rows)} predictions, {within} are within 10 % of the measured seconds, and {bytes_within} within 1 % "
        f"of the bytes that Linux counted between nodes; the farthest is {worst['off']['seconds']:+.0%} "
        f"(`{worst['strategy']}`, {worst['world']}). The ledger's bytes are right to {ledger:.2%}: not all ranks are "
        "recorded.",
        "",
        "Seconds, predicted over measured − 1, and in brackets bytes:",
        "",
        "| strategy | " + " | ".join(worlds) + " |",
        "|---|" + "--:|" * len(worlds),
    ]
    for spec in dict.fromkeys(row["strategy"] for row in rows):
        cells = []
        for world in worlds:
            row = next((r for r in rows if (r["strategy"], r["world"]) == (spec, world)), None)
            cells.append(f"{row['off']['seconds']:+.0%} ({row['off']['kernel']:+.1%})" if row else "–")
        lines.append(f"| `{spec}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(path: Path) -> None:
    page = DOCS / "plan.md"
    table = render(json.loads(path.read_text()))
    begin, end = "<!-- plan check -->\n", "<!-- end -->"
    text = re.sub(rf"{begin}.*?{end}", lambda match: f"{begin}\n{table}\n\n{end}", page.read_text(), flags=re.DOTALL)
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=DOCS / "plan-check.json")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--only", default="", help="strategies whose spec contains this")
    parser.add_argument("--worlds", default="", help="worlds whose name contains this")
    args = parser.parse_args()
    if args.render:
        write_page(args.json)
        return
    torch.set_num_threads(1)
    begin, rows = time.monotonic(), []
    for world in WORLDS:
        if args.worlds not in str(world):
            continue
        specs = [s for s in SPECS if args.only in s and not (world.ranks % 2 and "blocks=2" in s)]
        wire, real = wire_of(world), measured(world, specs)
        for spec in specs:
            rows.append(compare(world, spec, predicted(world, spec, wire), real.get(spec, {})))
            show(rows[-1])
    about = {
        "date": str(date.today()), "cores": len(os.sched_getaffinity(0)), "cpu": cpu_name(), "torch": torch.__version__,
        "command": "python benchmarks/plan_check.py", "seconds": round(time.monotonic() - begin),
    }  # fmt: skip
    args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"{about['seconds']} s in all; {args.json}")


def cpu_name() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    main()
