"""What is measured between ranks once they have joined, and on each of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinwire.comm.base import Comm
from thinwire.comm.clocks import measure_clocks
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.link_probe import PAIR_BYTES, PairLink, first_ranks, measure_pairs, measure_ring, probed_ranks
from thinwire.common.formats import format_bytes
from thinwire.common.messages import print_line

SECONDS_PER_PAIR, MOST_SECONDS, RING_SECONDS = 1.5, 12.0, 2.0
COMPUTE_SECONDS, MATRIX_SIZE = 0.3, 512


class Measurements(NamedTuple):
    """Links between the ranks `probed`, and around the ring of `firsts`, the first rank of each node."""

    probed: list[int]
    firsts: list[int]
    nodes: list[int]  # of each rank
    links: list[list[PairLink | None]]
    ring: PairLink | None
    clocks: list[float]  # seconds ahead of rank 0, of each of `firsts`
    compute: list[float]  # Gflop/s of each rank, while all compute
    segments: list[int]  # TCP segments that each rank's host sent during the probe
    retransmitted: list[int]  # of these, again

    def links_json(self) -> dict[str, Any] | None:
        """The matrix of links as JSON."""
        if self.ring is None:
            return None
        return {
            "ranks": self.probed,
            "rate_mbit": [[link and link.rate_mbit for link in row] for row in self.links],
            "latency_ms": [[link and link.latency_ms for link in row] for row in self.links],
            "ring": self.ring._asdict(),
        }


def measure_world(comm: Comm, device: torch.device) -> Measurements:
    """Measure links, clocks and computing. Collective; every rank gets the same."""
    probed = probed_ranks(comm.nodes)
    seconds = pairs_seconds(len(probed))
    if comm.rank == 0 and comm.size > 1:
        print_line(announcement(comm.nodes))
    before = _tcp_segments()
    links, ring = measure_pairs(comm, seconds), measure_ring(comm, RING_SECONDS)
    sent, again = (now - then for now, then in zip(_tcp_segments(), before, strict=True))
    clocks = measure_clocks(comm)
    with comm.ledger.purpose("start"):
        comm.barrier()
        own = {"compute": measure_compute(device), "sent": sent, "again": again}
        gathered = all_gather_json(comm, own)
    compute, segments, retransmitted = ([one[name] for one in gathered] for name in ("compute", "sent", "again"))
    firsts = first_ranks(comm.nodes)
    return Measurements(probed, firsts, list(comm.nodes), links, ring, clocks, compute, segments, retransmitted)


def pairs_seconds(num_ranks: int) -> float:
    """How long the links between so many ranks are measured, at most."""
    return min(MOST_SECONDS, SECONDS_PER_PAIR * num_ranks * (num_ranks - 1))


def announcement(nodes: Sequence[int]) -> str:
    """What will be sent, and for how long.

    >>> announcement([0, 1])
    'measuring 2 links between 2 nodes, then the ring: about 5 s and 336 MB at most'
    """
    probed, firsts = probed_ranks(nodes), first_ranks(nodes)
    pairs = len(probed) * (len(probed) - 1)
    what = "nodes" if len(set(nodes)) > 1 else "ranks"
    some = f"{len(probed)} of {len(firsts)}" if len(probed) < len(firsts) else str(len(probed))
    seconds = pairs_seconds(len(probed)) + RING_SECONDS + COMPUTE_SECONDS
    most = format_bytes(PAIR_BYTES * (pairs + len(firsts)))
    return f"measuring {pairs} links between {some} {what}, then the ring: about {seconds:.0f} s and {most} at most"


def measure_compute(device: torch.device, seconds: float = COMPUTE_SECONDS) -> float:
    """Gflop/s of products of float32 matrices on a device.

    >>> measure_compute(torch.device("cpu"), seconds=0.01) > 0
    True
    """
    matrix = torch.full((MATRIX_SIZE, MATRIX_SIZE), 1 / MATRIX_SIZE, device=device)
    matrix = matrix @ matrix  # the first product also loads libraries
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        for _ in range(4):
            matrix = matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += 4
    return 2e-9 * MATRIX_SIZE**3 * count / elapsed


def _tcp_segments() -> tuple[int, int]:
    """TCP segments that this host has sent so far, and how many of them again."""
    lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    counts = dict(zip(names, values, strict=True))
    return int(counts["OutSegs"]), int(counts["RetransSegs"])
