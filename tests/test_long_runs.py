"""Long runs: nothing grows from step to step; and benchmarks/long_runs.py says what it measured."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import thinwire as tw
from tests.training import batches, seeded, spec_of, trainer
from tests.training import part as part_of
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.spec import parse

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
long_runs, rank, render = (
    importlib.import_module(name) for name in ("long_runs", "long_runs_rank", "long_runs_render")
)
RESULTS = json.loads((ROOT / "docs" / "long-runs.json").read_text())
NET = seeded(7, rank.net)
SPECS = {name: spec_of(name) for name in registry.TABLE["strategies"]} | {
    "ab": "ab(group_size=1, cutoff=0.5, sync_every=20, warmup=20, rebound=2, climb=2, joint=0)",
    "diloco": "diloco(every=4, fragments=2, wait=1)",
    "data_parallel": "data_parallel(reducer=error_feedback(maxnorm(bits=4)), bucket_mb=0.001)",
    "sequence": "sequence([local_sgd, data_parallel], [1])",
    "daso": "daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=0)",
}
LOOKS, LAST, EPOCH = (100, 200, 300), 300, 20


def held(comm: Comm, strategy: Any) -> dict[str, int]:
    """What is there after a step: of this rank, and of the process."""
    timeline = comm.ledger.timeline
    return {
        "ledger": len(comm.ledger.totals),
        "spans": len(timeline._spans) + len(timeline._operations),
        "state": sum(1 for one in leaves(strategy.state_dict())),
    }


def wait_for_others(comm: Any) -> None:
    """Return once all others wait in a barrier, so that no post of the barrier before is left."""
    others = set(range(comm.size)) - {comm.rank}
    deadline = time.monotonic() + 20
    while not others <= {wait.rank for wait in list(comm.board.waiting.values())} and time.monotonic() < deadline:
        time.sleep(0.001)


def leaves(tree: Any) -> list[Any]:
    """The values of a state."""
    parts = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else None
    return [tree] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def trained_for_long(comm: Comm, spec: str) -> list[dict[str, int]]:
    """Train, end epochs, consolidate and save; look after some of the steps."""
    strategy = trainer(comm, spec, NET, epochs=LAST // EPOCH)
    data, found = batches(EPOCH, 8), []
    for step in range(1, LAST + 1):
        if step % EPOCH == 1:
            strategy.begin_epoch(EPOCH)
        strategy.step(part_of(data[step % EPOCH], strategy.shard))
        if step % EPOCH == 0:
            strategy.end_epoch()
        if step % 50 == 0:
            strategy.load_state_dict(copy.deepcopy(strategy.state_dict()))
            strategy.consolidate()
        if step in LOOKS:
            comm.barrier()
            if comm.rank == 0:
                wait_for_others(comm)
                gc.collect()
                objects = gc.get_objects()
                process = {
                    "posts": len(comm.board.posts),  # type: ignore[attr-defined]
                    "tensors": sum(issubclass(type(one), Tensor) for one in objects),
                    "threads": threading.active_count(),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "groups": sum(issubclass(type(one), Comm) for one in objects),
                }  # fmt: skip
                del objects  # which would keep all of them
            else:
                process = {}
            comm.barrier()
            found.append(held(comm, strategy) | process)
            comm.barrier()
    return found


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"pipeline", "auto"}))  # these run on processes, or as another one
def test_nothing_grows_from_step_to_step(name: str) -> None:
    for found in tw.simulate(lambda comm: trained_for_long(comm, SPECS[name]), ranks=2):
        counts = {what: [one[what] for one in found] for what in found[0]}
        grown = {what: one for what, one in counts.items() if one[0] < one[1] < one[2]}
        assert not grown, f"after {LOOKS} steps"


# ---- the measurement


def sample(step: int, **changes: int) -> dict[str, int]:
    return dict.fromkeys(render.FLAT, 7) | {"step": step, "rss_bytes": 2**28} | changes


def test_a_verdict_is_about_the_last_steps() -> None:
    late = [sample(step, tensors=5 + step // 1000) for step in range(1000, 10_001, 1000)]
    early = [sample(step, tensors=min(4, step // 1000)) for step in range(1000, 10_001, 1000)]
    memory = [sample(step, rss_bytes=2**28 + 200 * step) for step in range(1000, 10_001, 1000)]
    row = {"name": "x", "spec": "ab", "ranks": 2, "steps": 10_000, "seconds": 1.0}
    assert render.verdict(row | {"samples": [early, late]}) == "grows: tensors"
    assert render.growth(row | {"samples": [early, late]}, "tensors") == 1
    assert render.verdict(row | {"samples": [early]}) == "flat"
    assert render.verdict(row | {"samples": [memory]}) == "grows: rss_bytes"


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "speed.md").read_text()
    assert render.with_section(page, render.SECTION, render.section(RESULTS)) == page
    measured = {parse(row["spec"]).name for row in RESULTS["rows"] if row["spec"]}
    assert measured == set(registry.TABLE["strategies"])
    assert {row["name"] for row in RESULTS["rows"]} == set(long_runs.BY_NAME)
    assert all(row["steps"] == 10_000 and "failed" not in row for row in RESULTS["rows"])
    assert [render.verdict(row) for row in RESULTS["rows"]] == ["flat"] * len(RESULTS["rows"])


def test_cases_name_what_exists() -> None:
    for case in long_runs.CASES:
        if case.spec:
            registry.check("strategies", case.spec)
        else:
            assert case.name in long_runs.PROGRAMS
