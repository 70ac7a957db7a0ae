"""Temporary folders, in a folder that other users write to as well."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from thinwire.common import files
from thinwire.common.files import scratch_folder, scratch_prefix


def left_by(folder: Path, name: str) -> Path:
    """A folder as a killed process leaves it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    left = folder / (scratch_prefix().replace(str(os.getpid()), str(ended.pid), 1) + name)
    left.mkdir()
    (left / "file").touch()
    return left


def test_folders_of_killed_processes_are_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may name a link like one, or remove folders of theirs at any moment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "SHORT", str(tmp_path))
    mine, gone = left_by(tmp_path, "mine"), left_by(tmp_path, "gone")
    running = tmp_path / f"{scratch_prefix()}running"
    running.mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    link = tmp_path / mine.name.replace("mine", "link")
    link.symlink_to(kept)
    lstat = Path.lstat

    def vanish_before(path: Path) -> os.stat_result:
        if path == gone:
            (gone / "file").unlink()
            gone.rmdir()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanish_before)
    with scratch_folder() as scratch:
        assert scratch.stat().st_mode & 0o777 == 0o700, "closed to other users"
    assert {path.name for path in tmp_path.iterdir()} == {"kept", running.name, link.name}
    assert (kept / "file").exists()
