"""Trackers get every row once, also when a run is stopped and goes on, and never stop a run."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests import own_parts
from tests.run.test_options import READ, rows_of, stopped_and_gone_on
from tests.run.test_worker import alone, same_files, train
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.config import RunConfig
from thinwire.launch.settings import check_options
from thinwire.run.network import LinkReport
from thinwire.run.setup import tracked_settings
from thinwire.run.tracking import base, tensorboard
from thinwire.run.tracking.base import numbers

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {"task": READ, "log_every": 4, "checkpoint_every": 6, "test_every": "10steps"}
Points = dict[tuple[int, str], list[float]]  # what a tracker has: by step and name


# ---- what trackers have written, read back with their own formats


@contextmanager
def same_environment() -> Iterator[None]:
    """Some packages write into the environment when they are imported."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def read_tensorboard(folder: Path) -> Points:
    with same_environment():
        from tensorboardX.proto.event_pb2 import Event

    found: Points = {}
    for file in sorted((folder / "tensorboard").iterdir()):
        content, place = file.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack("<Q", content[place : place + 8])
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += length + 16
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault((event.step, value.tag), []).append(value.simple_value)
    return found


def read_wandb(folder: Path) -> Points:
    with same_environment():
        from wandb.proto.wandb_internal_pb2 import Record

    found: Points = {}
    runs = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len({run.name for run in runs}) == 1, "all are of one run"
    for record in (Record.FromString(content) for run in runs for content in logged_by_wandb(run.read_bytes())):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                found.setdefault((int(items["_step"]), name), []).append(value)
    return found


def logged_by_wandb(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, in which records are whole or in pieces."""
    record, place = b"", 7
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_mlflow(folder: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("thinwire").experiment_id])
    assert run.data.params["task"] == READ
    assert run.info.status == "FINISHED"
    found: Points = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            found.setdefault((point.step, name), []).append(point.value)
    return found


def read_trackio(folder: Path) -> Points:
    found: Points = {}
    with sqlite3.connect(folder / "trackio" / "thinwire.db") as database:
        for step, values in database.execute("SELECT step, metrics FROM metrics"):
            for name, value in json.loads(values).items():
                found.setdefault((step, name), []).append(value)
    return found


READERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio,
}  # fmt: skip


def expected(folder: Path) -> Points:
    return {(row["step"], name): [value] for row in rows_of(folder) for name, value in numbers(row).items()}


def same_points(one: Points, other: Points) -> None:
    """Equal, as far as 32 bits can tell; times may be of before a run was stopped."""
    assert one.keys() == other.keys()
    for place, values in one.items():
        assert len(values) == 1, f"{place} is there {len(values)} times"
        if "second" not in place[1]:
            assert values == pytest.approx(other[place], rel=1e-6)


@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_has_each_row_once_although_the_run_was_stopped(tmp_path: Path, tracker: str) -> None:
    if importlib.util.find_spec(base.PACKAGES[tracker]) is None:
        pytest.skip(
            f"{base.PACKAGES[tracker]} is not installed: too large for the dev extra (mlflow 536 MB, trackio 88)"
        )
    alone(**SETTINGS, out=tmp_path / "plain")
    stopped_and_gone_on(tmp_path / "run", 17, **SETTINGS, track=tracker)  # after the row of step 16; goes on after 12
    assert same_files(tmp_path / "plain", tmp_path / "run")
    points = READERS[tracker](tmp_path / "run")
    same_points(points, expected(tmp_path / "run"))
    assert {name for _, name in points} >= {"loss", "lr", "wire_bytes", "waiting_seconds", "test_accuracy"}
    alone(**SETTINGS, out=tmp_path / "run", track=tracker, resume=True)  # nothing is left to train
    same_points(READERS[tracker](tmp_path / "run"), expected(tmp_path / "run"))


def test_a_tracker_that_comes_later_gets_all_rows_and_the_last_test(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {**SETTINGS, "test_every": 0, "schedule": "constant"}
    alone(**settings, out=out)
    assert not (out / "tracking.json").exists(), "off unless asked for"
    alone(**{**settings, "steps": 40}, out=out, track="tensorboard", resume=True)
    same_points(read_tensorboard(out), expected(out))
    assert "test_accuracy" in rows_of(out)[-1]


def test_settings_are_told_to_the_tracker(tmp_path: Path) -> None:
    alone(**SETTINGS, lr=0.25, out=tmp_path / "run", track="tensorboard")
    written = b"".join(file.read_bytes() for file in (tmp_path / "run" / "tensorboard").iterdir())
    for told in (b"| lr | 0.25 |", b"| ranks | 1 |", b"| nodes | 1 |", b"| batch_size | 16 |"):
        assert told in written


def test_the_link_is_told_to_the_tracker() -> None:
    def told(comm: Comm) -> dict[str, Any]:
        return tracked_settings(RunConfig(link="100mbit", nodes=2), comm, LinkReport(True, "shaped", 93.5, 1.2))

    (settings,) = tw.simulate(told, ranks=1)
    expected = {"link": "100mbit", "link_state": "shaped", "link_rate_mbit": 93.5, "link_latency_ms": 1.2, "ranks": 1}
    assert expected.items() <= settings.items()


def test_only_rank_0_tracks(process_world: ProcessWorlds, tmp_path: Path) -> None:
    process_world.run(train, 2, {**SETTINGS, "out": str(tmp_path / "run"), "track": "tensorboard"})
    same_points(read_tensorboard(tmp_path / "run"), expected(tmp_path / "run"))
    assert expected(tmp_path / "run")[8, "wire_bytes"][0] > 0


def test_a_missing_package_is_named_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.PACKAGES, "trackio", "no_such_package")
    message = r"--track trackio needs the package no_such_package; install it with: pip install 'thinwire\[trackio\]'"
    with pytest.raises(tw.UsageError, match=message):
        check_options(RunConfig(track="trackio"))
    with pytest.raises(tw.UsageError, match=message):
        alone(**SETTINGS, out=tmp_path / "run", track="trackio")
    assert not (tmp_path / "run").exists()


def test_a_tracker_is_told_whether_the_run_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    close = tensorboard.TensorBoard.close

    def note(tracker: Any, is_complete: bool) -> None:
        told.append(is_complete)
        close(tracker, is_complete)

    monkeypatch.setattr(tensorboard.TensorBoard, "close", note)
    stopped_and_gone_on(tmp_path / "run", 17, **SETTINGS, track="tensorboard")
    assert told == [False, True]


@pytest.mark.parametrize("broken", ["__init__", "write", "close"])
def test_a_tracker_that_fails_is_given_up_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    close = tensorboard.TensorBoard.close

    def fail(tracker: Any, *args: Any) -> None:
        if broken == "close":
            close(tracker, *args)
        raise ConnectionError("the disk is full")

    monkeypatch.setattr(tensorboard.TensorBoard, broken, fail)
    alone(**SETTINGS, out=tmp_path / "plain")
    alone(**SETTINGS, out=tmp_path / "run", track="tensorboard")
    assert same_files(tmp_path / "plain", tmp_path / "run")
    assert capsys.readouterr().err.count("warning: --track tensorboard failed (ConnectionError: the disk is full)") == 1


@pytest.mark.timeout(60)
def test_a_disk_that_is_full_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the package writes in a thread of its own."""
    with same_environment():
        from tensorboardX.record_writer import RecordWriter

    write, count = RecordWriter.write, 0

    def fill(writer: Any, data: bytes) -> None:
        nonlocal count
        count += 1
        if count > 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, data)

    monkeypatch.setattr(RecordWriter, "write", fill)
    alone(**SETTINGS, out=tmp_path / "run", track="tensorboard")
    assert capsys.readouterr().err.count("warning: --track tensorboard failed (OSError") == 1


def test_a_run_that_failed_before_its_first_checkpoint_leaves_nothing_for_trackers(tmp_path: Path) -> None:
    own_parts.STOP["step"] = 5
    with pytest.raises(own_parts.Stopped):
        alone(**SETTINGS, out=tmp_path / "run", track="tensorboard")
    assert not (tmp_path / "run").exists()
