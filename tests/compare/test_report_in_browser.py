"""The report in a browser: it draws, fits, follows the light, and can be printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compare.browser import DRAWN, brightness, browser, check_in_browser
from tests.compare.comparisons import BEHAVIOUR, DENSE, LOW, NASTY, SPARSE, compare
from thinwire.compare.files import run_place
from thinwire.compare.report import write_report
from thinwire.compare.results import read_results
from thinwire.run.records import RunFolder


def test_in_a_browser(tmp_path: Path) -> None:
    specs = [*BEHAVIOUR, "data_parallel", "alone"]  # with both baselines, a target and unequal work: all columns
    compare(tmp_path, specs, (0, 1), target=96.0, unfinished=(run_place(3, "local_sgd(every=8)", 1),))
    run = RunFolder(tmp_path / run_place(0, DENSE, 0))
    run.save_summary(json.loads(run.summary.read_text()) | {"steps": 9, "samples": 123_456_789})
    check_in_browser(write_report(read_results(tmp_path)), figures=5 + len(specs))


@pytest.mark.parametrize(
    ("layers", "epochs"), [(("</script><b>",), 1), (tuple(f"features.{i}.{'x' * i}" for i in range(70)), 90)]
)
def test_ranks_in_a_browser(tmp_path: Path, layers: tuple[str, ...], epochs: int) -> None:
    results = compare(tmp_path, [DENSE, LOW, "ab(cutoff=0.5)"], (0,), layers=layers, epochs=epochs)
    check_in_browser(write_report(results), figures=5 + 2 + 3)


def test_little_in_a_browser(tmp_path: Path) -> None:
    """One rank, one epoch, a nasty name: figures of single points, and none of bytes."""
    results = compare(tmp_path, [f"{DENSE}{NASTY}<b>"], (0,), task=NASTY, metric="loss", ranks=1, epochs=1)
    check_in_browser(write_report(results), figures=2)


def test_hiding_strategies_and_printing(tmp_path: Path) -> None:
    path = write_report(compare(tmp_path, [DENSE, SPARSE], (0,)))
    lines = "document.querySelectorAll('#curve-bytes .scatterlayer .trace').length"
    with browser() as opened:
        view = opened.new_page(color_scheme="dark")
        view.goto(path.resolve().as_uri())
        assert view.evaluate(lines) == 2
        view.click("button[data-strategy='1']")
        assert view.evaluate(lines) == 1
        assert view.locator("button[aria-pressed=false]").count() == 2  # one in each key
        view.click("button[data-strategy='1']")
        assert view.evaluate(lines) == 2

        view.evaluate(f"addEventListener('beforeprint', () => window.printed = ({DRAWN})())")
        assert view.pdf(print_background=True).startswith(b"%PDF")
        printed = {plot["id"]: plot for plot in view.evaluate("printed")}
        assert printed["timeline-2"]["marks"] > 0, "closed on the screen, open on paper"
        assert all(brightness(c) < 110 for plot in printed.values() for c in plot["colours"])
        view.wait_for_function("document.querySelectorAll('details:not([open])').length === 2")
        assert all(brightness(c) > 110 for plot in view.evaluate(DRAWN) for c in plot["colours"])
