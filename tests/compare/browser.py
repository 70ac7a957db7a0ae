"""Open a report in a headless chromium, and check what readers see."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LOOKS = [("dark", 1400, "dark", "screen"), ("desktop", 1400, "light", "screen"), ("tablet", 800, "light", "screen"),
         ("phone", 390, "light", "screen"), ("print", 1280, "dark", "print")]  # fmt: skip
CELLS = """() => [...document.querySelectorAll(".wide")].map(wide => ({
  hinted: !wide.previousElementSibling.hidden && wide.previousElementSibling.getBoundingClientRect().height > 0,
  cut: Math.max(...[...wide.querySelectorAll("td")].map(cell => cell.getBoundingClientRect().right)) > innerWidth,
  labels: [...wide.querySelectorAll("tbody tr:first-child td")].map(cell =>
    getComputedStyle(cell, "::before").content.includes(cell.dataset.label)),
  overlaps: [...wide.querySelectorAll("td")].filter(cell => cell.scrollWidth > cell.clientWidth + 1).length}))"""
SETTLED = """() => [...document.querySelectorAll(".plot")].every(plot => {
  const drawing = plot.querySelector("svg.main-svg"), text = plot.querySelector("svg text");
  return drawing && Math.abs(drawing.getBoundingClientRect().width - plot.getBoundingClientRect().width) < 2
    && getComputedStyle(text).fill === getComputedStyle(document.body).color;
})"""
DRAWN = """() => [...document.querySelectorAll(".plot")].map(plot => {
  const box = plot.getBoundingClientRect();
  const marks = [...plot.querySelectorAll(".trace path, .trace .point, .barlayer path, .heatmaplayer image")];
  const big = marks.filter(mark => { const b = mark.getBoundingClientRect(); return b.width + b.height > 2; });
  const texts = [...plot.querySelectorAll("svg text")].filter(text => text.textContent.trim());
  return {id: plot.id, width: box.width, height: box.height, marks: big.length,
          buttons: [...plot.querySelectorAll(".modebar-btn")].map(button => button.dataset.title),
          outside: texts.filter(text => { const b = text.getBoundingClientRect();
            return b.width && (b.right > box.right + 1 || b.left < box.left - 1); }).map(text => text.textContent),
          right: box.right, colours: [...new Set(texts.map(text => getComputedStyle(text).fill))]};
})"""


def brightness(colour: str) -> float:
    """Of "rgb(…)", from 0 to 255."""
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3


@contextmanager
def browser() -> Iterator[Any]:
    """A headless chromium, closed again whatever happens."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


def check_in_browser(path: Path, figures: int | None = None, pictures: Path | None = None) -> None:
    """Open a report as readers do, and check that it draws, fits, follows the light and asks nothing of others."""
    address = path.resolve().as_uri()
    problems: list[str] = []
    requests: list[str] = []
    with browser() as opened:
        view = opened.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
        view.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        view.on("pageerror", lambda error: problems.append(str(error)))
        view.on("request", lambda request: requests.append(request.url))
        view.goto(address)
        view.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        for name, width, scheme, media in LOOKS:
            view.set_viewport_size({"width": width, "height": 900})
            view.emulate_media(media=media, color_scheme=scheme)
            settle(view)
            if pictures:
                view.screenshot(path=pictures / f"{name}.png", full_page=True)
            check_look(view, name, scheme == "light" or media == "print", figures)
    assert problems == []
    assert [url for url in requests if not url.startswith(("data:", "blob:", address))] == []


def settle(view: Any) -> None:
    """Wait until figures have the width and the colour of their page; where they never do, the checks say so."""
    deadline = time.monotonic() + 20
    while not view.evaluate(SETTLED) and time.monotonic() < deadline:
        view.wait_for_timeout(50)


def check_look(view: Any, name: str, light: bool, figures: int | None) -> None:
    """Check a page as it stands: its colours, its width, and that every figure is drawn."""
    plots = view.evaluate(DRAWN)
    background, reach, inner = view.evaluate(
        "[getComputedStyle(document.body).backgroundColor, document.documentElement.scrollWidth, innerWidth]"
    )
    assert (brightness(background) > 200) == light, f"{name}: the page is {background}"
    assert reach <= inner, f"{name}: the page scrolls sideways, {reach} px in {inner} px"
    for table in view.evaluate(CELLS) if name != "print" else []:
        assert not table["cut"] or table["hinted"], f"{name}: a table is cut off without a hint"
        assert not table["overlaps"], f"{name}: figures run into each other"
        assert all(table["labels"]) == (name == "phone"), f"{name}: as cards, each figure has its name beside it"
        assert not (name == "phone" and table["cut"]), "on a phone all of a card is seen"
    assert figures is None or len(plots) == figures, f"{name}: {[plot['id'] for plot in plots]}"
    for plot in plots:
        assert plot["marks"] > 0, f"{name}: {plot['id']} drew nothing"
        assert plot["width"] > 200, f"{name}: {plot}"
        assert plot["height"] > 80, f"{name}: {plot}"
        assert plot["right"] <= inner, f"{name}: {plot['id']} is cut off at {plot['right']} px"
        assert plot["outside"] == [], f"{name}: {plot['id']} cuts words off"
        assert plot["buttons"] == ["Zoom", "Pan", "Reset axes", "Download plot as a PNG"], "none sends data away"
        assert plot["colours"], f"{name}: {plot['id']} has no text"
        assert all((brightness(c) < 110) == light for c in plot["colours"]), f"{name}: {plot['id']} {plot['colours']}"
