"""What an optimizer remembers of a weight, when that weight becomes two factors or is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.optim import OptimizerFactory
from thinwire.surgery.lowrank import Factored

State = dict[str, Any]  # of one parameter: moments as tensors of its shape, counters
SUMS = {"momentum_buffer", "exp_avg"}  # of gradients
SUMS_OF_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}


@torch.no_grad()
def rotated(state: State, layer: Factored) -> tuple[State, State]:
    """The moments of W as those of `up` and `down`, as far as they can be known.

    ∂L/∂up = G·downᵀ and ∂L/∂down = upᵀ·G, so sums of gradients follow exactly. Squares do if the elements of G are
    uncorrelated: E(G·downᵀ)² = E(G²)·(down²)ᵀ. Moments that we do not know start again.
    """
    up, down = layer.up.weight, layer.down.weight
    states: tuple[State, State] = {}, {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:  # a count
            states[0][name], states[1][name] = copied(state)[name], copied(state)[name]
        elif name in SUMS | SUMS_OF_SQUARES:
            power = 1 if name in SUMS else 2
            moment = value.flatten(1)
            states[0][name] = (moment @ down.flatten(1).pow(power).T).view(up.shape)
            states[1][name] = (up.flatten(1).pow(power).T @ moment).view(down.shape)
        else:
            return {}, {}
    return states


def resized(state: State, like: Tensor) -> State:
    """The moments of a factor of another rank: cut off, or zeros where there was nothing. Others start again."""
    shaped = {name for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    if not shaped <= SUMS | SUMS_OF_SQUARES:
        return {}
    return {name: _fitted(value, like) if name in shaped else value for name, value in state.items()}


def _fitted(moment: Tensor, like: Tensor) -> Tensor:
    common = tuple(slice(min(old, new)) for old, new in zip(moment.shape, like.shape, strict=True))
    made = torch.zeros_like(like, dtype=moment.dtype)
    made[common] = moment[common]
    return made


class Kind(NamedTuple):
    """A moment that an optimizer keeps of each parameter."""

    dtype: torch.dtype
    start: float  # what it is before the first step


def kinds_of_state(optimizer: OptimizerFactory, like: Tensor) -> tuple[dict[str, Kind], State]:
    """What an optimizer remembers of a parameter such as this: moments of its shape, and counters.

    It is asked to take a step without a gradient.
    """
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=like.dtype, device=like.device))
    asked = optimizer([parameter])
    parameter.grad = torch.zeros_like(parameter)
    try:
        asked.step()
    except TypeError as error:
        raise UsageError(f"{type(asked).__name__} takes no plain step ({error}); try SGD or AdamW") from None
    state = {key: value for key, value in asked.state[parameter].items() if value is not None}
    shaped = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == (2, 3)}
    counters = {key: value for key, value in state.items() if key not in shaped}
    if odd := [key for key, value in counters.items() if isinstance(value, Tensor) and value.dim()]:
        raise UsageError(
            f"{type(asked).__name__} remembers {odd[0]}, which has not the shape of its parameter and cannot be cut; "
            "try optimizer_state=reset"
        )
    return {key: Kind(value.dtype, value[0, 0].item()) for key, value in shaped.items()}, counters


def copied(state: State, device: torch.device | None = None) -> State:
    """A state that its optimizer no longer changes; moments are moved to a device, counts stay where they are."""
    return {name: _copy(value, device) if isinstance(value, Tensor) else value for name, value in state.items()}


def _copy(value: Tensor, device: torch.device | None) -> Tensor:
    return value.clone() if value.dim() == 0 or device is None else value.to(device, copy=True)
