"""DASO: the traces, merge values, traffic and laws of the paper, on threads and on processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.training import PLAIN, batches, epochs, same, sgd, steps, trainer, weights
from tests.worlds import World, on_threads
from thinwire.comm.base import Comm
from thinwire.comm.wire_bytes import all_reduce_bytes
from thinwire.errors import UsageError
from thinwire.strategies.daso import DASO
from thinwire.strategies.daso_schedule import Cycle, Plateau

CYCLING = "daso(ranks_per_node={}, warmup_epochs=0, cooldown_epochs=0)"


def daso(comm: Comm, spec: str, num_epochs: int = 1) -> DASO:
    strategy = trainer(comm, spec, epochs=num_epochs)
    assert isinstance(strategy, DASO)
    return strategy


# ---- what happens when


def trace(comm: Comm, cycle: Cycle, num_batches: int) -> list[str]:
    """What one rank sees of an epoch, batch by batch."""
    strategy = daso(comm, CYCLING.format(4))
    strategy.cycle, strategy.node_ranks_differ = cycle, cycle.local_every > 1
    events: list[str] = []
    leaders: list[int] = []
    start, merge, backward = strategy.averaging.start, strategy.averaging.merge, strategy.learner.backward
    ended = False

    def b() -> str:
        return f"b{strategy.batch - ended}"

    def started(number: int = 0, leader: int = 0, average_node: bool = False, with_snapshot: bool = True) -> None:
        events.append(f"{b()} {'blocking' if ended else 'send'} r{leader}")
        leaders.append(leader)
        assert with_snapshot == (not ended)
        start(number, leader, average_node, with_snapshot)

    def merged(rule: Any = None) -> None:
        if rule is not None:
            events.append(f"{b()} merge r{leaders[-1]} (S={strategy.batches_in_flight})")
        merge(rule)

    def computed(batch: Any, exchange: Any, exchanging: bool = True) -> Tensor:
        if not exchanging:
            events.append(f"{b()} without local sync")
        return backward(batch, exchange, exchanging)

    strategy.averaging.start, strategy.averaging.merge = started, merged  # type: ignore[method-assign]
    strategy.learner.backward = computed  # type: ignore[method-assign]
    steps(strategy, batches(num_batches, 16))
    ended = True
    strategy.end_epoch()
    return events


@pytest.mark.parametrize(
    ("cycle", "last", "expected"),
    [
        (
            Cycle(4, 1, 1),
            11,
            "b0 send r0, b1 merge r0 (S=1), b4 send r1, b5 merge r1 (S=1), b8 send r2, b9 merge r2 (S=1), "
            "b11 blocking r3",
        ),
        (
            Cycle(8, 2, 2),
            17,
            "b0 send r0, b2 merge r0 (S=2), b3 without local sync, b5 without local sync, b7 without local sync, "
            "b8 send r1, b10 merge r1 (S=2), b11 without local sync, b13 without local sync, b15 without local sync, "
            "b16 send r2, b17 merge r2 (S=1), b17 blocking r3",
        ),
        (Cycle(4, 1, 1), 4, "b0 send r0, b1 merge r0 (S=1), b4 send r1, b4 merge r1 (S=0), b4 blocking r2"),
        (
            Cycle(1, 1, 1),
            2,
            "b0 send r0, b1 merge r0 (S=1), b1 send r1, b2 merge r1 (S=1), b2 send r2, b2 merge r2 (S=0), "
            "b2 blocking r3",
        ),
    ],
)
def test_an_epoch_goes_as_the_paper_says(cycle: Cycle, last: int, expected: str) -> None:
    for events in tw.simulate(lambda comm: trace(comm, cycle, last + 1), ranks=8, nodes=2):
        assert ", ".join(events) == expected


def blocking_rails(comm: Comm) -> list[int]:
    strategy = daso(comm, "daso(ranks_per_node=2, warmup_epochs=1, cooldown_epochs=0)")
    return [strategy.rail for batch in batches(4, 16) if steps(strategy, [batch])]


def test_rails_take_turns_while_nodes_wait_for_each_other_too() -> None:
    assert tw.simulate(blocking_rails, ranks=4) == [[1, 0, 1, 0]] * 4, "the next one's turn"


def test_the_cycle_after_a_plateau() -> None:
    cycle, found = Cycle(), []
    for _ in range(6):
        cycle = cycle.after_plateau(longest=8)
        found.append((cycle.global_every, cycle.delay, cycle.local_every))
    assert found == [(2, 1, 1), (1, 1, 1), (8, 2, 2), (4, 1, 1), (2, 1, 1), (1, 1, 1)]
    assert Cycle(1).after_plateau(longest=16) == Cycle(16, 4, 4)
    assert Cycle(16, 4, 4).after_plateau(longest=16) == Cycle(8, 3, 2)
    for longest in range(1, 100):
        cycle = Cycle(min(4, longest))
        for _ in range(12):
            cycle = cycle.after_plateau(longest)
            assert 1 <= cycle.delay <= cycle.global_every <= longest
            assert 1 <= cycle.local_every <= cycle.global_every
    assert Cycle(1).after_plateau(longest=2) == Cycle(2, 1, 1)


def test_a_loss_is_stable_after_three_failures_in_a_row() -> None:
    plateau, stable = Plateau(), []
    #                1.0: first  0.96, 0.951: not below 0.95  0.94: better  0.9, 0.9, 0.9: stable  then anew
    for loss in (1.0, 0.96, 0.951, 0.94, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.9):
        plateau = plateau.after(loss, stability=0.05)
        stable.append(plateau.is_stable)
    assert stable == [False] * 6 + [True] + [False] * 2 + [True] + [False] * 2
    below_zero = Plateau().after(-1.0, 0.05).after(-1.04, 0.05)
    assert below_zero.failures == 1, "5 per cent of the amount, whatever its sign"
    assert below_zero.after(-1.06, 0.05) == Plateau(-1.06)


def adapts(comm: Comm) -> list[tuple[float, int]]:
    """Each rank's losses go their own way; their mean falls by more than 5 % in three epochs, and then not."""
    strategy = daso(comm, "daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=0)", num_epochs=9)
    found = []
    for epoch, mean_loss in enumerate([1.0, 0.8, 0.64, 0.6, 0.62, 0.64, 0.3]):
        strategy.batch = 4
        strategy.loss_sum = torch.tensor(4 * (mean_loss + (0.1 * epoch if comm.rank == 0 else -0.1 * epoch))).double()
        strategy.end_epoch()
        assert not strategy.loss_sum
        found.append((round(strategy.plateau.best, 6), strategy.cycle.global_every))
    return found


def test_ranks_go_by_the_mean_loss_of_all(world: World) -> None:
    expected = [(1.0, 4), (0.8, 4), (0.64, 4), (0.6, 4), (0.6, 4), (0.6, 4), (0.3, 4)]
    assert world(adapts, 2) == [expected] * 2


def cycles(comm: Comm) -> list[tuple[int, int, int]]:
    """With stability 1 only a loss of zero is an improvement: the first epoch, and then never."""
    strategy = daso(comm, "daso(ranks_per_node=2, warmup_epochs=1, cooldown_epochs=1, stability=1)", num_epochs=13)
    found = []
    for _ in range(13):
        steps(strategy, batches(3, 16))
        found.append(
            (strategy.cycle.global_every, strategy.cycle.delay, strategy.cycle.local_every)
            if strategy.is_cycling
            else (0, 0, 0)
        )
        strategy.end_epoch()
    return found


def test_phases_and_cycles_of_a_run(world: World) -> None:
    warm, four, two, one, eight = (0, 0, 0), (4, 1, 1), (2, 1, 1), (1, 1, 1), (8, 2, 2)
    expected = [warm, *[four] * 4, *[two] * 3, *[one] * 3, eight, warm]
    assert world(cycles, 4) == [expected] * 4


# ---- values


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.x


def daso_of_a_number(comm: Comm, spec: str) -> DASO:
    strategy = tw.prepare(
        spec,
        model=Number(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        loss=nn.functional.mse_loss,
        comm=comm,
        epochs=1,
    )
    assert isinstance(strategy, DASO)
    return strategy


def merged(comm: Comm, merge: str, waited: int) -> float:
    spec = f"daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=0, reducer=mean, merge={merge})"
    strategy = daso_of_a_number(comm, spec)
    x = strategy.model.get_parameter("x").data
    x.fill_(8.0 * comm.rank)
    strategy._start_exchange()
    x.fill_([4.0, 1.0][comm.rank])
    strategy.batches_in_flight = waited
    strategy._wait_and_merge()
    return x.item()


def test_merge_values(world: World) -> None:
    """N = 2, sent 0 and 8. S = 1: x = 4 → 4, x = 1 → 2.5. S = 0: weight 1. Deltas: 4 + (4 − 0), 4 + (1 − 8)."""
    assert world(merged, 2, "paper", 1) == [4.0, 2.5]
    assert world(merged, 2, "paper", 0) == [pytest.approx(4.0), pytest.approx(3.0)]
    assert world(merged, 2, "paper", 3) == [pytest.approx(4.0), pytest.approx((6 + 8) / 8)]
    assert world(merged, 2, "delta", 1) == [8.0, -3.0]


def merged_apart(comm: Comm) -> float:
    """Two nodes of two whose ranks have gone their own ways: they sent 0, 4, 8, 12 and are at 1, 3, 5, 7 by now."""
    spec = "daso(ranks_per_node=2, warmup_epochs=0, cooldown_epochs=0, reducer=mean)"
    strategy = daso_of_a_number(comm, spec)
    x = strategy.model.get_parameter("x").data
    strategy.node_ranks_differ = True
    x.fill_(4.0 * comm.rank)
    strategy._start_exchange()
    x.fill_(1.0 + 2 * comm.rank)
    strategy.batches_in_flight = 1
    strategy._wait_and_merge()
    return x.item()


def test_ranks_of_a_node_that_went_their_own_ways_all_count(world: World) -> None:
    """x ← (2x + 2·6)/4, and then the mean of a node: (2·2 + 12)/4 and (2·6 + 12)/4."""
    assert world(merged_apart, 4) == [4.0, 4.0, 6.0, 6.0]


def train_plain(comm: Comm, spec: str) -> dict[str, Tensor]:
    strategy = tw.prepare(
        spec, model=copy.deepcopy(PLAIN), optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm, epochs=4
    )
    epochs(strategy, batches(20, 24), 5)
    return weights(strategy.consolidate())


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_blocking_in_full_precision_is_flat_data_parallelism(world: World, ranks_per_node: int) -> None:
    spec = f"daso(ranks_per_node={ranks_per_node}, warmup_epochs=2, cooldown_epochs=2, reducer=mean)"
    expected = world(train_plain, 4, "data_parallel")[0]
    for found in world(train_plain, 4, spec):
        close(found, expected)


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 2), (5, 2), (5, 3)])
def test_unequal_nodes_count_by_their_ranks(ranks: int, nodes: int) -> None:
    def on_nodes(spec: str) -> list[dict[str, Tensor]]:
        return tw.simulate(lambda comm: train_plain(comm, spec), ranks=ranks, nodes=nodes)

    expected = on_nodes("data_parallel")[0]
    for found in on_nodes("daso(warmup_epochs=4, cooldown_epochs=0, reducer=mean)"):
        close(found, expected)
    cycling = on_nodes("daso(warmup_epochs=0, cooldown_epochs=0)")
    assert all(same(cycling[0], other) for other in cycling)


def test_on_one_node_it_is_data_parallel_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    for ranks in (1, 3):
        found = tw.simulate(lambda comm: train_plain(comm, "daso(warmup_epochs=1, cooldown_epochs=1)"), ranks=ranks)[0]
        assert same(found, tw.simulate(lambda comm: train_plain(comm, "data_parallel"), ranks=ranks)[0])
        assert "all ranks are on one node, so this is data_parallel" in capsys.readouterr().err


def test_alone_any_number_of_ranks_per_node_will_do() -> None:
    alone = tw.simulate(
        lambda comm: train_plain(comm, "daso(ranks_per_node=4, warmup_epochs=1, cooldown_epochs=1)"), ranks=1
    )
    assert same(alone[0], tw.simulate(lambda comm: train_plain(comm, "data_parallel"), ranks=1)[0])


def test_a_run_without_cycling_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    tw.simulate(lambda comm: daso(comm, "daso(ranks_per_node=1)", num_epochs=8), ranks=2)
    assert "8 of 8 epochs are warm-up or cool-down, in which nodes wait for each other" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("options", "told"), [("", "8 of 9 epochs are"), (", warmup_epochs=1, cooldown_epochs=1", "")])
def test_a_run_with_little_cycling_is_told_what_saves(
    options: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of the README: what it says saves really does."""
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    data = [(torch.randn(32, 20), torch.randint(0, 2, (32,)))] * 32

    def sent(spec: str) -> tuple[int, int]:
        def train(comm: Comm) -> tuple[int, int]:
            ours = tw.prepare(
                spec, model=copy.deepcopy(net), optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm, epochs=9
            )
            for _ in range(9):
                for batch in tw.epoch(ours, data, comm):
                    ours.step(batch)
            return comm.ledger.wire_bytes, sum(row["between_bytes"] for row in comm.ledger.rows())

        every = tw.simulate(train, ranks=4, nodes=2)
        return max(total for total, _ in every), sum(between for _, between in every)

    total, between = sent(f"daso(ranks_per_node=2{options})")
    said = capsys.readouterr().err
    plain_total, plain_between = sent("data_parallel")
    assert (total > plain_total) == bool(told)
    assert between < plain_between / (6 if not told else 3)
    assert said.count(told or "thinwire: daso") == (1 if told else 0)
    if told:
        assert "try daso(warmup_epochs=1, cooldown_epochs=1), or more epochs" in said


def long_and_stopped(comm: Comm, stops: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Through all cycles, l = 2 among them, on two nodes of two; and again from where it was stopped."""
    spec = (
        "daso(ranks_per_node=2, warmup_epochs=0, cooldown_epochs=1, stability=1, "
        "local_reducer=error_feedback(maxnorm(bits=4)), reducer=error_feedback(maxnorm(bits=4)))"
    )
    data, length, num_epochs = batches(66, 16), 6, 11
    straight, saved = daso(comm, spec, num_epochs), {}
    for i, batch in enumerate(data):
        if i in stops:
            saved[i] = copy.deepcopy(straight.state_dict())
        epochs(straight, [batch], length, start=i)
    found = [weights(straight.consolidate())]
    for stop, state in saved.items():
        resumed = daso(comm, spec, num_epochs)
        steps(resumed, data[:1])  # something is under way in it, too
        resumed.load_state_dict(state)
        epochs(resumed, data[stop:], length, start=stop)
        found.append(weights(resumed.consolidate()))
    return found


@pytest.mark.slow
def test_a_run_stopped_in_mid_cycle_goes_on_exactly(world: World) -> None:
    results = world(long_and_stopped, 4, (1, 29, 41, 61, 62))
    for straight, *resumed in results:
        assert same(straight, results[0][0])
        assert all(same(straight, one) for one in resumed)


def inside_nodes(comm: Comm, merge: str) -> list[tuple[bool, bool, bool]]:
    """After each step: did the ranks of a node once go their own ways; are they equal; are all ranks?"""
    spec = f"daso(ranks_per_node=2, warmup_epochs=0, cooldown_epochs=1, stability=1, merge={merge})"
    strategy = daso(comm, spec, num_epochs=15)
    found = []
    for i, batch in enumerate(batches(15 * 9, 16)):
        epochs(strategy, [batch], 9, start=i)
        flat = torch.cat([p.detach().flatten() for p in strategy.model.parameters()])
        everyone = comm.all_gather(flat)
        mate = everyone[comm.rank ^ 1]
        found.append(
            (strategy.node_ranks_differ, torch.equal(flat, mate), all(torch.equal(flat, other) for other in everyone))
        )
    return found


@pytest.mark.parametrize("merge", ["paper", "delta"])
def test_ranks_of_a_node_are_equal_until_they_go_their_own_ways_and_all_are_when_nodes_meet(merge: str) -> None:
    for found in tw.simulate(lambda comm: inside_nodes(comm, merge), ranks=4):
        assert any(apart for apart, *_ in found)
        assert all(inside for apart, inside, _ in found if not apart)
        assert not all(inside for apart, inside, _ in found if apart)
        assert all(everywhere for *_, everywhere in found[8::9]), "at the end of each epoch"
        assert all(everywhere for *_, everywhere in found[-9:]), "throughout the cool-down"


def statistics(comm: Comm) -> list[Tensor]:
    strategy = daso(comm, "daso(ranks_per_node=2, warmup_epochs=1, cooldown_epochs=0)")
    steps(strategy, batches(3, 16))
    return [b.clone() for b in strategy.model.buffers() if b.is_floating_point()]


def test_batchnorm_statistics_are_averaged_between_nodes_and_equal_inside(world: World) -> None:
    results = world(statistics, 4)
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
    assert not torch.equal(results[0][0], torch.zeros(16))


# ---- bytes


def between(comm: Comm, spec: str, num_batches: int) -> dict[str, int]:
    """Bytes that this rank sent to another node while training, by link."""
    strategy = tw.prepare(
        spec, model=copy.deepcopy(PLAIN), optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm, epochs=1
    )
    steps(strategy, batches(num_batches, 16))
    rows = [row for row in comm.ledger.rows() if row["purpose"] == "train"]
    return {
        link: sum(row["between_bytes"] for row in rows if row["link"] == link) for link in ("world", "node", "between")
    }


@pytest.mark.parametrize("nodes", [2, 4])
def test_traffic_between_nodes_is_that_of_the_formula_and_less_than_a_bth_of_data_parallels(nodes: int) -> None:
    payload = sum(p.numel() for p in PLAIN.parameters())

    def total(spec: str) -> dict[str, int]:
        found = tw.simulate(lambda comm: between(comm, spec, 8), ranks=2 * nodes, nodes=nodes)
        return {link: sum(one[link] for one in found) for link in found[0]}

    flat = total("data_parallel")["world"]
    blocking = total("daso(warmup_epochs=1, cooldown_epochs=0)")
    cycling = total("daso(warmup_epochs=0, cooldown_epochs=0)")
    in_full = total("daso(warmup_epochs=0, cooldown_epochs=0, reducer=mean)")
    assert blocking == {"world": 0, "node": 0, "between": nodes * 8 * all_reduce_bytes(2 * payload, nodes)}
    assert cycling["between"] == blocking["between"] / 4
    assert in_full["between"] == 2 * cycling["between"]
    assert in_full["between"] <= flat / 4


# ---- what is refused


@pytest.mark.parametrize(
    ("spec", "num_epochs", "message"),
    [
        ("daso(ranks_per_node=3)", 9, "ranks_per_node=3 does not divide 4 ranks; try 1 or 2, or leave it out"),
        ("daso(ranks_per_node=8)", 9, "ranks_per_node=8 does not divide 4 ranks"),
        ("daso", 7, "warmup_epochs=4 and cooldown_epochs=4 are longer than the run of 7 epochs; try 9 epochs or more"),
        ("daso", None, "it must know how many epochs there will be: prepare(…, epochs=90)"),
        ("daso(merge=mean)", 9, "merge='mean' is not possible: should be 'paper' or 'delta'"),
        ("daso(max_global_skips=0)", 9, "max_global_skips=0 is not possible"),
        ("daso(stability=-1)", 9, "stability=-1 is not possible"),
    ],
)
def test_what_is_not_possible_is_refused(spec: str, num_epochs: int | None, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tw.simulate(lambda comm: trainer(comm, spec, epochs=num_epochs), ranks=4, nodes=2)
    assert message in str(caught.value)


def test_a_node_of_one_rank_may_leave_parameters_unused() -> None:
    """Nobody waits for their gradients."""
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(2, 2)})

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.parts["used"](x)
            return out

    def run(comm: Comm) -> int:
        one = trainer(comm, "daso(ranks_per_node=1, warmup_epochs=8, cooldown_epochs=0)", Half())
        steps(one, batches(2))
        count: int = one.learner.num_steps
        return count

    assert on_threads(run, 2) == [2, 2]
