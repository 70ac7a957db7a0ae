"""The report's page with names that look like markup: they are text, and nothing else."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from tests.compare.comparisons import compare
from tests.fuzz.harness import Case
from thinwire.compare.report import page, shell

MARKUP = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</title><b>",
    "<!--",
    "-->",
    "]]>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    '" style="position:fixed',
    "javascript:alert(1)",
    "&lt;b&gt;",
    "&#60;b&#62;",
    "<a href='https://example.org'>x</a>",
    "{{7*7}}",
    "{% include 'x' %}",
    "\u202eabc",
    "\u2066x",
    "\u2028",
    "\0",
    "\x1b[31m",
    "<" * 50,
    "A" * 3000,
    "</style><b>",
    "<iframe src=//x>",
    "<base href=//x>",
    "<meta http-equiv=refresh content=0>",
    "\ufeff<b>",
    "＜b＞",
    "%{customdata}",
]


class Shape(HTMLParser):
    """The elements of a page with the names of their attributes, and what its scripts hold."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.values: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "wbr":  # where a long name may break
            return
        self.inside = tag
        self.tags.append((tag, *(name for name, _ in attrs)))
        self.values += [value or "" for name, value in attrs if name in ("href", "src", "style", "id", "class")]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)


def prepare(folder: Path) -> Case:
    """The page of a comparison has the same elements and attributes whatever its names are."""
    shell.get_plotlyjs = lambda: ""

    def written(name: Any) -> str:
        """The page of a comparison in which names are what `name()` gives."""
        place = folder / "comparison"
        for path in place.rglob("*.*"):
            path.unlink()
        specs = [f"ab(cutoff={name()!r})".replace("\n", " "), f"data_parallel(x={name()!r})"]
        series = {"layer_ranks": dict.fromkeys(("title", "about", "row", "cell"), name()) | {"draw": "heatmap"}}
        artifact = {
            "name": name(),
            "about": name(),
            "file": name(),
            "column": name(),
            "parameters": 1,
            "bytes": 4,
            "ratio": 2.0,
            "value": 5.0,
        }
        errors = {"runs/2-data_parallel/seed-1": name()}
        results = compare(
            place,
            specs,
            (0, 1),
            epochs=2,
            task=name(),
            model=name(),
            link=name(),
            layers=("a" + name(), "b" + name()),
            versions={"torch": name(), "own": name()},
            series=series,
            artifacts=[artifact],
            errors=errors,
        )
        return page(results)

    numbers = count(10)
    want = Shape(written(lambda: f"word{next(numbers)}"))

    def case(rng: Random) -> None:
        html = written(lambda: rng.choice(("", "x")) + rng.choice(MARKUP).replace("\0", "") + str(next(numbers)))
        found = Shape(html)
        assert found.tags == want.tags, first_difference(found.tags, want.tags)
        assert found.values == want.values, first_difference(found.values, want.values)
        assert len(found.scripts) == len(want.scripts)
        for one, other in zip(found.scripts, want.scripts, strict=True):
            if other.startswith("{"):
                assert all("<a " not in text for text in texts(json.loads(one))), "a link in a figure"
            else:
                assert one == other, "data in a script"

    return case


def texts(tree: Any) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [text for part in parts for text in texts(part)]


def first_difference(found: list[Any], want: list[Any]) -> str:
    pairs = zip([*found, None], [*want, None], strict=False)
    return next((f"{one} is not {other}" for one, other in pairs if one != other), "")
