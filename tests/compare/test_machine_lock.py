"""One comparison at a time on a machine; tests/compare/test_runner.py has a second one that waits."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from thinwire.compare.machine_lock import _note_owner, machine_lock


@pytest.mark.parametrize("kind", ["a folder", "a link"])
def test_a_file_that_cannot_be_locked_is_a_warning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path, other = tmp_path / f"thinwire-compare-{os.getuid()}.lock", tmp_path / "other"
    other.write_text("untouched")
    if kind == "a link":
        path.symlink_to(other)
    else:
        path.mkdir()
    with machine_lock():
        pass
    assert f"warning: cannot lock {path} (" in capsys.readouterr().err
    assert other.read_text() == "untouched"


def test_the_lock_is_free_again_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        with machine_lock():
            (path,) = tmp_path.iterdir()
            assert path.read_text() == str(os.getpid())
            assert path.stat().st_mode & 0o777 == 0o600


def test_the_owner_is_never_written_through_a_link(tmp_path: Path) -> None:
    """Somebody may put a link in the place of the file after it was locked."""
    path, other = tmp_path / "lock", tmp_path / "other"
    other.write_text("untouched")
    path.symlink_to(other)
    _note_owner(path)
    assert other.read_text() == "untouched"
