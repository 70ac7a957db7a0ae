"""What a test measures: the accuracy, the loss, or a function of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import registry
from thinwire.errors import UsageError
from thinwire.losses import is_of_model

# (outputs, targets), or (model, batch) with just this first name → the mean over the batch, or a value of each sample
MetricFunction = Callable[[Any, Any], Any]


class Metric(NamedTuple):
    """A metric: its name, which way is better, and the function that computes it."""

    name: str
    higher_is_better: bool
    function: MetricFunction | None  # None = the loss, which every test computes
    unit: float = 1.0  # by which a mean is multiplied: 100 for per cent

    @property
    def takes_outputs(self) -> bool:
        """Whether it is a function of (outputs, targets), and not of (model, batch)."""
        return self.function is not None and not is_of_model(self.function)

    def mean(self, first: Any, second: Any, num_samples: int) -> Tensor:
        """The mean over a batch, from what the function takes, as a float64 number on its device."""
        if self.function is None:
            return torch.zeros((), dtype=torch.float64)
        result = torch.as_tensor(self.function(first, second))
        is_by_sample = result.dim() == 1 and len(result) == num_samples
        if not is_by_sample and result.numel() != 1:
            raise UsageError(
                f"metric {self.name} returned a tensor of shape {tuple(result.shape)} for {num_samples} samples; "
                "return the mean over the batch as one number, or one number for each sample"
            )
        return result.double().mean()


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of outputs whose largest element is that of the target."""
    return (outputs.argmax(-1) == targets).double().mean()


METRICS = {
    "accuracy": Metric("accuracy", higher_is_better=True, function=accuracy, unit=100.0),
    "loss": Metric("loss", higher_is_better=False, function=None),
}


def as_metric(metric: str | MetricFunction) -> Metric:
    """The metric that a task names, or whose function it gives. The function says which way is better.

    >>> def error(outputs, targets): return (outputs - targets).abs().mean()
    >>> error.higher_is_better = False
    >>> as_metric(error).name
    'error'
    """
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric]
    if isinstance(metric, str) or not callable(metric):
        raise UsageError(
            f"metric={metric!r}; possible: 'accuracy' (in per cent, of classes), 'loss' (that of `loss`), or a "
            "function of (outputs, targets) or of (model, batch)"
        )
    named = metric.func if isinstance(metric, functools.partial) else metric
    name = getattr(named, "__name__", type(named).__name__)
    higher = getattr(named, "higher_is_better", None)
    if not isinstance(higher, bool):
        raise UsageError(
            f"metric {name} does not say which way is better; write below it: {name}.higher_is_better = True"
        )
    if name in METRICS:
        raise UsageError(f"metric {name} has the name of one of thinwire's; give the function another name")
    return Metric(name, higher, metric)


def load_metric(text: str) -> str | MetricFunction:
    """The metric that --metric names, as a task takes it; raise UsageError if there is none."""
    if not registry.is_own(text):
        return as_metric(text).name
    own = registry.load_own("metric", text, ("outputs", "targets"), "a number or one for each sample")
    as_metric(own.function)
    return functools.partial(own.function, **own.options)
