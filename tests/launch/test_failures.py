"""What ranks leave behind when they fail."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import RunError
from thinwire.launch.failures import ROOM_BYTES, Failure, make_room, pop_failures, read_failures
from thinwire.launch.rendezvous import LocalRendezvous


def test_failures_fit_into_the_room_that_was_made_for_them(tmp_path: Path) -> None:
    make_room(tmp_path, range(11))
    assert read_failures(tmp_path) == []
    short, long = (
        Failure(10, "RunError", "no space"),
        Failure(2, "ValueError", "é\0" * ROOM_BYTES, "x" * ROOM_BYTES + "end"),
    )
    for one in (short, long):
        one.write(tmp_path)
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {ROOM_BYTES}, "nothing more is taken from the disk"
    first, second = pop_failures(tmp_path)
    assert second == short
    assert first[:2] == long[:2]
    assert long.message.startswith(first.message)
    assert first.traceback.endswith("end")
    assert min(len(first.message), len(first.traceback)) > 1000
    assert read_failures(tmp_path) == []


def test_failures_are_forgotten_without_giving_up_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk somebody else takes the room of a file that is emptied."""
    make_room(tmp_path, [0, 1])
    failure, before = Failure(1, "RunError", "no space"), Path.open
    failure.write(tmp_path)

    def on_a_full_disk(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "w" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return before(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", on_a_full_disk)
    assert pop_failures(tmp_path) == [failure]
    assert read_failures(tmp_path) == []
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {ROOM_BYTES}


def test_half_a_failure_is_none(tmp_path: Path) -> None:
    make_room(tmp_path, [0])
    (tmp_path / "0.failure").write_bytes(b'{"rank": 0, "kind": "Run'.ljust(ROOM_BYTES))
    assert read_failures(tmp_path) == pop_failures(tmp_path) == []


def test_a_folder_without_room_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*gone: .*; free some space, or set TMPDIR to another folder"):
        make_room(tmp_path / "gone", [0])


def test_a_restart_says_what_ranks_said_that_lost_others_if_all_did(tmp_path: Path) -> None:
    rendezvous = LocalRendezvous(3, 1, tmp_path)
    make_room(tmp_path, range(3))
    assert rendezvous._describe_failure() == "a rank died"
    lost = [Failure(rank, "PeerLost", f"rank {rank} could not join 3 ranks: …") for rank in (2, 1, 0)]
    for one in lost[:2]:
        one.write(tmp_path)
    assert rendezvous._describe_failure() == "a rank died"
    for one in lost:
        one.write(tmp_path)
    assert rendezvous._describe_failure() == "rank 0: rank 0 could not join 3 ranks: …"
    for one in (*lost, Failure(2, "ValueError", "no")):
        one.write(tmp_path)
    assert rendezvous._describe_failure() == "rank 2 failed: ValueError: no"
