"""The laws of Comm, on threads and on processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.wire_bytes import all_gather_bytes, all_reduce_bytes, broadcast_sends
from thinwire.errors import UsageError

World = Callable[..., list[Any]]
RANKS = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (1000,)]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def reduce_all(comm: Comm, op: str) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for shape in SHAPES:
        for dtype in DTYPES:
            tensor = values(comm.rank, shape, dtype)
            before = tensor.clone()
            result = getattr(comm, op)(tensor)
            assert torch.equal(tensor, before), "the input was changed"
            assert result.shape == tensor.shape
            assert result.dtype == tensor.dtype
            assert result.data_ptr() != tensor.data_ptr() or not tensor.numel()
            pairs.append((tensor, result))
    return pairs


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_reductions_are_right_and_the_same_on_every_rank(world: World, ranks: int, op: str) -> None:
    per_rank = world(reduce_all, ranks, op)
    for cases in zip(*per_rank, strict=True):
        stacked = torch.stack([tensor for tensor, _ in cases])
        expected = stacked.sum(0) if op == "sum" else getattr(stacked, f"a{op}")(0)
        for _, result in cases:
            assert torch.equal(result, expected.to(result.dtype))


def means(comm: Comm) -> list[Tensor]:
    matrix = torch.randn(6, 5, generator=torch.Generator().manual_seed(comm.rank))
    bf16 = matrix.bfloat16()
    return [matrix, comm.mean(matrix), comm.mean(matrix.t()), comm.mean(matrix[:, 1]), bf16, comm.mean(bf16)]


@pytest.mark.parametrize("ranks", RANKS)
def test_mean_is_the_mean_also_of_views(world: World, ranks: int) -> None:
    per_rank = world(means, ranks)
    expected = torch.stack([r[0] for r in per_rank]).double().mean(0)
    for results in per_rank:
        assert all(torch.equal(a, b) for a, b in zip(results[1:4], per_rank[0][1:4], strict=True))
        torch.testing.assert_close(results[1].double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[2].double(), expected.t(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[3].double(), expected[:, 1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[5].double(), expected, rtol=0.05, atol=0.02)


def large_halves(comm: Comm) -> list[Tensor]:
    """Numbers whose sum is more than float16 holds, small ones, and some between."""
    generator = torch.Generator().manual_seed(comm.rank)
    between = torch.randn(500, generator=generator).half()
    return [comm.mean(torch.full((3,), 30_000.0).half()), comm.mean(torch.full((3,), -65504.0).half()), between,
            comm.mean(between), comm.sum(between)]  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
def test_a_mean_in_float16_does_not_overflow_where_the_sum_would(world: World, ranks: int) -> None:
    """Plain DDP divides first. Where nothing overflows, it is the sum, divided: bit for bit."""
    for large, largest, _, mean, total in world(large_halves, ranks):
        assert torch.equal(large, torch.full((3,), 30_000.0).half())
        assert torch.equal(largest, torch.full((3,), -65504.0).half())
        assert torch.equal(mean, total / ranks)


def complex_numbers(comm: Comm) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    found = []
    for dtype in (torch.complex64, torch.complex128):
        for shape in [(), (0,), (5,), (3, 4)]:
            values = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(comm.rank))
            for tensor in (values, values.conj(), values.mT if len(shape) == 2 else values):
                before = comm.ledger.wire_bytes
                total, mean = comm.sum(tensor), comm.mean(tensor)
                assert total.shape == mean.shape == tensor.shape
                assert total.dtype == mean.dtype == dtype
                found.append((tensor.resolve_conj(), total, mean, comm.ledger.wire_bytes - before))
    for op in (comm.max, comm.min):
        with pytest.raises(UsageError, match="complex numbers have no order"):
            op(tensor)
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_complex_numbers_are_added_and_averaged_as_pairs_of_reals(world: World, ranks: int) -> None:
    per_rank = world(complex_numbers, ranks)
    for cases in zip(*per_rank, strict=True):
        truth = torch.stack([tensor for tensor, *_ in cases]).sum(0)
        for tensor, total, mean, sent in cases:
            assert torch.equal(total, cases[0][1])
            assert torch.equal(mean, cases[0][2])
            torch.testing.assert_close(total, truth)
            torch.testing.assert_close(mean, truth / ranks)
            assert sent == 2 * all_reduce_bytes(tensor.numel() * tensor.element_size(), ranks)


def overlapping_means(comm: Comm) -> tuple[Tensor, Tensor, bool, int]:
    tensor = torch.full((4,), float(comm.rank))
    first = comm.start_mean(tensor)
    tensor += 100
    second = comm.start_mean(tensor)
    late, early = second.wait(), first.wait()
    assert torch.equal(first.wait(), early), "a second wait gives the same"
    return early, late, first.done() and second.done(), comm.ledger.rows()[0]["calls"]


@pytest.mark.parametrize("ranks", RANKS)
def test_start_mean_is_of_the_moment_it_was_started(world: World, ranks: int) -> None:
    middle = (ranks - 1) / 2
    for early, late, done, calls in world(overlapping_means, ranks):
        assert early.tolist() == [middle] * 4
        assert late.tolist() == [middle + 100] * 4
        assert done
        assert calls == 2


def not_done_alone(comm: Comm) -> bool:
    """Rank 1 joins only after rank 0 has looked."""
    if comm.rank == 0:
        pending = comm.start_mean(torch.zeros(10))
        early = pending.done()
        comm.send(torch.zeros(1), to=1)
        pending.wait()
        return early
    comm.recv(torch.zeros(1), source=0)
    comm.mean(torch.zeros(10))
    return False


def test_done_tells_the_truth_and_never_blocks(world: World) -> None:
    assert world(not_done_alone, 2) == [False, False]


def moves(comm: Comm) -> dict[str, Any]:
    n, me = comm.size, comm.rank
    out: dict[str, Any] = {}
    for dtype in [torch.float32, torch.float8_e4m3fn, torch.int16, torch.bool, torch.bfloat16]:
        tensor = torch.full((2, 3), float(me % 2)).to(dtype)
        gathered = comm.all_gather(tensor)
        assert [g.dtype for g in gathered] == [dtype] * n
        assert [g.float().flatten()[0].item() for g in gathered] == [float(r % 2) for r in range(n)]
    assert [len(g) for g in comm.all_gather(torch.empty(0))] == [0] * n
    out["scalar"] = [g.item() for g in comm.all_gather(torch.tensor(me))]
    parts = [torch.full((1 + me + j,), 10 * me + j) for j in range(n)]
    like = [torch.empty(1 + j + me, dtype=torch.int64) for j in range(n)]
    out["all_to_all"] = [p.tolist() for p in comm.all_to_all(parts, like)]
    mixed = comm.all_to_all([torch.full((2,), me, dtype=torch.int8) for _ in range(n)])
    out["equal"] = [p.tolist() for p in mixed]
    out["empty"] = [p.numel() for p in comm.all_to_all([torch.empty(0) for _ in range(n)])]
    out["broadcast"] = [comm.broadcast(torch.full((3,), float(me)), root=r)[0].item() for r in range(n)]
    return out


@pytest.mark.parametrize("ranks", RANKS)
def test_movement_puts_everything_in_its_place(world: World, ranks: int) -> None:
    for me, out in enumerate(world(moves, ranks)):
        assert out["scalar"] == list(range(ranks))
        assert out["all_to_all"] == [[10 * j + me] * (1 + j + me) for j in range(ranks)]
        assert out["equal"] == [[j, j] for j in range(ranks)]
        assert out["empty"] == [0] * ranks
        assert out["broadcast"] == [float(r) for r in range(ranks)]


def large_moves(comm: Comm) -> bool:
    """Tensors that gloo's own all_gather does not move, and parts that wait for each other in all_to_all."""
    n, me = comm.size, comm.rank
    for count in (2**16 - 1, 2**16, 2**16 + 1, 300_001):
        gathered = comm.all_gather(torch.full((count,), me, dtype=torch.uint8))
        assert [g.unique().tolist() for g in gathered] == [[r] for r in range(n)]
        assert [g.numel() for g in gathered] == [count] * n

    def part(source: int, to: int) -> Tensor:
        """Of another size for each pair, and none at all for some."""
        return torch.full((50_000 * source + 90_000 * to * (source % 2),), 10 * source + to, dtype=torch.int32)

    received = comm.all_to_all([part(me, j) for j in range(n)], [part(j, me) for j in range(n)])
    return all(torch.equal(got, part(j, me)) for j, got in enumerate(received))


@pytest.mark.parametrize("ranks", RANKS)
def test_large_tensors_are_moved_to_their_places(world: World, ranks: int) -> None:
    assert world(large_moves, ranks) == [True] * ranks


def in_lanes(comm: Comm) -> tuple[list[float], int, int]:
    """In each lane, on a thread of its own, operations in another order than in the other lanes."""
    totals: list[float] = [0.0] * len(comm.lanes)
    before = comm.ledger.wire_bytes

    def run(number: int) -> None:
        lane = comm.lanes[number]
        for i in range(20):
            if (i + number) % 2:
                totals[number] += lane.sum(torch.full((1000,), float(i)))[0].item()
            else:
                totals[number] += torch.stack(lane.all_gather(torch.full((30_000,), float(i)))).sum(0)[0].item()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(comm.lanes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals, comm.ledger.wire_bytes - before, len(comm.lanes)


@pytest.mark.parametrize("ranks", [2, 4])
def test_lanes_do_not_mix_and_are_booked_together(world: World, ranks: int) -> None:
    for totals, wire_bytes, num_lanes in world(in_lanes, ranks):
        assert totals == [ranks * sum(range(20))] * num_lanes
        each = 10 * (all_reduce_bytes(4000, ranks) + all_gather_bytes(120_000, ranks))
        assert wire_bytes == num_lanes * each


def test_processes_have_two_lanes_and_subgroups_too(process_world: ProcessWorlds) -> None:
    assert process_world.run(num_lanes_of_groups, 4) == [[2, 2]] * 4


def num_lanes_of_groups(comm: Comm) -> list[int]:
    half = comm.split([[0, 1], [2, 3]], "half")
    assert [lane.sum(torch.ones(1)).item() for lane in half.lanes] == [2.0, 2.0]
    return [len(comm.lanes), len(half.lanes)]


def ring(comm: Comm) -> list[float]:
    """Everyone sends three numbered messages to the right; odd ranks receive first."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = []
    for number in range(3):
        message = torch.tensor([comm.rank * 10.0 + number])
        if comm.rank % 2 == 0:
            comm.send(message, to=right)
        got.append(comm.recv(torch.empty(1), source=left).item())
        if comm.rank % 2:
            comm.send(message, to=right)
    return got


@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_arrive_in_order(world: World, ranks: int) -> None:
    for me, got in enumerate(world(ring, ranks)):
        assert got == [(me - 1) % ranks * 10.0 + number for number in range(3)]


def many_under_way(comm: Comm) -> list[tuple[int, float]]:
    """Both send before either receives; sizes differ, and tensors change once they are on their way."""
    other, on_their_way = 1 - comm.rank, []
    for number in range(8):
        message = torch.full((1000 * (8 - number),), float(number))
        on_their_way.append(comm.isend(message, to=other))
        message.zero_()
    got = [comm.recv(torch.empty(1000 * (8 - number)), source=other) for number in range(8)]
    for pending in on_their_way:
        pending.wait()
    return [(len(message), message.mean().item()) for message in got]


def test_messages_under_way_arrive_in_order_and_as_they_were(world: World) -> None:
    assert world(many_under_way, 2) == [[(1000 * (8 - number), number) for number in range(8)]] * 2


def split_twice(comm: Comm) -> Any:
    inner = comm.split([[0, 1], [2, 3]], link="node")
    rail = comm.split([[0, 2], [1, 3]], link="wan")
    total = inner.sum(torch.tensor([float(comm.rank)]))
    across = rail.sum(torch.tensor([float(comm.rank)]))
    links = sorted((row["link"], row["ranks"]) for row in comm.ledger.rows())
    return total.item(), across.item(), inner.rank, inner.size, rail.link, links


def test_split_makes_groups_with_their_own_link(world: World) -> None:
    results = world(split_twice, 4)
    assert [r[0] for r in results] == [1, 1, 5, 5]
    assert [r[1] for r in results] == [2, 4, 2, 4]
    assert [r[2] for r in results] == [0, 1, 0, 1]
    assert all(r[3:] == (2, "wan", [("node", 2), ("wan", 2)]) for r in results)


def booked(comm: Comm) -> dict[str, tuple[int, int]]:
    n = comm.size
    comm.sum(torch.zeros(100))
    comm.mean(torch.zeros(50, dtype=torch.float64))
    comm.all_gather(torch.zeros(7, dtype=torch.int8))
    comm.broadcast(torch.zeros(10), root=n - 1)
    comm.all_to_all([torch.zeros(j + 1) for j in range(n)], [torch.zeros(comm.rank + 1)] * n)
    return {row["op"]: (row["payload_bytes"], row["wire_bytes"]) for row in comm.ledger.rows()}


@pytest.mark.parametrize("ranks", RANKS)
def test_booked_bytes_follow_the_formulas(world: World, ranks: int) -> None:
    parts = 4 * sum(range(1, ranks + 1))
    for rank, rows in enumerate(world(booked, ranks)):
        assert rows["all_reduce"] == (800, 2 * all_reduce_bytes(400, ranks))
        assert rows["all_gather"] == (7, all_gather_bytes(7, ranks))
        assert rows["broadcast"] == (40, sum(broadcast_sends(40, ranks, rank, ranks - 1, "gloo").values()))
        assert rows["all_to_all"] == (parts, parts - 4 * (rank + 1))


def exchange_json(comm: Comm) -> Any:
    return all_gather_json(comm, {"rank": comm.rank, "text": "é" * comm.rank, "none": None})


@pytest.mark.parametrize("ranks", RANKS)
def test_json_of_any_length_crosses(world: World, ranks: int) -> None:
    expected = [{"rank": r, "text": "é" * r, "none": None} for r in range(ranks)]
    assert world(exchange_json, ranks) == [expected] * ranks


def booked_messages(comm: Comm) -> list[tuple[str, int, int]]:
    if comm.rank == 0:
        comm.send(torch.zeros(5), to=1)
    else:
        comm.recv(torch.zeros(5), source=0)
    return [(row["op"], row["payload_bytes"], row["wire_bytes"]) for row in comm.ledger.rows()]


def test_a_message_is_booked_as_sent_once(world: World) -> None:
    assert world(booked_messages, 2) == [[("send", 20, 20)], [("recv", 20, 0)]]


def odd_sizes(comm: Comm) -> list[list[float]]:
    """Parts of one and three bytes in front of doubles, which must then be aligned again."""
    n = comm.size
    like = [torch.empty(1 + 2 * (j % 2), dtype=torch.int8) for j in range(n)]
    comm.all_to_all([torch.ones(1 + 2 * (comm.rank % 2), dtype=torch.int8) for _ in range(n)], like)
    parts = [torch.full((1 + j,), comm.rank + 0.5, dtype=torch.float64) for j in range(n)]
    if comm.rank == 0:
        parts[0] = torch.ones(3, dtype=torch.int8)
    wanted: list[Tensor] = [torch.empty(1 + comm.rank, dtype=torch.float64) for _ in range(n)]
    if comm.rank == 0:
        wanted[0] = torch.empty(3, dtype=torch.int8)
    return [part.tolist() for part in comm.all_to_all(parts, wanted)]


def test_parts_of_different_dtypes_arrive_aligned(world: World) -> None:
    assert world(odd_sizes, 3) == [
        [[1, 1, 1], [1.5], [2.5]],
        [[0.5, 0.5], [1.5, 1.5], [2.5, 2.5]],
        [[0.5] * 3, [1.5] * 3, [2.5] * 3],
    ]


def never_waited(comm: Comm) -> int:
    with comm.ledger.purpose("sync"):
        pending = comm.start_mean(torch.zeros(100))
    pending.wait()
    row = comm.ledger.rows()[0]
    assert row["purpose"] == "sync", "what counts is the purpose when it began"
    assert row["seconds"] > 0
    return int(row["wire_bytes"])


def test_a_mean_is_booked_when_it_begins(world: World) -> None:
    assert world(never_waited, 2) == [400, 400]


def int16_is_refused(comm: Comm) -> str:
    with pytest.raises(UsageError) as caught:
        comm.sum(torch.zeros(2, dtype=torch.int16))
    return str(caught.value)


def test_gloo_says_what_it_cannot_sum(process_world: Any) -> None:
    assert all("gloo cannot reduce torch.int16; possible:" in m for m in process_world.run(int16_is_refused, 2))


def refused(comm: Comm) -> list[str]:
    messages = []
    for call in (
        lambda: comm.mean(torch.zeros(3, dtype=torch.int32)),
        lambda: comm.all_to_all([torch.zeros(1)] * (comm.size + 1)),
        lambda: comm.split([[0]], link="node"),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_mistakes_are_refused_before_anything_is_sent(world: World) -> None:
    for messages in world(refused, 2):
        assert "try sum" in messages[0]
        assert "3 parts given for 2 ranks" in messages[1]
        assert "does not hold each of 2 ranks" in messages[2]
