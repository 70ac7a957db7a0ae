"""The result of an examination, as it is shown and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from thinwire.advice.facts import Facts
from thinwire.advice.findings import Finding, worst
from thinwire.advice.measurements import Measurements
from thinwire.comm.world import number_nodes


@dataclass(frozen=True)
class Diagnosis:
    """What was found in a world."""

    launcher: str
    facts: list[Facts]  # of each rank
    findings: list[Finding]
    measured: Measurements | None = None  # None if the ranks could not join

    @property
    def failed(self) -> bool:
        """Whether a run would fail."""
        return worst(self.findings) == "failure"

    @property
    def num_nodes(self) -> int:
        """How many nodes the ranks are on."""
        return len(set(number_nodes([one.node for one in self.facts])))

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        return {
            "ok": not self.failed,
            "launcher": self.launcher,
            "ranks": len(self.facts),
            "nodes": self.num_nodes,
            "versions": [one.versions for one in self.facts],
            "findings": [one._asdict() for one in self.findings],
            "links": self.measured.links_json() if self.measured else None,
            "compute_gflops": self.measured.compute if self.measured else None,
            "clocks_seconds": self.measured.clocks if self.measured else None,
            "machines": [asdict(one) for one in self.facts],
        }
