"""Load the task that a spec names: a registered one, or the user's own function."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from thinwire import registry, spec
from thinwire.errors import UsageError
from thinwire.tasks.base import Task


def load_task(text: str, data: Path | None, seed: int) -> Task:
    """Load a task by its spec: a registered one, or the user's own as `package.module:function(option=value)`."""
    module, colon, rest = text.partition(":")
    if not colon:
        task: Task = registry.build("tasks", text, data, seed)
        return task
    parsed = spec.parse(rest)
    function = _import_function(module, parsed.name, text)
    loaded = function(data, seed, **registry.bind_options(function, parsed, num_leading=2))
    if not isinstance(loaded, Task):
        raise UsageError(f"task '{text}' returned {type(loaded).__name__}; expected a thinwire.Task")
    return loaded


def check_task(text: str) -> None:
    """Raise UsageError unless the task exists and its options are valid; loads no data."""
    module, colon, rest = text.partition(":")
    if colon:
        parsed = spec.parse(rest)
        registry.bind_options(_import_function(module, parsed.name, text), parsed, num_leading=2)
    else:
        registry.check("tasks", text)


def _import_function(module: str, name: str, text: str) -> Any:
    function = registry.import_attribute(module, name, f"task '{text}'")
    try:
        inspect.signature(function).bind_partial(None, 0)
    except (TypeError, ValueError):
        raise UsageError(
            f"task '{text}' must be a function of (data, seed, /, *, options…) that returns a Task"
        ) from None
    return function
