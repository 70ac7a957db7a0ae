"""A plan as a page and as data, in a folder."""

from __future__ import annotations

import json
from pathlib import Path

from thinwire.advice.plan import Plan
from thinwire.common.files import write_text


def write_page(plan: Plan, folder: Path) -> Path:
    """Write plan.json; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    write_text(path, json.dumps(plan.as_json(), indent=2) + "\n")
    return path
