"""Files are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.common.files import write_atomically, write_text
from thinwire.config import RunConfig
from thinwire.errors import RunError, UsageError
from thinwire.run import records
from thinwire.run.records import RunFolder, read_rows


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_text(file, "old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left on device"):
        write_atomically(file, fail)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_half_a_line_is_ignored_and_later_steps_are_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append(folder.metrics, [{"step": 1}, {"step": 2}, {"step": 3}])
    with folder.metrics.open("a") as stream:
        stream.write('{"step": 4, "lo')
    assert [row["step"] for row in read_rows(folder.metrics)] == [1, 2, 3]
    folder.drop_rows_after(2)
    assert [row["step"] for row in read_rows(folder.metrics)] == [1, 2]
    assert read_rows(folder.ledger) == []


def test_final_lines_of_the_ledger_are_forgotten_when_a_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_ledger({"step": 1}, [[{"wire_bytes": 5}], [{"wire_bytes": 7}]])
    folder.append_ledger({"step": 1}, [[{"wire_bytes": 6}]], final=True)
    rows = [{"step": 1, "rank": rank, "wire_bytes": sent} for rank, sent in ((0, 5), (1, 7))]
    assert read_rows(folder.ledger) == [*rows, {"step": 1, "final": True, "rank": 0, "wire_bytes": 6}]
    folder.drop_rows_after(1)
    assert read_rows(folder.ledger) == rows


def test_new_folders_get_the_next_free_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(task="synthetic(width=8)", strategy="data_parallel(bucket_mb=1)")
    first = RunFolder.new(config)
    assert str(first.path) == "runs/synthetic-data_parallel-1"
    first.save_config(config)
    assert str(RunFolder.new(config).path) == "runs/synthetic-data_parallel-2"
    assert str(RunFolder.new(RunConfig(task="my.module:task")).path) == "runs/task-data_parallel-1"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; give a folder"):
        RunFolder.new(RunConfig(out=tmp_path / "file"))


def test_one_run_at_a_time_holds_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LOCK_SECONDS", 0.1)
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.hold()
    with pytest.raises(UsageError, match=r"another run writes to .*run; wait until it has ended, .* another --out"):
        second.hold()
    first.release()
    second.hold()
    second.release()
    assert list(second.path.iterdir()) == [], "it leaves nothing behind"


def test_what_a_killed_run_had_not_written_to_its_end_is_swept_up(tmp_path: Path) -> None:
    scraps = [".model.safetensors.12.new", ".metrics.jsonl.12.new", ".config.toml.12.new", ".model-2.safetensors.3.new"]
    scraps.append(".membership.jsonl.12.new")  # of an elastic run
    users = [".notes.12.new", ".model.safetensors.new", "model.safetensors", "metrics.jsonl.12.new", ".env"]
    for name in (*scraps, *users):
        (tmp_path / name).touch()
    (tmp_path / ".model.12.new").mkdir()
    (tmp_path / ".model.12.new" / "model-1.safetensors").touch()
    folder = RunFolder(tmp_path)
    folder.hold()
    folder.release()
    assert {path.name for path in tmp_path.iterdir()} == set(users)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot make --out .*; choose another --out"):
        RunFolder(tmp_path / "file" / "run").hold()


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("ranks = 'x'")
    with pytest.raises(UsageError, match=r"config.toml: ranks='x' is not possible"):
        RunFolder(tmp_path).load_config()
