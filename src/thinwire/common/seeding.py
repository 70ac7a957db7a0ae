"""Random numbers that follow from a seed, without a change to those of the program around them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GENERATOR_LOCK = threading.RLock()


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, torch's random numbers depend on the seed alone; afterwards they continue as before.

    Simulated ranks are threads that share torch's generators, so they take turns: nothing inside may wait for another
    rank.

    >>> with seeded(torch.device("cpu"), 1):
    ...     first = torch.rand(2)
    >>> with seeded(torch.device("cpu"), 1):
    ...     torch.equal(torch.rand(2), first)
    True
    """
    with _GENERATOR_LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
