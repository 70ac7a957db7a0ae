"""The report of a sequence: a table of its parts, and a timeline of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.compare.comparisons import DENSE, compare
from tests.compare.pages import drawn, text
from thinwire.compare.files import run_place
from thinwire.compare.report import page
from thinwire.compare.results import read_results
from thinwire.run.records import RunFolder, read_rows

SEQUENCE = "sequence([<b>first</b>, local_sgd], [8, 4])"


def write_sequence(folder: Path) -> None:
    """A comparison whose second strategy is a sequence of two parts, of 8 and 4 epochs."""
    compare(folder, [DENSE, SEQUENCE], (0,))
    run = RunFolder(folder / run_place(1, SEQUENCE, 0))
    rows = read_rows(run.metrics)
    for row in rows:
        row["part"], row["part_strategy"] = (1, "<b>first</b>") if row["epoch"] <= 8 else (2, "local_sgd")
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spans = read_rows(run.timeline)
    both = [span | {"part": part, "step": span["step"] + 100 * part} for part in (1, 2) for span in spans]
    run.timeline.write_text("".join(json.dumps(span) + "\n" for span in both))


def test_each_part_has_a_row_and_a_timeline(tmp_path: Path) -> None:
    write_sequence(tmp_path)
    html = page(read_results(tmp_path))
    words = text(html)
    assert "Parts of sequences" in words
    rows = read_rows(RunFolder(tmp_path / run_place(1, SEQUENCE, 0)).metrics)
    sent = [rows[7]["training_bytes_between"], rows[11]["training_bytes_between"] - rows[7]["training_bytes_between"]]
    assert sent[0] == 2 * sent[1]
    first, second = f"{sent[0] / 1e6:.0f} MB", f"{sent[1] / 1e6:.0f} MB"
    assert re.search(rf"1\. &lt;b&gt;first&lt;/b&gt; 1 to 8 \d\d\.\d\d %? ?{first} 40\.0 s", words), words
    assert re.search(rf"2\. local_sgd 9 to 12 \d\d\.\d\d %? ?{second} 20\.0 s", words)
    assert {"timeline-1", "timeline-2-1", "timeline-2-2"} <= drawn(html).keys()
    assert "[8, 4]), part 2 waiting" in words
    assert "Steps 240 to 243 of seed 0." in words


def test_without_sequences_there_is_no_such_table(tmp_path: Path) -> None:
    assert "Parts of sequences" not in page(compare(tmp_path, [DENSE], (0,)))
