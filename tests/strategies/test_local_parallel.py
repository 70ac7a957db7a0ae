"""Local parallelism: what is computed, by whom, and what crosses the wire."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.data import mix
from thinwire.strategies.local_parallel import LocalParallel
from thinwire.strategies.staged import seeded
from thinwire.surgery.heads import Exit, Readout
from thinwire.tasks.models.gpt import gpt

World = Callable[..., list[Any]]
Data = list[tuple[Tensor, Tensor]]


def deep_net(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([6, 16, 16, 16]):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def small_gpt(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return gpt((5,), 11, width=8, depth=4, heads=2, dropout=dropout)


MODELS = {(kind, p): make(p) for kind, make in (("deep", deep_net), ("gpt", small_gpt)) for p in (0.0, 0.3)}


def batches(kind: str, num_steps: int, size: int = 12) -> Data:
    generator = torch.Generator().manual_seed(1)
    if kind == "gpt":
        texts = [torch.randint(0, 11, (size, 6), generator=generator) for _ in range(num_steps)]
        return [(text[:, :-1], text[:, 1:]) for text in texts]
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(num_steps)
    ]


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def trainer(comm: Comm, spec: str, model: nn.Module, optimizer: Any = adamw, **options: Any) -> LocalParallel:
    made = tw.prepare(spec, model=copy.deepcopy(model), optimizer=optimizer, loss=loss_of, comm=comm, **options)
    assert isinstance(made, LocalParallel)
    return made


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# ---- the one-process loop: for each batch, for each block


def in_one_process(exits: list[nn.Module], seed: int, data: Data, overlap: int, reduce: str, pieces: int) -> None:
    """Train the blocks of a model, all in this process. `exits` are the blocks up to each head, with that head.

    Losses' gradients go back through `overlap` blocks; a block's weights get those of its window, or the farthest.
    """
    blocks, heads = [exit[k] for k, exit in enumerate(exits)], [exit[-1] for exit in exits]
    num_blocks = len(blocks)
    optimizers = [
        adamw([p for p in [*b.parameters(), *h.parameters()] if p.requires_grad])
        for b, h in zip(blocks, heads, strict=True)
    ]
    copies: list[dict[str, Tensor]] = []
    for step, (inputs, targets) in enumerate(data):
        every = next((head.every for head in heads if isinstance(head, Readout)), 0)
        if every and step and step % every == 0:
            for head in heads:
                if isinstance(head, Readout) and copies:
                    head.lagged.load_state_dict(copies[-1])
            copies.append(weights(blocks[-1][-1]))
        for piece, (x, y) in enumerate(zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True)):
            ins, outs, losses_at = [], [], [[] for _ in range(num_blocks)]
            for k, (block, head) in enumerate(zip(blocks, heads, strict=True)):
                torch.manual_seed(mix(seed, k, 0, step, piece, 0))
                z = (outs[-1].detach() if k else x).clone()
                ins.append(z.requires_grad_() if k else z)
                outs.append(block(ins[-1].clone() if k else ins[-1]))
                judged = outs[-1].detach().requires_grad_()
                torch.manual_seed(mix(seed, k, 0, step, piece, 1))
                loss = (head.loss(judged, y, loss_of) if isinstance(head, Exit) else loss_of(head(judged), y)) * (
                    len(x) / len(inputs)
                )
                trains = [
                    i
                    for i in range(num_blocks)
                    if (i <= k < i + overlap if reduce == "sum" else k == min(i + overlap, num_blocks) - 1)
                ]
                if not trains:
                    continue
                loss.backward()
                gradient = judged.grad
                for i in range(k, min(trains) - 1, -1):
                    if i in trains:
                        losses_at[i].append(gradient)
                    if i > min(trains):
                        (gradient,) = torch.autograd.grad(outs[i], ins[i], gradient, retain_graph=True)
            for out, gradients in zip(outs, losses_at, strict=True):
                out.backward(sum(gradients[1:], gradients[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def pipelined_and_not(
    comm: Comm, kind: str, dropout: float, spec: str, overlap: int, reduce: str, pieces: int, stop: int
) -> bool:
    """Train over ranks; on each of them also train all blocks in one process; are both the same?"""
    data = batches(kind, 7)
    strategy = trainer(comm, spec, MODELS[kind, dropout])
    strategy.begin(data[0][0])
    parts = strategy.gathered(heads=True)
    blocks, heads = [], []
    for stage, tensors in zip(strategy.stages, parts, strict=True):
        alone = copy.deepcopy(stage).to_empty(device="cpu")
        alone.load_state_dict(tensors)
        blocks.append(alone.block)
        heads.append(alone.head if alone.head is not None else nn.Identity())
    exits = [nn.Sequential(*blocks[: k + 1], heads[k]) for k in range(len(blocks))]
    for batch in data[:stop]:
        strategy.step(batch)
    strategy.end_epoch()
    found = weights(strategy.consolidate())
    found_heads = [weights(exit) for exit in strategy.exits()]
    with seeded(torch.device("cpu"), 0):  # threads share one generator
        in_one_process(exits, strategy.seed, data[:stop], overlap, reduce, pieces)
    wanted = dict(zip(found, (t for block in blocks for t in block.state_dict().values()), strict=True))
    wanted_heads = [weights(exit) for exit, stage in zip(exits, strategy.stages, strict=True) if stage.head is not None]
    return same(found, wanted) and all(same(a, b) for a, b in zip(found_heads, wanted_heads, strict=True))


CASES = [
    ("deep", 2, "blocks=2", 1, "sum", 1),
    ("deep", 4, "head=linear", 1, "sum", 1),
    ("deep", 3, "head=predsim, microbatches=3, queue=1", 1, "sum", 3),
    ("deep", 4, "overlap=2", 2, "sum", 1),
    ("deep", 4, "overlap=3, microbatches=2", 3, "sum", 2),
    ("deep", 4, "overlap=2, reduce=farthest, microbatches=3", 2, "farthest", 3),
    ("deep", 4, "overlap=3, reduce=farthest", 3, "farthest", 1),
    ("gpt", 2, "blocks=2, head=readout(every=2)", 1, "sum", 1),
    ("gpt", 4, "head=readout(every=3), overlap=2", 2, "sum", 1),
    ("gpt", 4, "head=auglocal, microbatches=2", 1, "sum", 2),
]


@pytest.mark.parametrize(("kind", "ranks", "options", "overlap", "reduce", "pieces"), CASES)
def test_pipelined_over_processes_is_the_one_process_loop_bit_for_bit(
    process_world: ProcessWorlds, kind: str, ranks: int, options: str, overlap: int, reduce: str, pieces: int
) -> None:
    """With AdamW, BatchNorm or attention, and dropout."""
    spec = f"local_parallel({options})"
    assert all(process_world.run(pipelined_and_not, ranks, kind, 0.3, spec, overlap, reduce, pieces, 7))


@pytest.mark.parametrize(("kind", "ranks", "options", "overlap", "reduce", "pieces"), CASES)
def test_so_it_is_on_threads(kind: str, ranks: int, options: str, overlap: int, reduce: str, pieces: int) -> None:
    def run(comm: Comm) -> bool:
        return pipelined_and_not(comm, kind, 0.3, f"local_parallel({options})", overlap, reduce, pieces, 5)

    assert all(tw.simulate(run, ranks=ranks))
