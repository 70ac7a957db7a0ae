"""The optimizer's state of a weight, when that weight becomes two factors, changes its layer rank or is sliced."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.optim import OptimizerFactory
from thinwire.surgery.huggingface import is_transposed_linear
from thinwire.surgery.lowrank import Factored, weight_matrix

OptimizerState = dict[str, Any]  # of one parameter: moments, which are tensors of its shape, and counters
GRADIENT_SUMS = {"momentum_buffer", "exp_avg"}
SQUARE_SUMS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}
KNOWN_MOMENTS = GRADIENT_SUMS | SQUARE_SUMS


@torch.no_grad()
def rotate_state(state: OptimizerState, layer: Factored) -> tuple[OptimizerState, OptimizerState]:
    """The state of W as the states of `up` and `down`.

    ∂L/∂up = G·downᵀ and ∂L/∂down = upᵀ·G, so sums of gradients follow exactly. Squares follow if the elements of G are
    uncorrelated: E(G·downᵀ)² = E(G²)·(down²)ᵀ. If there is a moment of another kind, both states start empty.
    """
    up, down = layer.up.weight, layer.down.weight
    states: tuple[OptimizerState, OptimizerState] = {}, {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:  # a counter
            states[0][name], states[1][name] = copy_state(state)[name], copy_state(state)[name]
        elif name in KNOWN_MOMENTS:
            power = 1 if name in GRADIENT_SUMS else 2
            moment, up_matrix = weight_matrix(layer.up, value), weight_matrix(layer.up)
            of_up = moment @ down.flatten(1).pow(power).T
            states[0][name] = (of_up.T.contiguous() if is_transposed_linear(layer.up) else of_up).view(up.shape)
            states[1][name] = (up_matrix.pow(power).T @ moment).view(down.shape)
        else:
            return {}, {}
    return states


def resize_state(state: OptimizerState, like: Tensor) -> OptimizerState:
    """The state of a factor whose layer rank changed: moments are cut off or padded with zeros.

    If there is a moment of another kind, the state starts empty.
    """
    moments = {name for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    if not moments <= KNOWN_MOMENTS:
        return {}
    return {name: _crop_or_pad(value, like) if name in moments else value for name, value in state.items()}


def _crop_or_pad(moment: Tensor, like: Tensor) -> Tensor:
    common = tuple(slice(min(old, new)) for old, new in zip(moment.shape, like.shape, strict=True))
    made = torch.zeros_like(like, dtype=moment.dtype)
    made[common] = moment[common]
    return made


class Moment(NamedTuple):
    """A moment that an optimizer keeps of each parameter."""

    dtype: torch.dtype
    initial: float  # its value before the first step


def probe_optimizer(optimizer: OptimizerFactory, like: Tensor) -> tuple[dict[str, Moment], OptimizerState]:
    """The moments by name, and the counters, that an optimizer keeps of a parameter of this dtype and device.

    Found by a step of a new optimizer on a small parameter whose gradient is zero.
    """
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=like.dtype, device=like.device))
    probe = optimizer([parameter])
    parameter.grad = torch.zeros_like(parameter)
    try:
        probe.step()
    except TypeError as error:
        raise UsageError(f"{type(probe).__name__} takes no plain step ({error}); try SGD or AdamW") from None
    state = {key: value for key, value in probe.state[parameter].items() if value is not None}
    moments = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == (2, 3)}
    counters = {key: value for key, value in state.items() if key not in moments}
    if odd := [key for key, value in counters.items() if isinstance(value, Tensor) and value.dim()]:
        raise UsageError(
            f"{type(probe).__name__} keeps {odd[0]}, which does not have the shape of its parameter and so cannot be "
            "sliced; try optimizer_state=reset"
        )
    return {key: Moment(value.dtype, value[0, 0].item()) for key, value in moments.items()}, counters


def states_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, OptimizerState]:
    """A copy of the optimizer's state of each parameter that has one, by the parameter's name."""
    return {name: copy_state(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def copy_state(state: OptimizerState, device: torch.device | None = None) -> OptimizerState:
    """A copy that the optimizer no longer changes; moments are moved to the device, counters stay where they are."""
    return {name: _copy_tensor(value, device) if isinstance(value, Tensor) else value for name, value in state.items()}


def _copy_tensor(value: Tensor, device: torch.device | None) -> Tensor:
    return value.clone() if value.dim() == 0 or device is None else value.to(device, copy=True)
