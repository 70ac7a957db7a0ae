"""The report: what its page says, that it is safe, and that it asks nothing of the network."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.compare.comparisons import DENSE, NASTY, SPARSE, compare, write_run
from tests.compare.pages import drawn, json_text, row, text
from thinwire.compare.files import run_place
from thinwire.compare.report import page, write_report
from thinwire.compare.results import Entry, Record, Results, read_results
from thinwire.config import RunConfig
from thinwire.run.records import RunFolder


def test_a_comparison_says_what_was_compared_and_how_it_ended(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE, SPARSE], target=95.0))
    words = text(html)
    assert (
        "task digits with model mlp: 4 ranks on 2 nodes, link 100mbit,10ms, seeds 0, 1 and 2, 12 epochs each" in words
    )
    assert re.search(r"1data_parallel\(bucket_mb=5\) 9\d\.\d\d ± 0\.\d\d ", row(html, 1))
    assert "+3.1 %" in row(html, 4), "in the table below, with its own heading"
    assert "thinwire 0.1.0, torch 2.11.0" in words
    assert "100mbit,10ms asked for; measured 95.1–97.1 Mbit/s and 10.06 ms" in words
    assert "runs/2-data_parallel/seed-2" in words
    assert "note" not in words.lower()


def test_the_best_of_a_column_is_marked_once(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE, SPARSE]))
    dense, sparse = re.findall(r"<tr><th scope=\"row\">.*?</tr>", html, flags=re.DOTALL)[:2]
    sent = re.compile(r' class="best"><span class="mean">[\d.]+ MB<')
    assert sent.search(sparse)
    assert not sent.search(dense)
    assert re.search(r' class="best"><span class="mean">97\.', dense)


def test_equal_means_are_underlined_alike_whatever_their_deviation(tmp_path: Path) -> None:
    """97.08 ± 0.59 was underlined and 97.08 ± 0.20 was not."""
    values = {"calm": (96.88, 97.08, 97.28), "wild": (96.49, 97.08, 97.67), "best": (97.30, 97.50, 97.70),
              "worse": (95.8, 96.0, 96.2)}  # fmt: skip
    compare(tmp_path, [*values])
    for i, (spec, found) in enumerate(values.items()):
        for seed, value in enumerate(found):
            run = RunFolder(tmp_path / run_place(i, spec, seed))
            run.save_summary(json.loads(run.summary.read_text()) | {"value": value})
    html = page(read_results(tmp_path))
    marks = re.findall(r'data-label="Final accuracy \(%\)"( class="best")?><span class="mean">(.*?)<', html)
    assert marks == [(' class="best"', "97.08"), (' class="best"', "97.08"), (' class="best"', "97.50"), ("", "96.00")]
    assert "Underlined: the best of a column, and whatever these seeds cannot tell apart from it." in text(html)


def test_with_one_seed_only_bytes_are_underlined(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE, SPARSE], (0,)))
    assert set(re.findall(r'data-label="([^"]*)" class="best"', html)) == {
        "Sent in training, between nodes", "Sent in all, between nodes"
    }  # fmt: skip
    assert "Only bytes are marked" in text(html)


def test_verdicts_factors_and_unequal_work_are_on_the_page(tmp_path: Path) -> None:
    compare(tmp_path, ["data_parallel", SPARSE])
    for seed in range(3):
        run = RunFolder(tmp_path / run_place(1, SPARSE, seed))
        run.save_summary(json.loads(run.summary.read_text()) | {"steps": 900})
    html = page(read_results(tmp_path))
    assert re.search(rf"In short 1data_parallel a baseline 2{re.escape(SPARSE)} \S.*1\.3 × faster than data_parallel",
                     text(html))  # fmt: skip
    assert f"Not the same work: {SPARSE} took 900 updates, the others" not in text(html), "there is one other"
    assert f"Not the same work: {SPARSE} took 900 updates, data_parallel 480." in text(html)
    assert re.search(r" 1\.3 × .* 900 $", row(html, 2))
    assert "1.00 ×" in row(html, 1)
    assert "In short" not in text(page(compare(tmp_path / "one", ["data_parallel"])))


def test_a_factored_model_is_told_with_its_size_and_ratio(tmp_path: Path) -> None:
    small = {"name": "factored", "about": "the small one", "file": "model-factored.safetensors"}
    small |= {"column": "Factored model", "parameters": 11_000, "ratio": 9.25, "bytes": 44_000, "value": 95.0}
    text = page(compare(tmp_path / "with", ["ab"], artifacts=[small]))
    assert '<th scope="col">Factored model</th>' in text
    assert '>44.0 kB<span class="sub">9.2 : 1</span></td>' in text
    assert "<dt>Factored model</dt><dd>The small one: its size as saved" in text
    without = page(compare(tmp_path / "without", ["ab"], artifacts=[{**small, "column": ""}]))
    assert '<th scope="col">Factored model</th>' not in without


def test_one_strategy_is_marked_best_nowhere(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE], (0,)))
    assert 'class="best"' not in html
    assert "One seed, so no deviation is known." in text(html)
    assert "±" not in row(html, 1)
    curve = drawn(html)["curve-train_seconds"]["data"]
    assert [trace.get("fill") for trace in curve] == [None]  # one seed has no band


def test_a_single_run_is_a_report_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    write_run(folder, DENSE, 3)
    folder.save_config(RunConfig(strategy=DENSE, seed=3))
    path = write_report(read_results(folder.path))
    assert path == folder.path / "report.html"
    assert "One strategy on task digits" in text(path.read_text())


def test_another_path_can_be_given(tmp_path: Path) -> None:
    results = compare(tmp_path / "a", [DENSE], (0,))
    assert write_report(results, tmp_path / "b" / "x.html") == tmp_path / "b" / "x.html"
    assert not (tmp_path / "a" / "report.html").exists()
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["x.html"]


def test_what_users_wrote_stays_text(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [f"{DENSE}<img src=x>", SPARSE], (0, 1), task=NASTY, model="<b>m</b>",
                        errors={"runs/2-data_parallel/seed-1": "</script><i onclick=x>&"}))  # fmt: skip
    assert "<img" not in html.replace("<image", "")
    assert "alert(1)</script>" not in html
    assert "digits&lt;/script&gt;&lt;script&gt;alert(1)" in html
    assert "&lt;/script&gt;&lt;i onclick=x&gt;&amp;" in html
    assert "<" not in json_text(html)
    assert html.count("</script>") == 3  # plotly.js, the data, and the page's own
    names = json.dumps(drawn(html)["purposes"]["layout"]["annotations"])
    assert "&lt;img src=x&gt;" in names


def test_failed_and_unfinished_runs_are_named(tmp_path: Path) -> None:
    failed, open_ = "runs/2-data_parallel/seed-1", "runs/2-data_parallel/seed-2"
    errors = {failed: "rank 1 died: out of memory"}
    html = page(compare(tmp_path, [DENSE, SPARSE], errors=errors, unfinished=(open_,)))
    words = text(html)
    assert f"Runs that failed 2{SPARSE}, seed 1: rank 1 died: out of memory" in words
    assert f"Runs not finished 2{SPARSE}, seed 2" in words
    assert "1 of 3 runs finished" in row(html, 2)
    assert f"{failed} failed" in words
    assert f"{open_} not finished" in words


def test_nothing_finished_is_said_and_nothing_drawn(tmp_path: Path) -> None:
    places = tuple(run_place(i, spec, 0) for i, spec in enumerate([DENSE, SPARSE]))
    html = page(compare(tmp_path, [DENSE, SPARSE], (0,), unfinished=places))
    assert "No run has finished, so there is nothing to compare yet." in text(html)
    assert "<table" not in html
    assert drawn(html) == {}
    assert "thinwire compare" in text(html)


def test_a_strategy_without_a_finished_run_has_an_empty_row(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE, SPARSE], (0,), errors={"runs/2-data_parallel/seed-0": "no"}))
    assert "0 of 1 runs finished" in row(html, 2)
    assert len(drawn(html)["front-train_seconds"]["data"]) == 2  # the front and one point


@pytest.mark.parametrize(
    ("state", "measured", "said"),
    [
        ("not shaped", None, "The link was not shaped. It could not be made on this machine"),
        ("off", {"rate_mbit": 71.2, "latency_ms": 14.0}, "Measured: 71.2 Mbit/s and 14.00 ms."),
        ("shaped", {"rate_mbit": 95.1, "latency_ms": 10.0}, ""),
    ],
)
def test_a_link_that_is_not_what_was_asked_for_is_noted(
    tmp_path: Path, state: str, measured: dict[str, float] | None, said: str
) -> None:
    html = page(compare(tmp_path, [DENSE], (0,), link_state=state, link_measured=measured))
    assert ('class="note"' in html) == bool(said)
    assert said in text(html)


def test_targets_that_some_or_no_seed_reached(tmp_path: Path) -> None:
    results = compare(tmp_path, [DENSE, SPARSE], target=96.0)
    best = sorted(max(r["test_accuracy"] for r in record.metrics) for record in results.entries[1].records)
    some = Results(results.folder, results.entries, results.command, target=(best[0] + best[1]) / 2)
    assert "Time to" in text(page(some))
    assert "2 of 3 seeds" in row(page(some), 2)
    none = Results(results.folder, results.entries, results.command, target=99.9)
    assert "not reached" in row(page(none), 1)
    assert "target 99.90 %" in json.dumps(drawn(page(none))["curve-bytes"])


def test_less_loss_is_better(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [SPARSE, DENSE], metric="loss", target=0.5))
    assert "Final loss" in text(html)
    assert "%" not in text("<body>" + html.split("<thead>")[1].split("</thead>")[0]).replace("(%)", "")
    assert re.search(r' class="best"><span class="mean">0\.0', re.findall(r"<tr>.*?</tr>", html, flags=re.DOTALL)[2])
    assert "Lower to the left is better" in text(html)


def test_a_diverged_seed_is_left_out_and_named(tmp_path: Path) -> None:
    results = compare(tmp_path, [DENSE, SPARSE])
    for place, value in ((run_place(1, SPARSE, 1), math.nan), (run_place(0, DENSE, 0), math.inf)):
        run = RunFolder(tmp_path / place)
        run.save_summary(json.loads(run.summary.read_text()) | {"value": value})
        run.metrics.write_text(run.metrics.read_text().replace('"test_accuracy": ', '"test_accuracy": NaN, "x": '))
    html = page(read_results(results.folder))
    assert "not a number, left out of the means: 1" in text(html)
    assert "2 of 3 seeds" in row(html, 2)
    assert len(drawn(html)["curve-train_seconds"]["data"]) == 4


def test_one_rank_sends_nothing(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE], (0,), ranks=1, nodes=1, link=None, link_state=None, link_measured=None,
                        wire_bytes_by_link={}, kernel_bytes_by_link=None))  # fmt: skip
    words = text(html)
    assert "1 rank, seed 0" in words
    assert "No bytes were recorded." in words
    assert "by Linux" not in words
    assert {"curve-train_seconds", "timeline-1"} == set(drawn(html))


def test_runs_without_curves_ledger_or_timeline(tmp_path: Path) -> None:
    write_run(RunFolder(tmp_path), DENSE, 0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    bare = Record(0, tmp_path, summary, [], [])
    words = text(page(Results(tmp_path, [Entry(DENSE, [bare])], "thinwire train", target=90.0)))
    assert "No evaluation was recorded" in words
    assert "No timeline was recorded." in words
    assert "not reached" in words


def test_the_page_asks_nothing_of_others(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE, SPARSE], (0,)))
    own = "".join(
        part for part in re.split(r"(<script>.*?</script>)", html, flags=re.DOTALL) if "plotly.js v" not in part
    )
    assert not re.search(r"""(src|href|url|@import)\s*[=(]?\s*["']?(https?:)?//""", own)
    assert html.count("* plotly.js v") == 1
