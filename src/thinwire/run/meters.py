"""What a rank measures of itself: what it sent, by its ledger and by its host's kernel, and how long it waited."""

from __future__ import annotations

import resource
from collections import Counter
from typing import Any

import torch

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.netlab import sent_bytes
from thinwire.run.network import LinkReport

TIMELINE_STEPS = range(2, 6)  # of a run, kept in detail; the first ones are not typical
MAX_SPANS, SPANS_BYTES = 128, 16_384


class Meters:
    """One rank's ledger, timeline and kernel counters, as one thing to save, load and gather."""

    def __init__(self, comm: Comm, device: torch.device, link: LinkReport) -> None:
        self.link = link
        self.comm = comm
        self.device = device
        self.ledger = comm.ledger
        self.timeline = comm.ledger.timeline
        self.kernel = KernelCount(comm, link.on_hosts)
        self._await_all()

    def _await_all(self) -> None:
        """Let nobody send before every host was asked what it has sent."""
        with self.ledger.purpose("start"):
            self.comm.barrier()

    def keep_some(self, step: int) -> None:
        """Keep a few steps in the timeline; told before each of the first ones."""
        if step == TIMELINE_STEPS.start:
            self.timeline.record()
        elif step == TIMELINE_STEPS.stop:
            self.timeline.pause()

    def gather(self, train_seconds: float) -> list[dict[str, Any]]:
        """What every rank has measured so far. Collective."""
        with self.ledger.purpose("eval"):
            self.comm.barrier()  # what the kernel has yet to send is not in its count: all has arrived
        own = {
            "ledger": self.ledger.rows(),
            "kernel": self.kernel.now(),
            "waiting_seconds": self.timeline.waiting_seconds,
            "train_seconds": train_seconds,
            "peak_memory_bytes": peak_memory(self.device),
        }
        with self.ledger.purpose("eval"):
            return all_gather_json(self.comm, own)

    def gather_timeline(self) -> list[dict[str, Any]]:
        """The steps that were kept, of all ranks, from the first one's begin. Collective."""
        with self.ledger.purpose("eval"):
            everyone = all_gather_json(self.comm, self.timeline.rows()[:MAX_SPANS], SPANS_BYTES)
        begin = min((span["begin"] for spans in everyone for span in spans), default=0.0)
        return [
            {"rank": rank, **span, "begin": round(span["begin"] - begin, 6)}
            for rank, spans in enumerate(everyone)
            for span in spans
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped."""
        return {
            "ledger": self.ledger.rows(),
            "waiting_seconds": self.timeline.waiting_seconds,
            "kernel": self.kernel.now(),
            "link_state": self.link.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Collective."""
        self.kernel.restart(state["kernel"])
        self._await_all()
        self.ledger.load_rows(state["ledger"])
        self.timeline.waiting_seconds = state["waiting_seconds"]
        self.link = self.link.mixed_with(state["link_state"])


class KernelCount:
    """Bytes that this rank's host has sent, inside it and between hosts; counted by the first rank on it alone."""

    def __init__(self, comm: Comm, on_hosts: bool) -> None:
        self.counts = on_hosts and comm.nodes.index(comm.nodes[comm.rank]) == comm.rank
        self.restart({})

    def restart(self, before: dict[str, int] | None) -> None:
        """Count from now on, in addition to what was counted before; what was not counted makes this no count."""
        self.counts = self.counts and before is not None
        self.begin = Counter(sent_bytes())
        self.begin.subtract(before or {})

    def now(self) -> dict[str, int] | None:
        """The count so far; None where it is not this rank's to give."""
        if not self.counts:
            return None
        return {link: count - self.begin[link] for link, count in sent_bytes().items()}


def add_up(counts: list[dict[str, int] | None]) -> dict[str, int] | None:
    """The count of all hosts, from what every rank has.

    >>> add_up([{"inside": 1, "between": 2}, None, {"inside": 0, "between": 5}])
    {'inside': 1, 'between': 7}
    """
    given = [count for count in counts if count is not None]
    return {link: sum(count[link] for count in given) for link in ("inside", "between")} if given else None


def peak_memory(device: torch.device) -> int:
    """The most memory this rank has held: of its GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
