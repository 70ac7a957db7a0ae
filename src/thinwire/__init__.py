"""Train neural networks over thin wires."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.comm.base import Comm as Comm
    from thinwire.comm.join import join as join
    from thinwire.comm.threads import simulate as simulate
    from thinwire.data import Shard as Shard
    from thinwire.data import loader as loader
    from thinwire.elastic.job import Job as Job
    from thinwire.elastic.train import train_elastic as train_elastic
    from thinwire.errors import RunError as RunError
    from thinwire.errors import UsageError as UsageError
    from thinwire.exchange.attach import attach as attach
    from thinwire.strategies.base import Strategy as Strategy
    from thinwire.strategies.epochs import epoch as epoch
    from thinwire.strategies.own_loop import rounds as rounds
    from thinwire.strategies.prepare import prepare as prepare
    from thinwire.surgery.axes.axis import Axis as Axis
    from thinwire.tasks.base import Task as Task

__version__ = "0.1.0"

# The module of each public name. It is imported on first use, so that `thinwire list` needs no torch.
_MODULES = {
    "Axis": "thinwire.surgery.axes.axis",
    "Comm": "thinwire.comm.base",
    "Job": "thinwire.elastic.job",
    "RunError": "thinwire.errors",
    "Shard": "thinwire.data",
    "Strategy": "thinwire.strategies.base",
    "Task": "thinwire.tasks.base",
    "UsageError": "thinwire.errors",
    "attach": "thinwire.exchange.attach",
    "epoch": "thinwire.strategies.epochs",
    "join": "thinwire.comm.join",
    "loader": "thinwire.data",
    "prepare": "thinwire.strategies.prepare",
    "rounds": "thinwire.strategies.own_loop",
    "simulate": "thinwire.comm.threads",
    "train_elastic": "thinwire.elastic.train",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'thinwire' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
