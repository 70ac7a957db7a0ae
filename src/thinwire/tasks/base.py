"""Task: data, model, loss, metric and default settings; what `--task` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Generator, Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from thinwire import registry
from thinwire.data import num_samples
from thinwire.errors import UsageError
from thinwire.tasks.metrics import MetricFunction, as_metric

Transform = Callable[[Tensor, Generator | None], Tensor]  # generator None: evaluation, nothing is random


def no_transform(inputs: Tensor, generator: Generator | None) -> Tensor:
    """The default transform: inputs as they are."""
    return inputs


@dataclass(frozen=True)
class Task:
    """What a run trains on: everything that it needs besides the strategy."""

    train: Dataset[
        Any
    ]  # of (inputs, targets), or a stream of them; a TensorDataset is fastest; `transform` is applied to the inputs
    test: Dataset[Any]
    shape: tuple[int, ...]  # of one model input
    classes: int
    model: str | Callable[[], nn.Module]  # a model's spec, or a function that makes one
    loss: Callable[[Any, Tensor], Tensor] = nn.functional.cross_entropy
    metric: str | MetricFunction = "accuracy"  # or "loss", or a function of (outputs, targets)
    transform: Transform = no_transform  # batch → model input, on the device; augments if given a generator
    defaults: dict[str, Any] = field(default_factory=dict)  # epochs, batch_size, lr, optimizer, schedule, …

    def __post_init__(self) -> None:
        as_metric(self.metric)
        is_stream = isinstance(self.train, IterableDataset)  # of which nobody knows whether it is empty
        if (not is_stream and num_samples(self.train, "train") < 1) or num_samples(self.test, "test") < 1:
            raise UsageError(f"{len(self.train)} samples in train and {len(self.test)} in test; both need some")  # type: ignore[arg-type]
        if isinstance(self.model, nn.Module):
            raise UsageError(
                f"model is a {type(self.model).__name__}; give a function that makes one, so that every run begins "
                "with a new model: lambda: Net()"
            )
        for name in ("loss", "transform"):
            if not callable(getattr(self, name)):
                raise UsageError(f"{name}={getattr(self, name)!r}; give a function, as torch.nn.functional.mse_loss")
        if self.metric == "accuracy" and self.classes < 2:
            raise UsageError(
                f"classes={self.classes}: accuracy needs two or more; for regression give loss and metric='loss'"
            )

    def build_model(self, spec: str | None = None) -> nn.Module:
        """The model that a spec names, or the task's own."""
        choice = spec or self.model
        model: nn.Module = (
            registry.build("models", choice, self.shape, self.classes) if isinstance(choice, str) else choice()
        )
        return model
