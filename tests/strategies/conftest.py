"""Strategies that need processes are not run on threads."""

from __future__ import annotations

import pytest

PROCESSES_ONLY = ("pipeline",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_impossible(getattr(item, "callspec", None))]


def _is_impossible(case: object) -> bool:
    values = getattr(case, "params", {})
    return values.get("world") == "threads" and str(values.get("spec", "")).startswith(PROCESSES_ONLY)
