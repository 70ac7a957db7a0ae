"""benchmarks/floor.py: its arithmetic, its results file, its tables, and one measurement. No time is asserted."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire import registry, spec
from thinwire.comm.wire_bytes import all_reduce_bytes

ROOT = Path(__file__).parent.parent
FLOOR = ROOT / "benchmarks" / "floor.py"
PARAMETERS = (3 * 32 * 32 + 1) * 16 + (16 + 1) * 10  # of mlp(width=16, depth=1)
sys.path.append(str(FLOOR.parent))
results, rows, render, rank = (
    importlib.import_module(f"floor_{name}") for name in ("results", "rows", "render", "rank")
)  # fmt: skip

ABOUT = {
    "date": "2026-01-02", "commands": ["python benchmarks/floor.py"], "device": "cuda",
    "hardware": {"gpu": "a GPU", "cpu": "a CPU", "cpus": 16},
    "versions": {"python": "3", "torch": "2", "thinwire": "0"},
    "model": "resnet18", "parameters": 11_173_962, "batch_size": 128, "ranks": 4,
}  # fmt: skip
STAMP = {"date": "2026-01-02", "revision": "1951636", "threads": 3, "seconds": 4.0}


def found(name: str, link: str = "1gbit", ms: float = 600.0, **changes: Any) -> dict[str, Any]:
    sent = all_reduce_bytes(4 * 11_173_962, 4)
    row = {
        "link": link, "row": name, "blocks": False, "steps": 5, "rounds_ms": [ms, ms - 1, ms + 50],
        "compute_ms": [16.0, 15.0, 40.0], "rank_bytes": sent, "host_bytes": sent, "host_bytes_by_kernel": None,
        "cpu_ms": 5.0, "memory_bytes": 2_000_000_000, **STAMP,
    }  # fmt: skip
    return row | changes


def test_the_floor_is_bytes_over_rate() -> None:
    assert results.floor_ms(all_reduce_bytes(4 * 11_173_962, 4), 1e3) == pytest.approx(536.35, abs=0.01)
    assert results.floor_ms(1e6, 100.0) == pytest.approx(80)
    assert results.floor_ms(1e6, None) == 0


def test_the_bound_is_the_larger_time_or_the_sum() -> None:
    assert results.bound_ms(16.0, 70.0, blocks=False) == 70
    assert results.bound_ms(16.0, 7.0, blocks=False) == 16
    assert results.bound_ms(16.0, 70.0, blocks=True) == 86


def test_a_line_has_medians_and_their_ratio() -> None:
    overlapping, blocking = results.line(found("DDP")), results.line(found("local_sgd", blocks=True))
    assert (overlapping.ms, overlapping.compute) == (600, 16)
    assert overlapping.ratio == pytest.approx(600 / overlapping.floor)
    assert blocking.ratio == pytest.approx(600 / (16 + blocking.floor))
    assert results.line(found("DDP", link="none")).bound == 16


@pytest.mark.parametrize(
    ("period_seconds", "expected"), [(0.01, (5, 80)), (0.6, (5, 1)), (1.5, (2, 1)), (9.0, (2, 1)), (0.9, (4, 1))]
)
def test_rounds_fit_the_budget(period_seconds: float, expected: tuple[int, int]) -> None:
    assert results.plan(4.0, period_seconds) == expected


def test_bytes_are_those_of_the_busiest_rank_and_host() -> None:
    def one(node: int, num_bytes: int, seconds: float) -> dict[str, Any]:
        sent = {"rank_bytes": 20 * num_bytes, "between_bytes": 10 * num_bytes}
        a_round = {"seconds": seconds, "cpu_seconds": 0.5, "steps": 10, **sent}
        return {"rounds": [a_round] * 3, "compute": [0.01], "node": node, "by_kernel": 70.0 + node, "memory": None}

    row = rows.Row("daso", blocks=True)
    combined = rank.combined(row, [one(0, 10, 1.0), one(0, 20, 1.0), one(1, 25, 3.0), one(1, 0, 3.0)])
    assert (combined["rank_bytes"], combined["host_bytes"], combined["host_bytes_by_kernel"]) == (50, 30, 71)
    assert (combined["rounds_ms"], combined["compute_ms"], combined["steps"]) == ([200.0] * 3, [10.0], 30)
    assert combined["cpu_ms"] * len(os.sched_getaffinity(0)) == pytest.approx(4 * 50, abs=0.01)


def test_bytes_of_a_step_are_those_of_all_rounds() -> None:
    def one(node: int, by_round: list[int]) -> dict[str, Any]:
        same = {"seconds": 1.0, "cpu_seconds": 0.5, "steps": 10}
        rounds = [{**same, "rank_bytes": b, "between_bytes": b} for b in by_round]
        return {"rounds": rounds, "compute": [0.01], "node": node, "by_kernel": None, "memory": None}

    combined = rank.combined(rows.Row("ist"), [one(0, [90, 0, 0]), one(1, [0, 60, 0])])  # they take turns
    assert (combined["rank_bytes"], combined["host_bytes"], combined["steps"]) == (3, 3, 30)


def test_results_are_added_one_by_one_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    first = results.Results(path, ABOUT, resume=False)
    first.add_row(found("DDP"))
    first.add_row({"link": "1gbit", "row": "ist(local_steps=64)", "failed": "no units", **STAMP})
    again = results.Results(path, ABOUT | {"date": "2026-01-03"}, resume=True)
    assert again.has_row("1gbit", "DDP")
    assert not again.has_row("10gbit", "DDP")
    assert not again.has_row("1gbit", "ist(local_steps=64)")  # it failed, and is tried again
    again.add_row(found("ist(local_steps=64)"))
    again.add_row(found("DDP", ms=500.0))
    saved = json.loads(path.read_text())
    assert [(row["row"], row["rounds_ms"][0]) for row in saved["rows"]] == [("ist(local_steps=64)", 600), ("DDP", 500)]
    assert (saved["date"], len(saved["commands"])) == ("2026-01-02", 2)  # the date of the first command
    assert [file.name for file in tmp_path.iterdir()] == ["speed.json"]
    with pytest.raises(SystemExit, match="batch_size 128, not 64"):
        results.Results(path, ABOUT | {"batch_size": 64}, resume=True)


def test_what_is_of_another_revision_is_kept_and_named(tmp_path: Path) -> None:
    own = results.Results(tmp_path / "speed.json", ABOUT, resume=False)
    own.add_row(found("DDP"))
    own.add_row(found("data_parallel", date="2026-01-05", revision="ab12cd3", kernels="compiled"))
    own.add_row(found("local_sgd", date="2026-01-07", revision="ab12cd3", kernels="compiled"))
    own.add_trainer({"name": "an MLP", "ms": {"written by hand": [10.0]}, **STAMP})
    assert own.has_row("1gbit", "DDP")
    assert not own.has_row("1gbit", "DDP", "ab12cd3")
    assert own.has_row("1gbit", "local_sgd", "ab12cd3")
    assert (own.has_trainer("an MLP", "1951636"), own.has_trainer("an MLP", "ab12cd3")) == (True, False)
    expected = "measured at 1951636 (2026-01-02) and ab12cd3 with compiled kernels (2026-01-05 to 2026-01-07)"
    assert render.about(own.data).endswith(expected)


def test_a_link_has_a_rate_for_each_number_of_hosts(tmp_path: Path) -> None:
    own = results.Results(tmp_path / "speed.json", ABOUT, resume=False)
    own.add_rate("1gbit", 4, 987.61)
    own.add_rate("1gbit", 2, 990.0)
    assert own.data["links"] == {"1gbit": {"4": 987.6, "2": 990.0}}
    assert render.compute_text(own.data, "1gbit") == "link measured at 988 Mbit/s (4 hosts) and 990 Mbit/s (2 hosts)"


def test_tables_show_what_was_found(tmp_path: Path) -> None:
    measured = [found("data_parallel", ms=300.0), found("DDP")]
    data = {**ABOUT, "links": {"1gbit": {"4": 987.6}}, "trainer": [], "rows": measured}
    data["rows"].append({"link": "none", "row": "pipeline", "failed": "UsageError: <no>", **STAMP})
    times = {"written by hand": [10.0, 20.0], "thinwire train": [11.0, 22.0]}
    data["trainer"].append({"name": "ResNet-18", "ms": times, **STAMP})
    assert [row[0] for row in render.link_table(data, "1gbit")[1]] == ["`DDP`", "`data_parallel`"]
    assert render.pays_table(data) == (["method", "1 Gbit/s"], [["`DDP`", "1.00"], ["`data_parallel`", "0.50"]])
    assert render.trainer_table(data)[1][1] == ["ResNet-18", "thinwire train", "16.50", "1.100"]
    (tmp_path / "speed-gpu.json").write_text(json.dumps(data))
    page = (
        "before\n<!-- speed-gpu: drawn -->\nold\n<!-- end -->\nafter\n<!-- speed-cpu: drawn -->\nkept\n<!-- end -->\n"
    )
    (tmp_path / "speed.md").write_text(page)
    render.render(tmp_path)
    drawn = (tmp_path / "speed.md").read_text()
    assert "| `DDP` | 67.04 | 536.4 | 16.0 | 536.4 | 600.0 | 1.12 | 1.00 | 2.00 GB (× 1.00) |" in drawn
    assert "compute 16.0 ms (15.0 – 40.0)" in drawn
    assert "pipeline, loopback: UsageError: <no>" in drawn
    assert "old" not in drawn
    assert drawn.startswith("before\n")
    assert "after\n<!-- speed-cpu: drawn -->\nkept\n<!-- end -->" in drawn
    render.render(tmp_path)
    assert (tmp_path / "speed.md").read_text() == drawn
    drawing = (tmp_path / "speed-gpu.svg").read_text()
    assert [drawing.count(f'class="{kind}"') for kind in ("bar", "mark")] == [3, 3]  # of two rows, and the legend


def test_names_in_the_picture_are_short_and_differ() -> None:
    names = [render.shortened(row.name) for row in rows.ROWS if row.main]
    assert max(map(len, names)) <= render.MOST_LETTERS
    assert len(set(names)) == len(names)
    assert "ab(group_size=2, warmup=2, sync_every=1000000, …)" in names


def test_rows_name_what_exists() -> None:
    ours = [row for row in rows.ROWS if not row.name.startswith("DDP")]
    for row in ours:
        registry.check("strategies", row.name)
    assert {spec.parse(row.name).name for row in ours} == set(registry.TABLE["strategies"]) - {
        "alone",
        "sequence",
        "auto",
    }
    assert len(rows.BY_NAME) == len(rows.ROWS)


def test_rows_are_selected_by_name_or_by_a_part_of_it() -> None:
    assert [row.name for row in rows.selected("none", ["data_parallel"], "cpu")] == ["data_parallel"]
    assert all("diloco" in row.name for row in rows.selected("none", ["diloco("], "cpu"))
    assert len(rows.selected("1gbit", [], "cpu")) == len(rows.ROWS)
    assert "pipeline" not in [row.name for row in rows.selected("1gbit", [], "cuda")]
    assert all(row.main for row in rows.selected("10gbit", [], "cuda"))


def test_two_ranks_measure_on_loopback(tmp_path: Path) -> None:
    names, ranks, out = ["DDP", "data_parallel", "diloco(fragments=4)"], 2, tmp_path / "speed.json"
    command = [
        sys.executable,
        str(FLOOR),
        "--device",
        "cpu",
        "--links",
        "none",
        "--ranks",
        str(ranks),
        "--out",
        str(out),
    ]
    command += ["--model", "mlp(width=16, depth=1)", "--batch-size", "2", "--seconds", "0.02", "--only", *names]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        shown = " ".join(process.communicate(timeout=90)[0].split())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        process.communicate()
        raise
    assert process.returncode == 0
    saved = json.loads(out.read_text())
    own = {row["row"]: row for row in saved["rows"]}
    assert (list(own), saved["parameters"]) == (names, PARAMETERS)
    exact = all_reduce_bytes(4 * PARAMETERS, ranks)
    assert [row["rank_bytes"] for row in own.values()] == [exact, exact, round(exact / 16)]  # all fragments in 16 steps
    for row in own.values():
        assert results.FEWEST_ROUNDS <= len(row["rounds_ms"]) <= results.MOST_ROUNDS
        assert row["steps"] >= len(row["rounds_ms"])
        assert (len(row["compute_ms"]), row["host_bytes"]) == (4, 0)  # loopback leads to no other host
        assert STAMP.keys() <= row.keys()
        assert f"{row['row']} " in shown  # the table
    assert render.about(saved).partition("; measured at ")[2] in shown
    assert [file.name for file in tmp_path.iterdir()] == ["speed.json"]
