"""Is a factored layer faster than the full layer? Forward and backward pass, at two layer ranks.

    python benchmarks/lowrank.py [--threads 1] [--device cpu] [--rounds 30] [--batch 64]

At the layer rank r = mn/(2(m + n)) two thin layers have half the parameters and half the multiplications, at a quarter
of that rank an eighth. Each round times the full layer, the factored layer with both factors trained, and the factored
layer with one factor frozen, as the groups of `ab` train it. Times are medians. Ratios are to the full layer of the
same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from comparison import print_table
from torch import Tensor, nn

from thinwire.surgery.lowrank import Layer, decompose, factor, set_factors

LAYERS: list[tuple[Layer, tuple[int, ...]]] = [  # and the shape of one input
    (nn.Linear(256, 256), (256,)),
    (nn.Linear(1024, 1024), (1024,)),
    (nn.Linear(4096, 4096), (4096,)),
    (nn.Linear(512, 4096), (512,)),
    (nn.Linear(768, 3072), (128, 768)),
    (nn.Linear(3072, 768), (128, 3072)),
    (nn.Conv2d(64, 64, 3, padding=1), (64, 32, 32)),
    (nn.Conv2d(128, 128, 3, padding=1), (128, 16, 16)),
    (nn.Conv2d(256, 256, 3, padding=1), (256, 8, 8)),
    (nn.Conv2d(512, 512, 3, padding=1), (512, 4, 4)),
    (nn.Conv2d(64, 256, 1), (64, 16, 16)),
    (nn.Conv1d(128, 128, 5, padding=2), (128, 256)),
]

SHARES = (1 / 2, 1 / 8)  # of the layer rank at which two factors are as large as the layer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        measure(layer.to(options.device), shape, share, options.batch, options.rounds)
        for layer, shape in LAYERS
        for share in SHARES
    ]
    print(f"{options.device}, {options.threads} thread(s), batch {options.batch}, torch {torch.__version__}")
    print_table(["layer", "rank", "full", "factored", "ratio", "one frozen", "ratio"], rows)


def measure(layer: Layer, shape: tuple[int, ...], share: float, batch: int, rounds: int) -> list[str]:
    m, n = len(layer.weight), layer.weight[0].numel()
    rank = max(1, int(share * m * n / (m + n)))
    split = decompose(layer.weight)
    both, one = (set_factors(factor(layer, rank), split) for _ in range(2))
    one.A.requires_grad_(False)
    x = torch.randn(batch, *shape, device=layer.weight.device, requires_grad=True)
    steps = [step(module, x) for module in (layer, both, one)]
    for warm_up in steps * 3:
        warm_up()
    times = [[seconds(run, x.is_cuda) for run in steps] for _ in range(rounds)]
    full, *others = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = [statistics.median(row[i] / row[0] for row in times) for i in (1, 2)]
    cells = [f"{1e3 * other:.2f} ms" for other in others]
    name = f"{type(layer).__name__} {m}×{n} on {'×'.join(map(str, shape))}"
    return [name, str(rank), f"{1e3 * full:.2f} ms", cells[0], f"{ratios[0]:.2f}", cells[1], f"{ratios[1]:.2f}"]


def step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """One forward and backward pass, with gradients of everything that is trained and of the input."""
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    gradient = torch.randn_like(module(x))

    def run() -> None:
        torch.autograd.grad(module(x), wanted, gradient)

    return run


def seconds(run: Callable[[], None], on_gpu: bool) -> float:
    begin = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
