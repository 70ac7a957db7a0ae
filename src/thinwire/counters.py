"""What the kernel says was sent: the judge of the ledger, where a host's interfaces carry nothing but the run."""

from __future__ import annotations

from collections import Counter

from thinwire.comm.base import Comm
from thinwire.netlab import sent_bytes


class KernelCount:
    """Bytes that this rank's host has sent, inside it and between hosts; counted by the first rank on it alone."""

    def __init__(self, comm: Comm, on_hosts: bool) -> None:
        self.counts = on_hosts and comm.nodes.index(comm.nodes[comm.rank]) == comm.rank
        self.restart(None)

    def restart(self, before: dict[str, int] | None) -> None:
        """Count from now on, in addition to what was counted before."""
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
