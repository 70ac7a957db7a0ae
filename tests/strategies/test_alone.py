"""One machine alone: what plain training gives, and nothing between machines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.training import MODELS, batches, decayed_sgd, same, seeded, steps, trained_by_torch, trainer, weights
from tests.worlds import World, worlds
from thinwire.comm.base import Comm


def on_nodes(comm: Comm, spec: str, nodes: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """The model, the bytes of each purpose, and those of training that left the node, with ranks on such nodes."""
    before, comm.nodes = comm.nodes, nodes
    try:
        strategy = trainer(comm, spec)
        steps(strategy, batches(6, 24))
        strategy.end_epoch()
        model = weights(strategy.consolidate())
    finally:
        comm.nodes = before
    rows = comm.ledger.rows()
    sent = {row["purpose"]: 0 for row in rows}
    for row in rows:
        sent[row["purpose"]] += row["wire_bytes"]
    return model, sent, sum(row["between_bytes"] for row in rows if row["purpose"] == "train")


@worlds(threads=[1, 2, 4], processes=[1, 3])
def test_every_rank_of_one_node_trains_as_if_there_were_no_other(world: World, ranks: int) -> None:
    expected = trained_by_torch(MODELS[0], batches(6, 24))
    for model, sent, _ in world(on_nodes, ranks, "alone", (0,) * ranks):
        assert same(model, expected)
        assert "train" not in sent, "not a single message"


@worlds(threads=[4], processes=[4])
def test_the_ranks_of_a_node_are_one_machine_and_nothing_leaves_it(world: World, ranks: int) -> None:
    expected = world(on_nodes, 2, "data_parallel", (0, 0))
    parameters = list(MODELS[0].parameters())
    gradients, used_map = 4 * sum(p.numel() for p in parameters), 4 * len(parameters)
    for model, sent, between in world(on_nodes, ranks, "alone", (0, 0, 1, 1)):
        assert same(model, expected[0][0])
        assert between == 0
        assert expected[0][1]["train"] == 6 * gradients, "a ring of two, in every step"
        assert sent["train"] == 6 * (gradients + used_map), "the same, and which parameters were used"


class Parts(nn.Module):
    """Uses another layer in every step, and one in none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


PARTS = seeded(1, Parts)


def train_parts(comm: Comm, nodes: tuple[int, ...]) -> dict[str, Tensor]:
    before, comm.nodes = comm.nodes, nodes
    try:
        strategy = trainer(comm, "alone", PARTS, decayed_sgd)
        every = [(torch.cat([x, x]), torch.cat([y, y])) for x, y in batches(6, 12)]
        for inputs, targets in every:  # both ranks of a node have the same samples: their mean is each one's gradient
            half = len(inputs) // strategy.shard.count
            strategy.step((inputs[:half], targets[:half]))
        return weights(strategy.consolidate())
    finally:
        comm.nodes = before


@worlds(threads=[4], processes=[4])
def test_a_node_may_leave_parameters_unused_as_a_single_rank_may(world: World, ranks: int) -> None:
    """Those keep no gradient, so the optimizer leaves them alone, as in plain training: the same bits."""
    expected = trained_by_torch(PARTS, batches(6, 12), decayed_sgd)
    assert torch.equal(expected["layers.2.weight"], PARTS.layers[2].weight)
    for found in world(train_parts, ranks, (0, 0, 1, 1)):
        assert same(found, expected)


def test_nodes_need_not_be_numbered_in_the_order_of_ranks() -> None:
    def train(comm: Comm) -> tuple[tuple[int, int], bool]:
        comm.nodes = (1, 0, 1, 0)
        strategy = trainer(comm, "alone")
        return (strategy.shard.index, strategy.shard.count), strategy.sees_loss

    assert tw.simulate(train, ranks=4) == [((0, 2), True), ((0, 2), False), ((1, 2), True), ((1, 2), False)]


def test_where_machines_differ_the_result_is_that_of_the_first() -> None:
    def train(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
        strategy = trainer(comm, "alone")
        inputs, targets = batches(1, 24)[0]
        strategy.step((inputs + comm.rank // 2, targets))  # as dropout would make them differ
        return weights(strategy.model), weights(strategy.consolidate()), strategy.sees_loss

    own, whole, sees = zip(*tw.simulate(train, ranks=4, nodes=2), strict=True)
    assert not same(own[0], own[2])
    assert all(same(one, own[0]) for one in whole)
    assert sees == (True, True, False, False)


def test_unequal_nodes_are_refused() -> None:
    with pytest.raises(tw.UsageError, match=r"alone: nodes have 2, 1 ranks.*start as many ranks on every node"):
        tw.simulate(lambda comm: trainer(comm, "alone"), ranks=3, nodes=2)
