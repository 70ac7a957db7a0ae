"""Measure links as ranks see them: rate and latency between pairs of ranks, and around a ring.

Ranks of one node share its link, so one rank of each node is measured; on one node, every rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.work import Work

MOST_RANKS = 8  # of a matrix of pairs
NUM_PINGS = 6  # the first one is not counted
FIRST_BYTES, LARGEST_BYTES = 2**13, 2**25  # of the part of a transfer that is timed; a quarter more goes before it
PAIR_BYTES = LARGEST_BYTES // 4 * 5 * 2  # the most that one pair sends, since each transfer at least doubles the last
TIMED_SHARE = 0.4  # of a pair's time is for its last transfer, the one that counts
LARGEST_GROWTH = 16.0


class PairLink(NamedTuple):
    """What one rank gets through to another one, and how long a small message takes one way."""

    rate_mbit: float
    latency_ms: float


Matrix = list[list[PairLink | None]]


class Transfer(NamedTuple):
    """The size of a transfer, and how long it took."""

    num_bytes: int
    seconds: float

    def next_bytes(self, wanted_seconds: float, largest: int = LARGEST_BYTES) -> int:
        """How much to send next, so that it takes as long as is wanted; 0 if this was long or large enough.

        >>> Transfer(1000, 0.02).next_bytes(0.1), Transfer(1000, 0.06).next_bytes(0.1), Transfer(1000, 0).next_bytes(1)
        (5000, 0, 16000)
        """
        if self.seconds >= wanted_seconds / 2 or self.num_bytes >= largest:
            return 0
        growth = min(LARGEST_GROWTH, wanted_seconds / max(self.seconds, 1e-9))
        return min(largest, round(self.num_bytes * growth))

    @property
    def rate_mbit(self) -> float:
        """Mbit/s."""
        return 8e-6 * self.num_bytes / max(self.seconds, 1e-9)


def first_ranks(nodes: Sequence[int]) -> list[int]:
    """The first rank of each node; on a single node, every rank.

    >>> first_ranks([0, 0, 1, 1]), first_ranks([0, 0, 0])
    ([0, 2], [0, 1, 2])
    """
    firsts = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    return firsts if len(firsts) > 1 else list(range(len(nodes)))


def probed_ranks(nodes: Sequence[int], most: int = MOST_RANKS) -> list[int]:
    """The ranks between which `measure_pairs` measures: `first_ranks`, or some of them, evenly spread.

    >>> probed_ranks([0] * 20, most=4)
    [0, 5, 10, 15]
    """
    ranks = first_ranks(nodes)
    count = min(most, len(ranks))
    return [ranks[i * len(ranks) // count] for i in range(count)]


def measure_latency(comm: Comm, a: int, b: int) -> float:
    """Milliseconds that a small message takes from rank a to rank b, or back: half a round trip, the median of several.

    Collective; every rank gets the same.

    >>> import thinwire
    >>> len(set(thinwire.simulate(lambda comm: measure_latency(comm, 0, 2), ranks=3)))
    1
    """
    with comm.ledger.purpose("start"):
        found = torch.tensor([_ping(comm, a, b)], dtype=torch.float64)
        return float(comm.broadcast(found, root=a).item())


def measure_pairs(comm: Comm, seconds: float) -> Matrix:
    """The link from each of `probed_ranks(comm.nodes)` (the rows) to each other one, measured one after the other.

    It takes about `seconds` at most. Links for which no time is left are None, as is the diagonal. Each sends at most
    `PAIR_BYTES`. On a link with a long latency, TCP may need more time than this to reach its full rate.

    Collective; every rank gets the same.

    >>> import thinwire
    >>> matrix = thinwire.simulate(lambda comm: measure_pairs(comm, 0.1), ranks=2)[0]
    >>> matrix[0][0], matrix[0][1].rate_mbit > 0
    (None, True)
    """
    ranks = probed_ranks(comm.nodes)
    pairs = _in_order(ranks)
    end = time.monotonic() + seconds
    latencies: dict[tuple[int, int], float] = {}
    rates: dict[tuple[int, int], float] = {}
    with comm.ledger.purpose("start"):
        for i, (a, b) in enumerate(pairs):
            if comm.rank not in (a, b) or not _agree(comm, a, b, time.monotonic() < end):
                continue
            if (b, a) not in latencies:  # else it was measured with the way back
                latencies[a, b] = _ping(comm, a, b)
            transfer = _transfer_between(comm, a, b, (end - time.monotonic()) / (len(pairs) - i))
            if transfer is not None:
                rates[a, b] = transfer.rate_mbit
        own = {
            "latencies": [[*pair, ms] for pair, ms in latencies.items() if comm.rank == pair[0]],
            "rates": [[*pair, rate] for pair, rate in rates.items()],
        }
        gathered = all_gather_json(comm, own)
    ms = {frozenset((a, b)): found for one in gathered for a, b, found in one["latencies"]}
    links = {(a, b): PairLink(rate, ms[frozenset((a, b))]) for one in gathered for a, b, rate in one["rates"]}
    return [[links.get((a, b)) for b in ranks] for a in ranks]


def measure_ring(comm: Comm, seconds: float, largest: int = LARGEST_BYTES) -> PairLink | None:
    """The slowest link while each of `first_ranks(comm.nodes)` sends to the next one, as in a ring all-reduce.

    The latency is the longest of one hop, on an idle network. None if there is only one rank. It takes about `seconds`
    at most. Messages have at most `largest` bytes, and each rank sends at most `PAIR_BYTES`.

    Collective; every rank gets the same.

    >>> import thinwire
    >>> thinwire.simulate(lambda comm: measure_ring(comm, 0.1).rate_mbit > 0, ranks=3)
    [True, True, True]
    """
    ranks = first_ranks(comm.nodes)
    if len(ranks) == 1:
        return None
    begin = time.monotonic()
    with comm.ledger.purpose("start"):
        latency = max(_ping(comm, a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        size = FIRST_BYTES
        while size:
            comm.barrier()
            mine = _send_around(comm, ranks, size) if comm.rank in ranks else 0.0
            worst = comm.max(torch.tensor([mine, time.monotonic() - begin, latency], dtype=torch.float64)).tolist()
            slowest = Transfer(size, worst[0])
            size = slowest.next_bytes(seconds * TIMED_SHARE, largest) if worst[1] < seconds else 0
    return PairLink(slowest.rate_mbit, worst[2])


def _in_order(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs. Each sender begins with the sender before it, so no pair starts before the one in front is done."""
    count = len(ranks)
    return [(ranks[i], ranks[(i - 1 - step) % count]) for i in range(count) for step in range(count - 1)]


def _agree(comm: Comm, a: int, b: int, proceed: bool) -> bool:
    """What rank a decided, on both ranks."""
    flag = torch.tensor([proceed])
    if comm.rank == a:
        comm.send(flag, to=b)
        return proceed
    return bool(comm.recv(flag, source=a).item())


def _ping(comm: Comm, a: int, b: int) -> float:
    """Half a round trip in ms, on rank a; 0 on others. Receives are posted first, or gloo would hold messages back."""
    times = []
    like = torch.zeros(1)
    if comm.rank == a:
        for _ in range(NUM_PINGS):
            answer = comm.irecv(like, source=b)
            begin = time.perf_counter()
            comm.send(like, to=b)
            answer.wait()
            times.append(time.perf_counter() - begin)
    elif comm.rank == b:
        coming = comm.irecv(like, source=a)
        for i in range(NUM_PINGS):
            coming.wait()
            if i < NUM_PINGS - 1:
                coming = comm.irecv(like, source=a)
            comm.send(like, to=a)
    return 1e3 * statistics.median(times[1:]) / 2 if times else 0.0


def _transfer_between(comm: Comm, a: int, b: int, seconds: float) -> Transfer | None:
    """The largest transfer from rank a to rank b, on rank b, which decides how much comes next."""
    end = time.monotonic() + seconds
    size = torch.tensor(FIRST_BYTES)
    transfer = None
    while size:
        if comm.rank == a:
            for work in [comm.isend(part, to=b) for part in _parts(int(size))]:
                work.wait()
            size = comm.recv(size, source=b)
        else:
            works = [comm.irecv(part, source=a) for part in _parts(int(size), torch.empty)]
            transfer = Transfer(int(size), _seconds_between(*works))
            size = torch.tensor(transfer.next_bytes(seconds * TIMED_SHARE) if time.monotonic() < end else 0)
            comm.send(size, to=a)
    return transfer


def _send_around(comm: Comm, ranks: Sequence[int], num_bytes: int) -> float:
    """Send to the next rank while the last one sends here; returns how long what comes here took."""
    at = ranks.index(comm.rank)
    coming = [comm.irecv(part, source=ranks[at - 1]) for part in _parts(num_bytes, torch.empty)]
    going = [comm.isend(part, to=ranks[(at + 1) % len(ranks)]) for part in _parts(num_bytes)]
    seconds = _seconds_between(*coming)
    for work in going:
        work.wait()
    return seconds


def _parts(num_bytes: int, make: Callable[..., torch.Tensor] = torch.zeros) -> list[torch.Tensor]:
    """A part that fills the link, then the one that is timed."""
    return [make(count, dtype=torch.uint8) for count in (num_bytes // 4, num_bytes)]


def _seconds_between(first: Work, second: Work) -> float:
    """From the arrival of one message to that of the next: neither latency nor the wait for the sender is in it."""
    first.wait()
    begin = time.perf_counter()
    second.wait()
    return time.perf_counter() - begin
