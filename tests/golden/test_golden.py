"""Every method gives the numbers that it gave before."""

from __future__ import annotations

import math

import pytest

from tests.golden.runs import FILES, ON_PROCESSES, arithmetic, names, record, stored
from tests.worlds import ProcessWorlds

NEARLY = 0.02  # of losses, where the last bits differ: rounding to a few bits makes more of them


@pytest.mark.parametrize("name", [name for name in names() if name not in ON_PROCESSES])
def test_numbers_have_not_changed(name: str) -> None:
    compare(name)


@pytest.mark.parametrize("name", ON_PROCESSES)
def test_numbers_of_processes_have_not_changed(name: str, process_world: ProcessWorlds) -> None:
    compare(name, process_world)


def compare(name: str, processes: ProcessWorlds | None = None) -> None:
    """To change the numbers on purpose: python -m tests.golden, and say why in the commit."""
    before, after = stored(name), record(name, processes)
    assert len(before["runs"]) == len(after)
    for old, new in zip(before["runs"], after, strict=True):
        assert new["wire_bytes"] == old["wire_bytes"]
        if before["arithmetic"] == arithmetic():
            assert new == old
        for there, here in zip(old["losses"], new["losses"], strict=True):
            assert len(there) == len(here)
            for one, other in zip(map(float.fromhex, there), map(float.fromhex, here), strict=True):
                assert (math.isnan(one) and math.isnan(other)) or other == pytest.approx(one, rel=NEARLY, abs=NEARLY)


def test_every_method_has_a_golden_file() -> None:
    """To make the file of a new method: make golden."""
    assert {path.stem for path in FILES.iterdir()} == set(names())
