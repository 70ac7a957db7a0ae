"""The trackers that --track names, and what they have in common. None is imported before it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from thinwire.errors import UsageError

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
PROJECT = "thinwire"  # under which trackers list runs, unless their own variables name another


class About(NamedTuple):
    """What a tracker is told of a run when it is opened."""

    folder: Path
    id: str  # of the run in the tracker; the same when the run goes on
    is_new: bool  # whether the tracker has nothing of this run yet
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """Writes the numbers of steps for one tracker."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self, is_complete: bool) -> None: ...  # whether the run has come to its end


def check_tracker(name: str) -> None:
    """Raise UsageError unless the package of a tracker is installed; it is not imported."""
    package = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"--track {name} needs the package {package}; install it with: pip install 'thinwire[{name}]' (or pip "
            f"install {package}), or leave --track out"
        )


def open_tracker(name: str, about: About) -> Tracker:
    """The tracker of a name, for a run. What its package writes into the environment is taken back."""
    before = dict(os.environ)
    try:
        opened: Tracker = importlib.import_module(f"thinwire.run.tracking.{name}").open_run(about)
        return opened
    finally:
        for variable in os.environ.keys() - before.keys():
            del os.environ[variable]
        os.environ.update(before)


@contextmanager
def unless_set(**variables: str) -> Iterator[None]:
    """Inside, the environment has these variables, unless the user has set them."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row of metrics, also those in its lists and dicts; `step` is left out.

    >>> numbers({"step": 9, "loss": 0.5, "phase": "ab", "shares": [0.4, 0.6], "layer_ranks": {"fc": [3, 8]}})
    {'loss': 0.5, 'shares/0': 0.4, 'shares/1': 0.6, 'layer_ranks/fc/0': 3, 'layer_ranks/fc/1': 8}
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, list | tuple):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or name != "step"):
            found[f"{prefix}{name}"] = value
    return found
