"""How far the clocks of nodes are apart."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from thinwire.comm.base import Comm
from thinwire.comm.link_probe import first_ranks

NUM_TRIES = 5


def measure_clocks(comm: Comm, now: Callable[[], float] = time.time) -> list[float]:
    """Seconds by which the clock of each of `first_ranks(comm.nodes)` is ahead of rank 0's.

    It is right up to half a round trip. Collective; every rank gets the same.

    >>> import thinwire
    >>> thinwire.simulate(lambda comm: round(measure_clocks(comm, lambda: comm.rank * 60.0)[1]), ranks=2)
    [60, 60]
    """
    ranks = first_ranks(comm.nodes)
    with comm.ledger.purpose("start"):
        ahead = [0.0, *(_seconds_ahead(comm, rank, now) for rank in ranks[1:])]
        found = torch.tensor(ahead, dtype=torch.float64)
        return [float(one) for one in comm.broadcast(found, root=0)]


def _seconds_ahead(comm: Comm, other: int, now: Callable[[], float]) -> float:
    """On rank 0, by the shortest of several round trips."""
    question = torch.zeros(1, dtype=torch.float64)
    tries = []
    for _ in range(NUM_TRIES):
        if comm.rank == 0:
            answer = comm.irecv(question, source=other)
            begin, begin_ticks = now(), time.perf_counter()
            comm.send(question, to=other)
            there, seconds = float(answer.wait().item()), time.perf_counter() - begin_ticks
            tries.append((seconds, there - begin - seconds / 2))
        elif comm.rank == other:
            comm.recv(question, source=0)
            comm.send(torch.tensor([now()], dtype=torch.float64), to=0)
    return min(tries)[1] if tries else 0.0
