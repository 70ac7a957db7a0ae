"""How much do reducers disturb a gradient: as SGD sees it, and as Adam sees it?

    python benchmarks/disturbance.py --data DIR [SPEC …] [--model vgg16] [--steps 25] [--ranks 4] [--batch-size 64]

Trains a model on CIFAR-10 with AdamW for some steps on this process's CPU, takes the gradients of another batch for
each rank, reduces them on threads, and compares the result g̃ with the exact mean g:

    SGD     ‖g̃ − g‖ / ‖g‖
    Adam    the same, each element divided by √v + 1e-8: the root of its mean of squares so far, and Adam's ε

Adam makes elements alike that differ by orders of magnitude. So noise that is small beside a scale block's largest
element is large beside most others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.tasks.cifar10 import cifar10

SPECS = [
    "maxnorm", "maxnorm(bits=4)", "maxnorm(bits=4, block=64)", "error_feedback(maxnorm(bits=4))",
    "error_feedback(maxnorm(bits=2))", "powersgd(rank=4)",
]  # fmt: skip
LR, WEIGHT_DECAY, CLIP_NORM, EPS = 0.003, 0.1, 1.0, 1e-8
Gradients = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--data", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--steps", type=int, default=25, help="of training before gradients are taken")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    for spec in options.specs:
        registry.check("reducers", spec)
    of_ranks, roots = gradients(options)
    exact = {name: sum(one[name] for one in of_ranks) / options.ranks for name in roots}
    print(f"{'reducer':40}   SGD    Adam")
    for spec in options.specs:
        found = reduced(spec, of_ranks)
        plain = distance(found, exact, dict.fromkeys(exact, torch.ones(())))
        print(f"{spec:40} {plain:6.3f} {distance(found, exact, roots):6.3f}", flush=True)


def gradients(options: argparse.Namespace) -> tuple[list[Gradients], Gradients]:
    """A gradient for each rank after some steps of training, and the roots of Adam's mean squares."""
    torch.manual_seed(0)
    task, generator = cifar10(options.data, 0), torch.Generator().manual_seed(0)
    model = registry.build("models", options.model, task.shape, task.classes)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=WEIGHT_DECAY)
    images, labels = task.train.tensors  # type: ignore[attr-defined]

    def gradient() -> Gradients:
        chosen = torch.randint(0, len(images), (options.batch_size,), generator=generator)
        model.zero_grad()
        outputs = model(task.transformed((images[chosen], labels[chosen]), generator)[0])
        torch.nn.functional.cross_entropy(outputs, labels[chosen]).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    for step in range(options.steps):
        gradient()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.param_groups[0]["lr"] = LR * (step + 1) / options.steps  # as in an epoch of warm-up
        optimizer.step()
    roots = {name: optimizer.state[p]["exp_avg_sq"].sqrt() for name, p in model.named_parameters()}
    return [gradient() for _ in range(options.ranks)], roots


def reduced(spec: str, of_ranks: list[Gradients]) -> Gradients:
    """What a reducer makes of the ranks' gradients in its first step."""
    reducer = registry.build("reducers", spec)

    def reduce(comm: Comm) -> Gradients:
        own = {name: gradient.clone() for name, gradient in of_ranks[comm.rank].items()}
        mean: Gradients = reducer.reduce(own, reducer.init(own), comm).mean
        return mean

    return tw.simulate(reduce, ranks=len(of_ranks))[0]


def distance(found: Gradients, exact: Gradients, unit: Gradients) -> float:
    """‖g̃ − g‖ / ‖g‖, each element in its unit."""
    off = sum(float(((found[name] - exact[name]) / (unit[name] + EPS)).square().sum()) for name in exact)
    size = sum(float((exact[name] / (unit[name] + EPS)).square().sum()) for name in exact)
    return float((off / size) ** 0.5)


if __name__ == "__main__":
    main()
