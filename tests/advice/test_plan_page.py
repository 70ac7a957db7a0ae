"""The page of a plan: its curves, the speeds that it names, the user's runs beside predictions, and that it is safe."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.advice.plans import MACHINE, made_curves, nasty_page, real_plan
from tests.compare.browser import check_in_browser
from tests.compare.comparisons import NASTY, write_run
from tests.compare.pages import drawn, json_text, text
from thinwire.advice.crossings import Range, fastest_ranges, sentence, speed_text
from thinwire.advice.curves import RATES, RateCurves, crossings, node_counts, rank_curves, rate_curves
from thinwire.advice.own_runs import own_runs
from thinwire.advice.plan import Plan, check_folder
from thinwire.advice.plan_html import html_of
from thinwire.advice.plan_page import write_page
from thinwire.advice.ranking import wire_for
from thinwire.comm.world import place
from thinwire.config import PlanConfig
from thinwire.errors import UsageError
from thinwire.plan.planner import study_elsewhere
from thinwire.run.records import RunFolder

STEPS = 45  # of an epoch of digits on two ranks


def ranges_of(curves: RateCurves) -> list[Range]:
    return fastest_ranges(curves.times, curves.rates, curves.specs)


def near(value: float) -> Any:
    return pytest.approx(value, rel=0.05)


# ---- curves


def test_times_fall_with_the_speed_of_the_link() -> None:
    curves = rate_curves(real_plan())
    assert curves.rates == RATES
    assert (curves.rates[0], curves.rates[-1]) == (1.0, near(1e5))
    for seconds in curves.as_json()["seconds_per_epoch"].values():
        assert all(1.05 * slow >= fast > 0 for slow, fast in pairwise(seconds))
        assert seconds[0] > 10 * seconds[-1]


def test_without_time_the_curves_have_few_points_over_the_whole_range() -> None:
    curves = made_curves(data_parallel=(1.0, 100.0))
    curves.rates = []
    curves.draw(most_seconds=0.0)
    assert curves.rates == RATES[::5]
    plan = real_plan()
    few = rank_curves(plan, ["diloco"], most_seconds=-1.0)
    assert list(few.forecasts["diloco"]) == [2]
    assert "time" in few.left_out["diloco"][4]


def test_ranks_are_powers_of_two_with_as_many_on_a_node_and_a_full_batch_each() -> None:
    assert node_counts(PlanConfig(ranks=4), most=1000) == {2**k: 2**k for k in range(1, 7)}
    assert node_counts(PlanConfig(ranks=8, nodes=2), most=31) == {4: 1, 8: 2, 16: 4}
    assert node_counts(PlanConfig(ranks=6, nodes=3), most=100) == {2: 1, 4: 2, 6: 3, 8: 4, 16: 8, 32: 16, 64: 32}


def test_a_strategy_elsewhere_has_the_times_that_are_known() -> None:
    plan = real_plan()
    wire = wire_for(plan.links[0], plan.config, MACHINE)
    for one in plan.studies:
        assert study_elsewhere(one, plan.workload, place(2, 2)).forecast(wire) == one.forecast(wire)
        on_four = study_elsewhere(one, plan.workload, place(4, 4))
        assert all(trace is one.timed[0] for trace in on_four.timed.values())
        assert on_four.steps_per_epoch == 23


# ---- the fastest strategy by speed


def test_named_speeds_are_right() -> None:
    """a + b / rate meet at (b − b') / (a' − a)."""
    curves = made_curves(diloco=(10.0, 100.0), local_sgd=(9.0, 233.0), data_parallel=(2.0, 5000.0))
    found = ranges_of(curves)
    assert [one.strategy for one in found] == ["diloco", "local_sgd", "data_parallel"]
    assert [one.to_mbit for one in found[:2]] == [near(133), near((5000 - 233) / 7)]
    assert sentence(found) == (
        f"Below {speed_text(found[0].to_mbit)}, diloco is fastest; from there to {speed_text(found[1].to_mbit)}, "
        "local_sgd is fastest; from there on, data_parallel is fastest."
    )


def test_a_strategy_that_is_fastest_between_two_points_only_is_named() -> None:
    """At 100 and at 158 Mbit/s another is faster."""
    formulas = {"diloco": (10.0, 0.0), "local_sgd": (5.6, 500.0), "data_parallel": (0.0, 1380.0)}
    found = ranges_of(made_curves(**formulas))
    assert [one.strategy for one in found] == ["diloco", "local_sgd", "data_parallel"]
    assert 100 < found[0].to_mbit < found[1].to_mbit < 158.5


def test_what_is_as_fast_is_not_called_faster() -> None:
    always = ranges_of(made_curves(diloco=(1.0, 100.0), local_sgd=(1.001, 100.1)))
    assert sentence(always) == "diloco is as fast as any at every speed from 1 Mbit/s to 100 Gbit/s."
    late = ranges_of(made_curves(diloco=(1.0, 100.0), data_parallel=(1.0, 1000.0)))
    assert [one.strategy for one in late] == ["diloco", "data_parallel"]
    assert late[1].from_mbit == near(900 / 0.02)
    assert sentence(late).endswith("from there on, data_parallel is as fast as any.")
    even = ranges_of(made_curves(diloco=(1.0, 100.0), data_parallel=(1.01, 100.0)))
    assert [(one.strategy, one.from_mbit) for one in even] == [("data_parallel", 1.0)], "it is exact"
    flat = ranges_of(made_curves(diloco=(10.0, 100.0), local_sgd=(9.0, 633.0), data_parallel=(2.0, 5000.0)))
    assert [one.strategy for one in flat] == ["diloco", "data_parallel"], "local_sgd is never ahead by 2 %"
    assert flat[0].to_mbit == near(4900 / 8)
    assert fastest_ranges(lambda rate, specs: {}, RATES, []) == []


def test_speeds_are_told_for_all_and_for_those_that_keep_the_accuracy() -> None:
    plan = real_plan()
    everything, kept = crossings(plan, rate_curves(plan))
    assert set(everything.strategies) == {one.spec for one in plan.studies}
    assert set(kept.strategies) == {"data_parallel", "data_parallel(reducer=maxnorm(bits=4))"}, "measured, or exact"
    for one in (everything, kept):
        assert {found.strategy for found in one.ranges} <= set(one.strategies)
        assert (one.ranges[0].from_mbit, one.ranges[-1].to_mbit) == (1.0, RATES[-1])


# ---- the user's own runs


def with_runs(folder: Path) -> Plan:
    """The plan, with a folder of runs: two that it can be held against, and others."""
    same = {"ranks": 2, "nodes": 2, "epochs": 3, "steps": 3 * STEPS, "train_seconds": 3.6, "link": "100mbit"}
    same |= {"link_measured": {"rate_mbit": 97.5, "latency_ms": 0.01}}
    others: list[dict[str, Any]] = [
        {}, {"link": "100mbit,30ms"}, {"ranks": 4}, {"model": "cnn"}, {"task": "mnist"}, {"steps": 30},
        {"link": None, "link_state": None, "link_measured": None},
    ]  # fmt: skip
    for number, other in enumerate(others):
        write_run(RunFolder(folder / f"{number}"), "diloco", 0, **{**same, **other})
    write_run(RunFolder(folder / "other"), "ab", 0, **same)
    plan = real_plan()
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"own_runs": folder}))


def test_own_runs_are_beside_their_predictions(tmp_path: Path) -> None:
    plan = with_runs(tmp_path)
    found = own_runs(plan)
    assert [(run.folder, run.is_on_curve, run.rate_mbit, run.latency_ms) for run in found.runs] == [
        ("0", True, 97.5, 0.0), ("1", False, 97.5, 30.0)
    ]  # fmt: skip
    assert all(run.measured == pytest.approx(1.2) for run in found.runs)
    assert found.runs[0].predicted < found.runs[1].predicted, "with more latency it takes longer"
    assert found.left_out == {
        "another number of ranks": 1, "another model": 1, "another task": 1, "a strategy that is not in the plan": 1,
        "10 steps an epoch, and the plan has 45: another batch size": 1, "the speed of its link is not known": 1,
    }  # fmt: skip
    curves = rate_curves(plan)
    assert found.runs[0].predicted == pytest.approx(curves.at("diloco", 97.5).seconds_per_epoch), "on its curve"


# ---- the page


def test_the_page_and_its_data(tmp_path: Path) -> None:
    plan = with_runs(tmp_path / "own")
    said: list[str] = []
    page = write_page(plan, tmp_path / "plan", said.append)
    data = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert data["options"] == plan.as_json()
    assert data["curves"]["ranks"]["ranks"] == [2, 4, 8, 16, 32, 64]
    assert all(None not in seconds for seconds in data["curves"]["ranks"]["seconds_per_epoch"].values())
    assert data["measured_runs"][0]["measured_seconds_per_epoch"] == pytest.approx(1.2)
    assert data["measured_runs"][0]["predicted_seconds_per_epoch"] > 0
    assert data["about"]["versions"]["torch"]
    assert any("link speeds" in line for line in said)

    html = page.read_text()
    words = text(html)
    for one in data["crossings"]:
        assert one["sentence"] in words
    assert all(option["why"] in words for option in data["options"])
    assert "+0.9 points (CIFAR-10 of 4,000 images" in words, "where accuracy was measured"
    assert "another latency than the curves have" in words
    assert "--here plans for hosts" in words
    points = [trace for trace in drawn(html)["rates"]["data"] if trace["marker"].get("symbol") == "diamond"]
    assert [(trace["x"], trace["y"]) for trace in points] == [([97.5], [pytest.approx(1.2)])]
    check_in_browser(page, figures=2)


def test_names_are_text_and_not_markup() -> None:
    html = html_of(nasty_page(NASTY))
    own = "".join(
        part for part in re.split(r"(<script>.*?</script>)", html, flags=re.DOTALL) if "plotly.js v" not in part
    )
    assert "<script>alert" not in own
    assert "alert(1)" in text(html), "as text it is there"
    assert "</" not in json_text(html)
    assert not re.search(r"""(src|href|url|@import)\s*[=(]?\s*["']?(https?:)?//""", own)
    shown = json.dumps(drawn(html))
    assert "<script" not in shown, "in hover texts, which plotly reads as markup"


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"options": [], "curves": {}}')
    check_folder(tmp_path)
    check_folder(tmp_path / "new")
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(UsageError, match=r"other things already \(plan.json\)"):
        check_folder(tmp_path)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"notes\.txt"):
        write_page(real_plan(), tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        check_folder(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_earlier_plan_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.advice.plan_page.pictured", lambda plan, say: nasty_page("x"))
    plan = real_plan()
    for _ in range(2):
        assert write_page(plan, tmp_path) == tmp_path / "plan.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json"]
