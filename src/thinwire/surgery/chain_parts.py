"""A part of a model with a chain of blocks: the model's own forward, which begins and ends at given blocks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.surgery.chain_recording import ChainRecording

CHECKPOINTED = (
    ", as with torch.utils.checkpoint around blocks; call it inside the blocks, or use a strategy that does not cut "
    "the model"
)


def make_part(model: nn.Module, path: str, recording: ChainRecording, begin: int, end: int) -> ChainPart:
    """The positions from `begin` to `end` of a model; it has the model's own tensors, and no others are parameters.

    A buffer that several parts use belongs to the first of them; the others have it as a cache, which is in no state.
    In the copy of the model that it runs, other blocks pass their input on, other parameters are zeros that take no
    memory, and dropout in front of the blocks does nothing in later parts: it would draw random numbers for nothing.
    """
    gate = _Gate()
    own = set().union(*(recording.used[position] for position in range(begin, end)))
    own -= {id(b) for b in model.buffers() if any(id(b) in recording.used[position] for position in range(begin))}
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    for parameter in model.parameters():
        zeros = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        memo[id(parameter)] = parameter if id(parameter) in own else zeros
    for number, block in enumerate(model.get_submodule(path).children(), 1):
        is_last = number == len(recording.num_outputs)
        place = _Place(
            copy.deepcopy(block, memo) if begin <= number < end else None,
            gate,
            takes_z=begin > 0 and (number == begin or (is_last and begin > number)),
            leaves_before=end == number == 1,
            leaves_after=end == number + 1,
            num_outputs=recording.num_outputs[number - 1],
            attributes=_plain_attributes(block),
        )
        memo[id(block)] = _in_mode_of(block, place)
    if begin > 0:
        memo |= {id(dropout): _in_mode_of(dropout, nn.Identity()) for dropout in recording.dropouts}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        _hide_tensors_of_others(module, own)
    return ChainPart(copied, gate, None if begin == 0 else recording, leaves=end <= len(recording.num_outputs) + 1)


def _in_mode_of(original: nn.Module, stand_in: nn.Module) -> nn.Module:
    stand_in.training = original.training
    return stand_in


def _hide_tensors_of_others(module: nn.Module, own: set[int]) -> None:
    """Leave zeros, and buffers of other parts, out of parameters and states."""
    for key, tensor in list(module._parameters.items()):
        if tensor is not None and not isinstance(tensor, nn.Parameter):
            del module._parameters[key]
            module.register_buffer(key, tensor, persistent=False)
    module._non_persistent_buffers_set |= {k for k, b in module._buffers.items() if b is not None and id(b) not in own}


def _plain_attributes(block: nn.Module) -> dict[str, Any]:
    """What a model may read from a block without running it, as the kind of its attention."""
    internal = vars(nn.Module()).keys()
    return {name: value for name, value in vars(block).items() if name not in internal}


class ChainPart(nn.Module):
    """Runs a model from one position to another: z comes in where the block before would have returned it."""

    def __init__(self, model: nn.Module, gate: _Gate, later: ChainRecording | None, leaves: bool) -> None:
        super().__init__()
        self.training = model.training
        self.model, self.gate, self.is_first, self.leaves = model, gate, later is None, leaves
        if later is not None:
            x, z = later.example, later.passed[0]
            self.input_dtype = x.dtype
            self.input_sizes = [  # of a stand-in for the input: None is the size of z
                None if dim < z.dim() and size == z.shape[dim] else size for dim, size in enumerate(x.shape)
            ]

    def forward(self, z: Tensor) -> Tensor:
        x, has_left = z if self.is_first else self._stand_in(z), False
        self.gate.z, self.gate.is_taken = z, self.is_first
        try:
            out: Tensor = self.model(x)
        except _Left as left:
            out, has_left = left.z, True
        finally:
            self.gate.z = None
        if not self.gate.is_taken or has_left != self.leaves:
            raise UsageError(
                "a block of the model was left out in this pass, as layerdrop does, so what it should pass on to the "
                "next block is not known; try layerdrop=0, or a strategy that does not cut the model"
            )
        if torch.is_grad_enabled() and not out.requires_grad and any(p.requires_grad for p in self.parameters()):
            raise UsageError(f"a block returns a tensor without gradients{CHECKPOINTED}")
        return out

    def _stand_in(self, z: Tensor) -> Tensor:
        """An input of the right shape; nothing of what is computed from it counts."""
        sizes = [z.shape[dim] if size is None else size for dim, size in enumerate(self.input_sizes)]
        return torch.zeros(sizes, dtype=self.input_dtype, device=z.device)


class _Gate:
    """Through which z comes to the first block of a part."""

    z: Tensor | None = None
    is_taken = False

    def take(self) -> Tensor:
        if self.z is None:
            raise UsageError(f"a block runs again after the forward pass{CHECKPOINTED}")
        self.is_taken = True
        return self.z


class _Left(BaseException):  # not an Exception, which a model's forward may catch
    """Ends the forward pass of a part behind its last block."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.z = z


class _Place(nn.Module):
    """In the place of a block: the block itself if it belongs to the part, else what passes its input on."""

    def __init__(
        self, block: nn.Module | None, gate: _Gate, *, takes_z: bool, leaves_before: bool, leaves_after: bool,
        num_outputs: int | None, attributes: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.block, self.gate, self.takes_z = block, gate, takes_z
        self.leaves_before, self.leaves_after, self.num_outputs = leaves_before, leaves_after, num_outputs
        self.attributes = attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            attributes = self.__dict__.get("attributes", {})
            if name in attributes:
                return attributes[name]
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.takes_z and args:
            args = (self.gate.take(), *args[1:])
        elif self.takes_z:
            kwargs = {**kwargs, next(iter(kwargs)): self.gate.take()}
        z = args[0] if args else next(iter(kwargs.values()))
        if self.leaves_before:
            raise _Left(z)
        out = z if self.block is None else self.block(*args, **kwargs)
        if self.leaves_after:
            raise _Left(out[0] if isinstance(out, tuple) else out)
        if self.block is None and self.num_outputs is not None:
            return (z, *[None] * (self.num_outputs - 1))
        return out
