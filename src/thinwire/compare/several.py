"""One report over several folders: comparisons and runs of the same task, on different networks or days."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.compare.files import holds_comparison
from thinwire.compare.report import write_report
from thinwire.compare.results import Results, read_results
from thinwire.errors import UsageError
from thinwire.run.records import RunFolder
from thinwire.run.tables import measured_words

MARK = "thinwire report of several folders"  # in the head of such a page: see templates/page.html
TRAINED = (
    "model", "ranks", "epochs", "minutes", "batch_size", "lr", "optimizer", "schedule", "clip_norm", "accumulate",
    "autocast", "compile",
)  # fmt: skip
NOT_COMPARABLE = "Results of different folders cannot be compared, only those of one."
NOT_TIMES = "So times of different folders differ for that reason too."


def report_several(folders: Sequence[Path], out: Path | None) -> Results:
    """Write one report.html over several folders into `out`, by default a new folder; returns what is in it."""
    out = out or next(path for i in range(1, 10**6) if not (path := Path(f"runs/report-{i}")).exists())
    _check_out(out)
    results = read_several(folders, out)
    write_report(results)
    return results


def read_several(folders: Sequence[Path], out: Path) -> Results:
    """The results of several folders as one. UsageError if they have different tasks."""
    parts = dict(zip(_short_names(folders), map(read_results, folders), strict=True))
    for name, part in parts.items():
        if part.example is None:
            raise UsageError(f"no run in {name} has finished; finish one, or leave the folder out")
    _check_same(parts, "task")
    _check_same(parts, "metric")
    trained, elsewhere = _differences(parts, _training), _differences(parts, _place)
    notes = [f"Not the same training: {'; '.join(trained)}. {NOT_COMPARABLE}"] if trained else []
    notes += [f"Not the same network or machine: {'; '.join(elsewhere)}. {NOT_TIMES}"] if elsewhere else []
    count = Counter(entry.spec for part in parts.values() for entry in part.entries)
    entries = [
        replace(entry, part=number, label=name if notes or count[entry.spec] > 1 else "")
        for number, (name, part) in enumerate(parts.items())
        for entry in part.entries
    ]
    targets = {part.target for part in parts.values()}
    command = shlex.join(["thinwire", "report", *map(str, folders), "--out", str(out)])
    target = targets.pop() if len(targets) == 1 else None
    return Results(out, entries, command, target, parts, tuple(notes), is_comparable=not trained)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The ends of the folders' paths, as long as it takes to tell them apart."""
    whole = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, whole, strict=True):
        if whole.count(path) > 1:
            raise UsageError(f"{folder} is given twice; give each folder once")
    length = next(n for n in range(1, 10**6) if len({path.parts[-n:] for path in whole}) == len(whole))
    return ["/".join(path.parts[-length:]) for path in whole]


def _check_same(parts: dict[str, Results], key: str) -> None:
    values = {name: (part.example or {})[key] for name, part in parts.items()}
    if len(set(values.values())) > 1:
        found = ", ".join(f"{name} has {value}" for name, value in values.items())
        raise UsageError(f"folders with different {key}s cannot be in one report: {found}; make one for each {key}")


def _differences(parts: dict[str, Results], facts: Callable[[Results], dict[str, Any]]) -> list[str]:
    """What differs between folders, as "epochs is 1 in a, 2 in b"."""
    found = {name: facts(part) for name, part in parts.items()}
    keys = dict.fromkeys(key for one in found.values() for key in one)
    return [
        f"{key} is {', '.join(f'{_word(one.get(key))} in {name}' for name, one in found.items())}"
        for key in keys
        if len({_word(one.get(key)) for one in found.values()}) > 1
    ]


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _training(part: Results) -> dict[str, Any]:
    """The settings that decide what a run learns; those of folders without config.toml are in the summary."""
    record = next(record for entry in part.entries for record in entry.finished)
    run = RunFolder(record.folder)
    config = run.load_config().model_dump() if run.config.exists() else {}
    summary = part.example or {}
    asked_steps = {"steps": config.get("steps")}  # those of the summary are what became of any length
    return {name: config.get(name, summary.get(name)) for name in TRAINED} | asked_steps


def _place(part: Results) -> dict[str, Any]:
    """The network and the machine. Rates that were measured are never quite the same, so they do not count."""
    summary = part.example or {}
    link = summary["link"] or (measured_words(part.summaries) and "measured") or None
    versions = {name: summary["versions"].get(name) for name in ("torch", "gpu", "cores")}
    return {"nodes": summary["nodes"], "link": link, **versions}


def _check_out(out: Path) -> None:
    """Raise UsageError for a folder whose report.html is about something else."""
    page = out / "report.html"
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a folder")
    if holds_comparison(out) or RunFolder(out).config.exists():
        raise UsageError(f"--out {out} holds a comparison or a run, and its report.html is about that; give another")
    if page.exists() and MARK not in page.read_text(encoding="utf-8", errors="replace")[:4096]:
        raise UsageError(f"{page} is no report of several folders, and is not overwritten; give another --out")
