"""tw.prepare: a trainer for your model, from the text that names a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels, registry
from thinwire.comm.base import Comm
from thinwire.comm.dry import DryComm
from thinwire.common.dtypes import refuse_unfit
from thinwire.common.messages import quiet, say
from thinwire.common.tensors import named_tensors
from thinwire.errors import ThinwireError, UsageError
from thinwire.losses import Loss
from thinwire.optim import OptimizerFactory
from thinwire.strategies.base import Strategy
from thinwire.strategies.recipe import Recipe
from thinwire.surgery.meta import refuse_moved_to_meta, with_tensors


def prepare(
    spec: str,
    *,
    model: nn.Module,
    optimizer: OptimizerFactory,
    loss: Loss | None,
    comm: Comm,
    schedule: Callable[[int], float] = lambda step: 1.0,
    clip_norm: float | None = None,
    accumulate: int = 1,
    autocast: bool = False,
    epochs: int | None = None,
    compile: bool = False,
) -> Strategy:
    """A trainer for your model: the strategy that a spec names, ready to `step`.

    `loss` is a function of (output, targets), for batches that are (inputs, targets). If its first parameter is called
    `model`, it is a function of (model, batch): it calls the model itself, and batches have any structure. It is None
    if the model returns its loss. A loss may be a dict: "loss", and further numbers to log (`trainer.loss_parts`).

    `optimizer` is a factory because some strategies make parameters in mid-run. `schedule` maps a step to a factor of
    the optimizer's learning rate, which torch's schedulers may change too. `epochs` is the number of epochs of the
    run, for strategies that have phases. All ranks start from rank 0's weights. With `compile` the model is compiled in
    place by torch.compile. On a GPU, weights of convolutions get channels_last order.

    >>> import thinwire as tw, torch
    >>> with tw.join() as comm:
    ...     trainer = tw.prepare("data_parallel", model=torch.nn.Linear(2, 1), comm=comm,
    ...                          optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=torch.nn.functional.mse_loss)
    ...     loss = trainer.step((torch.ones(4, 2), torch.zeros(4, 1)))
    ...     type(trainer.consolidate()).__name__
    'Linear'
    """
    _check_options(optimizer, loss, clip_norm, accumulate, epochs)
    _check_schedule(schedule)
    _check_model(model)
    recipe = Recipe(loss, optimizer, schedule, clip_norm, accumulate, autocast, epochs, compile)
    comm.ledger.part = 0  # a sequence that was prepared before may have left its own
    return make_strategy(spec, model, recipe, comm)


def rehearse(
    spec: str, model: nn.Module, on_meta: bool, recipe: Recipe, comm: Comm, num_steps: int | None
) -> list[int]:
    """Raise the UsageError that making a strategy later, and its first epoch of so many steps, would raise.

    Returns its representatives. The strategy is made for a copy of the model, with zeros or on the meta device, and
    with a comm that sends nothing. Errors of others, as of an optimizer that needs a GPU, say nothing about the run.
    """
    device = "meta" if on_meta else "cpu"
    zeros = {name: torch.zeros(t.shape, dtype=t.dtype, device=device) for name, t in named_tensors(model).items()}
    tried = with_tensors(model, zeros)
    with quiet():
        try:
            strategy: Strategy = registry.build("strategies", spec, tried, recipe, DryComm(comm))
            strategy.begin_epoch(num_steps)
            return strategy.representatives()
        except ThinwireError:
            raise
        except Exception:
            return [0] * comm.size


def make_strategy(spec: str, model: nn.Module, recipe: Recipe, comm: Comm) -> Strategy:
    """The strategy that a spec names; if the recipe says so, the model is compiled in place."""
    if recipe.compile:
        refuse_compiling(spec)
    kernels.check_choice()
    strategy: Strategy = registry.build("strategies", spec, model, recipe, comm)
    if recipe.compile and strategy.keeps_model:
        say("compiling the model: the first steps take seconds to minutes", comm.rank, once=True)
        _compile_in_place(model)
    return strategy


def _compile_in_place(model: nn.Module) -> None:
    """What `model.compile()` does: names stay, and copies are not compiled.

    But torch does not compile its own modules when they are called from outside, so that method does nothing for an
    nn.Sequential. A function of ours between the two is compiled with what it calls.
    """

    if next(model.parameters()).device.type == "cpu":
        from torch._inductor import cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"compile needs a C++ compiler on a CPU, and torch finds none ({reason}); install g++, name another "
                "one in CXX, or leave compile out"
            ) from error

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    model._compiled_call_impl = torch.compile(call)


def refuse_compiling(spec: str) -> None:
    """Raise UsageError if a strategy, or a part of a sequence, trains something else than the whole model."""
    for name in (one.name for one in registry.strategies_in(spec)):
        if registry.load("strategies", name).keeps_model:
            continue
        possible = [other for other in registry.TABLE["strategies"] if registry.load("strategies", other).keeps_model]
        raise UsageError(
            f"{name} cuts the model or replaces its layers, and cannot compile it; leave compile out. Possible with "
            f"compile: {', '.join(possible)}"
        )


def _check_options(optimizer: Any, loss: Any, clip_norm: float | None, accumulate: int, epochs: int | None) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "optimizer: give a factory, not an optimizer: lambda parameters: torch.optim.SGD(parameters, 0.1)"
        )
    if loss is not None and (not callable(loss) or isinstance(loss, type)):
        raise UsageError(
            f"loss={loss!r}; give a function of (output, targets), as torch.nn.functional.cross_entropy, or of (model, "
            "batch), or None if the model returns its loss"
        )
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}; possible: 1 or more")
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"clip_norm={clip_norm}; possible: more than 0, or None to leave gradients as they are")
    if epochs is not None and (epochs < 1 or epochs != int(epochs)):
        raise UsageError(f"epochs={epochs}; give the number of epochs of the run, 1 or more, or leave it out")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={model!r}; give a module, as torch.nn.Linear(20, 2)")
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        raise UsageError(
            "model is wrapped in DistributedDataParallel, which would average gradients a second time; give the "
            "wrapped model, model.module, or keep DDP and your own loop, and use tw.attach"
        )
    refuse_moved_to_meta(model)
    refuse_unfit(model, "prepare")


def _check_schedule(schedule: Callable[[int], float]) -> None:
    """Raise UsageError before the first step if this is not a function from a step to a finite factor."""
    try:
        wrong = None if math.isfinite(schedule(0)) else f"schedule(0) is {schedule(0)}"
    except Exception as error:
        wrong = f"schedule(0) fails ({type(error).__name__}: {error})"
    if wrong:
        raise UsageError(
            f"schedule={schedule!r}, but {wrong}; give a function from a step to a factor of the learning rate, as "
            "lambda step: 0.99**step. To use one of torch's schedulers, make it in the optimizer factory, for the "
            "optimizer that the factory returns, and call its step() after the trainer's"
        )
