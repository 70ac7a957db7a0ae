"""The report: what its page says, that it draws in a browser, and that it asks nothing of the network."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from thinwire.compare.files import run_place
from thinwire.compare.report import page, write_report
from thinwire.compare.report.axes import metric_axis
from thinwire.compare.report.heatmap import heatmap
from thinwire.compare.report.pareto import Point, pareto_front
from thinwire.compare.report.style import Figure, short
from thinwire.compare.report.timeline import timeline, without
from thinwire.compare.results import Entry, Record, Results, read_results
from thinwire.config import RunConfig
from thinwire.run.records import RunFolder
from thinwire.run.schema import SeriesSummary
from thinwire.strategies.ab import AB

DENSE = "data_parallel(bucket_mb=5)"
SPARSE = "data_parallel(reducer=error_feedback(global_randk(ratio=0.01)))"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LOW = "ab(cutoff=0.3)"
NASTY = "digits</script><script>alert(1)</script>&<!--"

# What a strategy does to a run: epochs until it has learnt most, where it ends, share of the bytes, seconds an epoch.
BEHAVIOUR = {
    DENSE: (2.0, 97.6, 1.0, 9.5),
    SPARSE: (4.5, 96.2, 0.012, 3.9),
    "data_parallel(reducer=error_feedback(topk(ratio=0.01)))": (3.2, 97.1, 0.045, 4.4),
    "local_sgd(period=8)": (2.8, 96.9, 0.125, 4.6),
    "powersgd(rank=2)": (2.4, 97.4, 0.06, 5.2),
}

RANK_SERIES = SeriesSummary(**AB.series["layer_ranks"]._asdict())


def write_run(
    run: RunFolder, spec: str, seed: int, *, epochs: int = 12, timeline: bool = True, layers: tuple[str, ...] = ("1",),
    **more: Any,
) -> None:  # fmt: skip
    """The files of a run that looks like training; `layers` are those that "ab" factors, `more` is for its summary."""
    patience, ceiling, share, pace = BEHAVIOUR.get(spec, (3.0, 96.0, 0.5, 5.0))
    chance, metric, ranks = random.Random(f"{spec}{seed}"), more.get("metric", "accuracy"), more.get("ranks", 4)
    run.path.mkdir(parents=True, exist_ok=True)
    sent = share * 130e6 * (ranks > 1)
    metrics = []
    for epoch in range(1, epochs + 1):
        accuracy = ceiling - 70 * math.exp(-epoch / patience) + chance.gauss(0, 2 / epoch + 0.15)
        row = {
            "step": 40 * epoch, "epoch": epoch, "seconds": epoch * pace * 1.1, "train_seconds": epoch * pace,
            "train_loss": 2 / epoch, "test_loss": 3 * (1 - accuracy / 100), "samples_per_second": 5000 / pace,
            "wire_bytes": round(sent * epoch + 9e5), "training_bytes": round(sent * epoch),
            "training_bytes_between": round(sent * epoch) // 2 * (ranks // 2), "waiting_seconds": 0.4 * epoch,
        }  # fmt: skip
        if spec.startswith("ab"):
            row |= rank_status(epoch, layers)
        metrics.append(row | ({"test_accuracy": accuracy} if metric == "accuracy" else {}))
    values = [row[f"test_{metric}"] for row in metrics]
    ledger = write_ledger(sent, epochs, ranks)
    total, between = (sum(r[k] for r in ledger if r["epoch"] == epochs) for k in ("wire_bytes", "between_bytes"))
    summary = {
        "task": "digits", "strategy": spec, "model": "mlp", "ranks": ranks, "nodes": 2, "link": "100mbit,10ms",
        "link_state": "shaped", "link_measured": {"rate_mbit": 95.1 + seed, "latency_ms": 10.06}, "seed": seed,
        "epochs": epochs, "steps": 40 * epochs, "samples": 1400 * epochs, "seconds": epochs * pace * 1.2,
        "train_seconds": epochs * pace + chance.gauss(0, 0.3), "metric": metric, "value": values[-1],
        "best": max(values) if metric == "accuracy" else min(values), "wire_bytes_per_rank": round(total / ranks),
        "wire_bytes_by_link": {"inside": total - between, "between": between},
        "wire_bytes_by_purpose": sent_for(ledger),
        "kernel_bytes_by_link": {"inside": total - between, "between": round(1.031 * between)},
        "waiting_share": 0.72 * share**0.4, "samples_per_second": 5000 / pace, "parameters": 101770,
        "peak_memory_bytes": 412_000_000 + round(share * 10**8),
        "versions": {"thinwire": "0.1.0", "torch": "2.11.0", "python": "3.12.4"},
    }  # fmt: skip
    run.append(run.metrics, metrics)
    run.append(run.ledger, ledger)
    run.append(run.timeline, write_timeline(share, ranks) if timeline else [])
    series = {"layer_ranks": RANK_SERIES.model_dump()} if spec.startswith("ab") else {}
    run.save_summary(summary | {"series": series} | more)


def rank_status(epoch: int, layers: tuple[str, ...]) -> dict[str, Any]:
    """What "ab" adds to an epoch's row: two epochs at full rank, then less and less, and less in later layers."""
    found = {name: [max(1, 256 // (1 if epoch < 3 else epoch + i)), 256] for i, name in enumerate(layers)}
    return {"phase": "warmup" if epoch < 3 else "ab", "layer_ranks": found}


def write_ledger(sent: float, epochs: int, ranks: int) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(1, epochs + 1):
        for rank in range(ranks):
            shares = {"train": sent * epoch, "eval": 9e3 * epoch, "checkpoint": 4e5 * epoch, "start": 4e5}
            for purpose, wire in shares.items():
                wire = round(wire) if ranks > 1 else 0
                between = wire // 2 if rank % 2 else 0
                about = {"step": 40 * epoch, "epoch": epoch, "rank": rank, "purpose": purpose, "link": "world"}
                counts = {"op": "all_reduce", "ranks": ranks, "calls": 40 * epoch, "payload_bytes": wire}
                rows.append(about | counts | {"wire_bytes": wire, "between_bytes": between, "seconds": 0.1})
    return rows


def sent_for(ledger: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Bytes by purpose and link at the end, as in a summary."""
    last = [row for row in ledger if row["epoch"] == ledger[-1]["epoch"]]
    return {
        purpose: {
            "inside": sum(row["wire_bytes"] - row["between_bytes"] for row in last if row["purpose"] == purpose),
            "between": sum(row["between_bytes"] for row in last if row["purpose"] == purpose),
        }
        for purpose in dict.fromkeys(row["purpose"] for row in last)
    }


def write_timeline(share: float, ranks: int) -> list[dict[str, Any]]:
    rows, chance = [], random.Random(0)
    for rank in range(ranks):
        begin = 0.002 * rank
        for step in range(40, 44):
            compute, wire = 0.05 + chance.random() * 0.006, 0.012 + 0.17 * share**0.5
            busy = max(compute, 0.3 * compute + wire)
            about = {"rank": rank, "step": step}
            rows.append(about | {"kind": "step", "name": "step", "begin": begin, "seconds": busy, "bytes": 0})
            rest = {"begin": begin + compute, "seconds": busy - compute, "bytes": 0}
            rows.append(about | {"kind": "waiting", "name": "all_reduce", **rest})
            for bucket in range(3):
                part = {"begin": begin + 0.3 * compute + bucket * wire / 3, "seconds": wire / 3 * 0.93}
                sent = {"bytes": round(share * 1e6)}
                rows.append(about | {"kind": "communication", "name": "all_reduce", **part, **sent})
            begin += busy + 0.001
    return rows


def compare(
    folder: Path, specs: list[str], seeds: tuple[int, ...] = (0, 1, 2), *, target: float | None = None,
    errors: dict[str, str] | None = None, unfinished: tuple[str, ...] = (), **more: Any,
) -> Results:  # fmt: skip
    """A comparison on disk, read back; runs in `errors` and `unfinished` leave nothing behind."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": 1, "specs": specs, "seeds": seeds, "errors": errors or {}, "target": target}
    command = f"thinwire compare {' '.join(repr(spec) for spec in specs)} --ranks 4 --link 100mbit,10ms"
    (folder / "compare.json").write_text(json.dumps(about | {"command": command}))
    for i, spec in enumerate(specs):
        for seed in seeds:
            place = run_place(i, spec, seed)
            if place not in about["errors"] and place not in unfinished:
                write_run(RunFolder(folder / place), spec, seed, **more)
    return read_results(folder)


def text(html: str) -> str:
    """What a reader sees of a page, as one line."""
    body = re.sub(r"<(script|style).*?</\1>", "", html[html.index("<body>") :], flags=re.DOTALL)
    body = body.replace('<span class="sub">', " ")
    words = re.sub(r"<wbr>|</?(span|code|strong|b|i)\b[^>]*>", "", body)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", words))


def row(html: str, number: int) -> str:
    """The cells of a strategy's row of the results."""
    return text("<body>" + re.findall(r"<tr>.*?</tr>", html, flags=re.DOTALL)[number])


def json_text(html: str) -> str:
    found = re.search(r'<script type="application/json" id="drawn">(.*?)</script>', html, flags=re.DOTALL)
    return found[1] if found else '{"figures": {}}'


def drawn(html: str) -> dict[str, Any]:
    """What plotly.js is given, by the name of the figure."""
    return json.loads(json_text(html))["figures"]


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


def test_bytes_that_cost_are_those_between_nodes_where_there_are_several(tmp_path: Path) -> None:
    """ "quiet" sends most inside nodes: it was to the right of "loud", though its link carries less."""
    results = compare(tmp_path, ["loud", "quiet"], (0,))
    run = RunFolder(tmp_path / run_place(1, "quiet", 0))
    sent = {"train": {"inside": 10**12, "between": 3_000_000}, "sync": {"inside": 5, "between": 1_000_000},
            "eval": {"inside": 7, "between": 10**11}}  # fmt: skip
    run.save_summary(json.loads(run.summary.read_text()) | {"wire_bytes_by_purpose": sent})
    rows = [json.loads(line) | {"training_bytes_between": 4e6} for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = page(read_results(results.folder))
    _, loud, quiet = drawn(html)["front-bytes"]["data"]
    assert quiet["x"] == [4_000_000]
    assert quiet["x"] < loud["x"]
    assert drawn(html)["curve-bytes"]["data"][1]["x"][-1] == 4_000_000
    title = drawn(html)["front-bytes"]["layout"]["xaxis"]["title"]["text"]
    assert title == "bytes between nodes (log scale)"
    assert "4.00 MB" in row(html, 2)
    assert "100 GB" in row(html, 5), "evaluation stands apart"
    one = page(compare(tmp_path / "one", ["loud"], (0,), nodes=1))
    assert drawn(one)["curve-bytes"]["layout"]["xaxis"]["title"]["text"] == "bytes per rank (log scale)"


def test_nothing_sent_has_a_place_on_a_log_axis(tmp_path: Path) -> None:
    compare(tmp_path, [DENSE, SPARSE, "alone"], (0,))
    run = RunFolder(tmp_path / run_place(2, "alone", 0))
    nothing = {"train": {"inside": 10**6, "between": 0}, "eval": {"inside": 0, "between": 10**4}}
    run.save_summary(json.loads(run.summary.read_text()) | {"wire_bytes_by_purpose": nothing})
    html = page(read_results(tmp_path))
    figure = drawn(html)["front-bytes"]
    axis = figure["layout"]["xaxis"]
    assert (axis["type"], axis["ticktext"][0]) == ("log", "0")
    assert figure["data"][-1]["x"] == [axis["tickvals"][0]]
    assert "On this log scale 0 is drawn at the left edge." in text(html)
    assert "×\u00a0alone" in html
    assert "against one machine alone" in text(html) or "than one machine alone" in text(html)


def test_accuracies_near_100_percent_are_drawn_apart(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE, SPARSE], (0,)))
    axis = drawn(html)["curve-train_seconds"]["layout"]["yaxis"]
    places = dict(zip(axis["ticktext"], axis["tickvals"], strict=True))
    assert {"50 %", "80 %", "90 %", "95 %"} <= set(places)
    assert places["95 %"] - places["90 %"] > 0.7 * (places["80 %"] - places["50 %"])
    assert "does not begin at 0" in text(html)
    low, high = axis["range"]
    heights = [y for trace in drawn(html)["curve-train_seconds"]["data"] for y in trace["y"]]
    assert low < min(heights) < max(heights) < high


@pytest.mark.parametrize(
    ("metric", "values", "begins_at_0"),
    [("accuracy", [20.0, 70.0], False), ("accuracy", [2.0, 70.0], True), ("loss", [0.1, 2.0], True),
     ("loss", [1.5, 2.0], False), ("accuracy", [96.0, 98.0], False), ("accuracy", [100.0, 100.0], False),
     ("accuracy", [50.0, 100.0], False), ("accuracy", [0.0], True)],
)  # fmt: skip
def test_every_value_is_inside_of_its_axis_and_a_cut_axis_says_so(
    metric: str, values: list[float], begins_at_0: bool
) -> None:
    axis = metric_axis(metric, values)
    low, high = axis.layout["range"]
    assert all(low <= axis.position(value) <= high for value in values)
    assert ("does not begin at 0" in axis.remark) == (not begins_at_0)
    assert begins_at_0 == (low == 0)
    places = [axis.position(value) for value in sorted(values)]
    assert places == sorted(places)


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
    assert "by the kernel" not in words
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


def test_many_strategies_differ_in_colour_or_dash(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [f"local_sgd(period={i})" for i in range(1, 12)], (0,)))
    lines = [trace["line"] for trace in drawn(html)["curve-train_seconds"]["data"]]
    assert len({(line["color"], line["dash"]) for line in lines}) == 11


def test_the_front_is_what_nothing_beats() -> None:
    points = [Point(0, 1, 90), Point(1, 2, 89), Point(2, 3, 95), Point(3, 3, 94), Point(4, 9, 95)]
    assert [point.strategy for point in pareto_front(points, 1)] == [0, 2]
    assert [point.strategy for point in pareto_front(points, -1)] == [0, 1]


def test_computing_is_the_step_without_waiting(tmp_path: Path) -> None:
    assert without(0, 10, [(6, 12), (2, 3), (2, 2.5), (-4, -1)]) == [(0, 2), (3, 6)]
    results = compare(tmp_path, [DENSE], (0,), ranks=10)
    figure = timeline(0, results.entries[0])
    assert figure is not None
    assert "The first 8 of 10 ranks." in figure.reading
    computing, waiting, wire = figure.data
    steps = [r for r in results.entries[0].records[0].timeline if r["kind"] == "step" and r["rank"] < 8]
    assert sum(computing["x"]) + sum(waiting["x"]) == pytest.approx(1000 * sum(r["seconds"] for r in steps))
    assert len(wire["x"]) == 8 * 4 * 3


def rank_map(*rows: dict[str, Any], seed: int = 0) -> Figure | None:
    """The figure of one run with these rows of metrics."""
    return heatmap("layer_ranks", RANK_SERIES, 0, Entry(LOW, [Record(seed, Path("run"), {}, list(rows), [])]))


def test_ranks_are_shares_of_the_largest_from_the_first_layer_down() -> None:
    figure = rank_map(
        {"epoch": 1, "phase": "warmup", "layer_ranks": {"z": [8, 8], "a": [256, 256]}},
        {"epoch": 2, "phase": "ab", "layer_ranks": {"z": [8, 8], "a": [24, 256]}},
        {"epoch": 3, "layer_ranks": {"z": [2, 8], "a": [16, 256]}},
        seed=4,
    )
    assert figure is not None
    (heatmap,) = figure.data
    assert heatmap["z"] == [[100, 100, 25], [100, 9.375, 6.25]]
    assert heatmap["x"] == [1, 2, 3]
    assert (heatmap["zmin"], heatmap["zmax"]) == (0, 100)
    axis = figure.layout["yaxis"]
    assert dict(zip(axis["ticktext"], axis["tickvals"], strict=True)) == {"z": heatmap["y"][0], "a": heatmap["y"][1]}
    assert axis["range"] == [1.5, -0.5], "the first is on top"
    assert heatmap["text"][1][1] == "layer a, epoch 2: rank 24 of 256 (9 %), phase ab"
    assert heatmap["text"][1][2] == "layer a, epoch 3: rank 16 of 256 (6 %)"
    assert figure.reading == "After epoch 3 of seed 4, every layer had less than full rank."


def test_ranks_that_stay_full_are_drawn_too() -> None:
    figure = rank_map({"epoch": 1, "layer_ranks": {"1": [8, 8], "2": [8, 8]}})
    assert figure is not None
    assert figure.data[0]["z"] == [[100], [100]]
    assert "no layer had less than full rank" in figure.reading
    figure = rank_map({"epoch": 1, "layer_ranks": {"1": [7, 8], "2": [8, 8]}})
    assert figure is not None
    assert "1 of 2 layers had less than full rank" in figure.reading


def test_ranks_that_are_none_are_left_out() -> None:
    garbage = [None, 3, "8", [], [4], [1, 2, 3], [math.nan, 8], [4, math.inf], ["4", 8], [True, 8], [0, 0], [-1, 8],
               [9, 8], [4, 10**400]]  # fmt: skip
    good = {"epoch": 2, "phase": math.nan, "layer_ranks": {"a": [4, 8]}}
    rows = [{"epoch": 1, "layer_ranks": {"a": value}} for value in garbage]
    rows += [{"epoch": 1}, *({"epoch": 1, "layer_ranks": value} for value in (None, [], "x", math.nan, {}))]
    rows += [
        {"layer_ranks": {"a": [4, 8]}},
        *({"epoch": e, "layer_ranks": {"a": [4, 8]}} for e in (None, math.nan, "1", 0, 1e400)),
    ]
    assert rank_map(*rows) is None
    figure = rank_map(*rows, good, {"epoch": 3, "layer_ranks": {"a": [9, 8], "b": [1, 8]}})
    assert figure is not None
    assert figure.data[0]["z"] == [[50, None], [None, 12.5]]
    assert figure.data[0]["text"] == [["layer a, epoch 2: rank 4 of 8 (50 %)", ""],
                                      ["", "layer b, epoch 3: rank 1 of 8 (12 %)"]]  # fmt: skip
    json.dumps(figure.data, allow_nan=False)


def test_epochs_without_ranks_leave_a_hole_of_their_width() -> None:
    figure = rank_map(*({"epoch": epoch, "layer_ranks": {"a": [4, 8]}} for epoch in (2, 3, 10**8, 7)))
    assert figure is not None
    assert figure.data[0]["x"] == [2, 3, 4, 6, 7, 8, 10**8 - 1, 10**8]
    assert figure.data[0]["z"] == [[50, 50, None, None, 50, None, None, 50]]


def test_ranks_are_of_the_first_finished_seed_that_has_some(tmp_path: Path) -> None:
    row = {"epoch": 1, "layer_ranks": {"a": [4, 8]}}
    records = [Record(0, tmp_path, None, [row], []), Record(1, tmp_path, {}, [{"epoch": 1}], []),
               Record(2, tmp_path, {}, [row], []), Record(3, tmp_path, {}, [row], [])]  # fmt: skip
    figure = heatmap("layer_ranks", RANK_SERIES, 6, Entry(LOW, records))
    assert figure is not None
    assert figure.name == "layer_ranks-7"
    assert "seed 2" in figure.reading
    assert heatmap("layer_ranks", RANK_SERIES, 6, Entry(LOW, records[:2])) is None


@pytest.mark.parametrize(("layers", "low", "high"), [(1, 100, 150), (5, 200, 300), (52, 800, 900), (400, 800, 900)])
def test_many_layers_are_readable_and_one_is_not_huge(layers: int, low: int, high: int) -> None:
    figure = rank_map({"epoch": 1, "layer_ranks": {f"layer{i}.conv": [4, 8] for i in range(layers)}})
    assert figure is not None
    assert low <= figure.layout["height"] <= high
    axis = figure.layout["yaxis"]
    assert len(axis["tickvals"]) == len(axis["ticktext"])
    assert axis["ticktext"][1:2] == ([] if layers == 1 else [f"layer{axis['tickvals'][1]}.conv"])
    assert len(axis["tickvals"]) == (layers if layers < 60 else 67), "names do not overlap"


def test_long_layer_names_still_differ() -> None:
    names = [f"encoder.layers.layer_{i}.{x}" for i in range(12) for x in ("self_attention.out_projection", "mlp.0")]
    figure = rank_map({"epoch": 1, "layer_ranks": {name: [4, 8] for name in names}})
    assert figure is not None
    labels = figure.layout["yaxis"]["ticktext"]
    assert labels[1] == "…layer_0.mlp.0"
    assert len(set(labels)) == 24
    assert max(map(len, labels)) <= 36
    assert names[0] in figure.data[0]["text"][0][0]


def test_a_section_of_ranks_only_where_there_are_some(tmp_path: Path) -> None:
    assert "Rank of each layer" not in page(compare(tmp_path / "none", [DENSE, SPARSE], (0,)))
    html = page(compare(tmp_path / "one", [DENSE, LOW], (0,), layers=("1", "3")))
    assert "Rank of each layer Each row is a layer" in text(html)
    assert {name for name in drawn(html) if name.startswith("layer_ranks")} == {"layer_ranks-2"}
    html = page(compare(tmp_path / "two", [LOW, DENSE, "ab(cutoff=0.5)"], (0,)))
    section = html[html.index("<h2>Rank") : html.index("<h2>Timeline")]
    assert re.findall(r"<details( open)?>.*?id=\"(.*?)\"", section) == [
        (" open", "layer_ranks-1"),
        ("", "layer_ranks-3"),
    ]
    assert "2ab" not in text(f"<body>{section}")
    assert "3ab(cutoff=0.5)" in text(f"<body>{section}")


def test_names_of_layers_stay_text(tmp_path: Path) -> None:
    name = "</script><b>"
    html = page(compare(tmp_path, [LOW], (0,), layers=(name, "&lt;")))
    assert name not in html
    assert "<" not in json_text(html)
    assert html.count("</script>") == 3
    figure = drawn(html)["layer_ranks-1"]
    assert figure["layout"]["yaxis"]["ticktext"] == ["&lt;/script&gt;&lt;b&gt;", "&amp;lt;"]
    assert figure["data"][0]["text"][0][0].startswith("layer &lt;/script&gt;&lt;b&gt;, epoch 1: rank 256 of 256")


def test_long_names_keep_both_ends() -> None:
    assert short(DENSE) == DENSE
    assert short(SPARSE, 30) == "data_parallel(r…(ratio=0.01)))"
    assert len(short(SPARSE, 31)) == 31


LOOKS = [("dark", 1400, "dark", "screen"), ("desktop", 1400, "light", "screen"), ("tablet", 800, "light", "screen"),
         ("phone", 390, "light", "screen"), ("print", 1280, "dark", "print")]  # fmt: skip
CELLS = """() => [...document.querySelectorAll(".wide")].map(wide => ({
  hinted: !wide.previousElementSibling.hidden && wide.previousElementSibling.getBoundingClientRect().height > 0,
  cut: Math.max(...[...wide.querySelectorAll("td")].map(cell => cell.getBoundingClientRect().right)) > innerWidth,
  labels: [...wide.querySelectorAll("tbody tr:first-child td")].map(cell =>
    getComputedStyle(cell, "::before").content.includes(cell.dataset.label)),
  overlaps: [...wide.querySelectorAll("td")].filter(cell => cell.scrollWidth > cell.clientWidth + 1).length}))"""
SETTLED = """() => [...document.querySelectorAll(".plot")].every(plot => {
  const drawing = plot.querySelector("svg.main-svg"), text = plot.querySelector("svg text");
  return drawing && Math.abs(drawing.getBoundingClientRect().width - plot.getBoundingClientRect().width) < 2
    && getComputedStyle(text).fill === getComputedStyle(document.body).color;
})"""
DRAWN = """() => [...document.querySelectorAll(".plot")].map(plot => {
  const box = plot.getBoundingClientRect();
  const marks = [...plot.querySelectorAll(".trace path, .trace .point, .barlayer path, .heatmaplayer image")];
  const big = marks.filter(mark => { const b = mark.getBoundingClientRect(); return b.width + b.height > 2; });
  const texts = [...plot.querySelectorAll("svg text")].filter(text => text.textContent.trim());
  return {id: plot.id, width: box.width, height: box.height, marks: big.length,
          buttons: [...plot.querySelectorAll(".modebar-btn")].map(button => button.dataset.title),
          outside: texts.filter(text => { const b = text.getBoundingClientRect();
            return b.width && (b.right > box.right + 1 || b.left < box.left - 1); }).map(text => text.textContent),
          right: box.right, colours: [...new Set(texts.map(text => getComputedStyle(text).fill))]};
})"""


def brightness(colour: str) -> float:
    """Of "rgb(…)", from 0 to 255."""
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3


@contextmanager
def browser() -> Iterator[Any]:
    """A headless chromium, closed again whatever happens."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


def check_in_browser(path: Path, figures: int | None = None, pictures: Path | None = None) -> None:
    """Open a report as readers do, and check that it draws, fits, follows the light and asks nothing of others."""
    address = path.resolve().as_uri()
    problems: list[str] = []
    requests: list[str] = []
    with browser() as opened:
        view = opened.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
        view.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        view.on("pageerror", lambda error: problems.append(str(error)))
        view.on("request", lambda request: requests.append(request.url))
        view.goto(address)
        view.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        for name, width, scheme, media in LOOKS:
            view.set_viewport_size({"width": width, "height": 900})
            view.emulate_media(media=media, color_scheme=scheme)
            settle(view)
            if pictures:
                view.screenshot(path=pictures / f"{name}.png", full_page=True)
            check_look(view, name, scheme == "light" or media == "print", figures)
    assert problems == []
    assert [url for url in requests if not url.startswith(("data:", "blob:", address))] == []


def settle(view: Any) -> None:
    """Wait until figures have the width and the colour of their page; where they never do, the checks say so."""
    deadline = time.monotonic() + 20
    while not view.evaluate(SETTLED) and time.monotonic() < deadline:
        view.wait_for_timeout(50)


def check_look(view: Any, name: str, light: bool, figures: int | None) -> None:
    """Check a page as it stands: its colours, its width, and that every figure is drawn."""
    plots = view.evaluate(DRAWN)
    background, reach, inner = view.evaluate(
        "[getComputedStyle(document.body).backgroundColor, document.documentElement.scrollWidth, innerWidth]"
    )
    assert (brightness(background) > 200) == light, f"{name}: the page is {background}"
    assert reach <= inner, f"{name}: the page scrolls sideways, {reach} px in {inner} px"
    for table in view.evaluate(CELLS) if name != "print" else []:
        assert not table["cut"] or table["hinted"], f"{name}: a table is cut off without a hint"
        assert not table["overlaps"], f"{name}: figures run into each other"
        assert all(table["labels"]) == (name == "phone"), f"{name}: as cards, each figure has its name beside it"
        assert not (name == "phone" and table["cut"]), "on a phone all of a card is seen"
    assert figures is None or len(plots) == figures, f"{name}: {[plot['id'] for plot in plots]}"
    for plot in plots:
        assert plot["marks"] > 0, f"{name}: {plot['id']} drew nothing"
        assert plot["width"] > 200, f"{name}: {plot}"
        assert plot["height"] > 80, f"{name}: {plot}"
        assert plot["right"] <= inner, f"{name}: {plot['id']} is cut off at {plot['right']} px"
        assert plot["outside"] == [], f"{name}: {plot['id']} cuts words off"
        assert plot["buttons"] == ["Zoom", "Pan", "Reset axes", "Download plot as a PNG"], "none sends data away"
        assert plot["colours"], f"{name}: {plot['id']} has no text"
        assert all((brightness(c) < 110) == light for c in plot["colours"]), f"{name}: {plot['id']} {plot['colours']}"


def test_in_a_browser(tmp_path: Path) -> None:
    specs = [*BEHAVIOUR, "data_parallel", "alone"]  # with both baselines, a target and unequal work: all columns
    compare(tmp_path, specs, (0, 1), target=96.0, unfinished=(run_place(3, "local_sgd(period=8)", 1),))
    run = RunFolder(tmp_path / run_place(0, DENSE, 0))
    run.save_summary(json.loads(run.summary.read_text()) | {"steps": 9, "samples": 123_456_789})
    check_in_browser(write_report(read_results(tmp_path)), figures=5 + len(specs))


@pytest.mark.parametrize(
    ("layers", "epochs"), [(("</script><b>",), 1), (tuple(f"features.{i}.{'x' * i}" for i in range(70)), 90)]
)
def test_ranks_in_a_browser(tmp_path: Path, layers: tuple[str, ...], epochs: int) -> None:
    results = compare(tmp_path, [DENSE, LOW, "ab(cutoff=0.5)"], (0,), layers=layers, epochs=epochs)
    check_in_browser(write_report(results), figures=5 + 2 + 3)


def test_little_in_a_browser(tmp_path: Path) -> None:
    """One rank, one epoch, a nasty name: figures of single points, and none of bytes."""
    results = compare(tmp_path, [f"{DENSE}{NASTY}<b>"], (0,), task=NASTY, metric="loss", ranks=1, epochs=1)
    check_in_browser(write_report(results), figures=2)


def test_hiding_strategies_and_printing(tmp_path: Path) -> None:
    path = write_report(compare(tmp_path, [DENSE, SPARSE], (0,)))
    lines = "document.querySelectorAll('#curve-bytes .scatterlayer .trace').length"
    with browser() as opened:
        view = opened.new_page(color_scheme="dark")
        view.goto(path.resolve().as_uri())
        assert view.evaluate(lines) == 2
        view.click("button[data-strategy='1']")
        assert view.evaluate(lines) == 1
        assert view.locator("button[aria-pressed=false]").count() == 2  # one in each key
        view.click("button[data-strategy='1']")
        assert view.evaluate(lines) == 2

        view.evaluate(f"addEventListener('beforeprint', () => window.printed = ({DRAWN})())")
        assert view.pdf(print_background=True).startswith(b"%PDF")
        printed = {plot["id"]: plot for plot in view.evaluate("printed")}
        assert printed["timeline-2"]["marks"] > 0, "closed on the screen, open on paper"
        assert all(brightness(c) < 110 for plot in printed.values() for c in plot["colours"])
        view.wait_for_function("document.querySelectorAll('details:not([open])').length === 2")
        assert all(brightness(c) > 110 for plot in view.evaluate(DRAWN) for c in plot["colours"])
