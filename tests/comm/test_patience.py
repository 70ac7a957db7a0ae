"""How long a rank waits for another: every further group is as patient as the first one."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.comm.test_store import free_port
from tests.worlds import ProcessWorlds, no_grace
from thinwire.comm import store
from thinwire.comm.patience import DEFAULT_SECONDS, default_patience
from thinwire.comm.process import ProcessComm
from thinwire.comm.user_groups import comm_like
from thinwire.config import MAY_CHANGE, CompareConfig, RunConfig
from thinwire.errors import PeerLost, RunError
from thinwire.run.startup import suit_patience
from thinwire.run.worker import run_rank


def seconds(groups: Sequence[dist.ProcessGroup]) -> list[float]:
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def group_of(timeout: float) -> dist.ProcessGroup:
    made = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    assert isinstance(made, dist.ProcessGroup)
    return made


def test_join_hands_its_patience_to_all_groups() -> None:
    with tw.join(patience=9) as comm:
        part = comm.split([[0]], "part")
        assert seconds([comm.group, comm.side_group, part.group, part.side_group]) == [9] * 4


def test_further_groups_have_the_timeout_of_one_that_exists() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=7))
    try:
        with tw.join(patience=9) as comm:
            assert seconds([comm.group, comm.side_group]) == [7, 7]
    finally:
        dist.destroy_process_group()


def split_and_attached(comm: ProcessComm) -> list[float]:
    half = comm.split([[0], [1]], "half")
    ddp = DistributedDataParallel(nn.Linear(3, 2), process_group=group_of(7))
    attached = tw.attach(ddp, "mean")
    own = attached._exchange.comm
    found = seconds([comm.side_group, half.group, half.side_group, own.group, own.side_group])
    attached.close()
    return found


def test_processes_pass_timeouts_on(process_world: ProcessWorlds) -> None:
    assert process_world.run(split_and_attached, 2) == [[60, 60, 60, 7, 7]] * 2


def one_never_answers(comm: ProcessComm) -> str:
    own = comm_like(group_of(4), torch.device("cpu"))
    message = ""
    try:
        if comm.rank == 0:
            with no_grace():
                own.sum(torch.ones(3))
    except PeerLost as error:
        message = str(error)
    finally:
        comm.barrier()  # the other rank was here all the time
        own.close()
    return message


def test_a_rank_that_never_answers_is_lost_after_that_time(process_world: ProcessWorlds) -> None:
    first, second = process_world.run(one_never_answers, 2)
    assert first.startswith("rank 1 (busy) has not reached all_reduce of training, for 4 s; patience is over")
    assert second == ""


@pytest.mark.parametrize(
    "patience", [0, -1, float("nan"), float("inf"), 1e300, "5", "", "5m 2h", "-3s", "nans", "0s", "999d"]
)
def test_a_patience_that_is_none_is_refused(patience: float | str) -> None:
    with pytest.raises(tw.UsageError, match=r"patience.*30m|patience.*1h30m"), tw.join(patience=patience):
        pass


BYTES, RANKS, MBIT = st.integers(0, 10**13), st.integers(1, 1000), st.floats(0.01, 1e5)


@given(BYTES, RANKS, MBIT, st.floats(1, 100))
def test_the_default_suffices_for_the_largest_message_and_grows_with_what_the_link_needs(
    num_bytes: int, ranks: int, mbit: float, more: float
) -> None:
    found = default_patience(num_bytes, ranks, mbit)
    year = 365 * 86_400
    assert min(year, DEFAULT_SECONDS + ranks * num_bytes * 8e-6 / mbit) <= found <= year
    assert found <= default_patience(round(num_bytes * more), ranks, mbit)
    assert found <= default_patience(num_bytes, ranks, mbit / more)
    assert default_patience(num_bytes, ranks, None) == DEFAULT_SECONDS


def more_patient(comm: ProcessComm) -> list[list[float]]:
    own = comm_like(group_of(9), torch.device("cpu"))
    own.be_patient(70)
    half = own.split([[0], [1]], "half")
    own.be_patient(65)
    found = [seconds([one.group, one.side_group]) for one in (own, half)]
    own.close()
    return found


def test_a_world_may_become_more_patient(process_world: ProcessWorlds) -> None:
    assert process_world.run(more_patient, 2) == [[[70, 70], [70, 70]]] * 2


def test_a_run_is_as_patient_as_its_model_and_its_link_need() -> None:
    model = nn.BatchNorm1d(100)  # 4 · 100 numbers and a count: 1608 bytes
    for config, rate, expected in (
        (RunConfig(), None, 1800), (RunConfig(), 1e-6, 1800 + 4 * 1608 * 8), (RunConfig(patience="5m"), 1e-6, 300),
        (RunConfig(strategy="alone"), 1e-6, 604_800),
    ):  # fmt: skip
        with tw.join(patience=config.patience) as comm:
            suit_patience(config, comm, model, rate)
            assert seconds([comm.group, comm.side_group]) == [expected] * 2


def test_machines_that_train_alone_are_not_waited_for_any_longer_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "JOIN_SECONDS", 0.5)
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**world, "MASTER_PORT": free_port("127.0.0.1")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"within 0\.5 s: rank 1 did not come; start them all"):
        run_rank(RunConfig(strategy="alone", device="cpu"))


def test_the_runs_of_a_comparison_have_its_patience() -> None:
    assert CompareConfig(patience="5m").run("daso", 1, Path("out"), resume=False).patience == "5m"
    assert "patience" in MAY_CHANGE
    with pytest.raises(ValueError, match=r"'5' is no duration: give a number with a unit, as 90s, 5m, 2h or 1h30m"):
        RunConfig(patience="5")
