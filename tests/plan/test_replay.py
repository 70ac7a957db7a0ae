"""Replays against closed formulas: rings, shared links, overlap, messages, machines that share cores, large worlds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.comm.recording import RecordingComm, record
from thinwire.comm.trace import Trace
from thinwire.comm.wire_bytes import all_reduce_bytes
from thinwire.comm.world import place
from thinwire.netlab.link import Link
from thinwire.plan.replay import Result, replay
from thinwire.plan.wire import Frames, Wire, hops, messages

FREE = Frames(header_bytes=0)  # no headers, no acknowledgements


def played(function: Any, ranks: int, wire: Wire, nodes: int | None = None, of: list[int] | None = None) -> Result:
    placed = place(ranks, nodes or ranks)
    traces = {r: one[0] for r, one in record(function, ranks=ranks, nodes=placed, of=of).items()}
    return replay(traces, [0] * ranks if of else list(range(ranks)), placed, wire)


def seconds(function: Any, ranks: int, wire: Wire, **options: Any) -> float:
    return played(function, ranks, wire, **options).seconds("step")[-1]


def compute(trace: Trace, duration: float) -> None:
    """Let a trace say that the thread that runs now has computed."""
    trace.add("mark")
    trace._into[-1] = trace._into[-1]._replace(seconds=duration)


def mark(comm: RecordingComm) -> None:
    comm.trace.add("mark", op="step")


def sum_of(count: int) -> Any:
    def run(comm: RecordingComm) -> None:
        comm.sum(torch.zeros(count, dtype=torch.uint8))
        mark(comm)

    return run


@pytest.mark.parametrize("ranks", [2, 3, 8, 1024])
def test_a_ring_takes_its_bytes_over_the_rate_and_its_hops(ranks: int) -> None:
    wire = Wire(Link(100.0, 5.0), FREE, hop_seconds=0.0)
    size = 8_000_000
    overhead = messages("all_reduce", size, ranks, 1) * 144  # gloo's preambles
    expected = 8e-8 * (all_reduce_bytes(size, ranks) + overhead) + 5e-3 * hops("all_reduce", size, ranks)
    assert seconds(sum_of(size), ranks, wire, of=[0] if ranks > 8 else None) == pytest.approx(expected, rel=1e-6)


def test_headers_make_it_longer() -> None:
    lean, fat = (seconds(sum_of(10**7), 2, Wire(Link(100.0), frames)) for frames in (FREE, Frames(mtu=1500)))
    assert fat / lean == pytest.approx(1 + Frames().overhead, rel=0.01)


def test_ranks_of_a_node_share_its_link_and_a_ring_crosses_it_once() -> None:
    wire = Wire(Link(100.0), FREE, loopback_mbit=1e6, hop_seconds=0.0)
    ring = seconds(sum_of(10**7), 4, wire, nodes=2)
    assert ring == pytest.approx(8e-8 * all_reduce_bytes(10**7, 4), rel=0.01)

    def everyone_to_everyone(comm: RecordingComm) -> None:
        comm.all_to_all([torch.zeros(10**6, dtype=torch.uint8)] * comm.size)
        mark(comm)

    both_ranks_of_a_node = 2 * 2 * 10**6 * 8e-8
    assert seconds(everyone_to_everyone, 4, wire, nodes=2) == pytest.approx(both_ranks_of_a_node, rel=0.01)


def test_two_lanes_share_the_link_and_computing_goes_on_meanwhile() -> None:
    wire = Wire(Link(80.0), FREE, hop_seconds=0.0)
    device = torch.device("cpu")

    def overlapped(comm: RecordingComm) -> None:
        data = torch.zeros(10**6, dtype=torch.uint8)
        tasks = [lane.in_background(lambda lane=lane: lane.sum(data), device) for lane in comm.lanes]
        compute(comm.trace, 0.15)
        for task in tasks:
            task.wait()
        mark(comm)

    result = played(overlapped, 2, wire)
    assert result.seconds("step")[0] == pytest.approx(0.2, rel=0.01)  # 2 MB at 10 MB/s, and 0.15 s of it hidden
    assert result.waited("step")[0] == pytest.approx(0.05, rel=0.05)


def test_a_message_waits_for_both_ends() -> None:
    wire = Wire(Link(80.0), FREE, hop_seconds=0.0)

    def pipeline(comm: RecordingComm) -> None:
        data = torch.zeros(10**6, dtype=torch.uint8)
        if comm.rank == 0:
            compute(comm.trace, 1.0)
            comm.send(data, 1)
        else:
            comm.recv(data, 0)
            compute(comm.trace, 0.5)
        mark(comm)

    result = played(pipeline, 2, wire)
    assert [marks[0][1] for marks in result.marks.values()] == pytest.approx([1.1, 1.6], rel=0.01)


def test_the_slowest_rank_holds_up_the_others() -> None:
    def uneven(comm: RecordingComm) -> None:
        compute(comm.trace, 0.1 * (1 + comm.rank))
        comm.sum(torch.zeros(4))
        mark(comm)

    result = played(uneven, 3, Wire(Link(1000.0), FREE, hop_seconds=0.0))
    assert result.seconds("step")[0] == pytest.approx(0.3, abs=1e-3)
    assert result.waited("step")[0] == pytest.approx(0.1, abs=1e-3)  # 0.2, 0.1 and 0


@pytest.mark.parametrize(("is_one_machine", "expected"), [(True, 2.0), (False, 1.0)])
def test_hosts_on_one_machine_share_its_cores(is_one_machine: bool, expected: float) -> None:
    wire = Wire(Link(1000.0), FREE, cores=2, is_one_machine=is_one_machine)

    def busy(comm: RecordingComm) -> None:
        compute(comm.trace, 1.0)
        mark(comm)

    assert seconds(busy, 4, wire) == pytest.approx(expected)


def test_one_recorded_rank_stands_for_all() -> None:
    def train(comm: RecordingComm) -> None:
        compute(comm.trace, 0.01)
        comm.sum(torch.zeros(10**5))
        comm.all_gather(torch.zeros(1000))
        comm.all_to_all([torch.zeros(100)] * comm.size)
        mark(comm)

    wire = Wire(Link(100.0, 1.0))
    assert seconds(train, 6, wire, nodes=3, of=[0]) == pytest.approx(seconds(train, 6, wire, nodes=3), rel=0.02)
