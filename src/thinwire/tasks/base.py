"""Task: data, loss, metric and sensible settings; what `--task` names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset

from thinwire import registry, spec
from thinwire.data import num_samples
from thinwire.errors import UsageError

Transform = Callable[[Tensor, Generator | None], Tensor]  # None: evaluation, so nothing random


def unchanged(inputs: Tensor, generator: Generator | None) -> Tensor:
    """The transform of tasks whose data needs none."""
    return inputs


@dataclass(frozen=True)
class Task:
    """Everything that a run needs besides the strategy."""

    train: Dataset[Any]  # of (inputs, targets); a TensorDataset is fastest; inputs may be compact, see transform
    test: Dataset[Any]
    shape: tuple[int, ...]  # of one input as the model sees it
    classes: int
    model: str | Callable[[], nn.Module]  # a model's spec, or a function that makes one
    loss: Callable[[Any, Tensor], Tensor] = nn.functional.cross_entropy
    metric: Literal["accuracy", "loss"] = "accuracy"
    transform: Transform = unchanged  # batch → model input, on the device; augments when given a generator
    defaults: dict[str, Any] = field(default_factory=dict)  # epochs, batch_size, lr, optimizer, schedule, …

    def __post_init__(self) -> None:
        if self.metric not in ("accuracy", "loss"):
            raise UsageError(
                f"metric={getattr(self.metric, '__name__', repr(self.metric))}; possible: 'accuracy' (in per cent, of "
                "classes) or 'loss' (that of `loss`); for another figure, load the run's model.safetensors and test it"
            )
        if num_samples(self.train, "train") < 1 or num_samples(self.test, "test") < 1:
            raise UsageError(f"{len(self.train)} samples in train and {len(self.test)} in test; both need some")  # type: ignore[arg-type]
        if isinstance(self.model, nn.Module):
            raise UsageError(
                f"model is a {type(self.model).__name__}; give a function that makes one, so that every run begins "
                "anew: lambda: Net()"
            )
        for name in ("loss", "transform"):
            if not callable(getattr(self, name)):
                raise UsageError(f"{name}={getattr(self, name)!r}; give a function, as torch.nn.functional.mse_loss")
        if self.metric == "accuracy" and self.classes < 2:
            raise UsageError(
                f"classes={self.classes}: there is nothing to tell apart; for regression give loss and metric='loss'"
            )

    def build_model(self, asked: str | None = None) -> nn.Module:
        """The model asked for by spec, or the task's own."""
        choice = asked or self.model
        model: nn.Module = (
            registry.build("models", choice, self.shape, self.classes) if isinstance(choice, str) else choice()
        )
        return model


def load_task(text: str, data: Path | None, seed: int) -> Task:
    """The task that a spec names: a registered one, or `package.module:function(option=value)` of the user's."""
    module, colon, rest = text.partition(":")
    if not colon:
        task: Task = registry.build("tasks", text, data, seed)
        return task
    parsed = spec.parse(rest)
    function = _import(module, parsed.name, text)
    return _checked(function(data, seed, **registry.bind_options(function, parsed, num_leading=2)), text)


def check_task(text: str) -> None:
    """Raise UsageError unless the task exists and its options are valid; loads no data."""
    module, colon, rest = text.partition(":")
    if colon:
        parsed = spec.parse(rest)
        registry.bind_options(_import(module, parsed.name, text), parsed, num_leading=2)
    else:
        registry.check("tasks", text)


def _import(module: str, function: str, text: str) -> Any:
    found = registry.import_attribute(module, function, f"task '{text}'")
    try:
        inspect.signature(found).bind_partial(None, 0)
    except (TypeError, ValueError):
        raise UsageError(
            f"task '{text}' must be a function of (data, seed, /, *, options…) that returns a Task"
        ) from None
    return found


def _checked(task: Any, text: str) -> Task:
    if not isinstance(task, Task):
        raise UsageError(f"task '{text}' returned {type(task).__name__}; expected a thinwire.Task")
    return task


def find_file(data: Path | None, task: str, *names: str) -> Path:
    """A data file in the folder the user named, or one of its usual sub-folders."""
    if data is None:
        raise UsageError(f"{task} needs its data; give the folder that holds {names[0]} as --data DIR")
    if not data.is_dir():
        raise UsageError(f"--data {data} is not a folder; give the one that holds {names[0]}")
    for folder in (data, *sorted(p for p in data.iterdir() if p.is_dir() and re.search(task, p.name.replace("-", "")))):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise UsageError(f"{task}: none of {', '.join(names)} is in {data}; give the folder that holds them as --data DIR")


def crop_and_flip(images: Tensor, generator: Generator, pad: int = 4) -> Tensor:
    """Each image shifted by up to `pad` pixels (zeros come in at the border) and mirrored with probability ½."""
    n, _, height, width = images.shape
    device = images.device
    shift = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=generator, device=device)
    mirror = torch.randint(0, 2, (n, 1), generator=generator, device=device)
    rows = torch.arange(height, device=device) + shift[0]
    columns = torch.arange(width, device=device)
    columns = torch.where(mirror == 1, width - 1 - columns, columns) + shift[1]
    padded = nn.functional.pad(images, (pad, pad, pad, pad))
    sample = torch.arange(n, device=device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=device)[None, :, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
