"""results.json: the results of a comparison for programs."""

from __future__ import annotations

import itertools
from typing import Any

from thinwire.comm.ledger import LINKS, TRAINING
from thinwire.compare.files import FORMAT
from thinwire.compare.results import Entry, Results, Spread, on_link, sent
from thinwire.compare.terminal_table import comparison_caption
from thinwire.compare.verdicts import baselines, remarks, speed, verdicts

SHARED = ("task", "model", "metric", "ranks", "nodes", "link", "versions")  # settings that all runs have in common
MEASURES = (
    "value", "best", "seconds", "train_seconds", "steps", "samples", "samples_per_second", "waiting_share",
    "wire_bytes_per_rank", "kernel_bytes_per_rank", "peak_memory_bytes",
)  # fmt: skip


def results_json(results: Results) -> dict[str, Any]:
    """The settings that all runs share, and for each strategy its measures over seeds and its verdict."""
    example, sentences = results.example or {}, verdicts(results)
    return {
        "format": FORMAT,
        "command": results.command,
        "target": results.target,
        **{name: example.get(name) for name in SHARED},
        "network": comparison_caption(results),
        "remarks": remarks(results),
        "strategies": [
            {**_strategy_row(results, entry), "verdict": sentences.get(i)} for i, entry in enumerate(results.entries)
        ],
    }


def _strategy_row(results: Results, entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {"strategy": entry.spec, "seeds": [record.seed for record in entry.finished]}
    for name in ("link_state", "link_measured", "epochs"):  # a list, with one value per seed
        row[name] = [record.summary[name] for record in entry.finished if record.summary]
    row |= {name: _as_dict(entry.spread(name)) for name in MEASURES}
    for counter, link in itertools.product(("wire", "kernel"), LINKS):
        row[f"{counter}_bytes_{link}"] = _as_dict(entry.spread(on_link(counter, link)))
    row["training_bytes_per_rank"] = _as_dict(entry.spread(sent(TRAINING)))
    for link in LINKS:
        row[f"training_bytes_{link}"] = _as_dict(entry.spread(sent(TRAINING, link)))
    row["times_as_fast_as"] = {spec: speed(entry, other) for spec, other in baselines(results, entry).items()}
    if results.target is not None:
        row["seconds_to_target"] = _as_dict(entry.seconds_to(results.target))
    return {**row, "errors": entry.errors}


def _as_dict(spread: Spread | None) -> dict[str, Any] | None:
    return spread._asdict() if spread is not None else None
