"""One report over several folders: who is who, what may be compared, and nothing is overwritten."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.compare.comparisons import DENSE, SPARSE, compare, write_run
from thinwire.cli import report
from thinwire.compare.report import page
from thinwire.compare.results import Results, read_results
from thinwire.compare.several import read_several, report_several
from thinwire.compare.terminal_table import comparison_lines, comparison_table
from thinwire.compare.verdicts import baselines, verdicts
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.run.records import RunFolder

PLAIN, ROUNDS = "data_parallel", "local_sgd(every=8)"


def drawn(results: Results) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(comparison_table(results, 200))
    return console.export_text()


def single_run(folder: Path, spec: str, **settings: Any) -> Path:
    """A run as thinwire train leaves it."""
    write_run(RunFolder(folder), spec, 0)
    RunFolder(folder).save_config(RunConfig(strategy=spec, ranks=4, epochs=12, model="mlp", **settings))
    return folder


@pytest.fixture
def links(tmp_path: Path) -> list[Path]:
    """The same comparison on two links."""
    folders = [tmp_path / "slow", tmp_path / "fast"]
    for folder, link, pace in zip(folders, ("100mbit", "1gbit"), (1.0, 0.2), strict=True):
        compare(folder, [PLAIN, ROUNDS], (0, 1), link=link, train_seconds=30 * pace)
    return folders


def test_a_strategy_of_two_folders_has_two_rows_with_their_names(links: list[Path], tmp_path: Path) -> None:
    results = report_several(links, tmp_path / "both")
    names = [f"{spec} · {folder}" for folder in ("slow", "fast") for spec in (PLAIN, ROUNDS)]
    assert [entry.name for entry in results.entries] == names
    table, html = drawn(results), (tmp_path / "both" / "report.html").read_text()
    for name in names:
        assert name in table
        assert f"{name[-6:]}</span>" in html, "named in the page"
    assert "Results of 2 folders on task" in html
    for folder, link in (("slow", "100mbit"), ("fast", "1gbit")):
        about = f"{folder}</code> with model <code>mlp</code>: 4 ranks on 2 nodes, link <code>{link}</code>"
        assert about in html
    assert html.count("thinwire compare &#39;data_parallel&#39;") == 2, "how to repeat each"
    note = "Not the same network or machine: link is 100mbit in slow, 1gbit in fast. So times of different folders"
    assert note in html
    assert "and its cost</h2>" in html
    lines = comparison_lines(results)
    assert any(line.startswith(note) for line in lines)
    assert any(line.startswith("slow: link 100mbit, measured") for line in lines)


def test_each_result_is_compared_with_the_baseline_of_its_own_folder(links: list[Path], tmp_path: Path) -> None:
    results = read_several(links, tmp_path)
    for number in (0, 1):
        for entry in results.entries[2 * number : 2 * number + 2]:
            assert baselines(results, entry) == {PLAIN: results.entries[2 * number]}
    found = verdicts(results)
    assert f"{PLAIN} · slow" in found[1]
    assert f"{PLAIN} · fast" in found[3]


def test_single_runs_with_the_same_settings_are_compared(tmp_path: Path) -> None:
    folders = [single_run(tmp_path / "a", PLAIN), single_run(tmp_path / "b", ROUNDS)]
    results = read_several(folders, tmp_path / "out")
    assert [entry.name for entry in results.entries] == [PLAIN, ROUNDS], "each is there once"
    assert results.notes == ()
    assert baselines(results, results.entries[1]) == {PLAIN: results.entries[0]}
    assert "than data_parallel" in verdicts(results)[1]


def test_results_of_other_settings_are_shown_and_not_compared(tmp_path: Path) -> None:
    folders = [single_run(tmp_path / "a", PLAIN, lr=0.1), single_run(tmp_path / "b", ROUNDS, lr=0.2)]
    results = read_several(folders, tmp_path / "out")
    note = "Not the same training: lr is 0.1 in a, 0.2 in b. Results of different folders cannot be compared"
    assert results.notes[0].startswith(note)
    assert [entry.name for entry in results.entries] == [f"{PLAIN} · a", f"{ROUNDS} · b"]
    assert baselines(results, results.entries[1]) == {}
    assert set(verdicts(results).values()) == {"nothing in its folder to compare it with"}
    html = page(results)
    assert note in html
    assert "Underlined: the best" not in html
    assert "and its cost</h2>" not in html, "no front over results that cannot be compared"
    assert "–" in drawn(results)


def test_runs_of_so_many_steps_are_compared_only_with_runs_of_as_many(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, steps in zip(folders, (100, 1000, 100), strict=True):
        write_run(RunFolder(folder), PLAIN, 0)
        RunFolder(folder).save_config(RunConfig(strategy=PLAIN, ranks=4, steps=steps, model="mlp"))
    different = read_several(folders[:2], tmp_path / "out")
    assert not different.is_comparable
    assert "steps is 100 in a, 1000 in b" in different.notes[0]
    assert read_several(folders[::2], tmp_path / "out").is_comparable


def test_folders_that_cannot_be_in_one_report(links: list[Path], tmp_path: Path) -> None:
    compare(tmp_path / "other", [PLAIN], (0,), task="mnist")
    compare(tmp_path / "words", [PLAIN], (0,), metric="loss")
    compare(tmp_path / "empty", [PLAIN], (0,), unfinished=("runs/1-data_parallel/seed-0",))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "compare.json").write_text("[1, 2")
    for folder, message in (
        ("other", "different tasks cannot be in one report: slow has digits, other has mnist; make one for each task"),
        ("words", "different metrics cannot be in one report"),
        ("empty", "no run in empty has finished"),
        ("foreign", "foreign holds no comparison and no run"),
        ("damaged", "cannot read .*damaged/compare.json"),
        ("nowhere", "nowhere is not a folder"),
        ("slow", "slow is given twice"),
        ("../" + tmp_path.name + "/slow", "slow is given twice"),
    ):
        with pytest.raises(UsageError, match=message):
            report_several([links[0], tmp_path / folder], tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing was made"


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / day / "cmp" for day in ("monday", "friday")]
    for folder in folders:
        compare(folder, [DENSE], (0,))
    names = [entry.name for entry in read_several(folders, tmp_path).entries]
    assert names == [f"{DENSE} · monday/cmp", f"{DENSE} · friday/cmp"]


def test_only_a_report_of_several_folders_is_overwritten(links: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "both"
    report_several(links, out)
    report_several(links, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    (tmp_path / "file").write_text("mine")
    compare(tmp_path / "cmp", [SPARSE], (0,))
    for place, message in (
        ("mine", "mine/report.html is no report of several folders, and is not overwritten; give another --out"),
        ("cmp", "cmp holds a comparison or a run, and its report.html is about that; give another"),
        ("file", "file is a file; give a folder"),
    ):
        with pytest.raises(UsageError, match=message):
            report_several(links, tmp_path / place)
    assert (tmp_path / "mine" / "report.html").read_text() == "mine"
    assert not (tmp_path / "cmp" / "report.html").exists()


def test_the_command(
    links: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report(links[0])
    assert capsys.readouterr().out == f"{links[0]}/report.html\n"
    assert (links[0] / "report.html").read_text() == page(read_results(links[0])), "one folder as before"
    report(*links)
    assert "open runs/report-1/report.html" in capsys.readouterr().out
    report(links[0], out=Path("copy"))
    assert "Results of 1 folder on task" in Path("copy/report.html").read_text()
    with pytest.raises(UsageError, match="report on what"):
        report()
