"""One forward pass of a model, recorded: whether its blocks are a chain, and what is used before, in and after them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

READS = {  # make a number of Python, or a decision, of the values of a tensor
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__int__", "__float__",
    "__index__",
}  # fmt: skip  # not __contains__: transformers' models look for padding with it, and only warn


class NoChain(Exception):
    """Why the blocks of a model are no chain."""


@dataclass
class ChainRecording:
    """What a forward pass showed. Position 0 is before the blocks, 1 … n are the blocks, n + 1 is after them."""

    example: Tensor  # the model's input
    passed: list[Tensor] = field(default_factory=list)  # into each block, and out of the last
    num_outputs: list[int | None] = field(default_factory=list)  # of each block, if it returns a tuple
    used: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # ids of tensors, by position
    dropouts: list[nn.Module] = field(default_factory=list)  # that run before the blocks
    output: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def position(self) -> int:
        """Where the pass is, in the middle of it."""
        return len(self.passed)

    @property
    def may_read(self) -> bool:
        """Whether the pass is inside a block or behind the last one, where values of tensors may be read."""
        return len(self.passed) > len(self.num_outputs)


@torch.no_grad()
def record_chain(model: nn.Module, path: str, example: Tensor) -> ChainRecording:
    """Run a model in eval mode; NoChain if the blocks at a path are not run as a chain.

    A chain passes what a block returns, or its first element, on to the next block as its first argument. Nothing else
    that depends on the input or on parameters may go into a block, or past the blocks. Nor may the forward read values
    of such tensors in front of a block: with other values, as in lines with padding, it may do something else.
    """
    blocks: Sequence[nn.Module] = list(model.get_submodule(path).children())
    recording = ChainRecording(example)
    for position, block in enumerate(blocks, 1):
        recording.used[position] |= {id(t) for t in (*block.parameters(), *block.buffers())}
    recorder = _Recorder(model, recording)
    modes = {m: m.training for m in model.modules()}
    with _hooks(model, blocks, recording, recorder):
        try:
            with recorder:
                output = model.eval()(example)
        finally:
            for m, mode in modes.items():
                m.training = mode
    if len(recording.passed) != len(blocks) + 1:
        raise NoChain("not every block runs")
    if recorder.goes_past:
        raise NoChain("what follows the blocks needs something that was computed before them")
    if not isinstance(output, Tensor):
        raise NoChain(f"the model returns a {type(output).__name__}, and blocks end with a tensor")
    recording.output = output
    return recording


@contextmanager
def _hooks(
    model: nn.Module, blocks: Sequence[nn.Module], recording: ChainRecording, recorder: _Recorder
) -> Iterator[None]:
    """Inside, a forward pass enters what blocks are given and what they return."""
    last: list[Tensor] = []  # what the last block returned

    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = len(recording.passed)
        if number >= len(blocks) or block is not blocks[number]:
            raise NoChain("its blocks do not run once each, in their order")
        given, *others = [*args, *kwargs.values()]
        if not isinstance(given, Tensor) or (last and given is not last[0]):
            raise NoChain(f"block {number} is not given what the block before it returned")
        if any(recorder.is_derived(t) for t in _pytree.tree_leaves(others)):
            raise NoChain(f"block {number} is given a second tensor that depends on the input or on parameters")
        recording.passed.append(given.clone())

    def after(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        z = out[0] if isinstance(out, tuple) else out
        if not isinstance(z, Tensor):
            raise NoChain("a block does not return a tensor")
        recording.num_outputs.append(len(out) if isinstance(out, tuple) else None)
        last[:] = [z]
        if len(recording.num_outputs) == len(blocks):
            recorder.end_chain(z)
            recording.passed.append(z.clone())

    def note_dropout(module: nn.Module, args: Any) -> None:
        if recording.position == 0:
            recording.dropouts.append(module)

    handles = [b.register_forward_pre_hook(before, with_kwargs=True) for b in blocks]
    handles += [b.register_forward_hook(after, with_kwargs=True) for b in blocks]
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    handles += [m.register_forward_pre_hook(note_dropout) for m in dropouts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchFunctionMode):
    """Enters which tensors each position uses, and knows all that was computed from the input or from parameters."""

    def __init__(self, model: nn.Module, recording: ChainRecording) -> None:
        super().__init__()
        self.recording = recording
        self.sources = {id(p) for p in model.parameters()}
        self.derived: dict[int, Tensor] = {id(recording.example): recording.example}  # kept, so that no id comes twice
        self.early: set[int] = set()  # what was derived before the chain ended, without what came out of it
        self.goes_past = False

    def is_derived(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (id(value) in self.derived or id(value) in self.sources)

    def end_chain(self, z: Tensor) -> None:
        """What is derived from now on comes from z, or it goes past the blocks."""
        self.early = set(self.derived) - {id(z)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in _pytree.tree_leaves(out) if isinstance(t, Tensor)]
        name = getattr(func, "__name__", "")
        if name in READS and not self.recording.may_read and any(self.is_derived(t) for t in given):
            raise NoChain(
                f"in front of a block, the forward reads values that depend on the input or on parameters ({name})"
            )
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):  # in place
            made += given[:1]
        if made:
            self.recording.used[self.recording.position] |= {id(t) for t in given}
            self.goes_past = self.goes_past or any(id(t) in self.early for t in given)
            if any(self.is_derived(t) for t in given):
                self.derived |= {id(t): t for t in made}
        return out
