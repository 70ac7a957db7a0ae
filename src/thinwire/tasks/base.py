"""Task: data, model, loss, metric and default settings; what `--task` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Generator, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from thinwire import registry
from thinwire.data import Batch, num_samples
from thinwire.errors import UsageError
from thinwire.losses import BatchLoss, Loss
from thinwire.tasks.metrics import MetricFunction, as_metric

Transform = Callable[[Any, Generator | None], Any]  # generator None: evaluation, nothing is random


def no_transform(inputs: Any, generator: Generator | None) -> Any:
    """The default transform: inputs as they are."""
    return inputs


@dataclass(frozen=True)
class Task:
    """What a run trains on: everything that it needs besides the strategy.

    Samples are (inputs, targets) and `loss` is a function of (output, targets). Or samples are anything else, as dicts,
    and `loss` is a function of (model, batch), which calls the model; or it is None, and the model returns its loss.
    Then the metric is the loss, or a function of (model, batch) too.
    """

    train: Dataset[Any]  # or a stream of samples; a TensorDataset is fastest
    test: Dataset[Any]
    shape: tuple[int, ...]  # of one model input
    classes: int
    model: str | Callable[[], nn.Module]  # a model's spec, or a function that makes one
    loss: Loss | None = nn.functional.cross_entropy
    metric: str | MetricFunction = "accuracy"  # or "loss", or a function of (outputs, targets) or (model, batch)
    transform: Transform = no_transform  # of the inputs, else the batch, on the device; augments if given a generator
    collate_fn: Callable[[list[Any]], Batch] = default_collate  # samples → batch, as a DataLoader's
    defaults: dict[str, Any] = field(default_factory=dict)  # epochs, batch_size, lr, optimizer, schedule, …

    def __post_init__(self) -> None:
        metric = as_metric(self.metric)
        is_stream = isinstance(self.train, IterableDataset)  # of which nobody knows whether it is empty
        if (not is_stream and num_samples(self.train, "train") < 1) or num_samples(self.test, "test") < 1:
            raise UsageError(f"{len(self.train)} samples in train and {len(self.test)} in test; both need some")  # type: ignore[arg-type]
        if isinstance(self.model, nn.Module):
            raise UsageError(
                f"model is a {type(self.model).__name__}; give a function that makes one, so that every run begins "
                "with a new model: lambda: Net()"
            )
        for name in ("loss", "transform", "collate_fn"):
            if not callable(getattr(self, name)) and (name, self.loss) != ("loss", None):
                raise UsageError(f"{name}={getattr(self, name)!r}; give a function, as torch.nn.functional.mse_loss")
        if metric.takes_outputs and self.batch_loss.kind != "output":
            raise UsageError(
                f"metric {metric.name} is a function of (outputs, targets), which needs a loss of (output, targets); "
                "give metric='loss', or a function of (model, batch)"
            )
        if self.metric == "accuracy" and self.classes < 2:
            raise UsageError(
                f"classes={self.classes}: accuracy needs two or more; for regression give loss and metric='loss'"
            )

    @cached_property
    def batch_loss(self) -> BatchLoss:
        """How the loss of a model on a batch is computed."""
        return BatchLoss(self.loss)

    def transformed(self, batch: Batch, generator: Generator | None) -> Batch:
        """A batch as the model gets it."""
        return self.batch_loss.map_inputs(batch, lambda inputs: self.transform(inputs, generator))

    def build_model(self, spec: str | None = None) -> nn.Module:
        """The model that a spec names, or the task's own."""
        choice = spec or self.model
        model: nn.Module = (
            registry.build("models", choice, self.shape, self.classes) if isinstance(choice, str) else choice()
        )
        return model
