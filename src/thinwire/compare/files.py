"""The files of a comparison: their places, their format, and reading them with clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel

from thinwire.common.json_text import parse_json
from thinwire.errors import UsageError
from thinwire.run.schema import NEEDED, Count, Summary, parsed

FORMAT = 1  # of compare.json and results.json

LONGEST_NAME = 100  # of a strategy, which is a part of its runs' folder


def _without_folders(spec: str) -> str:
    name = spec.partition("(")[0]
    if len(name) > LONGEST_NAME or {"/", "\0"} & set(name):
        raise ValueError(f"{name[:LONGEST_NAME]!r} is no name of a strategy")
    return spec


class ComparisonFile(BaseModel):
    """compare.json."""

    specs: list[Annotated[str, AfterValidator(_without_folders)]]
    seeds: list[Count]
    target: float | None
    errors: dict[str, str]
    command: str


def run_place(index: int, spec: str, seed: int) -> str:
    """The folder of one run, relative to the folder of its comparison.

    >>> run_place(1, "data_parallel(bucket_mb=5)", 0)
    'runs/2-data_parallel/seed-0'
    """
    return f"runs/{index + 1}-{spec.partition('(')[0]}/seed-{seed}"


def holds_comparison(folder: Path) -> bool:
    """Was this folder written by `thinwire compare`?"""
    return (folder / "compare.json").exists()


def read_comparison_file(folder: Path) -> dict[str, Any]:
    """compare.json: what is compared, and which runs failed."""
    path = folder / "compare.json"
    text = _read(path)
    about = _mapping(text, path)
    if about.get("format") != FORMAT:
        raise UsageError(
            f"{path} has format {about.get('format')}, this version reads {FORMAT}; repeat the comparison, "
            "or use the version of thinwire that wrote it"
        )
    if missing := [key for key in ("specs", "seeds", "target", "errors", "command") if key not in about]:
        raise UsageError(f"{path} lacks {', '.join(missing)}: it is damaged; repeat the comparison")
    return parsed(ComparisonFile, text, path)


def read_summary(path: Path) -> dict[str, Any]:
    """A run's summary.json; an error names the keys that a comparison needs and that it lacks."""
    text = _read(path)
    summary = _mapping(text, path)
    missing = [key for key in NEEDED if key not in summary]
    if missing:
        versions = summary.get("versions")
        by = versions.get("thinwire") if isinstance(versions, dict) else "another program"
        raise UsageError(
            f"{path} was written by thinwire {by} and lacks {', '.join(missing)}; "
            "move that run's folder away and do it again"
        )
    return parsed(Summary, text, path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; it is damaged, or not thinwire's") from None


def _mapping(text: str, path: Path) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}; it is damaged, or not thinwire's") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not one of thinwire's files; check the folder")
    return value
