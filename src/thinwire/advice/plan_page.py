"""A plan as a page and as data, in a folder: plan.html, which needs no other file and no network, and plan.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from thinwire.advice.plan import PAGE_MARK, Plan, check_folder
from thinwire.advice.plan_data import pictured
from thinwire.advice.plan_html import html_of
from thinwire.common.files import write_text


def write_page(plan: Plan, folder: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """Compute the curves, write plan.json and plan.html; returns the path of the page."""
    check_folder(folder)
    shown = pictured(plan, say)
    page = html_of(shown)
    assert PAGE_MARK in page[:1000]
    write_text(folder / "plan.json", json.dumps(shown.as_json(), indent=2) + "\n")
    write_text(folder / "plan.html", page)
    return folder / "plan.html"
