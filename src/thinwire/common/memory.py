"""Memory of this machine: how much is free, and how the C library treats what was freed."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from contextlib import suppress
from pathlib import Path

# Of mallopt in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_BLOCK = 32 * 2**20  # glibc allows no more; larger than a bucket of the default size
KEPT_BYTES = 2**29  # of free memory at the end of the heap


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep blocks of up to 32 MiB that were freed, instead of giving them back to Linux; once a process.

    A step allocates the same buffers again and again. Linux fills each page with zeros when it is used again, which
    took up to a third of a step. Threads that start later share one heap, because the heap of a thread is given back as
    a whole. Nothing is changed if the environment has settings of malloc already, or with another C library. Returns
    whether the settings were made.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: LARGEST_BLOCK, M_TRIM_THRESHOLD: KEPT_BYTES}
    done = [mallopt(name, value) for name, value in settings.items()]
    return all(done)


def free_memory() -> float:
    """Bytes that this process can still get, in the machine and in its container; infinite where Linux does not say."""
    free = float("inf")
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = 1024 * int(found[1]) if found else free
    with suppress(OSError, ValueError):  # no such limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return free
