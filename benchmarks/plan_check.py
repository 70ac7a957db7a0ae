"""Predicted against measured: seconds and bytes of every strategy on links and worlds that nothing was fitted to.

python benchmarks/plan_check.py --json plan-check.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from thinwire import netlab
from thinwire.comm.world import place
from thinwire.config import RunConfig
from thinwire.netlab import parse_link
from thinwire.plan.machine import measure_machine
from thinwire.plan.predict import predict_epochs
from thinwire.plan.schedule import record_schedule
from thinwire.plan.timing import time_steps
from thinwire.plan.wire import Wire, lab_frames
from thinwire.plan.workload import TaskWorkload
from thinwire.tasks.loading import load_task

SPECS = [
    "data_parallel",
    "data_parallel(reducer=maxnorm)",
    "data_parallel(reducer=maxnorm(bits=4))",
    "data_parallel(reducer=powersgd(rank=4))",
    "data_parallel(reducer=global_randk)",
    "local_sgd(every=4)",
    "diloco(every=4)",
    "diloco(every=8, fragments=4)",
    "daso(warmup_epochs=1, cooldown_epochs=1)",
    "ab(cutoff=0.3)",
    "ist(local_steps=4)",
    "local_parallel(blocks=2)",
    "pipeline(blocks=2)",
]
WORLDS = [("20mbit", 2, 2), ("300mbit", 2, 2), ("100mbit,10ms", 2, 2), ("100mbit", 3, 3), ("100mbit", 4, 2)]
SETTINGS = {
    "task": "synthetic",
    "model": "mlp(width=384, depth=3)",
    "batch_size": 64,
    "lr": 0.05,
    "optimizer": "sgd",
    "epochs": 4,
}
EPOCHS, STEPS = 4, 8


def measured(link: str, ranks: int, nodes: int, specs: list[str]) -> dict[str, dict]:
    """Run the specs one after the other on hosts of a link."""
    case = {"settings": SETTINGS, "specs": specs, "epochs": EPOCHS, "steps": STEPS}
    placed = place(ranks, nodes)
    with netlab.hosts(nodes, link=link) as hosts:
        processes = []
        for rank, node in enumerate(placed):
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(placed[:rank].count(node)),
                "LOCAL_WORLD_SIZE": str(placed.count(node)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500",
                "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, str(Path(__file__).with_name("plan_rank.py")), json.dumps(case)]
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(hosts[node].start(command, env=env, stdout=out, text=True))
        rows = {}
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            row = json.loads(line)
            rows[row["spec"]] = row
        for process in processes:
            process.wait(60)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="strategies whose spec contains this")
    parser.add_argument("--worlds", default="", help="worlds whose link contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.time()
    specs = [spec for spec in SPECS if args.only in spec]
    config = RunConfig(**SETTINGS)
    task = load_task(config.task, None, 0)
    rows = []
    for link, ranks, nodes in WORLDS:
        if args.worlds not in f"{link} {ranks}x{nodes}":
            continue
        placed = place(ranks, nodes)
        machine = measure_machine(ranks)
        print(machine)
        parsed = parse_link(link)
        wire = Wire(
            parsed, lab_frames(parsed, parsed.latency_ms > 0), is_one_machine=True, cores=machine.cores,
            slowdown=machine.slowdown, hop_seconds=machine.hop_seconds, busy_hop_seconds=machine.busy_hop_seconds,
        )  # fmt: skip
        possible = [s for s in specs if not (ranks % 2 and "blocks=2" in s)]
        found = measured(link, ranks, nodes, possible)
        for spec in possible:
            training = TaskWorkload(config, task).training(ranks, EPOCHS, STEPS)
            schedule = record_schedule(spec, training, placed)
            timed = time_steps(spec, training, schedule, 0.5)
            predicted = predict_epochs(schedule, timed, wire)
            rows.append(row_of(spec, f"{link} {ranks}x{nodes}", predicted, found.get(spec, {})))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print(f"{time.time() - begin:.0f} s in all")


def row_of(spec: str, world: str, predicted, real: dict) -> dict:
    """Print and return a row: sums over all epochs but the first, which makes connections."""
    if "seconds" not in real:
        print(f"{spec:48} {world:18} {real}")
        return {"spec": spec, "world": world, "error": real.get("error")}
    skip = 1
    row = {"spec": spec, "world": world}
    for key, guess in (
        ("seconds", predicted.seconds),
        ("waiting", predicted.waiting),
        ("kernel", predicted.kernel_between_bytes),
        ("wire", predicted.between_bytes),
    ):
        row[key] = [sum(guess[skip:]), sum(real[key][skip:])]
    off = {key: row[key][0] / row[key][1] - 1 if row[key][1] else 0.0 for key in ("seconds", "kernel", "wire")}
    row |= {"off": off}
    megabytes = [f"{count / 1e6:8.3f}" for count in row["kernel"]]
    print(
        f"{spec:48} {world:18} s {row['seconds'][0]:8.3f} {row['seconds'][1]:8.3f} {off['seconds']:+7.1%}   kernel "
        f"{' '.join(megabytes)} MB {off['kernel']:+7.2%}  wire {off['wire']:+.2%}  "
        f"waiting {row['waiting'][0]:.2f} {row['waiting'][1]:.2f}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
