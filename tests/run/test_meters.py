"""What a rank measures of itself survives a stop, and is added up over ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.comm.base import Comm
from thinwire.comm.threads import simulate
from thinwire.config import RunConfig
from thinwire.run import meters
from thinwire.run.meters import LinuxByteCount, Meters
from thinwire.run.network import LinkReport
from thinwire.run.position import Position
from thinwire.run.summary import summarise
from thinwire.tasks.metrics import METRICS

CPU = torch.device("cpu")


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    count = {"inside": 100, "between": 1000}
    monkeypatch.setattr(meters, "sent_bytes", lambda: dict(count))
    return count


def test_the_kernel_is_asked_by_the_first_rank_of_each_node_alone(counter: dict[str, int]) -> None:
    asked = simulate(lambda comm: LinuxByteCount(comm, on_hosts=True).now(), ranks=5, nodes=2)
    assert [count is not None for count in asked] == [True, False, False, True, False]
    assert simulate(lambda comm: LinuxByteCount(comm, on_hosts=False).now(), ranks=2) == [None, None]


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("late", [0, 1])
def test_the_kernel_is_asked_before_anybody_sends_and_after_all_has_arrived(
    counter: dict[str, int], late: int, resumes: bool
) -> None:
    def run(comm: Comm) -> list[dict[str, Any]]:
        meters = Meters(comm, CPU, LinkReport(on_hosts=True)) if resumes else None
        time.sleep(0.1 * (comm.rank == late))
        if meters is None:
            meters = Meters(comm, CPU, LinkReport(on_hosts=True))
        else:
            meters.load_state_dict(meters.state_dict())
        time.sleep(0.1 * (comm.rank == late))
        counter["between"] += 50
        return meters.gather(1.0)

    everyone = simulate(run, ranks=2, nodes=2)
    assert [[one["kernel"]["between"] for one in each] for each in everyone] == [[100, 100], [100, 100]]


def test_kernel_counts_and_waiting_go_on_after_a_stop(counter: dict[str, int]) -> None:
    def run(comm: Comm) -> Any:
        link = LinkReport(True, "shaped", 100.0, 0.0)
        first = Meters(comm, CPU, link)
        counter["between"] += 50
        first.timeline.waiting_seconds = 2.5
        state = first.state_dict()
        counter["between"] = 7  # another host, which has just begun
        second = Meters(comm, CPU, link)
        second.timeline.waiting_seconds = 0.0
        second.load_state_dict(state)
        counter["between"] += 30
        counter["inside"] += 4
        return second.linux_bytes.now(), second.timeline.waiting_seconds, second.link.state

    assert simulate(run, ranks=1) == [({"inside": 4, "between": 80}, 2.5, "shaped")]


def test_what_was_not_counted_makes_no_count(counter: dict[str, int]) -> None:
    def run(comm: Comm) -> Any:
        state = Meters(comm, CPU, LinkReport(state="not shaped")).state_dict()
        later = Meters(comm, CPU, LinkReport(True, "shaped", 100.0, 0.0))
        later.load_state_dict(state)
        return later.linux_bytes.now(), later.link.state

    assert simulate(run, ranks=1) == [(None, "not shaped")]


def test_a_summary_adds_up_what_ranks_have() -> None:
    def row(wire: int, between: int, purpose: str = "train") -> dict[str, Any]:
        return {"purpose": purpose, "wire_bytes": wire, "between_bytes": between}

    everyone = [
        {"ledger": [row(10, 4), row(5, 0, "eval")], "kernel": {"inside": 12, "between": 5}, "waiting_seconds": 1.0,
         "train_seconds": 4.0, "peak_memory_bytes": 300},
        {"ledger": [row(25, 25)], "kernel": None, "waiting_seconds": 3.0,
         "train_seconds": 4.0, "peak_memory_bytes": 200},
    ]  # fmt: skip
    at = Position(epoch=3, step=6, samples=400, value=90.0, best=91.0, train_seconds=4.0)
    with tw.join() as comm:
        model = torch.nn.Linear(1, 2)
        strategy = tw.prepare("alone", model=model, comm=comm, loss=torch.nn.functional.mse_loss,
                              optimizer=lambda p: torch.optim.SGD(p, 0.1))  # fmt: skip
        summary = summarise(
            RunConfig(link="10mbit", ranks=2), METRICS["accuracy"], at, 9.0, everyone,
            link=LinkReport(True, "off", 8.0, 0.1), nodes=2, parameters=3, model=model, artifacts=[],
            strategy=strategy, device=CPU,
        ).model_dump()  # fmt: skip
    expected = {
        "wire_bytes_per_rank": 20, "wire_bytes_by_link": {"inside": 11, "between": 29}, "kernel_bytes_per_rank": 8,
        "kernel_bytes_by_link": {"inside": 12, "between": 5}, "waiting_share": 0.5, "peak_memory_bytes": 300,
        "samples_per_second": 100.0, "link_state": "off", "link_measured": {"rate_mbit": 8.0, "latency_ms": 0.1},
        "epochs": 3, "nodes": 2, "samples": 400,
        "wire_bytes_by_purpose": {"train": {"inside": 6, "between": 29}, "eval": {"inside": 5, "between": 0}},
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == expected


def test_alone_nobody_waits() -> None:
    def train(comm: Comm) -> float:
        trainer = tw.prepare(
            "data_parallel", model=torch.nn.Linear(2000, 2000), comm=comm, loss=torch.nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
        )  # fmt: skip
        with comm.ledger.timeline.step(0):
            trainer.step((torch.ones(8, 2000), torch.ones(8, 2000)))
        return comm.ledger.timeline.waiting_seconds

    assert simulate(train, ranks=1) == [0.0]
    with tw.join() as comm:
        assert train(comm) == 0.0
