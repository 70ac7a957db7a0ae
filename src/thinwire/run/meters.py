"""What a rank measures: the bytes that it sent, by its ledger and by the Linux kernel, and how long it waited."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.netlab import sent_bytes
from thinwire.run.network import LinkReport

TIMELINE_STEPS = range(2, 6)  # steps that are recorded in detail; the first two are not typical
MAX_SPANS, SPANS_BYTES = 128, 16_384


class Meters:
    """One rank's ledger, timeline and Linux byte count, which are saved, loaded and gathered as one."""

    def __init__(self, comm: Comm, device: torch.device, link: LinkReport) -> None:
        self.link = link
        self.comm = comm
        self.device = device
        self.ledger = comm.ledger
        self.timeline = comm.ledger.timeline
        self.linux_bytes = LinuxByteCount(comm, link.on_hosts)
        self._wait_for_all_ranks()

    def _wait_for_all_ranks(self) -> None:
        """No rank may send before every host has read its counter."""
        with self.ledger.purpose("start"):
            self.comm.barrier()

    def record_some_steps(self, step: int) -> None:
        """Record TIMELINE_STEPS in the timeline; called before each step of the first epoch."""
        if step == TIMELINE_STEPS.start:
            self.timeline.record()
        elif step == TIMELINE_STEPS.stop:
            self.timeline.pause()

    def gather(self, train_seconds: float, loss_parts: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
        """What every rank has measured so far. Collective."""
        with self.ledger.purpose("eval"):
            self.comm.barrier()  # the Linux kernel counts bytes when it sends them: wait until all have arrived
        own = {
            "ledger": self.ledger.rows(),
            "kernel": self.linux_bytes.now(),
            "waiting_seconds": self.timeline.waiting_seconds,
            "train_seconds": train_seconds,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **({"loss_parts": loss_parts} if loss_parts else {}),
        }
        with self.ledger.purpose("eval"):
            return all_gather_json(self.comm, own)

    def gather_timeline(self) -> list[dict[str, Any]]:
        """The spans of all ranks that were recorded since the last call; times count from the first. Collective."""
        with self.ledger.purpose("eval"):
            spans_by_rank = all_gather_json(self.comm, self.timeline.take_rows()[:MAX_SPANS], SPANS_BYTES)
        begin = min((span["begin"] for spans in spans_by_rank for span in spans), default=0.0)
        return [
            {"rank": rank, "part": self.ledger.part, **span, "begin": round(span["begin"] - begin, 6)}
            for rank, spans in enumerate(spans_by_rank)
            for span in spans
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue as if the run had never stopped."""
        return {
            "ledger": self.ledger.rows(),
            "waiting_seconds": self.timeline.waiting_seconds,
            "kernel": self.linux_bytes.now(),
            "link_state": self.link.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Collective."""
        self.linux_bytes.restart(state["kernel"])
        self._wait_for_all_ranks()
        self.ledger.load_rows(state["ledger"])
        self.timeline.waiting_seconds = state["waiting_seconds"]
        self.link = self.link.combined_with(state["link_state"])


class LinuxByteCount:
    """Bytes that this rank's host has sent, inside it and to other hosts, as the Linux kernel counts.

    The first rank of each host counts for all its ranks.
    """

    def __init__(self, comm: Comm, on_hosts: bool) -> None:
        self.counts = on_hosts and comm.nodes.index(comm.nodes[comm.rank]) == comm.rank
        self.restart({})

    def restart(self, before: dict[str, int] | None) -> None:
        """Count from now on, in addition to `before`. If that is None, a part was not counted, so there is no count."""
        self.counts = self.counts and before is not None
        self.begin = Counter(sent_bytes())
        self.begin.subtract(before or {})

    def now(self) -> dict[str, int] | None:
        """The count so far; None on ranks that do not count."""
        if not self.counts:
            return None
        return {link: count - self.begin[link] for link, count in sent_bytes().items()}


def sum_over_hosts(counts: list[dict[str, int] | None]) -> dict[str, int] | None:
    """The bytes of all hosts, from the counts of all ranks.

    >>> sum_over_hosts([{"inside": 1, "between": 2}, None, {"inside": 0, "between": 5}])
    {'inside': 1, 'between': 7}
    """
    given = [count for count in counts if count is not None]
    return {link: sum(count[link] for count in given) for link in ("inside", "between")} if given else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has used: of its GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
