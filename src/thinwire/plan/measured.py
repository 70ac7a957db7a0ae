"""What measured runs say of a strategy's accuracy: points against data_parallel at the same settings."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.common.json_text import parse_json
from thinwire.errors import UsageError
from thinwire.spec import parse

REFERENCE = "data_parallel"
FIELDS: dict[str, Any] = {  # that a summary needs here, and their types
    "strategy": str, "task": str, "metric": str, "value": (int, float), "seed": int, "ranks": int, "epochs": int,
}  # fmt: skip
SIMILAR = 2.0  # runs whose lengths differ by less than this factor are about as long
DECIDING = ("batch_size", "lr", "optimizer", "schedule", "clip_norm", "accumulate", "autocast")  # settings of a run
FILE = Path(__file__).with_name("measured.json")  # made of docs/results.json by benchmarks/measured.py


class Quality(NamedTuple):
    """Points of accuracy that a strategy gained or lost against data_parallel, over so many seeds, and where."""

    points: float
    seeds: int
    about: str
    optimizer: str = ""  # its name, as adamw; "" = not known
    updates: int = 0  # of each run; 0 = not known

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        return f"{self.points:+.1f} points ({self.about}, {seeds})"


@cache
def shipped() -> dict[str, list[Quality]]:
    """The measurements of docs/results.md, by strategy."""
    return {spec: [Quality(*row) for row in rows] for spec, rows in json.loads(FILE.read_text()).items()}


def qualities(
    spec: str, optimizer: str = "", own: Mapping[str, list[Quality]] | None = None, updates: float | None = None
) -> list[Quality]:
    """What was measured of a strategy with just these options: the user's own runs first.

    What Adam makes of noise differs from what SGD does. So if there are runs with this optimizer, nothing is said of
    those with another one. Methods that exchange rarely lose most in short runs. So for a run of so many updates, the
    longest runs that were no longer count, and those about as long; if all were longer, all count.
    """
    spec, name = str(parse(spec)), optimizer_name(optimizer)
    found = [*(own or {}).get(spec, []), *shipped().get(spec, [])]
    is_measured = any(quality.optimizer == name for quality in found if name)
    alike = [quality for quality in found if quality.optimizer in ("", name)] if is_measured else found
    longest = max((one.updates for one in alike if one.updates <= (updates or 0)), default=0)
    if not longest:
        return alike
    return [one for one in alike if not one.updates or longest / SIMILAR < one.updates <= longest]


def optimizer_name(spec: str) -> str:
    """The name of an optimizer's class, in small letters; "" for none.

    >>> optimizer_name("adamw(weight_decay=0.1)"), optimizer_name("torch.optim:SGD"), optimizer_name("")
    ('adamw', 'sgd', '')
    """
    return spec.partition("(")[0].rpartition(":")[2].strip().lower()


def compare_cells(cells: Iterable[Mapping[str, Any]]) -> dict[str, list[Quality]]:
    """Qualities from finished runs: dictionaries with strategy, setting (what else decides a run), seed and accuracy.

    They may have the optimizer and the number of updates, too, which are then parts of the setting.

    >>> runs = [("data_parallel", 0, 90.0), ("diloco", 0, 89.0), ("data_parallel", 1, 90.5), ("diloco", 1, 89.0)]
    >>> cells = [{"strategy": s, "seed": i, "accuracy": a, "setting": "digits"} for s, i, a in runs]
    >>> print(compare_cells(cells)["diloco"][0])
    -1.2 points (digits, 2 seeds)
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    about: dict[str, tuple[str, int]] = {}  # optimizer and updates, by setting
    for cell in cells:
        key = str(parse(cell["strategy"])), str(cell["setting"])
        about[key[1]] = optimizer_name(cell.get("optimizer") or ""), cell.get("updates", 0)
        found.setdefault(key, {})[cell["seed"]] = float(cell["accuracy"])
    result: dict[str, list[Quality]] = {}
    for (spec, setting), by_seed in found.items():
        reference = found.get((REFERENCE, setting), {})
        seeds = sorted(by_seed.keys() & reference.keys())
        if spec != REFERENCE and seeds:
            points = statistics.fmean(by_seed[seed] - reference[seed] for seed in seeds)
            quality = Quality(round(points, 2), len(seeds), setting, *about[setting])
            result.setdefault(spec, []).append(quality)
    return result


def _setting(summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """All that decides a run besides strategy and seed: the settings in its config.toml, where there is one."""
    where = (
        f"{summary['task']}, {summary.get('model') or 'model'}, {summary['ranks']} ranks, {summary['epochs']} epochs"
    )
    config = folder / "config.toml"
    settings = tomllib.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    if not isinstance(settings.get("optimizer", ""), str):
        raise TypeError
    rest = [f"{name} {settings[name]}" for name in DECIDING if name in settings]
    return {"setting": ", ".join([where, *rest]), "optimizer": settings.get("optimizer")}


def read_own(folder: Path) -> dict[str, list[Quality]]:
    """Qualities from the runs in a folder that `thinwire compare` or `thinwire train` wrote, or that holds such."""
    cells = []
    for path in sorted(folder.glob("**/summary.json")) if folder.is_dir() else []:
        try:
            summary = parse_json(path.read_bytes())
            wrong = [name for name, types in FIELDS.items() if not isinstance(summary[name], types)]
            if wrong or (not math.isfinite(summary["value"]) and not math.isnan(summary["value"])):
                raise TypeError
            if summary["metric"] == "accuracy":
                cells.append({**summary, "accuracy": summary["value"], **_setting(summary, path.parent)})
        except (ValueError, KeyError, TypeError, OSError, RecursionError, AttributeError):
            raise UsageError(f"{path} is not the summary of a run; remove it, or give another --from") from None
    if not cells:
        raise UsageError(
            f"--from {folder} holds no finished runs with an accuracy (no summary.json); give a folder that thinwire "
            "compare or thinwire train wrote"
        )
    return compare_cells(cells)


def is_safe(spec: str, measured: list[Quality], loss_allowed: float) -> bool:
    """Whether a strategy computes what data_parallel does, or lost no more than allowed wherever it was measured."""
    if str(parse(spec)) == REFERENCE:
        return True
    return bool(measured) and min(quality.points for quality in measured) >= -loss_allowed
