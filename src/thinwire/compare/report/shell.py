"""What every page of thinwire needs: colours, style sheet, script, plotly.js, and the figures that it draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.compare.report.style import DARK, LIGHT, Figure


def shell(figures: Sequence[Figure], has_script: bool = True) -> dict[str, Any]:
    """The data of templates/base.html, but for the title."""
    from plotly.offline import get_plotlyjs

    return {
        "look": {"light": LIGHT, "dark": DARK},
        "css": _read("style.css"),
        "script": _read("script.js"),
        "has_script": has_script,
        "plotly": get_plotlyjs(),
        "drawn": {figure.name: {"data": figure.data, "layout": figure.layout} for figure in figures},
    }


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
