"""Draw when stages compute (blue) and when they wait (grey), as an SVG file.

    python benchmarks/timelines.py FILE.svg [SPEC SPEC …] [--link 200mbit] [--stages 4] [--model vgg8] [--batch-size 64]

Every stage is a process on a netlab host of its own. All strategies train the same model on the same blocks. They are
drawn on one scale of time, from the moment when the last stage has done a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import thinwire as tw
from thinwire import netlab, registry

NUM_STEPS, SKIPPED = 40, 8
WINDOW_SECONDS = 0.4
WIDTH, ROW, LEFT, GAP = 880, 18, 60, 40
STYLE = """<style>
text { font: 12px sans-serif; fill: #333 } .title { font-weight: bold } .busy { fill: #2a78d6 } .wait { fill: #e3e3e0 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .wait { fill: #3a3a38 } }
</style>"""
Span = tuple[str, float, float]  # busy or wait, begin, end


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("specs", nargs="*", default=["pipeline(microbatches=4)", "local_parallel(head=conv)"])
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--model", default="vgg8")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    if "RANK" in os.environ:
        print(json.dumps(run_stage(options.specs[0], options.model, options.batch_size)))
    else:
        options.file.write_text(draw_svg({spec: run_stages(spec, options) for spec in options.specs}))


def run_stages(spec: str, options: argparse.Namespace) -> list[list[Span]]:
    """The spans of each stage, on one clock."""
    program = [sys.executable, __file__, str(options.file), spec, "--model", options.model]
    program += ["--batch-size", str(options.batch_size)]
    with netlab.hosts(options.stages, options.link) as hosts:
        world = {
            "WORLD_SIZE": options.stages,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": 29500,
            "OMP_NUM_THREADS": 1,
        }
        ranks = []
        for rank, host in enumerate(hosts):
            own = {**world, "RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            env = os.environ | {name: str(value) for name, value in own.items()}
            ranks.append(host.start(program, env=env, text=True, stdout=subprocess.PIPE))
        return [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]


def run_stage(spec: str, model: str, batch_size: int) -> list[Span]:
    shape = (1, 8, 8)
    torch.manual_seed(0)
    with tw.join() as comm:
        trainer = tw.prepare(
            spec, model=registry.build("models", model, shape, 10), comm=comm, loss=torch.nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, 0.01, 0.9),
        )  # fmt: skip
        batch = torch.randn(batch_size, *shape), torch.randint(0, 10, (batch_size,))
        trainer.step(batch)  # the first step cuts the model
        timeline = comm.ledger.timeline
        timeline.record()
        trainer.begin_epoch(NUM_STEPS)
        for step in range(NUM_STEPS):
            with timeline.step(step):
                trainer.step(batch)
        spans = timeline.take_rows()
        trainer.end_epoch()
        comm.barrier()
    kinds = {"step": "busy", "waiting": "wait"}
    return [(kinds[s["kind"]], s["begin"], s["begin"] + s["seconds"]) for s in spans if s["kind"] in kinds]


def draw_svg(runs: dict[str, list[list[Span]]]) -> str:
    shapes, top = [], 0
    for spec, ranks in runs.items():
        top += GAP
        begin = sorted(b for kind, b, _ in ranks[-1] if kind == "busy")[SKIPPED]
        last = [span for span in ranks[-1] if span[0] == "busy" and begin < span[2] <= begin + WINDOW_SECONDS]
        about = f"{spec}: {len(last) / WINDOW_SECONDS:.0f} batches a second"
        shapes.append(f'<text class="title" x="0" y="{top - 8}">{about}</text>')
        for number, spans in enumerate(ranks, 1):
            shapes.append(f'<text x="0" y="{top + 12}">stage {number}</text>')
            shapes += [bar(span, begin, top) for kind in ("busy", "wait") for span in spans if span[0] == kind]
            top += ROW
    shapes.append(f'<text x="{LEFT}" y="{top + 16}">blue: computing; grey: waiting; {WINDOW_SECONDS} seconds</text>')
    size = f'viewBox="0 0 {WIDTH} {top + 26}" width="{WIDTH}" height="{top + 26}"'
    lines = "\n".join(shape for shape in shapes if shape)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}\n{lines}\n</svg>\n'


def bar(span: Span, begin: float, top: int) -> str:
    kind, *ends = span
    x, right = (LEFT + min(max((end - begin) / WINDOW_SECONDS, 0), 1) * (WIDTH - LEFT) for end in ends)
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{right - x:.1f}" height="{ROW - 4}"/>' if right > x else ""
    )


if __name__ == "__main__":
    main()
