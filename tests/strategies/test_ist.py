"""Independent subnet training: its laws, its bytes and memory, and what may go wrong."""

from __future__ import annotations

import copy
import gc
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import thinwire as tw
from tests import training
from tests.training import Weights, adamw, batches, decayed_sgd, same, seeded, weights
from tests.worlds import World
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.threads import ThreadComm
from thinwire.common.tensors import named_tensors, num_bytes
from thinwire.errors import PeerLost
from thinwire.exchange.sharded import Contribution, ShardedTensors
from thinwire.strategies.ist_shares import balance
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.axes.residual import residual_blocks_of
from thinwire.surgery.slices import Slices, take_slice
from thinwire.surgery.unit_assignment import assign_units


def mlp(width: int = 13) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width + 1), nn.ReLU(), nn.Linear(width + 1, 3)
    )


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 9, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 8, 2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 9, 3),
    )  # fmt: skip


def resnet() -> nn.Sequential:
    """Three blocks that may be left out."""
    return nn.Sequential(
        *list(registry.build("models", "resnet32", (1, 8, 8), 3))[:6],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


MLP, NORMED, WIDE = seeded(1, mlp), seeded(2, normed), seeded(1, lambda: mlp(256))
RESNET = seeded(3, resnet)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def trainer(comm: Comm, spec: str, model: nn.Module = MLP, optimizer: Any = decayed_sgd, **options: Any) -> Any:
    return training.trainer(comm, spec, model, optimizer, **options)


# ---- laws


@pytest.mark.parametrize("optimizer", [decayed_sgd, adamw, plain])
@pytest.mark.parametrize("kind", ["carry", "reset"])
def test_one_rank_is_plain_training(kind: str, optimizer: Any) -> None:
    def train(comm: Comm, spec: str) -> Weights:
        made = trainer(comm, spec, NORMED, optimizer)
        for batch in batches(7, shape=(1, 6, 6)):
            made.step(batch)
        return weights(made.consolidate())

    by_hand = copy.deepcopy(NORMED)
    taking = optimizer(by_hand.parameters())
    for x, y in batches(7, shape=(1, 6, 6)):
        taking.zero_grad()
        nn.functional.cross_entropy(by_hand(x), y).backward()
        taking.step()
    for scale in ("train", "eval"):
        spec = f"ist(local_steps=3, scale={scale}, optimizer_state={kind})"
        assert same(tw.simulate(lambda comm, spec=spec: train(comm, spec), ranks=1)[0], by_hand.state_dict())


def dealt_and_collected(comm: Comm, kind: str) -> tuple[bool, bool]:
    model = {"mlp": MLP, "normed": NORMED, "blocks": RESNET}[kind]
    slices = Slices(model, residual_blocks_of(model) if kind == "blocks" else axes_of(model))
    tensors = {
        name: t.detach() + (i if t.is_floating_point() else 3)
        for i, (name, t) in enumerate(named_tensors(model).items())
    }
    sharded = ShardedTensors(slices, comm, torch.device("cpu"), {name: t.dtype for name, t in tensors.items()})
    with torch.no_grad():
        sharded.scatter(tensors if comm.rank == 0 else {})
        before = {name: part.clone() for name, part in sharded.shards.items()}
        unchanged = True
        for number in range(3):
            units = assign_units([axis.size for axis in slices.axes], [1.0] * comm.size, 0, number)
            sharded.collect(sharded.deal(units), units, Contribution(1 + comm.rank, 0.0))
            unchanged = unchanged and same(sharded.shards, before)
        return unchanged, same(dict(sharded.gather()), tensors)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["mlp", "normed", "blocks"])
def test_collecting_what_was_dealt_changes_nothing(kind: str, ranks: int) -> None:
    torch.manual_seed(0)
    assert all(
        unchanged and whole for unchanged, whole in tw.simulate(lambda c: dealt_and_collected(c, kind), ranks=ranks)
    )


@pytest.mark.parametrize("kind", ["mlp", "normed"])
def test_collecting_what_was_dealt_changes_nothing_between_processes(process_world: Any, kind: str) -> None:
    assert all(unchanged and whole for unchanged, whole in process_world.run(dealt_and_collected, 3, kind))


def rounds(comm: Comm, spec: str, num_steps: int, optimizer: Any = decayed_sgd) -> tuple[Weights, list[float]]:
    made = trainer(comm, spec, optimizer=optimizer)
    losses = [made.step(batch).item() for batch in batches(num_steps, seed=comm.rank)]
    return weights(made.consolidate()), losses


def rounds_by_hand(
    ranks: int, num_steps: int, every: int, scale: str, carry: bool
) -> tuple[Weights, list[list[float]]]:
    """The same in one process, from the paper: three weights, three biases, SGD with momentum and weight decay."""
    w = [layer.weight.detach().clone() for layer in MLP if isinstance(layer, nn.Linear)]
    b = [layer.bias.detach().clone() for layer in MLP if isinstance(layer, nn.Linear)]
    if scale == "eval":
        w[1], w[2] = w[1] / (1 / ranks), w[2] / (1 / ranks)
    velocity = [[torch.zeros_like(t) for t in w], [torch.zeros_like(t) for t in b]]
    data = [batches(num_steps, seed=rank) for rank in range(ranks)]
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for number, start in enumerate(range(0, num_steps, every)):
        units = assign_units([13, 14], [1.0] * ranks, 0, number)
        last = []
        for rank, (i, j) in enumerate(units):
            picks = [(i, torch.arange(6)), (j, i), (torch.arange(3), j)]
            ws = [x[rows][:, columns].requires_grad_() for x, (rows, columns) in zip(w, picks, strict=True)]
            bs = [x[rows].requires_grad_() for x, (rows, _) in zip(b, picks, strict=True)]
            vs = [v[r][:, c] for v, (r, c) in zip(velocity[0], picks, strict=True)] + [
                v[r] for v, (r, _) in zip(velocity[1], picks, strict=True)
            ]  # fmt: skip
            optimizer = decayed_sgd([p for pair in zip(ws, bs, strict=True) for p in pair])
            for p, v in zip([*ws, *bs], vs, strict=True):
                optimizer.state[p] = {"momentum_buffer": v} if carry and number else {}
            times = [1.0, 13 / len(i), 14 / len(j)] if scale == "train" else [1.0] * 3
            for x, y in data[rank][start : start + every]:
                for layer in range(3):
                    x = x * times[layer] if times[layer] != 1 else x
                    x = nn.functional.linear(x, ws[layer], bs[layer])
                    x = x.relu() if layer < 2 else x
                loss = nn.functional.cross_entropy(x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[rank].append(loss.item())
            for layer, (rows, columns) in enumerate(picks):
                w[layer][rows[:, None], columns] = ws[layer].detach()
                velocity[0][layer][rows[:, None], columns] = optimizer.state[ws[layer]]["momentum_buffer"]
                if layer < 2:
                    b[layer][rows] = bs[layer].detach()
                    velocity[1][layer][rows] = optimizer.state[bs[layer]]["momentum_buffer"]
            last.append((bs[2].detach(), optimizer.state[bs[2]]["momentum_buffer"]))
        for target, values in ((b, [x for x, _ in last]), (velocity[1], [v for _, v in last])):
            target[2] = values[0].clone()
            for other in values[1:]:
                target[2] += (1 / ranks) * (other - values[0])
    if scale == "eval":
        w[1], w[2] = w[1] * (1 / ranks), w[2] * (1 / ranks)
    names = [name for name, _ in MLP.named_parameters()]
    return dict(zip(names, [t for pair in zip(w, b, strict=True) for t in pair], strict=True)), losses


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("scale", "carry"), [("eval", True), ("train", False), ("train", True)])
def test_ranks_do_what_one_process_would(world: World, ranks: int, scale: str, carry: bool) -> None:
    expected, losses = rounds_by_hand(ranks, 8, 3, scale, carry)
    spec = f"ist(local_steps=3, scale={scale}, optimizer_state={'carry' if carry else 'reset'})"
    for rank, (whole, own) in enumerate(world(rounds, ranks, spec, 8)):
        assert same(whole, expected)
        assert own == losses[rank]


def what_moved(comm: Comm, cut: str) -> bool:
    """After a round every element that no rank had is as it was, whatever its weight decay; and the rest is not."""
    model = MLP if cut == "units" else RESNET
    shape = (6,) if cut == "units" else (1, 8, 8)
    made = trainer(comm, f"ist(local_steps=2, cut={cut}, scale=train)", model)
    with torch.no_grad():
        before = dict(made.sharded.copy().gather())
    covered = {name: torch.zeros(t.shape) for name, t in before.items()}
    for units in made.units:
        for name, count in covered.items():
            places = made.slices.slice_index(name, units)
            if places is None:
                continue
            if count.dim() == 0:
                count += 1
            else:
                index = torch.meshgrid(
                    *[torch.arange(n) if p is None else p for n, p in zip(count.shape, places, strict=True)],
                    indexing="ij",
                )
                count[index] += 1
    for batch in batches(3, shape=shape, seed=comm.rank):
        made.step(batch)
    with torch.no_grad():
        after = dict(made.sharded.copy().gather())
    for name, count in covered.items():
        assert torch.equal(after[name][count == 0], before[name][count == 0])
        assert count.max() == 1 or not made.slices.is_divided(name)
        if before[name].dim() > 1:
            assert (after[name] != before[name])[count > 0].float().mean() > 0.9
    return any((count == 0).any() for count in covered.values()) or cut == "blocks"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cut", ["units", "blocks"])
def test_what_nobody_has_stays_as_it_is_and_nobody_shares_a_unit(cut: str, ranks: int) -> None:
    torch.manual_seed(0)
    assert all(tw.simulate(lambda comm: what_moved(comm, cut), ranks=ranks))


@pytest.mark.parametrize(
    "spec",
    ["ist", "ist(scale=train)", "ist(cut=blocks, branches=given)", "ist(cut=blocks, scale=train)", "ist(subnets=2)"],
)
def test_the_network_at_the_start_is_the_one_that_was_given(spec: str) -> None:
    torch.manual_seed(0)
    model = RESNET if "blocks" in spec else MLP
    for ranks in (2, 3):
        found = tw.simulate(lambda comm: weights(trainer(comm, spec, model).consolidate()), ranks=ranks)[0]
        assert found.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=0)


VIT = seeded(5, lambda: registry.build("models", "vit(patch=4, width=8, depth=2, heads=4)", (1, 8, 8), 3))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", [RESNET, VIT], ids=["resnet", "vit"])
@pytest.mark.parametrize("cut", ["units", "blocks"])
def test_residual_branches_begin_with_their_share(cut: str, model: nn.Module, ranks: int) -> None:
    """Of what was given, 1/n in the whole network; all else in it, and blocks in narrow networks, are as given."""

    def at_start(comm: Comm) -> tuple[Weights, Weights]:
        made = trainer(comm, f"ist(cut={cut})", model)
        return weights(made.model), weights(made.consolidate())

    given, blocks = model.state_dict(), residual_blocks_of(model)
    share = max(1 / ranks, 1 / blocks.size) if cut == "blocks" else 1 / ranks  # each rank has one block at least
    for narrow, whole in tw.simulate(at_start, ranks=ranks):
        assert cut == "units" or same(narrow, {name: given[name] for name in narrow})
        for name, tensor in given.items():
            expected = tensor * share if name in blocks.branch_ends else tensor
            torch.testing.assert_close(whole[name], expected, rtol=1e-6, atol=0)


class Shared(nn.Module):
    """x + mlp(x), with an mlp that other blocks may share; it declares a bias that its last layer does not have."""

    def __init__(self, mlp: nn.Sequential) -> None:
        super().__init__()
        self.mlp = mlp
        self.thinwire_branches = ["mlp.2.weight", "mlp.2.bias"]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def test_branches_that_are_shared_or_not_cut_begin_as_given() -> None:
    torch.manual_seed(0)
    one, other = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False)) for _ in range(2))
    model = nn.Sequential(nn.Linear(6, 8), Shared(one), Shared(one), Shared(other), nn.Linear(8, 3))
    found = tw.simulate(lambda comm: weights(trainer(comm, "ist", model).consolidate()), ranks=2)[0]
    assert torch.equal(found["1.mlp.2.weight"], one[2].weight), "shared, so no unit of it is dealt out"
    torch.testing.assert_close(found["3.mlp.2.weight"], other[2].weight.detach() / 2)


# ---- fewer narrow networks than ranks


def trained(comm: Comm, spec: str, num_steps: int = 7) -> Weights:
    made = trainer(comm, spec, optimizer=plain)
    for batch in batches(num_steps, seed=comm.rank):
        made.step(batch)
    made.end_epoch()
    return weights(made.consolidate())


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_narrow_network_for_all_ranks_is_local_sgd(world: World, ranks: int) -> None:
    for found, expected in zip(
        world(trained, ranks, "ist(subnets=1, local_steps=3)"), world(trained, ranks, "local_sgd(every=3)"), strict=True
    ):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def trained_together(comm: Comm, spec: str) -> tuple[Weights, Weights, list[list[Tensor]]]:
    """What this rank made of its narrow network in one round, what was collected, and the units of each rank."""
    made = trainer(comm, spec, NORMED)
    for batch in batches(2 + comm.rank, shape=(1, 6, 6), seed=comm.rank):
        made.step(batch)
    own = weights(made.model)
    made._collect_slices()
    with torch.no_grad():
        return own, dict(made.sharded.gather()), made.units


@pytest.mark.parametrize("state", ["carry", "reset"])
def test_ranks_with_the_same_narrow_network_average_it_by_steps(state: str) -> None:
    spec = f"ist(subnets=2, local_steps=9, scale=train, optimizer_state={state})"
    results = tw.simulate(lambda comm: trained_together(comm, spec), ranks=4)
    slices, (_, whole, units) = Slices(NORMED, axes_of(NORMED)), results[0]
    for rank in (0, 1):
        assert all(one.equal(other) for one, other in zip(units[rank], units[rank + 2], strict=True))
        (one, _, _), (other, _, _) = results[rank], results[rank + 2]
        divided = [name for name in one if slices.is_divided(name)]
        assert len(divided) > 5
        for name in divided:
            mean = ((2 + rank) * one[name] + (4 + rank) * other[name]) / (6 + 2 * rank)
            index = slices.slice_index(name, units[rank])
            assert index is not None
            torch.testing.assert_close(take_slice(whole[name], index), mean)


# ---- bytes and memory


def sent(comm: Comm, spec: str, optimizer: Any, num_rounds: int) -> tuple[list[int], int, int]:
    """Bytes of each round by the ledger, what the deal says they must be, and calls."""
    made = trainer(comm, spec, WIDE, optimizer)
    counted, expected = [], 0
    for i, batch in enumerate(batches(num_rounds * made.local_steps + 1)):
        before, old = comm.ledger.wire_bytes, made.units
        made.step(batch)
        if i and i % made.local_steps == 0:
            counted.append(comm.ledger.wire_bytes - before)
            expected += formula(made.sharded, old, made.units, 1 + len(made.moments.by_kind))
        else:
            assert comm.ledger.wire_bytes == before, "nothing is sent between rounds"
    calls = sum(row["calls"] for row in comm.ledger.rows() if row["purpose"] == "train" and row["op"] == "all_to_all")
    return counted, expected, calls


def formula(sharded: ShardedTensors, old: list[list[Tensor]], new: list[list[Tensor]], kinds: int) -> int:
    """What one rank sends in a round, element by element: its slice to other shards, and its shard's part to others."""
    rank, ranks = sharded.comm.rank, sharded.comm.size
    total = 0
    for units, away in ((old, True), (new, False)):
        for i in range(ranks):
            if i != rank:
                pieces = sharded.layout.pieces(units[rank], i) if away else sharded.layout.pieces(units[i], rank)
                total += 4 * kinds * sum(math.prod(piece.shape) for piece in pieces) + (16 * kinds if away else 0)
    return total


@pytest.mark.parametrize(("spec", "optimizer", "kinds", "subnets"), [
    ("ist(local_steps=4, optimizer_state=reset)", decayed_sgd, 1, 4), ("ist(local_steps=4)", decayed_sgd, 2, 4),
    ("ist(local_steps=4)", adamw, 3, 4), ("ist(local_steps=4)", plain, 1, 4),
    ("ist(local_steps=4, subnets=2)", decayed_sgd, 2, 2),
])  # fmt: skip
def test_a_round_sends_a_slice_each_way_and_nothing_else(
    world: World, spec: str, optimizer: Any, kinds: int, subnets: int
) -> None:
    ranks, num_rounds = 4, 4
    results = world(sent, ranks, spec, optimizer, num_rounds)
    h, d, c = 256, 6, 3
    subnet = d * h / subnets + h * (h + 1) / subnets**2 + (h + 1) * c / subnets + (2 * h + 1) / subnets + c
    published = 2 * (ranks - 1) / ranks * 4 * subnet * kinds
    mean = sum(sum(counted) for counted, _, _ in results) / sum(len(counted) for counted, _, _ in results)
    assert mean == pytest.approx(published, rel=0.05)  # the deal is random, and the report is 48 bytes
    for counted, expected, calls in results:
        assert len(counted) == num_rounds
        assert sum(counted) == expected
        assert calls == 2 * kinds * num_rounds


def held(comm: Comm, spec: str, optimizer: Any) -> tuple[int, int, int, int]:
    """Bytes of all tensors in this process, at most, while training; and the terms of the formula."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    total = sum(num_bytes(p) for p in model.parameters())
    made = tw.prepare(spec, model=model, optimizer=optimizer, loss=nn.functional.cross_entropy, comm=comm)
    del model
    data = (torch.randn(2, 64), torch.randint(0, 64, (2,)))
    subnet = 4 * max(made.slices.num_elements(units) for units in made.units)
    gc.collect()
    before = in_tensors() - sum(num_bytes(t) for t in held_by(made))
    most = [0]

    def look() -> None:
        most[0] = max(most[0], in_tensors() - before)

    exchange = comm.all_to_all

    def watched(parts: Any, like: Any = None) -> Any:
        found = exchange(parts, like)
        look()
        return found

    made.learner.recipe.__dict__["schedule"] = lambda step: look() or 1.0  # called with gradients there
    with mock.patch.object(comm, "all_to_all", watched):
        for _ in range(4):
            made.step(data)
    return most[0], subnet, total, len(made.moments.by_kind)


def in_tensors() -> int:
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def held_by(made: Any) -> list[Tensor]:
    return [
        *made.sharded.shards.values(),
        *(p for h in made.moments.by_kind.values() for p in h.shards.values()),
        *made.model.parameters(),
    ]


@pytest.mark.parametrize(("spec", "optimizer", "s"), [
    ("ist(local_steps=2, optimizer_state=reset)", plain, 0),
    ("ist(local_steps=2, optimizer_state=reset)", decayed_sgd, 1),
    ("ist(local_steps=2)", adamw, 2),
])  # fmt: skip
def test_no_rank_holds_more_than_the_formula(process_world: Any, spec: str, optimizer: Any, s: int) -> None:
    for most, subnet, total, carried in process_world.run(held, 4, spec, optimizer):
        limit = subnet * (2 + s) + total / 4 * (1 + carried)
        assert most <= 1.1 * limit, "a batch, indices and reports are small"
        assert most < total or carried  # the whole network is nowhere
        assert most > 0.5 * limit, "this would see it if it were more"


def sent_tensors(comm: Comm) -> bool:
    """Whether any number of the data is among those sent, in training and tests."""
    seen: list[Tensor] = []
    post = ThreadComm._exchange

    def watched(self: ThreadComm, value: Any) -> Any:
        seen.extend(value if isinstance(value, list) else [value])
        return post(self, value)

    comm._exchange = watched.__get__(comm)  # type: ignore[attr-defined]
    made = trainer(comm, "ist(local_steps=2)", NORMED)
    mark = 1234.5 + comm.rank
    for x, y in batches(5, shape=(1, 6, 6)):
        x[:, 0, 0, 0] = mark
        made.step((x, y))
    made.consolidate()
    bits = torch.tensor([mark]).view(torch.uint8).tolist()
    assert len(seen) > 20
    for tensor in seen:
        data = [] if tensor is None else tensor.contiguous().view(-1).view(torch.uint8).tolist()
        if any(data[i : i + 4] == bits for i in range(0, len(data) - 3, 4)):
            return True
    return False


def test_data_stay_where_they_are() -> None:
    assert tw.simulate(sent_tensors, ranks=3) == [False] * 3


# ---- ragged data, shares


def train_on_uneven(comm: Comm, numbers: list[int], spec: str) -> tuple[Weights, int, int]:
    made = trainer(comm, spec, NORMED)
    steps = 0
    for epoch in range(2):
        for batch in tw.epoch(made, batches(numbers[comm.rank], shape=(1, 6, 6), seed=epoch), comm):
            steps += 1
            assert made.step(batch).isfinite()
    return weights(made.consolidate()), steps, made.learner.num_steps


@pytest.mark.parametrize("numbers", [[5, 3, 7], [0, 4, 2], [1, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("spec", ["ist(local_steps=3)", "ist(local_steps=2, optimizer_state=reset)"])
def test_ranks_may_have_different_numbers_of_batches_or_none(world: World, numbers: list[int], spec: str) -> None:
    results = world(train_on_uneven, 3, numbers, spec)
    for whole, _, counted in results:
        assert same(whole, results[0][0])
        assert counted == 2 * max(numbers)
        assert all(t.isfinite().all() for t in whole.values())
    assert [steps for _, steps, _ in results] == [2 * n for n in numbers]


def shared_by_steps(comm: Comm) -> Tensor:
    made = trainer(comm, "ist(local_steps=4, scale=train)", optimizer=plain)
    for batch in batches(comm.rank + 1):
        made.step(batch)
    own = dict(made.model.named_parameters())["4.bias"].detach().clone()
    return torch.stack([own, made.consolidate()[4].bias.detach()])


def test_what_all_have_is_their_mean_by_steps() -> None:
    results = tw.simulate(shared_by_steps, ranks=3)
    mean = sum((rank + 1) / 6 * own for rank, (own, _) in enumerate(results))
    for _, found in results:
        torch.testing.assert_close(found, mean)


def test_shares_are_given_or_measured() -> None:
    def widths(comm: Comm, spec: str) -> list[int]:
        return [len(units) for units in trainer(comm, spec).units[comm.rank]]

    assert tw.simulate(lambda comm: widths(comm, "ist(shares=[3, 1, 1])"), ranks=3) == [[8, 8], [3, 3], [2, 3]]
    shares = [1.0, 1.0]
    for _ in range(20):  # one rank is three times as slow, and time is in proportion to units
        shares = balance(shares, [Contribution(4, 4 * shares[0]), Contribution(4, 12 * shares[1])])
    assert shares == pytest.approx([1.43, 0.57], abs=0.01)
    for _ in range(100):  # time does not depend on units at all
        shares = balance(shares, [Contribution(4, 4.0), Contribution(4, 4.2)])
    assert shares[0] / shares[1] < 1.3
    for _ in range(100):
        shares = balance(shares, [Contribution(4, 4.0), Contribution(4, 400.0)])
    assert shares[1] == 0.25
    assert balance([1.2, 0.8], [Contribution(0, 0.0), Contribution(4, 1.0)]) == [1.2, 0.8]

    def measured(comm: Comm) -> list[float]:
        made = trainer(comm, "ist(local_steps=2, shares=measured)")
        for batch in batches(2):
            made.step(batch)
        made.shares.seconds = 1.0 + 8 * comm.rank
        made.step(batch)
        return made.shares.weights

    assert tw.simulate(measured, ranks=2) == [pytest.approx([1.5, 0.5])] * 2  # times 1 and 9, half of the way


# ---- the whole network: BatchNorm, layer by layer, in files


def test_batch_norm_is_measured_anew() -> None:
    data = batches(20, size=64, shape=(1, 6, 6))

    def train(comm: Comm, calibration: int) -> tuple[nn.Module, Tensor]:
        made = trainer(comm, f"ist(local_steps=4, calibration={calibration})", NORMED)
        for x, y in data:
            made.step((x[comm.rank :: 2], y[comm.rank :: 2]))
        whole = made.consolidate()
        assert whole[1].num_batches_tracked == 20
        assert whole[1].momentum == 0.1
        return whole, torch.cat([x for x, _ in data[-8:]])

    whole, x = tw.simulate(lambda comm: train(comm, 8), ranks=2)[0]
    with torch.no_grad():
        hidden = whole.eval()[:3](x)
        before_norm = whole[3](hidden)
        torch.testing.assert_close(whole[4].running_mean, before_norm.mean((0, 2, 3)), rtol=0.02, atol=0.02)
        torch.testing.assert_close(whole[4].running_var, before_norm.var((0, 2, 3)), rtol=0.1, atol=0.02)
    without, _ = tw.simulate(lambda comm: train(comm, 0), ranks=2)[0]
    assert (without[4].running_var - before_norm.var((0, 2, 3))).abs().mean() > 5 * (
        whole[4].running_var - before_norm.var((0, 2, 3))
    ).abs().mean()


MODELS = {
    "normed": (NORMED, (1, 6, 6)),
    "mlp": (MLP, (6,)),
    "torch": (
        nn.Sequential(
            nn.Linear(6, 8),
            nn.Unflatten(1, (2, 4)),
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        (6,),
    ),
}


def in_parts(comm: Comm, folder: str, kind: str, scale: str) -> tuple[Weights, Tensor, Tensor, int, str]:
    model, shape = MODELS[kind]
    made = trainer(comm, f"ist(local_steps=2, scale={scale})", model)
    for batch in batches(5, shape=shape, seed=comm.rank):
        made.step(batch)
    whole = made.consolidate().eval()
    made.whole.max_gb = 1e-9
    try:
        made.consolidate()
    except tw.RunError as error:
        refused = str(error)
    streamed = made.eval_model().eval()
    made.export(folder, max_gb=1e-6)
    x = batches(1, shape=shape, seed=9)[0][0]
    with torch.no_grad():
        left = sum(num_bytes(p) for p in streamed.parameters() if not p.is_meta)
        return weights(whole), whole(x), streamed(x), left, refused


@pytest.mark.parametrize("scale", ["train", "eval"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_network_that_fits_nowhere_is_tested_and_written_in_parts(
    world: World, tmp_path: Path, kind: str, scale: str
) -> None:
    folder = tmp_path / "model"
    results = world(in_parts, 2, str(folder), kind, scale)
    whole = results[0][0]
    for _, expected, streamed, left, refused in results:
        torch.testing.assert_close(streamed, expected, rtol=1e-5, atol=1e-6)
        assert left == 0
        assert "more than whole_gb=1e-09" in refused
        assert "export" in refused
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    assert set(index["weight_map"].values()) == {file.name for file in files}
    found = {name: t for file in files for name, t in load_file(file).items()}
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-6, atol=1e-7)
    with pytest.raises(AssertionError if world.__name__ == "run" else tw.UsageError, match="exists already"):
        world(in_parts, 2, str(folder), kind, scale)


def from_nothing(comm: Comm) -> bool:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    made = tw.prepare("ist", model=model, optimizer=decayed_sgd, loss=nn.functional.cross_entropy, comm=comm)
    weight = made.consolidate()[0].weight
    return bool(weight.std() > 0.1) and all(p.is_meta for p in model.parameters())


def test_a_model_may_begin_on_the_meta_device(world: World) -> None:
    assert all(world(from_nothing, 2))


# ---- models and optimizers of all kinds


class Odd(nn.Module):
    """What models have besides weights: a mask with infinities, complex weights, a cache, a frozen layer, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.0), nn.ReLU(), nn.Linear(12, 4), nn.ReLU())
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.waves = nn.Parameter(torch.ones(4, dtype=torch.cfloat))
        self.head = nn.Linear(4, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        x = self.frozen(self.body(x)) * self.waves.abs() * (1 + self.seen / 100)
        return (self.head(x)[:, None, :] + self.mask.to(x.dtype)).logsumexp(-1)


ODD = seeded(4, Odd)


def odd(comm: Comm, optimizer: Any) -> tuple[Weights, Tensor]:
    made = trainer(comm, "ist(local_steps=2)", ODD, optimizer)
    for batch in batches(5, seed=comm.rank):
        made.step(batch)
    return weights(made.consolidate()), dict(made.model.named_parameters())["waves"].detach().clone()


@pytest.mark.parametrize("optimizer", [decayed_sgd, adamw])
def test_masks_complex_weights_caches_and_frozen_layers_are_what_they_would_be(optimizer: Any) -> None:
    plain_net = copy.deepcopy(ODD)
    taking = optimizer([p for p in plain_net.parameters() if p.requires_grad])
    for x, y in batches(5, seed=0):
        taking.zero_grad()
        nn.functional.cross_entropy(plain_net(x), y).backward()
        taking.step()
    assert same(tw.simulate(lambda comm: odd(comm, optimizer), ranks=1)[0][0], plain_net.state_dict())
    results = tw.simulate(lambda comm: odd(comm, optimizer), ranks=2)
    whole = results[0][0]
    assert torch.equal(whole["mask"], ODD.mask)
    assert torch.equal(whole["frozen.weight"], ODD.frozen.weight)
    torch.testing.assert_close(whole["waves"], (results[0][1] + results[1][1]) / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [decayed_sgd, adamw])
def test_moments_have_the_dtype_that_the_optimizer_gives_them(dtype: torch.dtype, optimizer: Any) -> None:
    def train(comm: Comm) -> tuple[float, float]:
        made = trainer(comm, "ist(local_steps=2)", copy.deepcopy(MLP).to(dtype), optimizer)
        losses = [made.step((x.to(dtype), y)).item() for x, y in batches(1) * 12]
        largest = max(
            part.abs().max().item() for moment in made.moments.by_kind.values() for part in moment.shards.values()
        )
        assert all(t.dtype == dtype for t in made.consolidate().parameters())
        return losses[-1] - losses[0], largest

    for ranks in (1, 2):
        for change, largest in tw.simulate(train, ranks=ranks):
            assert change < 0
            assert largest < 10


def counted(comm: Comm, numbers: list[int]) -> tuple[list[float], Weights, Weights]:
    made = trainer(comm, "ist(local_steps=4)", optimizer=adamw)
    for batch in tw.epoch(made, batches(numbers[comm.rank], seed=comm.rank), comm):
        made.step(batch)
    steps = [made.learner.optimizer.state[p]["step"].item() for p in made.model.parameters()]
    own = {name: made.learner.optimizer.state[p]["exp_avg"] for name, p in made.model.named_parameters()}
    made._collect_slices()
    with torch.no_grad():
        return steps, own, dict(made.moments.by_kind["exp_avg"].gather())


def test_adams_moments_travel_weighted_by_steps_and_its_count_goes_on() -> None:
    results = tw.simulate(lambda comm: counted(comm, [6, 3]), ranks=2)
    assert [set(steps) for steps, _, _ in results] == [{6.0}, {3.0}]
    first, second = (own["4.bias"] for _, own, _ in results)
    torch.testing.assert_close(results[0][2]["4.bias"], first)  # of the second round the other has no step
    results = tw.simulate(lambda comm: counted(comm, [4, 1]), ranks=2)
    first, second = (own["4.bias"] for _, own, _ in results)
    torch.testing.assert_close(results[0][2]["4.bias"], 0.8 * first + 0.2 * second)


def test_moments_begin_as_the_optimizer_has_them() -> None:
    def adagrad(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.5)

    def least(comm: Comm) -> float:
        made = trainer(comm, "ist(local_steps=1)", optimizer=adagrad)
        for batch in batches(3):
            made.step(batch) if comm.rank else made.skip_step()
        return min(part.min().item() for part in made.moments.by_kind["sum"].shards.values() if part.numel())

    assert min(tw.simulate(least, ranks=2)) >= 0.5


def frozen_norm(comm: Comm) -> tuple[Tensor, bool, float]:
    model = copy.deepcopy(NORMED)
    model.insert(3, nn.Dropout(0.5))
    model[1].eval()
    model[3].eval()
    model[1].running_mean.fill_(5.0)
    made = trainer(comm, "ist(local_steps=2)", model)
    buffer = torch.empty(8, 1, 6, 6)
    for x, y in batches(4 + 2 * comm.rank, shape=(1, 6, 6)):
        made.step((buffer.copy_(x), y)) if made.steps_in_round < 9 else None
        if comm.rank == 0 and made.learner.num_steps == 4:
            made.skip_step(), made.skip_step()
    buffer.fill_(1e3)
    whole = made.consolidate()
    return whole[1].running_mean, whole[3].training, whole[5].running_mean.abs().max().item()


def test_frozen_norms_stay_and_batches_are_kept_as_they_were() -> None:
    for mean, dropping, largest in tw.simulate(frozen_norm, ranks=2):
        assert torch.equal(mean, torch.full((9,), 5.0))
        assert not dropping
        assert largest < 50


def fewer_blocks_than_ranks(comm: Comm) -> bool:
    model = nn.Sequential(*list(RESNET)[:5], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    made = trainer(comm, "ist(cut=blocks, local_steps=2)", model)
    assert made.slices.axes[0].size == 2
    assert made._eval_scales()["3.body.4.weight"] == 0.5
    for batch in batches(5, shape=(1, 8, 8)):
        made.step(batch)
    return all(t.isfinite().all() for t in weights(made.consolidate()).values())


def test_blocks_may_be_fewer_than_ranks() -> None:
    assert all(tw.simulate(fewer_blocks_than_ranks, ranks=3))


def stop_and_go(comm: Comm) -> tuple[Weights, Weights]:
    """Stop in mid-round with unequal steps, shares and another seed; of four ranks, two train the same network each."""
    spec = "ist(local_steps=4, shares=[2, 1], seed=5, subnets=2)"

    def go(made: Any, first: int, last: int) -> None:
        for i, batch in enumerate(batches(9, shape=(1, 6, 6), seed=comm.rank)[first:last], first):
            made.skip_step() if comm.rank and i % 3 == 1 else made.step(batch)

    straight = trainer(comm, spec, NORMED, adamw)
    go(straight, 0, 6)
    saved = copy.deepcopy(straight.state_dict())
    go(straight, 6, 9)
    after = trainer(comm, "ist(local_steps=4, subnets=2)", NORMED, adamw)
    after.load_state_dict(saved)
    go(after, 6, 9)
    return weights(straight.consolidate()), weights(after.consolidate())


@pytest.mark.parametrize("ranks", [2, 4])
def test_unequal_shares_and_steps_resume_exactly(ranks: int) -> None:
    for straight, resumed in tw.simulate(stop_and_go, ranks=ranks):
        assert same(straight, resumed)


def test_a_list_of_batches_may_be_shorter_than_it_says() -> None:
    class Short(list[Any]):
        def __len__(self) -> int:
            return 4

    def train(comm: Comm) -> int:
        made = trainer(comm, "ist(local_steps=2)")
        for _ in range(2):
            for batch in tw.epoch(made, Short(batches(3 + comm.rank)), comm):
                made.step(batch)
        made.consolidate()
        return int(made.learner.num_steps)

    assert tw.simulate(train, ranks=2) == [8, 8]


# ---- what may go wrong


def test_an_emptied_model_is_refused_and_a_refused_one_is_not_emptied() -> None:
    def twice(comm: Comm) -> None:
        model = copy.deepcopy(MLP)
        options = {"model": model, "loss": nn.functional.cross_entropy, "comm": comm}
        with pytest.raises(tw.UsageError, match="optimizer_state=reset"):
            tw.prepare("ist", optimizer=lambda p: torch.optim.Adafactor(p), **options)
        made = tw.prepare("ist(optimizer_state=reset)", optimizer=lambda p: torch.optim.Adafactor(p), **options)
        assert torch.equal(made.consolidate()[0].weight, MLP[0].weight)
        with pytest.raises(tw.UsageError, match="tensors of this model were taken out"):
            tw.prepare("ist", optimizer=decayed_sgd, **options)
        with pytest.raises(tw.UsageError, match="LBFGS takes no plain step"):
            trainer(comm, "ist", optimizer=torch.optim.LBFGS)

    tw.simulate(twice, ranks=2)


def test_only_layers_on_the_meta_device_begin_anew() -> None:
    def mixed(comm: Comm) -> bool:
        model = copy.deepcopy(MLP)
        model[4] = nn.Linear(14, 3, device="meta")
        whole = trainer(comm, "ist", model).consolidate()
        return torch.equal(whole[0].weight, MLP[0].weight) and bool(whole[4].weight.std() > 0.05)

    assert all(tw.simulate(mixed, ranks=2))


def test_a_weight_that_is_read_elsewhere_is_not_computed_with_when_it_is_away() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), nn.Embedding(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.net(x), self.out.weight)

    def test(comm: Comm) -> None:
        made = trainer(comm, "ist(whole_gb=1e-9)", Reading())
        made.step(batches(1)[0])
        made.eval_model().eval()(batches(1)[0][0])

    with pytest.raises(tw.RunError, match="read by something else than its own layer"):
        tw.simulate(test, ranks=2)


def test_units_of_plain_parameters_are_not_scaled_in_training() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(12, 6)), nn.Parameter(torch.randn(3, 12))
            self.thinwire_axes = [tw.Axis(12, {"up": 0}, {"down": 1})]

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.up.T) @ self.down.T

    model = Bare()
    with pytest.raises(tw.UsageError, match=r"scale=train, but down is not of a layer.*try scale=eval"):
        tw.simulate(lambda comm: trainer(comm, "ist(scale=train)", model), ranks=2)
    for whole in tw.simulate(lambda comm: weights(trainer(comm, "ist", model).consolidate()), ranks=2):
        torch.testing.assert_close(whole["down"], model.down.detach())


def test_an_export_that_fails_fails_everywhere() -> None:
    def write(comm: Comm) -> str:
        with pytest.raises(tw.RunError, match="could not write") as caught:
            trainer(comm, "ist").export("/proc/nowhere/model", max_gb=1e-6)
        return str(caught.value)

    assert all("nowhere" in message for message in tw.simulate(write, ranks=2))


def test_bad_options_say_what_is_possible() -> None:
    narrow = nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 3))
    for spec, model, message in (
        (
            "ist",
            narrow,
            "0.weight makes 2 units, too few for 3 narrow networks.*at most 2 ranks, subnets=2 or",
        ),
        ("ist", nn.Linear(6, 3), "ist: no hidden units.*two layers"),
        ("ist(scale=norm)", MLP, "no norm follows 2.weight; try scale=eval"),
        ("ist(shares=[1, 2])", MLP, r"shares=\[1.0, 2.0\] for 3 ranks"),
        ("ist(shares=[1, 0, 2])", MLP, "shares"),
        ("ist(subnets=4)", MLP, "subnets=4 for 3 ranks; possible: 1 to 3"),
        ("ist(subnets=0)", MLP, "subnets"),
        ("ist(subnets=2, shares=measured)", MLP, "shares=measured.*leave subnets out"),
        ("ist(subnets=2, shares=[1, 2, 3])", MLP, r"shares=\[1.0, 2.0, 3.0\] for 2 narrow networks"),
        ("ist(local_steps=0)", MLP, "local_steps"),
        ("ist(cut=blocks)", MLP, "no residual blocks"),
    ):
        with pytest.raises(tw.UsageError, match=message):
            tw.simulate(lambda comm, spec=spec, model=model: trainer(comm, spec, model), ranks=3)


def test_a_refused_model_is_left_as_it_was() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8)

    def refused(comm: Comm) -> None:
        tw.prepare("ist", model=model, optimizer=decayed_sgd, loss=nn.functional.mse_loss, comm=comm)

    with pytest.raises(tw.UsageError, match="too few for 3 narrow networks"):
        tw.simulate(refused, ranks=3)
    assert isinstance(model.self_attn, nn.MultiheadAttention)
    assert not any(p.is_meta for p in model.parameters())


def test_moments_that_cannot_be_cut_are_refused() -> None:
    def odd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters)

    with pytest.raises(tw.UsageError, match=r"Adafactor keeps .*optimizer_state=reset"):
        tw.simulate(lambda comm: trainer(comm, "ist", optimizer=odd), ranks=2)
    tw.simulate(
        lambda comm: trainer(comm, "ist(optimizer_state=reset)", optimizer=odd).step(batches(1)[0]), ranks=2
    )  # fmt: skip


def test_a_rank_that_is_lost_in_mid_round_ends_the_run() -> None:
    def train(comm: Comm) -> None:
        made = trainer(comm, "ist(local_steps=3)")
        for i, batch in enumerate(batches(5)):
            if comm.rank == 1 and i == 2:
                raise PeerLost("its machine is gone")
            made.step(batch)

    with pytest.raises(PeerLost, match="its machine is gone"):
        tw.simulate(train, ranks=3)


def test_a_state_of_other_ranks_or_moments_is_refused() -> None:
    saved = tw.simulate(lambda comm: trainer(comm, "ist").state_dict(), ranks=2)[0]
    with pytest.raises(tw.RunError, match="another number of ranks"):
        tw.simulate(lambda comm: trainer(comm, "ist").load_state_dict(saved), ranks=3)
    for spec in ("ist(local_steps=3)", "ist(scale=train)", "ist(subnets=1)"):
        with pytest.raises(tw.RunError, match="local_steps, cut, scale"):
            tw.simulate(lambda comm, spec=spec: trainer(comm, spec).load_state_dict(saved), ranks=2)
    with pytest.raises(tw.RunError, match="another optimizer"):
        tw.simulate(lambda comm: trainer(comm, "ist(optimizer_state=reset)").load_state_dict(saved), ranks=2)


class Running(nn.Module):
    """Keeps a running mean of its inputs, which it changes in place in the forward pass."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.level.mul_(0.9).add_(x.detach().abs().mean(), alpha=0.1)
        return x


def test_a_model_may_change_its_buffers_while_it_computes(world: World) -> None:
    """Small weights lie beside them in memory, and autograd must not take those for changed."""
    found = world(with_running_mean, 2)
    assert all(losses[-1] < losses[0] for losses, _ in found)
    assert all(level > 0 for _, level in found)


def with_running_mean(comm: Comm) -> tuple[list[float], float]:
    net = seeded(3, lambda: nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)))
    one = trainer(comm, "ist(local_steps=2)", nn.Sequential(*net, Running()))
    losses = training.steps(one, batches(1) * 12)
    return losses, one.consolidate()[-1].level.item()
