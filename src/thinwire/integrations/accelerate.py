"""Accelerate: a loop of your own whose ranks exchange gradients with a reducer, or parameters in rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.exchange.attach import Attached
from thinwire.integrations.extras import extra
from thinwire.integrations.own_steps import count_steps, plain_model, separate_model
from thinwire.integrations.rank_files import RankState
from thinwire.strategies.own_loop import AttachedRounds

with extra("accelerate"):
    from accelerate import Accelerator


def attach(model: nn.Module, spec: str, accelerator: Accelerator) -> Attached:
    """tw.attach on the DDP that accelerator.prepare made. save_state and load_state include each rank's own state.

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    exchange = attach(model, "error_feedback(maxnorm(bits=4))", accelerator)
    """
    place = _place(model, accelerator, "attach")
    exchange = tw.attach(model, spec, scaler=accelerator.scaler)
    _keep_rank_files(accelerator, place, RankState(model, exchange), lambda: None)
    return exchange


def rounds(model: nn.Module, spec: str, accelerator: Accelerator, *, epochs: int | None = None) -> AttachedRounds:
    """tw.rounds on the model that accelerator.prepare made, whose DDP exchanges no gradients any more.

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    rounds = rounds(model, "diloco(every=16)", accelerator)

    Do not call `after_step`: each step of the optimizer counts, and backward passes that only accumulate gradients do
    not. With several optimizers of this model, steps of the last one count. save_state makes ranks equal, and includes
    each rank's own state. Call `together` before a test, and at the end; `daso` counts epochs by it (see tw.rounds).
    """
    place = _place(model, accelerator, "rounds")
    trained = {id(p) for p in model.parameters()}
    optimizers: list[Any] = [
        optimizer
        for optimizer in accelerator._optimizers
        if any(id(p) in trained for group in optimizer.param_groups for p in group["params"])
    ]
    if not optimizers:
        raise UsageError(
            "rounds: the accelerator has no optimizer of this model; give it to accelerator.prepare before"
        )
    made = tw.rounds(separate_model(model), spec, epochs=epochs)
    count_steps(optimizers[-1].optimizer, accelerator.scaler, made)
    _keep_rank_files(
        accelerator,
        place,
        RankState(model, made, optimizers, accelerator.scaler),
        partial(made.together, ends_epoch=False),
    )
    return made


def _place(model: nn.Module, accelerator: Accelerator, caller: str) -> int:
    """Which of the accelerator's models it is; UsageError for others, and for what is not whole on every rank."""
    plain = plain_model(model)
    places = [place for place, known in enumerate(accelerator._models) if known is plain]
    if not places or (model is plain and accelerator.num_processes > 1):
        raise UsageError(
            f"{caller}: {type(model).__name__} given, in a run of type {accelerator.distributed_type.value}; possible: "
            "the DDP that accelerator.prepare returned, in runs of type MULTI_CPU and MULTI_GPU"
        )
    return places[0]


def _keep_rank_files(accelerator: Accelerator, place: int, state: RankState, meet: Callable[[], None]) -> None:
    """Each rank keeps a file in the folders of save_state, and load_state loads it after everything else."""
    kept: dict[int, tuple[RankState, Callable[[], None]]] = vars(accelerator).setdefault("_thinwire", {})
    is_first = place not in kept
    kept[place] = state, meet  # of the newest, if rounds were closed and made again
    if not is_first:
        return
    name = "thinwire" if place == 0 else f"thinwire_{place}"  # as Accelerate names the files of further models
    mine = accelerator.process_index, accelerator.num_processes
    loaded_from: list[Path] = []

    def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        state, meet = kept[place]
        meet()  # weights are views of the parameters
        state.save(Path(folder, name), *mine)

    def note(models: list[nn.Module], folder: str) -> None:
        loaded_from[:] = [Path(folder, name)]

    load_state = accelerator.load_state

    def load_state_and_rank(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        kept[place][0].load(loaded_from[0], *mine)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(note)
    accelerator.load_state = load_state_and_rank  # its hooks come before its own loading
