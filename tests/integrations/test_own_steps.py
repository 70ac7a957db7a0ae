"""What adapters share: steps that count, a DDP without exchange, and a rank's file with optimizers and scaler."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.training import same
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.errors import RunError, UsageError
from thinwire.integrations.own_steps import after_each_step, plain_model, separate_model
from thinwire.integrations.rank_files import RankState


def stepper() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(2))
    return parameter, torch.optim.SGD([parameter], 0.1, momentum=0.9)


def test_each_step_counts_once_it_is_made() -> None:
    parameter, optimizer = stepper()
    seen: list[float] = []
    after_each_step(optimizer, None, lambda: seen.append(parameter[0].item()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.9, 0.9 - 0.05 * 1.9])


def test_with_a_scaler_a_step_counts_that_it_leaves_out() -> None:
    parameter, optimizer = stepper()
    _, other = stepper()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen: list[float] = []
    after_each_step(optimizer, scaler, lambda: seen.append(parameter[0].item()))
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        other.param_groups[0]["params"][0].grad = torch.ones(2)
        scaler.step(other)
        scaler.update()
    assert seen == pytest.approx([0.9, 0.9, 0.9 - 0.1 * 1.9])


@pytest.mark.parametrize("with_scaler", [False, True], ids=["plain", "scaler"])
def test_what_was_called_after_steps_is_called_and_held_no_more_once_it_is_ended(with_scaler: bool) -> None:
    _, optimizer = stepper()
    scaler = torch.amp.GradScaler("cpu") if with_scaler else None
    seen: list[str] = []
    held: list[weakref.ref[Callable[[], None]]] = []

    def call(name: str) -> Callable[[], None]:
        made: Callable[[], None] = lambda: seen.append(name)  # noqa: E731
        held.append(weakref.ref(made))
        return made

    ends = [after_each_step(optimizer, scaler, call(name)) for name in ("first", "second")]
    ends.pop(0)()
    gc.collect()
    assert [one() is None for one in held] == [True, False]
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    if scaler is not None:
        scaler.scale(torch.ones(()))  # makes its scale
    optimizer.step() if scaler is None else scaler.step(optimizer)
    assert seen == ["second"]


def gradients_of_a_separate_model(comm: Comm) -> list[float]:
    """Of a DDP that is silenced, with accumulation in between; each rank's input is its number plus one."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    plain = separate_model(ddp)
    assert plain is plain_model(ddp) is plain_model(torch.compile(ddp)) is ddp.module
    inputs, found = torch.full((1, 1), comm.rank + 1.0), []
    with ddp.no_sync():
        ddp(inputs).sum().backward()
    for _ in range(2):
        ddp(inputs).sum().backward()
        found.append(plain.weight.grad.item())  # type: ignore[union-attr, operator]
    return found


def test_a_separate_model_keeps_its_own_gradients(process_world: ProcessWorlds) -> None:
    assert process_world.run(gradients_of_a_separate_model, 2) == [[2.0, 3.0], [4.0, 6.0]]


def trained(steps: int) -> tuple[RankState, torch.optim.Optimizer, torch.amp.GradScaler]:
    parameter, optimizer = stepper()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for _ in range(steps):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return RankState(model, tw.rounds(model, "local_sgd"), [optimizer], scaler), optimizer, scaler


def test_a_rank_goes_on_with_its_own_optimizer_and_scaler(tmp_path: Path) -> None:
    state, optimizer, scaler = trained(3)
    state.save(tmp_path, 1, 2)
    loaded, new_optimizer, new_scaler = trained(0)
    loaded.load(tmp_path, 1, 2)
    assert new_scaler.get_scale() == scaler.get_scale() == 8.0
    assert new_scaler.state_dict() == scaler.state_dict()
    assert same(new_optimizer.state_dict()["state"][0], optimizer.state_dict()["state"][0])


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state, optimizer, _ = trained(1)
    state.save(tmp_path, 0, 2)
    with pytest.raises(UsageError, match=r"rank-1\.safetensors is missing"):
        state.load(tmp_path, 1, 2)
    with pytest.raises(UsageError, match="of 2 ranks, and these are 3"):
        state.load(tmp_path, 0, 3)
    with pytest.raises(UsageError, match=r"\(1, True\), and here they are \(1, False\)"):
        RankState(state.model, state.exchange, [optimizer]).load(tmp_path, 0, 2)
    nn.init.zeros_(state.model.weight)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"rank-0\.safetensors belongs to other weights than those that were loaded"):
        state.load(tmp_path, 0, 2)
    (tmp_path / "rank-0.safetensors").write_bytes(b"half a file")
    with pytest.raises(RunError, match="damaged"):
        state.load(tmp_path, 0, 2)
