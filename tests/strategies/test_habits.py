"""What loops of people's own do beside `tw.rounds`: scalers, GANs, EMA, checkpointing, schedulers and more.

Each habit is a loop that yields after every step of an optimizer. The same loops run on ranks with `tw.rounds`, and one
after the other in a single process, where parameters are averaged by hand: both must end with the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.training import seeded
from thinwire.comm.base import Comm

EVERY, STEPS, RANKS = 2, 6, 3
Loop = Callable[[nn.Module, int], Iterator[None]]


class Net(nn.Module):
    """Tied first and last layers, a frozen one, and two that may be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.frozen, self.critic = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 1)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(self.frozen(self.first(x)).tanh()).tanh())


NET = seeded(11, Net)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def error(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def with_scaler(model: nn.Module, rank: int) -> Iterator[None]:
    """A gradient scaler, which skips a step that overflows on one rank."""
    optimizer, scaler = SGD(trained(model), 0.1, 0.9), torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = error(model, inputs(rank, step)) * (float("inf") if (rank, step) == (1, 3) else 1.0)
        (scaler.scale(loss) + 0 * model.critic(inputs(rank, step)).sum()).backward()  # type: ignore[operator]
        scaler.step(optimizer)
        scaler.update()
        yield


def with_several_optimizers(model: nn.Module, rank: int) -> Iterator[None]:
    """Two optimizers with parameter groups, and a scheduler for one of them."""
    first = SGD([{"params": [model.first.weight]}, {"params": [model.first.bias], "lr": 0.01}], 0.1)  # type: ignore[union-attr,list-item]
    second = AdamW(model.hidden.parameters(), 0.01)  # type: ignore[union-attr]
    scheduler = OneCycleLR(first, [0.1, 0.01], total_steps=STEPS)
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        error(model, inputs(rank, step)).backward()
        first.step()
        second.step()
        scheduler.step()
        yield


def as_gan(model: nn.Module, rank: int) -> Iterator[None]:
    """A generator and a critic with two losses; each step of one leaves gradients in the other."""
    critic = SGD(model.critic.parameters(), 0.1)  # type: ignore[union-attr]
    generator = SGD([*model.first.parameters(), *model.hidden.parameters()], 0.1)  # type: ignore[union-attr]
    for step in range(STEPS):
        x = inputs(rank, step)
        critic.zero_grad()
        (model.critic(model(x).detach()) - model.critic(x)).mean().backward()  # type: ignore[operator]
        critic.step()
        generator.zero_grad()
        (-model.critic(model(x)).mean()).backward()  # type: ignore[operator]
        generator.step()
        yield


def with_checkpointing(model: nn.Module, rank: int) -> Iterator[None]:
    """Layers are computed again in the backward pass; several micro-batches; gradients are logged and clipped."""
    optimizer, norms = SGD(trained(model), 0.1), []
    for p in trained(model):
        p.register_hook(lambda gradient: norms.append(gradient.norm()))
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in inputs(rank, step).split(2):
            hidden = checkpoint(lambda x: model.hidden(model.first(x)).tanh(), part, use_reentrant=False)  # type: ignore[operator]
            (model.last(hidden) - part).square().sum().backward()  # type: ignore[operator]
        nn.utils.clip_grad_norm_(trained(model), 1.0)
        optimizer.step()
        assert norms
        yield


def with_average(model: nn.Module, rank: int) -> Iterator[None]:
    """An average of the weights over steps, which is trained against, as a teacher is."""
    optimizer, teacher = SGD(trained(model), 0.1), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        x = inputs(rank, step)
        optimizer.zero_grad()
        (error(model, x) + (model(x) - teacher(x).detach()).square().mean()).backward()
        optimizer.step()
        yield
        teacher.update_parameters(model)


def when_compiled(model: nn.Module, rank: int) -> Iterator[None]:
    """The model is compiled after its rounds were made, with a backend that computes as torch does."""
    optimizer, compiled = SGD(trained(model), 0.1), torch.compile(model, backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        error(compiled, inputs(rank, step)).backward()
        optimizer.step()
        yield


HABITS: list[Loop] = [with_scaler, with_several_optimizers, as_gan, with_checkpointing, with_average, when_compiled]


@torch.no_grad()
def average(models: list[nn.Module]) -> None:
    for same in zip(*map(trained, models), strict=True):
        mean = torch.stack(list(same)).mean(0)
        for p in same:
            p.copy_(mean)


def by_hand(habit: Loop) -> list[nn.Module]:
    """All ranks one after the other, averaged by hand in every second step and at the end."""
    models: list[nn.Module] = [copy.deepcopy(NET) for _ in range(RANKS)]
    loops = [habit(model, rank) for rank, model in enumerate(models)]
    for step, _ in enumerate(zip(*loops, strict=True), 1):
        if step % EVERY == 0:
            average(models)
    return models


def by_rounds(comm: Comm, habit: Loop) -> tuple[nn.Module, bool]:
    model = copy.deepcopy(NET)
    rounds = tw.rounds(model, f"local_sgd(every={EVERY})", comm=comm)
    for _ in habit(model, comm.rank):
        rounds.after_step()
    rounds.together()
    return model, model.last.weight is model.first.weight


@pytest.mark.parametrize("habit", HABITS)
def test_a_loop_keeps_its_habits(habit: Loop) -> None:
    for (model, is_tied), expected in zip(
        tw.simulate(lambda comm: by_rounds(comm, habit), ranks=RANKS), by_hand(habit), strict=True
    ):
        assert is_tied
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.frozen.weight, NET.frozen.weight, rtol=0, atol=0)  # type: ignore[union-attr]
