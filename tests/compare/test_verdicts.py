"""Each strategy in a sentence: against data_parallel and one machine alone, and no claim that seeds do not bear out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.compare.results import Entry, Record, Results
from thinwire.compare.results_json import results_json
from thinwire.compare.verdicts import remarks, unequal_work, verdicts


def entry(spec: str, values: list[float], seconds: list[float], **more: Any) -> Entry:
    """A strategy with these final metrics and training times, one of each for every seed."""
    common = {
        "task": "digits", "metric": "accuracy", "ranks": 4, "nodes": 2, "link": None, "link_state": None, "steps": 230,
        "link_measured": None, "epochs": 10, "samples": 14_000, "seconds": 99.0, "samples_per_second": 500.0,
        "best": 99.0,
        "wire_bytes_per_rank": 3, "wire_bytes_by_link": {"inside": 8, "between": 4}, "kernel_bytes_by_link": None,
        "wire_bytes_by_purpose": {"train": {"inside": 6, "between": 4}, "eval": {"inside": 2, "between": 0}},
        "waiting_share": 0.5, "peak_memory_bytes": 10, "versions": {},
    }  # fmt: skip
    pairs = enumerate(zip(values, seconds, strict=True))
    summaries = [common | {"value": value, "train_seconds": time} | more for _, (value, time) in pairs]
    return Entry(spec, [Record(seed, Path(), summary, [], []) for seed, summary in enumerate(summaries)])


def said(*entries: Entry) -> list[str]:
    results = Results(Path(), list(entries), "")
    return list(verdicts(results).values())


DENSE = entry("data_parallel", [97.0, 97.3, 97.1], [72.0, 73.5, 71.0])
ALONE = entry("alone", [97.2, 96.9, 97.0], [31.0, 31.4, 30.8])


def test_the_example_of_the_issue() -> None:
    quick = entry("diloco", [97.2, 97.0, 97.05], [10.0, 10.1, 9.95])
    assert said(DENSE, quick, ALONE) == [
        "a baseline; same accuracy within noise, 2.3 × slower than one machine alone",
        "same accuracy within noise, 7.2 × faster than data_parallel, 3.1 × faster than one machine alone",
        "a baseline; same accuracy within noise, 2.3 × faster than data_parallel",
    ]
    assert said(DENSE, quick) == ["a baseline", "same accuracy within noise, 7.2 × faster than data_parallel"]


def test_worse_better_slower_and_as_fast() -> None:
    bad = entry("bad", [96.2, 96.3, 96.4], [101.0, 100.0, 102.0])
    good = entry("good", [98.0, 98.1, 98.2], [72.5, 71.5, 72.1])
    assert said(DENSE, bad, good) == [
        "a baseline",
        "0.83 points lower accuracy, 1.4 × slower than data_parallel",
        "0.97 points higher accuracy, as fast as data_parallel within noise",
    ]
    near = entry("near", [97.1, 97.0, 97.3], [69.0, 68.9, 69.1])
    calm = entry("data_parallel", [97.0, 97.3, 97.1], [72.0, 72.1, 71.9])
    assert said(calm, near)[1] == "same accuracy within noise, 4 % faster than data_parallel"


def test_what_differs_between_baselines_is_said_for_each() -> None:
    worse = entry("alone", [94.0, 94.2, 94.1], [31.0, 31.4, 30.8])
    quick = entry("diloco", [97.2, 97.0, 97.05], [10.0, 10.1, 9.95])
    assert said(DENSE, quick, worse)[1] == (
        "against data_parallel same accuracy within noise, 7.2 × faster; "
        "against one machine alone 2.98 points higher accuracy, 3.1 × faster"
    )


def test_a_large_ratio_that_seeds_do_not_bear_out_is_not_called_as_fast() -> None:
    dense, alone = entry("data_parallel", [97.0, 97.2], [40.0, 90.0]), entry("alone", [97.0, 97.2], [28.0, 28.2])
    wild = entry("diloco", [97.0, 97.2], [15.0, 41.5])
    doubt = "by the means, but 2 seeds do not tell it from noise"
    assert said(dense, wild)[1] == f"same accuracy within noise, 2.3 × faster than data_parallel {doubt}"
    assert said(wild, dense, alone)[0] == (
        f"same accuracy within noise, 2.3 × faster than data_parallel {doubt}, "
        "as fast as one machine alone within noise"
    )
    slow = entry("daso", [97.0, 97.2], [60.0, 135.0])
    assert said(dense, slow)[1] == f"same accuracy within noise, 1.5 × slower than data_parallel {doubt}"
    near = entry("near", [97.0, 97.2], [36.0, 78.0])
    assert said(dense, near)[1] == "same accuracy within noise, as fast as data_parallel within noise"
    single = entry("diloco", [97.0], [28.0])
    assert "2.3 × faster than data_parallel by the means, but 1 seed does not tell it" in said(dense, single)[1]


def test_what_auto_took_is_said_for_each_seed_that_differs() -> None:
    status = {"choice": "diloco", "reason": "data_parallel would wait 90%"}
    auto = entry("auto", [97.2, 97.0, 97.05], [10.0, 10.1, 9.95], status=status)
    verdict = "same accuracy within noise, 7.2 × faster than data_parallel"
    assert said(DENSE, auto)[1] == f"took diloco: data_parallel would wait 90%; {verdict}"
    summary = auto.records[1].summary
    assert summary is not None
    summary["status"] = {"choice": "data_parallel", "reason": "it waits 5%"}
    assert said(DENSE, auto)[1] == (
        "took diloco: data_parallel would wait 90% (seed 0); took data_parallel: it waits 5% (seed 1); "
        f"took diloco: data_parallel would wait 90% (seed 2); {verdict}"
    )


def test_with_one_seed_the_noise_is_unknown() -> None:
    dense, quick = entry("data_parallel", [97.0], [72.0]), entry("diloco", [96.9], [10.0])
    same = entry("local_sgd", [97.001], [72.01])
    assert said(dense, quick, same) == [
        "a baseline",
        "0.10 points lower accuracy, 7.2 × faster than data_parallel (one seed: noise unknown)",
        "same accuracy, as fast as data_parallel (one seed: noise unknown)",
    ]


def test_less_loss_is_better_and_is_said_as_it_is() -> None:
    dense = entry("data_parallel", [1.50, 1.51, 1.49], [72.0, 73.0, 71.0], metric="loss")
    other = entry("diloco", [1.60, 1.61, 1.59], [10.0, 10.1, 9.9], metric="loss")
    assert said(dense, other)[1] == "0.1000 higher loss, 7.2 × faster than data_parallel"


def test_without_a_baseline_the_first_strategy_is_it() -> None:
    one, other = (entry(name, [97.0, 97.1], [time, time * 1.02]) for name, time in (("diloco", 10), ("ist", 20)))
    assert said(one, other) == ["a baseline", "same accuracy within noise, 2.0 × slower than diloco"]
    assert said(one) == []
    failed = Entry("daso", [Record(0, Path(), None, [], [], "no")])
    assert said(one, failed) == []


def test_a_strategy_that_lost_seeds_says_so() -> None:
    some = entry("diloco", [97.2, float("nan"), 97.05], [10.0, 10.1, 9.95])
    assert said(DENSE, some)[1].endswith("7.2 × faster than data_parallel (2 of 3 seeds)")


def test_so_does_one_that_is_held_against_it() -> None:
    some = entry("data_parallel", [97.0, float("nan"), 97.1], [72.0, 73.5, 71.0])
    few = entry("alone", [float("nan"), float("nan"), 97.1], [31.0, 31.4, 30.8])
    quick = entry("diloco", [97.2, 97.0, 97.05], [10.0, 10.1, 9.95])
    first, second, third = said(some, quick, few)
    assert first.endswith(" (2 of 3 seeds; one machine alone: 1 of 3 seeds)")
    assert second.endswith(" (data_parallel: 2 of 3 seeds; one machine alone: 1 of 3 seeds)")
    assert third.endswith(" (1 of 3 seeds; data_parallel: 2 of 3 seeds)")


def test_a_baseline_needs_a_finite_value() -> None:
    """Verdicts were empty."""
    nan = float("nan")
    diverged = entry("data_parallel", [nan, nan, nan], [72.0, 73.5, 71.0])
    quick, slow = (entry(name, [97.0, 97.1, 97.2], [t, t + 0.1, t]) for name, t in (("diloco", 10.0), ("ist", 20.0)))
    assert said(diverged, quick, slow) == ["a baseline", "same accuracy within noise, 2.0 × slower than diloco"]
    assert said(diverged, quick, ALONE)[0] == "same accuracy within noise, 3.1 × faster than one machine alone"
    assert results_json(Results(Path(), [diverged, quick], ""))["strategies"][1]["times_as_fast_as"] == {}


def test_a_small_difference_that_was_told_apart_is_not_called_none() -> None:
    dense = entry("data_parallel", [97.0, 97.0, 97.0], [72.0, 72.0001, 72.0])
    near = entry("diloco", [97.004, 97.004, 97.004], [72.1, 72.1001, 72.1])
    assert said(dense, near)[1] == "less than 0.01 points higher accuracy, less than 1 % slower than data_parallel"
    dense, near = (entry(name, [value] * 3, [72.0, 72.1, 72.2], metric="loss")
                   for name, value in (("data_parallel", 1.5), ("diloco", 1.49999)))  # fmt: skip
    assert said(dense, near)[1].startswith("less than 0.0001 lower loss, as fast as data_parallel within noise")


def test_a_strategy_with_more_noise_than_the_others_is_not_called_worse() -> None:
    """By the others' noise alone, a third of them would be."""
    calm = [entry(name, [97.0, 97.3, 97.1], [10.0, 10.1, 9.95]) for name in ("data_parallel", "a", "b", "c")]
    wild = entry("wild", [97.0, 92.0, 99.0], [10.0, 30.0, 9.0])
    assert said(*calm, wild)[4] == (
        "same accuracy within noise, "
        "1.6 × slower than data_parallel by the means, but 3 seeds do not tell it from noise"
    )


def test_when_one_machine_alone_wins_it_is_said_plainly() -> None:
    slow = entry("diloco", [97.2, 97.0, 97.05], [60.0, 61.0, 59.5])
    quick = entry("diloco", [97.2, 97.0, 97.05], [10.0, 10.1, 9.95])
    good = entry("diloco", [98.2, 98.0, 98.05], [60.0, 61.0, 59.5])
    plain = "One machine alone beats every other strategy here: none is faster, and none has a higher accuracy beyond "
    plain += "noise."
    assert remarks(Results(Path(), [DENSE, slow, ALONE], "")) == [plain]
    for other in (quick, good):
        assert remarks(Results(Path(), [DENSE, other, ALONE], "")) == []
    assert remarks(Results(Path(), [DENSE, slow], "")) == []
    once = Results(Path(), [entry("data_parallel", [97.0], [72.0]), entry("alone", [97.0], [31.0])], "")
    assert remarks(once)[0].endswith("none has a higher accuracy (one seed: noise unknown).")


def work(*counts: tuple[str, int, int]) -> str:
    entries = [entry(spec, [97.0], [10.0], steps=steps, samples=samples) for spec, steps, samples in counts]
    return unequal_work(Results(Path(), entries, ""))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([("a", 230, 14_360), ("b", 230, 14_368)], ""),
        ([("a", 230, 14_000), ("pipeline", 450, 14_000), ("c", 230, 14_000)],
         "Not the same work: pipeline took 450 updates, the others 230."),
        ([("a", 230, 14_000), ("b", 230, 7_000)],
         "Not the same work: b trained on 7,000 samples, a 14,000."),
        ([("a", 230, 1), ("b", 450, 1), ("c", 460, 1), ("d", 230, 1), ("e", 230, 1)],
         "Not the same work: c took 460 updates, b took 450 updates, the others 230."),
        ([("a", 100, 1), ("b", 200, 1), ("c", 300, 1), ("d", 400, 1)],
         "Not the same work: from 100 updates (a) to 400 (d)."),
    ],
)  # fmt: skip
def test_work_that_is_not_the_same_is_told(counts: list[tuple[str, int, int]], expected: str) -> None:
    assert work(*counts) == expected


def test_results_json_has_verdicts_factors_and_training_bytes() -> None:
    quick = entry("diloco", [97.2, 97.0, 97.05], [10.0, 10.1, 9.95])
    found = json.loads(json.dumps(results_json(Results(Path(), [DENSE, quick, ALONE], "")), allow_nan=False))
    row = found["strategies"][1]
    assert row["verdict"].startswith("same accuracy within noise, 7.2 × faster than data_parallel")
    assert row["times_as_fast_as"]["data_parallel"] == pytest.approx(216.5 / 30.05)
    assert (row["training_bytes_between"]["mean"], row["training_bytes_inside"]["mean"]) == (4, 6)
    assert (row["steps"]["mean"], row["samples"]["mean"]) == (230, 14_000)
    assert found["remarks"] == []
