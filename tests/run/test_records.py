"""Files are whole or not there."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thinwire.common.files import write_atomically, write_text
from thinwire.config import RunConfig
from thinwire.errors import RunError, UsageError
from thinwire.run import records
from thinwire.run.locks import LOCK, FolderLock
from thinwire.run.records import RunFolder, is_free, read_rows


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


def test_runs_that_begin_at_the_same_time_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(task="synthetic")
    begin, found = threading.Barrier(8), []

    def new() -> None:
        begin.wait()
        found.append(RunFolder.new(config).path)

    threads = [threading.Thread(target=new) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in found} == {f"synthetic-data_parallel-{i}" for i in range(1, 9)}


def test_a_new_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(RunError, match=r"cannot make --out runs/synthetic-data_parallel-1: Not a directory; choose an"):
        RunFolder.new(RunConfig(task="synthetic"))


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


def test_a_run_that_goes_on_is_not_taken_for_one_to_resume(tmp_path: Path) -> None:
    """Of two that are started with --resume=auto, the second may find no config.toml yet, and be told to resume."""
    config = RunConfig(out=tmp_path / "run")
    first = RunFolder.new(config)
    first.hold()
    first.save_config(config)
    with pytest.raises(UsageError, match=r"another run writes to .*run; wait until it has ended, .* another --out"):
        RunFolder.new(config)
    with pytest.raises(UsageError, match="holds a run already; add --resume"):
        first.refuse_used()
    first.release()
    with pytest.raises(UsageError, match="holds a run already; add --resume"):
        RunFolder.new(config)
    assert list(first.path.iterdir()) == [first.config], "it leaves nothing behind"


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


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_nothing_is_swept_up(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run may be writing these files."""

    def flock(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".metrics.jsonl.12.new").touch()
    folder = RunFolder(tmp_path)
    folder.hold()
    folder.release()
    assert not folder.is_held
    assert (tmp_path / ".metrics.jsonl.12.new").exists()
    said = f"warning: cannot lock {tmp_path}/.run.lock ({os.strerror(number)}): make sure that no other run writes to"
    assert capsys.readouterr().err == f"{said} this folder\n"


def test_network_file_systems_lock_the_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: a lock of a folder is a matter of one machine, one of a file needs a file that is open for writing."""
    real = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            return  # others do not see it
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    test_one_run_at_a_time_holds_a_folder(tmp_path, monkeypatch)


def test_a_run_that_waits_for_a_folder_holds_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that it waits for fails before its first checkpoint, and removes the folder."""
    first, second, third = (RunFolder(tmp_path / "run") for _ in range(3))
    first.hold()
    has_waited = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: (has_waited.set(), threading.Event().wait(seconds)))
    waiting = threading.Thread(target=second.hold)
    waiting.start()
    assert has_waited.wait(10)
    first.remove_if_empty()
    waiting.join(10)
    assert second.is_held
    assert second.path.is_dir()
    monkeypatch.setattr(records, "LOCK_SECONDS", 0.1)
    with pytest.raises(UsageError, match="another run writes to"):
        third.hold()
    second.remove_if_empty()
    assert not second.path.exists()


FORKS = """
import os, sys, time
from pathlib import Path
from thinwire.run.records import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.hold()
if pid := os.fork():
    print(pid, flush=True)
    os.kill(os.getpid(), 9)
os.close(1)
folder.release()  # it is not the child's
time.sleep(60)
"""


def test_a_process_that_a_task_forked_does_not_hold_the_folder(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", FORKS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    forked = int(run.communicate(timeout=30)[0])
    try:
        assert run.returncode == -signal.SIGKILL
        assert (tmp_path / LOCK).exists()
        folder = RunFolder(tmp_path)
        folder.hold()
        folder.release()
    finally:
        os.kill(forked, signal.SIGKILL)


def test_copies_of_the_descriptor_do_not_hold_a_folder_that_was_released(tmp_path: Path) -> None:
    """Processes have them that code other than Python's forked. The other name is for the file to stay."""
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert first.take() == "held"
    assert first._descriptor is not None
    copy = os.dup(first._descriptor)
    os.link(first.path, tmp_path / "other name")
    first.release()
    (tmp_path / "other name").rename(first.path)
    assert second.take() == "held"
    second.release()
    os.close(copy)


def test_a_run_takes_the_lock_of_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    assert is_free(tmp_path)
    folder = RunFolder(tmp_path)
    folder.hold()
    assert folder.is_held
    folder.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot make --out .*; choose another --out"):
        RunFolder(tmp_path / "file" / "run").hold()


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("ranks = 'x'")
    with pytest.raises(UsageError, match=r"config.toml: ranks='x' is not possible"):
        RunFolder(tmp_path).load_config()
