"""How ranks share the cores of a machine."""

from __future__ import annotations

import os


def num_threads(local_ranks: int) -> int:
    """Threads with which each of so many ranks of a machine computes: its share of the cores, less one to send with.

    >>> num_threads(1000)
    1
    """
    return max(1, len(os.sched_getaffinity(0)) // local_ranks - 1)
