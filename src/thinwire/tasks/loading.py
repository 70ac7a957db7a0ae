"""Load the task that a spec names: a registered one, or the user's own function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from thinwire import registry
from thinwire.errors import UsageError
from thinwire.registry.own import Own
from thinwire.tasks.base import Task
from thinwire.tasks.metrics import load_metric


def load_task(text: str, data: Path | None, seed: int) -> Task:
    """Load a task by its spec: a registered one, or the user's own as `package.module:function(option=value)`."""
    if not registry.is_own(text):
        task: Task = registry.build("tasks", text, data, seed)
        return task
    own = _load_own(text)
    loaded = own.function(data, seed, **own.options)
    if not isinstance(loaded, Task):
        raise UsageError(f"task '{text}' returned {type(loaded).__name__}; expected a thinwire.Task")
    return loaded


def with_metric(task: Task, metric: str | None) -> Task:
    """The task with the metric that --metric names, if it names one."""
    return task if metric is None else replace(task, metric=load_metric(metric))


def check_task(text: str) -> None:
    """Raise UsageError unless the task exists and its options are valid; loads no data."""
    if registry.is_own(text):
        _load_own(text)
    else:
        registry.check("tasks", text)


def _load_own(text: str) -> Own:
    return registry.load_own("task", text, ("data", "seed"), "a Task")
