"""Rounds in the loops of frameworks: no gradients are exchanged, and each step of the optimizer counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.strategies.own_loop import AttachedRounds


def plain_model(model: nn.Module) -> nn.Module:
    """The model in a DDP, or in what torch.compile made."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def separate_model(model: nn.Module) -> nn.Module:
    """The plain model; a DDP around it exchanges no gradients from now on."""
    ddp = getattr(model, "_orig_mod", model)
    if isinstance(ddp, DistributedDataParallel):
        ddp.require_backward_grad_sync = False  # no_sync, as gradient accumulation uses it, leaves it so
    return plain_model(model)


def count_steps(optimizer: Optimizer, scaler: GradScaler | None, rounds: AttachedRounds) -> None:
    """Each step of an optimizer counts in rounds, until these are closed; then nothing holds them any more."""
    stop, close = after_each_step(optimizer, scaler, rounds.after_step), rounds.close

    def stop_and_close() -> None:
        stop()
        close()

    rounds.close = stop_and_close  # type: ignore[method-assign]


def after_each_step(optimizer: Optimizer, scaler: GradScaler | None, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function after each step of an optimizer, on all ranks equally often; returns what ends that.

    A loss scaler leaves a step out where gradients overflow, which may be on one rank alone. So with a scaler, the
    steps that it was asked for count.
    """
    if scaler is None:
        return optimizer.register_step_post_hook(lambda *_: call()).remove
    calls: list[tuple[Optimizer, Callable[[], None]]] | None = vars(scaler).get("_thinwire_calls")
    if calls is None:
        calls = vars(scaler)["_thinwire_calls"] = []
        _call_after_steps(scaler, calls)
    entry = optimizer, call
    calls.append(entry)
    return lambda: calls.remove(entry) if entry in calls else None


def _call_after_steps(scaler: GradScaler, calls: list[tuple[Optimizer, Callable[[], None]]]) -> None:
    step = scaler.step

    def step_and_call(stepped: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result = step(stepped, *args, **kwargs)
        for optimizer, call in list(calls):
            if stepped is optimizer:
                call()
        return result

    scaler.step = step_and_call  # type: ignore[assignment, method-assign]
