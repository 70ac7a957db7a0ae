"""Parameters brought together: private snapshots, an exchange beside the training, a merge that loses nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire as tw
from tests.training import seeded
from thinwire.comm.base import Comm
from thinwire.errors import RunError, UsageError
from thinwire.exchange import fragments
from thinwire.exchange.fragments import make_fragments
from thinwire.exchange.parameters import Outer, ParameterAverager
from thinwire.reducers.base import Named, Reduced, Reducer
from thinwire.reducers.mean import mean

World = Callable[..., list[Any]]


class Numbers(nn.Module):
    """Two parameters and a buffer, all of one number."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([value]))
        self.b = nn.Parameter(torch.tensor([value]))
        self.register_buffer("statistic", torch.tensor([value]))
        self.register_buffer("cache", torch.tensor([value]), persistent=False)
        self.register_buffer("count", torch.tensor([0]))


def meet(averaging: ParameterAverager) -> None:
    for number in range(len(averaging.fragments)):
        averaging.start(number, with_snapshot=False)
        averaging.merge()


@torch.no_grad()
def put(model: nn.Module, value: float) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(value)


def values(model: nn.Module) -> list[float]:
    return [tensor.item() for tensor in (*model.parameters(), *model.buffers())]


def later(comm: Comm) -> list[float]:
    """Send 0 and 8; by the time that 4 comes back, this rank has gone on to 1 + rank."""
    model = Numbers()
    averaging = ParameterAverager(model, mean(), comm)
    put(model, 8.0 * comm.rank)
    averaging.start()
    put(model, 8.0 * comm.rank + 1 + comm.rank)
    averaging.merge()
    return values(model)


def test_what_was_learned_meanwhile_is_kept_whole(world: World) -> None:
    """The mean of what was sent, 4, and on top what each has learned since: 1, and 2."""
    assert world(later, 2) == [[5.0, 5.0, 5.0, 1.0, 1.0], [6.0, 6.0, 6.0, 10.0, 10.0]], "caches and counters stay"


def outer_steps(comm: Comm) -> list[list[float]]:
    model = Numbers()
    averaging = ParameterAverager(model, mean(), comm, outer=Outer(lr=0.5, momentum=0.9))
    found = []
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*model.parameters(), model.get_buffer("statistic")):
                tensor.sub_(1.0 + comm.rank)  # 1.5 on average
        meet(averaging)
        found.append(values(model)[:3])
    return found


def test_the_outer_step_is_sgd_with_nesterov_momentum_and_leaves_buffers_alone(world: World) -> None:
    reference = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([reference], 0.5, 0.9, nesterov=True)
    for steps in zip(*world(outer_steps, 2), strict=True):
        reference.grad = torch.tensor([1.5])
        optimizer.step()
        assert steps[0] == steps[1]
        assert steps[0][:2] == pytest.approx([reference.item()] * 2)
    assert steps[0][2] == pytest.approx(-4.5)


def weighted(comm: Comm) -> float:
    model = Numbers()
    averaging = ParameterAverager(model, mean(), comm, weight=[0.5, 0.5, 2.0][comm.rank])
    put(model, float(comm.rank))
    meet(averaging)
    assert model.a.item() == pytest.approx(model.get_buffer("statistic").item())
    return model.a.item()


def test_ranks_may_count_more_than_others(world: World) -> None:
    assert world(weighted, 3) == [pytest.approx((0 + 0.5 + 4) / 3)] * 3


def on_nodes(comm: Comm, average_node: bool) -> list[float]:
    """Two nodes of two; rank 1 of each node leads it. Parameters are 0, 1, 2, 3, statistics too."""
    node = comm.split([[0, 1], [2, 3]], "node")
    rails = comm.split([[0, 2], [1, 3]], "between")
    model = Numbers()
    averaging = ParameterAverager(model, mean(), rails, node=node)
    put(model, float(comm.rank))
    averaging.start(leader=1, average_node=average_node)
    averaging.merge()
    return values(model)[:3]


def test_the_leader_of_a_node_sends_its_own_parameters_or_the_mean_of_the_node(world: World) -> None:
    """Statistics are always those of all."""
    assert world(on_nodes, 4, False) == [[2.0, 2.0, 1.5]] * 4
    assert world(on_nodes, 4, True) == [[1.5, 1.5, 1.5]] * 4


class Mixed(nn.Module):
    """A frozen parameter, one in double precision, an infinite mask, a statistic that is made anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.tensor([1.0]), requires_grad=False)
        self.exact = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("statistic", torch.tensor([0.0]))


def mixed(comm: Comm) -> tuple[list[float], float, list[float], float]:
    model = Mixed()
    averaging = ParameterAverager(model, mean(), comm)
    with torch.no_grad():
        model.frozen.fill_(comm.rank)
        model.exact.data = torch.tensor([1 + 2e-12 * comm.rank], dtype=torch.float64)  # another tensor
    model.statistic = torch.tensor([float(comm.rank)])
    meet(averaging)
    return model.frozen.tolist(), model.exact.item(), model.get_buffer("mask").tolist(), model.statistic.item()


def test_what_is_frozen_stays_doubles_stay_exact_masks_stay_infinite_and_new_tensors_are_found(world: World) -> None:
    for rank, (frozen, double, mask, statistic) in enumerate(world(mixed, 2)):
        assert frozen == [rank]
        assert double == pytest.approx(1 + 1e-12, abs=1e-15)
        assert mask == [0.0, -torch.inf]
        assert statistic == 0.5


def test_complex_parameters_are_averaged_as_pairs_of_reals() -> None:
    def run(comm: Comm) -> Tensor:
        turned = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 + 2j * comm.rank)
        model = nn.ParameterDict({"z": nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64).t())})
        averaging = ParameterAverager(model, mean(), comm)
        model["z"].data = turned  # another tensor
        averaging.start()
        averaging.merge()
        return model["z"].detach()

    for found in tw.simulate(run, ranks=3):
        assert torch.equal(found, torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 + 2j))


def after_the_end(with_snapshot: bool) -> None:
    model = Numbers()
    with tw.join() as comm:
        averaging = ParameterAverager(model, mean(), comm)
    averaging.start(with_snapshot=with_snapshot)


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_a_world_that_was_closed_says_so(with_snapshot: bool) -> None:
    with pytest.raises(RunError, match="the world was closed; train inside of"):
        after_the_end(with_snapshot)


def of_other_options(comm: Comm) -> None:
    saved = ParameterAverager(Numbers(), mean(), comm, outer=Outer(0.7, 0.9)).state_dict()
    with pytest.raises(RunError, match="of another model, or of other outer options"):
        ParameterAverager(Numbers(), mean(), comm).load_state_dict(saved)


def test_a_state_of_other_options_is_refused(world: World) -> None:
    world(of_other_options, 1)


def in_background(comm: Comm) -> tuple[bool, float]:
    """An exchange that waits until the rank has gone on: were it part of `start`, nobody would ever get there."""
    gone_on = threading.Event()
    in_time = []

    def reduce(tensors: Named, state: dict[str, Tensor], comm: Comm) -> Reduced:
        in_time.append(gone_on.wait(20))
        return mean().reduce(tensors, state, comm)

    model = Numbers()
    averaging = ParameterAverager(model, Reducer(lambda tensors: {}, reduce), comm)
    put(model, 1.0 + comm.rank)
    averaging.start()
    put(model, 100.0)
    gone_on.set()
    averaging.merge()
    return in_time[0], model.a.item()


def test_the_exchange_runs_in_the_background_on_a_private_copy(process_world: Any) -> None:
    assert process_world.run(in_background, 2) == [(True, 1.5 + 99), (True, 1.5 + 98)]


def fails(comm: Comm) -> str:
    def reduce(tensors: Named, state: dict[str, Tensor], comm: Comm) -> Reduced:
        raise ZeroDivisionError("in the middle")

    averaging = ParameterAverager(Numbers(), Reducer(lambda tensors: {}, reduce), comm)
    averaging.start()
    with pytest.raises(ZeroDivisionError) as caught:
        averaging.merge()
    return str(caught.value)


def test_an_error_of_the_exchange_comes_out_where_its_result_would(world: World) -> None:
    assert world(fails, 2) == ["in the middle"] * 2


def saved_in_flight(comm: Comm) -> list[list[float]]:
    """A state saved while an exchange is under way, and the run that goes on from it, and the one that went on."""
    model = Numbers()
    averaging = ParameterAverager(model, mean(), comm, fragments=2, outer=Outer(0.7, 0.9))
    put(model, 1.0 + comm.rank)
    meet(averaging)
    averaging.start(1)
    state = copy.deepcopy(averaging.state_dict())
    other = copy.deepcopy(model)
    resumed = ParameterAverager(other, mean(), comm, fragments=2, outer=Outer(0.7, 0.9))
    resumed.load_state_dict(state)
    for one in (averaging, resumed):
        one.merge()
        meet(one)
    return [values(model), values(other)]


def test_a_state_saved_in_flight_goes_on_exactly(world: World) -> None:
    for straight, resumed in world(saved_in_flight, 2):
        assert straight == resumed


# ---- buckets and lanes

NETWORK = seeded(0, lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)))
PATCHING = threading.Lock()  # ranks may be threads


def in_buckets(comm: Comm, elements: int, nodes: bool, seed: int = 0) -> tuple[list[Tensor], int]:
    """Two streamed rounds, in fragments that overlap, and a blocking one, over lanes; and the number of buckets."""
    model, generator = copy.deepcopy(NETWORK), torch.Generator().manual_seed(seed + comm.rank // (2 if nodes else 1))
    groups = [[0, 2], [1, 3]] if nodes else [list(range(comm.size))]
    between = comm.split(groups, "between")
    node = comm.split([[0, 1], [2, 3]], "node") if nodes else None
    with PATCHING, mock.patch.object(fragments, "BUCKET_ELEMENTS", elements):
        averaging = ParameterAverager(model, mean(), between, 2, Outer(0.7, 0.9), node)

    @torch.no_grad()
    def train() -> None:
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.add_(torch.randn(tensor.shape, generator=generator))

    for _ in range(2):
        train()
        averaging.start(0, leader=1 if nodes else 0)
        train()
        averaging.start(1)
        averaging.merge()
        train()
        averaging.merge()
    for number in range(2):
        averaging.start(number, with_snapshot=False)
    averaging.merge()
    averaging.merge()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())], len(averaging.buckets)


@pytest.mark.parametrize("nodes", [False, True])
def test_buckets_and_lanes_do_not_change_the_result(world: World, nodes: bool) -> None:
    """Of two numbers, the sum does not depend on where in a message they are."""
    ranks = 4 if nodes else 2
    expected = world(in_buckets, ranks, 10**6, nodes)
    found = world(in_buckets, ranks, 20, nodes)
    assert [count for _, count in expected] == [2] * ranks
    assert [count for _, count in found] == [5] * ranks
    for (tensors, _), (others, _) in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(tensors, found[0][0], strict=True)), "ranks are equal"


def test_a_fragment_has_few_buckets_and_a_small_one_has_one() -> None:
    big = nn.ParameterDict({f"p{i:03}": torch.empty(2**16) for i in range(256)})
    assert [len(fragment.buckets) for fragment in make_fragments(big, 1)] == [8]
    assert [len(fragment.buckets) for fragment in make_fragments(big, 4)] == [2] * 4
    assert [len(fragment.buckets) for fragment in make_fragments(NETWORK, 2)] == [1, 1]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_fragments_hold_every_parameter_once_in_order_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    model = nn.ParameterDict({f"p{i}": torch.empty(size) for i, size in enumerate(sizes)})
    parameters = dict(model.named_parameters())
    number = data.draw(st.integers(1, len(sizes)))
    fragments = [[n for b in fragment.buckets for n in b.names] for fragment in make_fragments(model, number)]
    assert [name for fragment in fragments for name in fragment] == list(parameters)
    assert len(fragments) == number
    assert all(fragments)
    largest = max(sum(parameters[name].numel() for name in fragment) for fragment in fragments)
    assert number > len(sizes) // 3 or largest <= sum(sizes) / number + 2 * max(sizes)


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="fragments=3, but the model has 2 parameter tensors"):
        make_fragments(nn.ParameterDict({"a": torch.zeros(1), "b": torch.zeros(1)}), 3)
