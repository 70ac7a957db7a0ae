"""Tables fit the terminal: figures are left out before a name is, and nothing is cut in the middle."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.compare.comparisons import DENSE, SPARSE, compare
from thinwire.compare.results import Results
from thinwire.compare.terminal_table import comparison_caption, comparison_table
from thinwire.run.tables import result_table


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return compare(tmp_path_factory.mktemp("cmp"), [DENSE, SPARSE], seeds=(0, 1), target=90)


def drawn(results: Results, width: int, states: dict[str, str] | None = None) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(results, width, states))
    console.file.close()
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("width", [60, 72, 80, 90, 100, 120, 200])
def test_every_line_fits_and_names_are_whole(results: Results, width: int, live: bool) -> None:
    states = dict.fromkeys((DENSE, SPARSE), "1/2, seed 1: 45 %") if live else None
    lines = drawn(results, width, states)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    assert "…" not in text
    assert "data_parallel(" in text
    assert "accuracy" in text
    names = "".join(line.split()[0] for line in lines if line.strip() and "─" not in line and "strategy" not in line)
    assert names.replace("\n", "") == DENSE + SPARSE


def test_more_room_shows_more_figures(results: Results) -> None:
    headings = [drawn(results, width)[1].split() for width in (70, 90, 200)]
    assert headings[0] == headings[1][: len(headings[0])]
    assert headings[1] == headings[2][: len(headings[1])]
    assert len(headings[0]) < len(headings[1]) < len(headings[2])
    assert headings[2][-1] == "memory"


def test_the_table_of_a_run_adds_up_all_ranks() -> None:
    """Rank 0's rows stood beside the mean over ranks, and did not add up to it."""
    row = {"part": 0, "purpose": "train", "link": "world", "op": "send", "ranks": 2}
    ledgers = [
        [{**row, "calls": 1, "payload_bytes": 9_000, "wire_bytes": 10_000, "between_bytes": 0, "seconds": 3.0}],
        [{**row, "calls": 2, "payload_bytes": 9_000, "wire_bytes": 30_000, "between_bytes": 0, "seconds": 5.0},
         {**row, "purpose": "eval", "calls": 1, "payload_bytes": 0, "wire_bytes": 2_000, "between_bytes": 0,
          "seconds": 1.0}],
    ]  # fmt: skip
    sent = {"train": {"inside": 40_000, "between": 0}, "eval": {"inside": 2_000, "between": 0}}
    summary = {
        "task": "digits", "strategy": "x", "ranks": 2, "metric": "accuracy", "value": 97.0, "seconds": 9.0, "nodes": 1,
        "train_seconds": 6.0, "waiting_share": 0.5, "parameters": 10, "link": None,
        "artifacts": [], "series": {}, "status": {},
        "wire_bytes_by_purpose": sent,
    }  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result_table(summary, ledgers))
    shown = console.export_text()
    lines = [line.split() for line in shown.splitlines()]
    assert ["train", "world", "send", "2", "3", "18.0", "kB", "40.0", "kB", "5.0", "s"] in lines
    assert ["eval", "world", "send", "2", "1", "0", "B", "2.00", "kB", "1.0", "s"] in lines
    assert "sent 42.0 kB by all ranks, 40.0 kB of it in training; 21.0 kB by a rank on average" in shown
    assert "part" not in shown
    console.print(result_table(summary, [ledgers[0], [{**one, "part": 2} for one in ledgers[1]]]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["0", "train", "world", "send", "2", "1", "9.00", "kB", "10.0", "kB", "3.0", "s"] in lines
    assert ["2", "train", "world", "send", "2", "2", "9.00", "kB", "30.0", "kB", "5.0", "s"] in lines


def test_a_link_that_was_not_what_was_asked_for_is_said(tmp_path: Path) -> None:
    def caption(folder: str, **more: object) -> str:
        return comparison_caption(compare(tmp_path / folder, [DENSE, SPARSE], seeds=(0, 1), link="100mbit", **more))

    good = {"rate_mbit": 98.76, "latency_ms": 0.01}
    assert caption("good", link_state="shaped", link_measured=good) == "link 100mbit, measured 98.8–98.8 Mbit/s"
    assert caption("off", link_state="off", link_measured=good).endswith("; OFF in 4 of 4 runs")
    assert caption("none", link_state="not shaped", link_measured=None) == "link 100mbit; NOT SHAPED in 4 of 4 runs"
    assert comparison_caption(compare(tmp_path / "free", [DENSE], link=None, link_state=None)) == ""


def test_a_strategy_with_brackets_is_shown_whole(tmp_path: Path) -> None:
    """rich takes words in brackets for styles, and would leave them out."""
    spec = "sequence([data_parallel, local_sgd], [1])"
    assert spec in "\n".join(drawn(compare(tmp_path, [spec], (0,)), 200))
