"""Random numbers that follow from a seed, without a change to those of the program around them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_GENERATOR_LOCK = threading.RLock()


def _renew_lock() -> None:
    global _GENERATOR_LOCK
    _GENERATOR_LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it: a worker process would wait for ever


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


class OwnRandomness:
    """Random generators beside those of the program: torch's for the CPU, Python's and numpy's, all with one seed.

    >>> own = OwnRandomness(1)
    >>> with own.used():
    ...     first = random.random(), torch.rand(1).item()
    >>> with OwnRandomness(1).used():
    ...     first == (random.random(), torch.rand(1).item())
    True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._states: Any = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, random numbers are drawn from these generators; nothing inside may wait for another rank."""
        with _GENERATOR_LOCK:
            before = _generator_states()
            if self._states is None:
                torch.default_generator.manual_seed(self.seed)
                random.seed(self.seed)
                np.random.seed(self.seed % 2**32)
            else:
                _set_generator_states(self._states)
            try:
                yield
            finally:
                self._states = _generator_states()
                _set_generator_states(before)


def _generator_states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


def _set_generator_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
