"""Figures over seeds and epochs, from what runs left behind."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.compare.comparisons import DENSE, compare
from tests.compare.test_terminal_table import drawn
from tests.run.test_worker import train
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.common.formats import format_bytes
from thinwire.compare.report import page
from thinwire.compare.report.purposes import purpose_figure
from thinwire.compare.results import Record, read_results, spread
from thinwire.compare.results_json import results_json
from thinwire.run.records import RunFolder, read_rows


def record(metric: str, *values: float) -> Record:
    rows = [{"train_seconds": 10.0 * i, f"test_{metric}": value} for i, value in enumerate(values, 1)]
    return Record(0, Path(), None, rows, [])


def test_the_time_to_a_target_is_the_first_time_it_is_reached() -> None:
    assert record("accuracy", 50, 95, 94, 96).seconds_to(95) == 20
    assert record("accuracy", 50, 94.9).seconds_to(95) is None
    assert record("loss", 2.0, 0.5, 0.7, 0.4).seconds_to(0.5) == 20
    assert record("loss", 2.0, 0.6).seconds_to(0.5) is None
    assert record("accuracy").seconds_to(1) is None


def test_a_spread_is_of_the_sample() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.deviation) == (3.0, pytest.approx(math.sqrt((4 + 1 + 9) / 2)))
    assert spread([5.0]).deviation is None  # type: ignore[union-attr]
    assert spread([]) is None


def test_a_seed_that_diverged_is_left_out_and_results_stay_json(tmp_path: Path) -> None:
    results = compare(tmp_path, [DENSE], seeds=(0, 1, 2))
    path = tmp_path / "runs" / "1-data_parallel" / "seed-1" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "value": math.nan}))
    found = read_results(tmp_path).entries[0].spread("value")
    assert found is not None
    assert found.values == [v for i, v in enumerate(results.entries[0].spread("value").values) if i != 1]  # type: ignore[union-attr]
    json.loads(json.dumps(results_json(read_results(tmp_path)), allow_nan=False))


def on_two_nodes(comm: Comm, settings: dict[str, Any]) -> None:
    """A run of one epoch, and after it the same run resumed with a second one; the ledger counts two nodes."""
    found, comm.nodes = comm.nodes, tuple(range(comm.size))
    try:
        for epochs in (1, 2):
            folder = Path(settings["out"], str(epochs))
            if epochs == 2 and comm.rank == 0:
                shutil.copytree(folder.parent / "1", folder)
            comm.barrier()
            train(comm, {**settings, "schedule": "constant", "out": folder, "epochs": epochs, "resume": epochs == 2})
    finally:
        comm.nodes = found


@pytest.mark.parametrize("strategy", ["local_sgd(every=5)", "local_parallel(blocks=2)", "ab(sync_every=4, warmup=2)"])
def test_ledger_summary_table_and_figure_tell_the_same_bytes(
    process_world: ProcessWorlds, tmp_path: Path, strategy: str
) -> None:
    settings = {"model": "mlp(width=24, depth=3)", "strategy": strategy, "out": str(tmp_path)}
    process_world.run(on_two_nodes, 2, settings)
    for epochs in (1, 2):
        results = read_results(tmp_path / str(epochs))
        summary = results.example
        assert summary is not None
        rows = read_rows(RunFolder(results.folder).ledger)
        final = [row for row in rows if row.get("final")]
        assert rows[-len(final) :] == final, "the last lines are the final ones"
        assert {row["epoch"] for row in final} == {epochs}
        assert list(dict.fromkeys((row["epoch"], "final" in row) for row in rows)) == [
            *((epoch, False) for epoch in range(1, epochs + 1)),
            (epochs, True),
        ]
        sent: Counter[tuple[str, str]] = Counter()
        for row in final:
            sent[row["purpose"], "between"] += row["between_bytes"]
            sent[row["purpose"], "inside"] += row["wire_bytes"] - row["between_bytes"]
        assert sent.total() > 0
        by_purpose = summary["wire_bytes_by_purpose"]
        assert {(purpose, link): n for purpose, links in by_purpose.items() for link, n in links.items()} == sent
        assert summary["wire_bytes_by_link"] == {
            where: sum(count for part, count in sent.items() if part[1] == where) for where in ("inside", "between")
        }
        assert summary["wire_bytes_per_rank"] == round(sent.total() / 2)

        figure = purpose_figure(results)
        assert figure is not None
        assert sum(trace["x"][0] for trace in figure.data) == sent.total()
        training = bytes_of(by_purpose, TRAINING, ("between",))
        last = results.entries[0].records[0].metrics[-1]
        assert (last["training_bytes_between"], last["train_seconds"]) == (training, summary["train_seconds"])
        assert last["training_bytes"] == round(bytes_of(by_purpose, TRAINING) / 2)
        total = bytes_of(by_purpose, links=("between",))
        cells = re.findall(r'data-label="(.*?)">(?:<span class="mean">)?(.*?)<', page(results))
        assert {("Sent in training, between nodes", format_bytes(training)),
                ("Sent in all, between nodes", format_bytes(total)),
                ("Sent otherwise, between nodes", format_bytes(total - training))} <= set(cells)  # fmt: skip
        shown = " ".join(drawn(results, 200))
        assert f" {format_bytes(training)} " in shown
        assert f" {format_bytes(total)} " in shown
