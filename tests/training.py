"""What tests of training share: small models, batches, optimizers, and how weights are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.comm.base import Comm

Data = list[tuple[Tensor, Tensor]]
EXAMPLES = {
    "sequence": "sequence([data_parallel, local_sgd])",  # needs an option
    "auto": "auto(loss_allowed=0)",  # in `trainer` it always takes data_parallel
}
Weights = dict[str, Tensor]
Module = TypeVar("Module", bound=nn.Module)


# ---- models: made when a module is imported, because the ranks of a thread world share torch's random state


def seeded(seed: int, make: Callable[[], Module]) -> Module:
    """make() with weights that depend on the seed alone, so that every process makes the same model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def _plain_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def _deep_net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()]
    return nn.Sequential(nn.Linear(6, 64), *layers, nn.Linear(64, 3))


MODELS = {seed: seeded(seed, _small_net) for seed in range(4)}  # with batch norm
PLAIN = seeded(5, _plain_net)  # a batch in parts gives the gradients of the whole batch
DEEP = seeded(6, _deep_net)  # has several buckets


def spec_of(name: str) -> str:
    """A spec of a registered strategy."""
    return EXAMPLES.get(name, name)


# ---- batches


def batches(num_steps: int, size: int = 8, shape: tuple[int, ...] = (6,), seed: int = 1) -> Data:
    """Random inputs, and targets of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(num_steps)
    ]


def part(batch: tuple[Tensor, Tensor], shard: tw.Shard) -> tuple[Tensor, Tensor]:
    """A shard's part of a batch of all ranks."""
    inputs, targets = batch
    return inputs[shard.index :: shard.count], targets[shard.index :: shard.count]


# ---- training


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, 0.9)


def decayed_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Moves every parameter that has a gradient, even a gradient of zeros."""
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def trainer(comm: Comm, spec: str, model: nn.Module = MODELS[0], optimizer: Any = sgd, **options: Any) -> Any:
    """A strategy that trains a copy of a model."""
    options = {"loss": nn.functional.cross_entropy, "epochs": 8, **options}
    strategy: Any = tw.prepare(spec, model=copy.deepcopy(model), optimizer=optimizer, comm=comm, **options)
    if spec == EXAMPLES["auto"]:  # a choice by measured times may not be the same in two runs
        strategy._is_possible = lambda *_: False
    return strategy


def steps(strategy: tw.Strategy, data: Data) -> list[float]:
    """Train on this rank's part of each batch; returns the losses."""
    return [strategy.step(part(batch, strategy.shard)).item() for batch in data]


def epochs(strategy: tw.Strategy, data: Data, length: int, start: int = 0) -> None:
    """Train in epochs of so many batches; `start` batches of the first epoch are done already."""
    for i, batch in enumerate(data, start + 1):
        steps(strategy, [batch])
        if i % length == 0:
            strategy.end_epoch()


def trained_by_torch(model: nn.Module, data: Data, optimizer: Any = sgd) -> Weights:
    """The weights after an ordinary loop on whole batches, without thinwire."""
    model = copy.deepcopy(model)
    stepper = optimizer(model.parameters())
    for inputs, targets in data:
        stepper.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        stepper.step()
    return weights(model)


# ---- weights


def weights(module: nn.Module) -> Weights:
    """A copy of a module's parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one: Weights, other: Weights) -> bool:
    """Whether two models are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
