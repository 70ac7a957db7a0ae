"""What the documentation says is what happens: examples run, commands work, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import thinwire
from tests import programs
from thinwire import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
UNFIT = (
    "__main__",
    "integrations.lightning",
    "integrations.huggingface",
    "integrations.accelerate",
    "integrations.ray",
)  # to be imported here: frameworks change the environment
MODULES = [m.name for m in pkgutil.walk_packages(thinwire.__path__, "thinwire.") if not m.name.endswith(UNFIT)]


@pytest.mark.slow
def test_examples_in_docstrings() -> None:
    assert not [name for name in MODULES if doctest.testmod(importlib.import_module(name)).failed]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.slow  # some start processes, too
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def test_a_framework_needs_at_most_three_new_lines() -> None:
    new = [re.findall(r"^\+.*", block, re.M) for block in blocks(ROOT / "docs" / "loops.md", "diff")]
    assert len(new) == 5, "Lightning, Hugging Face, Accelerate with gradients and with rounds, Ray"
    assert all(1 <= len(lines) <= 3 for lines in new)


ALONE = ("thinwire plan ", "thinwire doctor", "thinwire list")  # need nothing and leave nothing: once is enough


def commands(page: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for block in blocks(page, "sh") for line in block.splitlines())
    return [line for line in lines if line]


@pytest.mark.usefixtures("program_server")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=lambda p: p.name)
def test_commands_work_in_order(page: Path, tmp_path: Path) -> None:
    elsewhere = {command for other in PAGES[: PAGES.index(page)] for command in commands(other)}
    if page.name == "running.md":  # it goes on with the run that the README began
        (tmp_path / "runs").mkdir()
        call("thinwire train --ranks 2 --epochs 1 --out runs/first", tmp_path)
    for command in commands(page):
        if command.startswith("make"):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
        elif not (command.startswith(ALONE) and command in elsewhere):
            call(re.sub(r"--link \d+mbit", "--link 500mbit", command), tmp_path)  # to wait less


def call(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "thinwire", command
    done = subprocess.run(
        [*programs.PYTHON, "-m", *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("program_server")
def test_the_demo_reaches_95_percent_and_writes_its_report(tmp_path: Path) -> None:
    lines = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    command = next(line for line in lines if "thinwire compare" in line)
    command = command.removeprefix(".venv/bin/")
    for there, sooner in (("--seeds 2", "--seeds 1"), ("--link 100mbit", "--link 1gbit")):
        assert there in command
        command = command.replace(there, sooner)
    call(f"{command} --out demo", tmp_path)
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert (results["task"], results["ranks"], results["nodes"]) == ("digits", 4, 2)
    shown = " ".join(row["strategy"] for row in results["strategies"])
    assert {row["strategy"].partition("(")[0] for row in results["strategies"]} == set(registry.TABLE["strategies"])
    assert all(family in shown for family in ("maxnorm", "powersgd")), "quantised and low-rank gradients too"
    for row in results["strategies"]:
        assert row["value"]["mean"] >= 95, row["strategy"]
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1e6


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_public_names_are_there_and_documented() -> None:
    for name in thinwire.__all__:
        assert getattr(thinwire, name).__doc__, name
    assert set(thinwire.__all__) <= set(dir(thinwire))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        thinwire.nothing  # noqa: B018


def test_the_readme_shows_what_was_measured() -> None:
    readme = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    results = json.loads((ROOT / "docs" / "readme.json").read_text())
    assert readme["table"](results) in (ROOT / "README.md").read_text()
    assert readme["picture"](results) == (ROOT / "docs" / "readme.svg").read_text()


def test_the_page_on_security_shows_what_was_measured() -> None:
    wireguard = runpy.run_path(str(ROOT / "benchmarks" / "wireguard.py"))
    results = json.loads((ROOT / "docs" / "wireguard.json").read_text())
    assert wireguard["table"](results) in (ROOT / "docs" / "security.md").read_text()
    assert all(one["wireguard"]["captured"]["marked"] == 0 < one["clear"]["captured"]["marked"] for one in results)


def test_the_page_on_speed_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw it again: python benchmarks/floor.py --render docs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for file in (ROOT / "docs").glob("speed*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    importlib.import_module("floor_render").render(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_text() == (ROOT / "docs" / file.name).read_text(), file.name


def test_the_page_on_elastic_runs_shows_what_was_measured() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "elastic.py"))["table"]
    measured = json.loads((ROOT / "docs" / "elastic.json").read_text())
    assert table(measured) in (ROOT / "docs" / "elastic.md").read_text()
    assert measured["disturbed"]["replay_is_equal"]


# ---- the site, and what a package index shows


def nav_pages(entries: list[dict[str, object]]) -> list[str]:
    """The pages that a navigation lists, also in its sections."""
    found: list[str] = []
    for entry in entries:
        for target in entry.values():
            found += [target] if isinstance(target, str) else nav_pages(target)  # type: ignore[arg-type]
    return found


def test_the_site_lists_every_page_once() -> None:
    listed = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    made_elsewhere = {"changelog.md", "contributing.md"}
    assert sorted(listed) == sorted({path.name for path in (ROOT / "docs").glob("*.md")} | made_elsewhere)


def test_the_reference_has_every_public_name() -> None:
    shown = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert {f"thinwire.{name}" for name in thinwire.__all__} <= shown
    for name in shown:
        if not name.startswith("thinwire.integrations"):
            assert pkgutil.resolve_name(name).__doc__, name


def test_choosing_quotes_what_was_measured() -> None:
    """Its table has figures of results.md and speed.md; after new measurements, change them there."""
    choosing, results, speed = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("choosing", "results", "speed"))
    table = choosing.partition("<!-- choosing")[2].partition("<!-- end -->")[0]
    small = results.partition("## On a CPU, small")[2].partition("### All methods")[2]
    steps = speed.partition("## On a CPU")[2].partition("**Time of a step")[2].partition("\n**")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", table, re.M)
    assert len(rows) >= 10
    for strategy, cells in rows:
        measured = re.search(rf"^\| \d+\. VGG8, SGD: {re.escape(strategy)} \| (.+) \|$", small, re.M)
        assert measured, strategy
        _, points, _, _, _, share, *_ = measured[1].split(" | ")
        times = re.search(rf"^\| {re.escape(strategy)} \| (.+) \| \S+ \|$", steps, re.M)
        assert cells.split(" | ") == [share, points, *(times[1].split(" | ") if times else "–––")], strategy
    long = choosing.partition("<!-- 30 epochs")[2].partition("<!-- end -->")[0]
    full = results.partition("## On a GPU")[2].partition("### All methods")[2].partition("## On a CPU")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", long, re.M)
    assert len(rows) == 10
    for strategy, quoted in rows:
        measured = re.search(rf"^\| \d+\. ResNet-18: {re.escape(strategy)} \| (.+) \|$", full, re.M)
        assert measured, strategy
        accuracy, _, seeds, _, _, share, *_ = measured[1].split(" | ")
        assert quoted.split(" | ") == [share, accuracy, seeds], strategy


def test_what_a_package_index_shows_has_no_links_to_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shown = (ROOT / "README.md").read_text()
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(change["pattern"], change["replacement"], shown)
    assert re.findall(r"\]\((?!https?:)", shown) == []
    assert "| compression.md | choose a reducer" in shown


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", thinwire.__version__]
