"""Elastic runs that go on from checkpoints: whose state counts, what becomes of other ones, and the record of it."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.elastic.runs import Mortal, job, world
from tests.elastic.test_command import Ranks, wait_for
from tests.elastic.test_leaving import notes, waiting
from tests.elastic.test_rounds import check
from tests.programs import PYTHON
from tests.training import same, weights
from thinwire.comm.store import local_store
from thinwire.config import RunConfig
from thinwire.elastic.command import train_as_member
from thinwire.elastic.meeting import Standing
from thinwire.elastic.member import Member
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes, client
from thinwire.elastic.record import Record, Row
from thinwire.elastic.replay import replay, told_apart
from thinwire.elastic.shares import Position
from thinwire.elastic.train import Brought, _check_job, _Saved, identity
from thinwire.elastic.trainee import Trainee
from thinwire.errors import RunError, UsageError
from thinwire.run import records


@pytest.fixture
def place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def entering(one: Membership, standing: Standing, found: dict[int, Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.update({one.id: one.enter(standing, 1)}), daemon=True)
    thread.start()
    return thread


def test_the_furthest_of_those_that_made_the_last_round_begins_whoever_comes_first() -> None:
    with notes() as here:
        found: dict[int, Any] = {}
        ranks = [Membership(here.another(), {}, 60) for _ in range(2)]
        threads = [entering(ranks[0], Standing(38, 1, was=4, others=2), found)]
        time.sleep(0.5)
        assert not found, "it did not wait for the other, which may be further"
        threads.append(entering(ranks[1], Standing(40, 2, was=7, others=2), found))
        for thread in threads:
            thread.join(20)
        assert found[0] == found[1]
        assert found[0].round == 40
        assert found[0].newcomers == (ranks[0].id,)
        assert found[0].resumed == {str(ranks[1].id): 7}
        for one in ranks:
            one.close()


def test_a_rank_that_is_resumed_waits_for_others_no_longer_than_its_patience() -> None:
    with notes() as here:
        alone = Membership(here, {}, 1.0)
        begin = time.monotonic()
        assert alone.enter(Standing(38, 1, was=4, others=2), 1).members == (alone.id,)
        assert 0.9 < time.monotonic() - begin < 15
        alone.close()


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("program_server")
def test_a_run_that_was_resumed_in_the_store_of_before_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    """Its ranks have other ids than before: those are never used again in a store."""
    strategy = "diloco(every=4, reducer=error_feedback(maxnorm(bits=4)))"
    ranks = Ranks(tmp_path, "--strategy", strategy, "--epochs", "3", "--patience", "3s", "--test-every", "0")
    try:
        for name in "ab":
            ranks.start(name, "--min-ranks", "2")
        wait_for(lambda: min(ranks.rows("a"), ranks.rows("b")) >= 3)
        ranks.kill()
        for name in "ab":
            ranks.start(name, "--resume")
        ends = {name: ranks.ended(name) for name in "ab"}
    finally:
        ranks.kill()
    assert [code for code, _ in ends.values()] == [0, 0], ends
    records = [Record.read(tmp_path / name / "membership.jsonl").rows for name in "ab"]
    assert records[0] == records[1]
    assert [row.resumed for row in records[0] if row.resumed] in ([{"2": 0, "3": 1}], [{"2": 1, "3": 0}])
    again = subprocess.run(
        [*PYTHON, "-m", "thinwire", "replay", str(tmp_path / "a")], capture_output=True, text=True, timeout=100
    )
    assert again.returncode == 0, again.stderr


def row(number: int, began: list[int], **more: Any) -> Row:
    samples = {str(one): 4 for one in began}
    return Row(number, began, more.pop("members", began), more.pop("joined", []), more.pop("lost", {}), samples, 0, 0,
               0, 1.0, **more)  # fmt: skip


def test_ids_that_are_given_again_in_a_new_store_are_those_of_other_ranks() -> None:
    rows = [
        row(0, [0, 1]), row(1, [0, 1], members=[0], lost={"1": "silent"}),
        row(2, [2, 1], joined=[1], resumed={"2": 0}), row(3, [2, 1, 0], joined=[0], members=[1, 0], heirs={"0": 2}),
    ]  # fmt: skip
    apart = told_apart(rows)
    assert [one.began for one in apart] == [[0, 1], [0, 1], [0, 2], [0, 2, 3]]
    assert [one.members for one in apart] == [[0, 1], [0], [0, 2], [2, 3]]
    assert [one.joined for one in apart] == [[], [], [2], [3]]
    assert apart[1].lost == {"1": "silent"}
    assert apart[3].heirs == {"3": 0}
    assert apart[3].samples == {"0": 4, "2": 4, "3": 4}


def test_a_rank_that_was_given_up_while_it_was_the_last_goes_on_from_its_checkpoint(tmp_path: Path, place: str) -> None:
    """A newcomer found nobody alive that had the state, and ended. The rank had only been stopped."""
    gave_up: list[str] = []

    def after_round(row: Row, member: Member) -> None:
        if row.round == 1 and not gave_up:
            member.membership.heart.stop()
            came = Membership(member.membership.notes.another(), {}, 1.0)
            meeting = came.enter(Standing(0, 1), 1)
            assert meeting.ended
            gave_up.append("once")
            came.leave("all that had its state have left")
            time.sleep(5)  # the store must not end meanwhile

    work = job("local_sgd(every=1)")
    run = tw.train_elastic(work, place, out=tmp_path / "run", after_round=after_round)
    rows = run.record.rows
    assert gave_up
    assert [one.round for one in rows] == list(range(len(rows)))
    assert rows[-1].epoch == 1
    assert [one.resumed for one in rows if one.resumed] == [{"2": 0}]
    store = local_store(1)
    again = replay(rows, work, lambda: Notes(lambda: client("127.0.0.1", store.port), "the test"))
    assert same(again, weights(run.model))


def test_what_a_rank_saved_of_rounds_that_the_run_did_not_make_is_set_aside(tmp_path: Path, place: str) -> None:
    """It was away, and the others went on from an older checkpoint. Later it must not go on from its own."""
    work, folder = job("local_sgd(every=1)", epochs=1), tmp_path / "run"
    own = tw.train_elastic(work, place, out=folder).record
    trainee = Trainee(work)
    saved = _Saved(records.RunFolder(folder), identity(work, trainee), keep=2, resume=True)
    saved.set_aside(own, [*own.rows[:2], replace(own.rows[2], began=[0, 1])])
    brought = saved.load(trainee, Record(rows=own.rows))
    assert brought == Brought(Position(1, 0, 8, 1), 0, 1)
    assert len(list((folder / "checkpoints").glob("*/*.refused"))) == 2


def test_a_newcomer_that_brings_a_further_state_says_that_it_is_not_used() -> None:
    def come(at: str, one: Mortal) -> None:
        if at == "train" and one.at.round == 1 and len(run.members) == 1:
            (late,) = run.start(1, before=brings)
            late.say = lines.append
            late.on_state = lambda rows: kept.append([row.round for row in rows])
            waiting(run, 2)

    def brings(at: str, one: Mortal) -> None:
        if at == "gather" and not kept:
            one.at = Position(40)

    lines: list[str] = []
    kept: list[list[int]] = []
    with world(job("local_sgd(every=1)", epochs=1)) as run:
        run.start(1, before=come)
    assert not run.errors
    assert kept == [[0, 1]]
    assert (
        "rank 1 brought the state after 40 rounds, but the run had gone on after 2 without it; it takes that" in lines
    )


def test_a_folder_of_another_run_is_refused(tmp_path: Path, place: str) -> None:
    """Its record and its checkpoints would be mixed with those of the new run."""
    work = job("local_sgd(every=2)", epochs=1)
    tw.train_elastic(work, place, out=tmp_path / "run")
    before = (tmp_path / "run" / "membership.jsonl").read_text()
    with pytest.raises(UsageError, match="of another run; resume=True"):
        tw.train_elastic(work, place, out=tmp_path / "run")
    assert (tmp_path / "run" / "membership.jsonl").read_text() == before


def test_one_rank_at_a_time_uses_a_folder(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one with resume=True swept tensors that the first had just written, and rewrote its record."""
    work, folder, tried = job("local_sgd(every=1)", epochs=1), tmp_path / "run", list[str]()
    config = RunConfig(elastic=place, strategy="local_sgd", out=folder, resume=True)
    monkeypatch.setattr(records, "LOCK_SECONDS", 0.1)
    others: dict[str, Callable[[], object]] = {
        "to resume": lambda: tw.train_elastic(work, place, out=folder, resume=True),
        "anew": lambda: tw.train_elastic(work, place, out=folder),
        "as a command": lambda: train_as_member(config),
    }

    def after_round(row: Row, member: Member) -> None:
        if row.round == 1:
            (folder / "config.toml").touch()
            manifest = next((folder / "checkpoints").glob("*/rank-0.json"))
            text = manifest.read_text()
            manifest.unlink()  # it is written after the tensors
            for name, come in others.items():
                with pytest.raises(UsageError, match=r"another run writes to .*run; wait until it has ended"):
                    come()
                tried.append(name)
            assert manifest.with_suffix(".safetensors").exists()
            manifest.write_text(text)

    tw.train_elastic(work, place, out=folder, after_round=after_round)
    assert tried == [*others]
    after = records.RunFolder(folder)
    after.hold()
    after.release()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9, weight_decay=0.01)},
            "lr=0.5",
        ),
        ({"schedule": lambda done, total: 1 - done / total}, "schedule"),
    ],
)
def test_a_rank_with_another_optimizer_or_schedule_is_refused(change: dict[str, Any], message: str) -> None:
    work = job("local_sgd")
    with notes() as here:
        _check_job(here, identity(work, Trainee(work)))
        _check_job(here, identity(work, Trainee(work)))
        other = replace(work, **change)
        with pytest.raises(UsageError, match=message):
            _check_job(here, identity(other, Trainee(other)))


def test_a_rank_whose_disk_is_full_says_so_and_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    def fill(at: str, one: Mortal) -> None:
        if at == "train" and one.at.round == 1:
            one.record.path = full

    full = tmp_path / "membership.jsonl"
    full.symlink_to("/dev/full")
    with world(job("local_sgd(every=1)")) as run:
        run.start(1, min_ranks=2)
        run.start(1, min_ranks=2, before=fill, patience=1000)
    assert isinstance(run.errors[1], RunError)
    assert "No space left on device; free some space and --resume" in str(run.errors[1])
    rows = check(run).record.rows
    assert "cannot write" in rows[2].lost["1"]
