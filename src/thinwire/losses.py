"""The loss of a model on a batch: a function of (output, targets), of (model, batch), or the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.common.batches import describe, map_tensors
from thinwire.errors import UsageError

Loss = Callable[[Any, Any], Any]  # (output, targets) or (model, batch) → mean over the batch, or a dict with "loss"


class LossValue(NamedTuple):
    """The mean loss over a batch, and further numbers that the loss returned, by name."""

    total: Tensor
    parts: dict[str, Tensor]


class BatchLoss:
    """How the loss of a model on a batch is computed, from the function that the user gave.

    A loss of (output, targets) is for batches that are (inputs, targets). A loss of (model, batch), which is one whose
    first parameter is called `model`, calls the model itself, and a batch is whatever it takes. Without a loss, the
    batch is the model's arguments, and the model returns its loss. Arguments of a model are a tensor, or several in a
    tuple or list, or keywords in a dict.

    >>> net, batch = torch.nn.Linear(2, 1), (torch.ones(3, 2), torch.zeros(3, 1))
    >>> of_output = BatchLoss(torch.nn.functional.mse_loss)(net, batch)
    >>> of_model = BatchLoss(lambda model, batch: (model(batch[0]) - batch[1]).square().mean())(net, batch)
    >>> torch.equal(of_output.total, of_model.total)
    True
    """

    def __init__(self, function: Loss | None) -> None:
        self.function = function
        self.kind: Literal["output", "model", "own"] = "own"
        if function is not None:
            self.kind = "model" if is_of_model(function) else "output"
        self.name = getattr(function, "__name__", str(function))

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        """The loss of the model, or of what is called in its place, on a batch."""
        if self.kind == "output":
            inputs, targets = self._pair(batch)
            return self.of_output(call(model, inputs), targets)
        return self.value(self.run(model, batch))

    def run(self, model: Callable[..., Any], inputs: Any) -> Any:
        """Run the model on what `inputs` returned."""
        return self.function(model, inputs) if self.kind == "model" and self.function else call(model, inputs)

    def of_output(self, output: Any, targets: Any) -> LossValue:
        """The loss of an output of the model; for a loss of (output, targets)."""
        assert self.kind == "output"
        assert self.function is not None
        return self.value(self.function(output, targets))

    def inputs(self, batch: Any) -> Any:
        """What the model computes from: the inputs of (inputs, targets), else the whole batch."""
        return self._pair(batch)[0] if self.kind == "output" else batch

    def map_inputs(self, batch: Any, function: Callable[[Any], Any]) -> Any:
        """The batch with a function applied to its inputs."""
        if self.kind != "output":
            return function(batch)
        inputs, targets = self._pair(batch)
        return function(inputs), targets

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                f"a batch that is {describe(batch)}; with a loss of (output, targets) give (inputs, targets): "
                "trainer.step((x, y)). For other batches give a loss of (model, batch), as "
                "def loss(model, batch): return model(**batch).loss"
            )
        return batch[0], batch[1]

    def value(self, result: Any) -> LossValue:
        """What the loss, or the model, returned; raise UsageError if there is no loss in it."""
        found: Any = result
        parts: dict[str, Tensor] = {}
        if isinstance(result, Mapping):
            found = result.get("loss")
            parts = {
                key: as_tensor for key, v in result.items() if key != "loss" and (as_tensor := _number(v)) is not None
            }
        elif not isinstance(result, Tensor):
            found = getattr(result, "loss", result)
        if self.kind == "own":
            _check_own(found, result)
        elif isinstance(result, Mapping) and not isinstance(found, Tensor):
            raise UsageError(
                f"the loss ({self.name}) returned a {type(result).__name__} with {', '.join(result)}; its total must "
                'be in it as a tensor, as {"loss": total, …}'
            )
        elif not isinstance(found, Tensor):
            raise UsageError(
                f"the loss ({self.name}) returned a {type(result).__name__}; return the mean over the batch as a "
                "tensor, without .item()"
            )
        return LossValue(found.reshape(()) if found.numel() == 1 else found, parts)


class CountedCalls:
    """A model whose calls go to `forward`, which may exchange gradients; a loss of (model, batch) gets this one."""

    def __init__(self, model: Any, forward: Callable[..., Any]) -> None:
        vars(self).update(_model=model, _forward=forward, num_calls=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["num_calls"] += 1
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def check(self) -> None:
        """Raise UsageError if the loss did not call the model: then DDP would not exchange gradients."""
        if not self.num_calls:
            raise UsageError(
                "the loss did not call the model; call it as model(…), and not one of its methods or layers, so that "
                "gradients are exchanged"
            )


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """model(inputs), with a dict as keywords, and a tuple or list as arguments.

    >>> call(max, (1, 2)), call(dict, {"a": 1})
    (2, {'a': 1})
    """
    match inputs:
        case Mapping():
            return model(**inputs)
        case list() | tuple():
            return model(*inputs)
    return model(inputs)


def channels_last(inputs: Any) -> Any:
    """Inputs whose images, tensors of four dimensions, have channels_last order."""

    def ordered(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    return map_tensors(inputs, ordered)


def is_of_model(function: Callable[..., Any]) -> bool:
    """Whether the first parameter of a function, or of a module's `forward`, is called `model`.

    >>> is_of_model(lambda model, batch: 0), is_of_model(torch.nn.functional.mse_loss)
    (True, False)
    """
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return next(iter(inspect.signature(called).parameters), "") == "model"
    except (TypeError, ValueError):  # a function of torch's in C
        return False


def _number(value: Any) -> Tensor | None:
    """A number as a tensor without a graph; None for everything else."""
    if isinstance(value, Tensor):
        return value.detach() if value.dim() == 0 else None
    return torch.tensor(float(value)) if isinstance(value, int | float) else None


def _check_own(loss: Any, result: Any) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    shape = f" of shape {', '.join(map(str, result.shape))}" if isinstance(result, Tensor) else ""
    what = f"{type(result).__name__}{shape}" if not isinstance(result, Mapping) else describe(result).removeprefix("a ")
    raise UsageError(
        f"the model returned a {what}, which is not its loss; give prepare a loss, or let the model return its loss, "
        'or a dict with "loss" (models of Hugging Face do so if the batch has labels)'
    )
