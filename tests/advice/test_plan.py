"""thinwire plan: its table and JSON, what is left out, what was measured, and what it says to mistakes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.advice.plans import made_plan
from tests.advice.test_doctor import facts
from tests.test_cli import call
from thinwire import registry
from thinwire.advice.candidates import candidates
from thinwire.advice.diagnosis import Diagnosis
from thinwire.advice.measurements import Measurements
from thinwire.advice.plan import check_world, load_workload, make_plan, parse_compute, time_left
from thinwire.advice.plan_table import print_plan
from thinwire.advice.ranking import chosen
from thinwire.advice.recommendation import recommend
from thinwire.comm.link_probe import PairLink
from thinwire.config import PlanConfig
from thinwire.netlab.link import Link, parse_link
from thinwire.plan.measured import Quality
from thinwire.spec import parse

FIELDS = {
    "strategy", "seconds_per_step", "seconds_per_epoch", "wire_bytes_per_step", "kernel_bytes_per_step",
    "between_bytes_per_step", "waiting_share", "memory_bytes", "measured", "why",
}  # fmt: skip
SMALL = ["--ranks", "2", "--epochs", "2", "--model", "mlp(width=32)"]


def test_json_has_an_object_for_each_strategy_and_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(
        capsys, monkeypatch, "plan", "data_parallel", "data_parallel(reducer=maxnorm(bits=4))", "--json",
        "--link", "1mbit", "--link", "50gbit", *SMALL,
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out)
    assert len(rows) == 4
    assert all(set(row) >= FIELDS for row in rows)
    slow, fast = rows[:2], rows[2:]
    assert [row["link"] for row in rows] == ["1mbit", "1mbit", "50gbit", "50gbit"]
    assert slow[0]["strategy"] == "data_parallel(reducer=maxnorm(bits=4))"  # the fastest first
    assert min(row["seconds_per_step"] for row in fast) < slow[0]["seconds_per_step"]
    assert slow[0]["kernel_bytes_per_step"] > slow[0]["wire_bytes_per_step"] > 0
    assert any("+0.9 points" in text for text in slow[0]["measured"])


def test_the_table_names_what_is_left_out_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(capsys, monkeypatch, "plan", "data_parallel", "ist", "--ranks", "64", "--model", "mlp(width=8)")
    assert code == 0
    assert "left out: ist:" in out
    assert "fastest: data_parallel" in out
    assert "exact" in out


@pytest.mark.parametrize("link", ["1gbit", "2.5gbit,10ms", "100mbit", "0.5mbit"])
def test_the_table_names_the_link_as_it_was_given(link: str) -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    print_plan(made_plan(["data_parallel"], [], parse_link(link, 0.1)), console)
    assert f"each with a link of {link} " in f"{console.export_text().splitlines()[0]} "


LONG = "diloco(fragments=4, reducer=maxnorm(bits=4))"


def printed(width: int, spec: str = LONG) -> str:
    """The table of a plan with the longest cells that there are, on a terminal of this width."""
    plan = made_plan([spec, "data_parallel"], [Quality(-12.8, 2, "digits"), Quality(0.2, 1, "digits")])
    console = Console(width=width, file=io.StringIO(), record=True)
    print_plan(plan, console)
    return console.export_text()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_cell_is_cut_however_narrow_the_terminal(width: int) -> None:
    text = printed(width)
    rows = [line.split("  ") for line in text.splitlines() if "kB" in line]
    assert len(rows) == 2
    for row in rows:
        cells = [cell.strip() for cell in row if cell.strip()]
        assert cells[1:] == ["100 ms", "2.0 s", "50%", "110 kB", "200 kB", "10.0 MB", "-12.8 … +0.2"]
    assert LONG in text, "on one line"
    assert "accuracy" in text


def test_at_80_columns_rows_have_numbers_and_the_specs_follow() -> None:
    lines = printed(80).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"  1  {LONG}" in lines
    assert "  2  data_parallel" in lines


def test_in_a_file_the_table_has_room_for_every_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, monkeypatch, "plan", "data_parallel", LONG, *SMALL)
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.strip().startswith(LONG) and "kB" in line]
    assert re.search(r"[+-]\d+\.\d … [+-]\d+\.\d$", row.rstrip()), row


def test_the_time_left_is_told_only_if_it_is_long() -> None:
    assert time_left(20.0, 10, 17) == " (about 14 s left)"
    assert time_left(20.0, 16, 17) == "", "strategies differ too much for so short an estimate"
    assert time_left(0.0, 0, 17) == "", "nothing is known yet"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--link", "0mbit"], "possible rates are"),
        (["--link", "100mbit/"], "expected a rate"),
        (["--ranks", "1"], "one rank sends nothing"),
        (["--ranks", "2", "--nodes", "3"], "3 nodes for 2 ranks"),
        (["diloko"], "did you mean 'diloco'"),
        (["auto"], "auto chooses when a run begins"),
        (["--compute", "fast"], "expected a rate above 0, as 500gflops"),
        (["--from", "nowhere"], "holds no finished runs"),
        (["ist", "--ranks", "64", "--model", "mlp(width=8)"], "none of these strategies can run: ist:"),
    ],
)
def test_mistakes(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(capsys, monkeypatch, "plan", *args)
    assert code == 2
    assert message in err


def test_own_runs_count_before_ours(tmp_path: Path) -> None:
    for spec, accuracy in (("data_parallel", 90.0), ("diloco", 89.8)):
        folder = tmp_path / spec
        folder.mkdir()
        about = {"task": "digits", "model": "mlp", "epochs": 3, "ranks": 2, "seed": 0, "metric": "accuracy"}
        (folder / "summary.json").write_text(json.dumps({**about, "strategy": spec, "value": accuracy}))
    config = PlanConfig(ranks=2, epochs=2, model="mlp(width=32)", own_runs=tmp_path)
    (options,) = make_plan(["data_parallel", "diloco"], config).options
    diloco = next(option for option in options if option.forecast.strategy == "diloco")
    assert str(diloco.measured[0]) == "-0.2 points (digits, mlp, 2 ranks, 3 epochs, 1 seed)"
    safe = chosen(options)
    assert safe is not None
    assert safe.forecast.strategy == "data_parallel"  # our own runs say that diloco loses more


@pytest.mark.parametrize("name", sorted(set(registry.TABLE["strategies"]) - {"alone", "auto"}))
def test_every_strategy_is_considered(name: str) -> None:
    assert any(parse(spec).name == name for spec in candidates(30))


def test_a_model_that_does_not_fit_is_recorded_without_memory() -> None:
    config = PlanConfig(task="synthetic", model="mlp(width=60000, depth=4)", ranks=2, epochs=2, batch_size=8)
    workload = load_workload(config)
    assert not workload.fits  # 7 G parameters
    (options,) = make_plan(["data_parallel"], config).options
    forecast = options[0].forecast
    assert forecast.wire_bytes_per_step == pytest.approx(4 * sum(p.numel() for p in workload.meta_model.parameters()))
    assert forecast.memory_bytes > 3 * forecast.wire_bytes_per_step


def test_a_given_computing_rate_replaces_this_machine() -> None:
    assert parse_compute("1.5 TFLOPS") == 1.5e12
    slow, fast = (
        make_plan(["data_parallel"], PlanConfig(ranks=2, epochs=2, link=["100gbit"], compute=rate)).options[0][0]
        for rate in ("1gflops", "1tflops")
    )
    assert slow.forecast.seconds_per_step > 10 * fast.forecast.seconds_per_step


def test_nodes_default_to_one_for_each_rank() -> None:
    assert check_world(PlanConfig(ranks=3)) == [0, 1, 2]
    assert make_plan(["data_parallel"], PlanConfig(ranks=2, epochs=2)).links == [Link(100.0)]


def test_doctor_recommends_a_strategy_for_the_measured_network() -> None:
    measured = Measurements(**dict.fromkeys(Measurements._fields) | {"ring": PairLink(1.0, 1.0)})  # type: ignore[arg-type]
    two = [facts(), facts(host="b", node="2/0")]
    finding = recommend(Diagnosis("thinwire", two, [], measured), "digits", "mlp(width=1024)", None)
    assert finding.value == "data_parallel(reducer=error_feedback(maxnorm(bits=2)))", "the task's optimizer is SGD"
    assert "waits" in finding.meaning
    assert recommend(Diagnosis("none", [facts()], []), "digits", None, None).value == "none"
