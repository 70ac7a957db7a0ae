"""tw.rounds in a part of the world: what a world of so many ranks trains and sends, whatever other ranks do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.training import MODELS, batches, part, same, weights
from tests.worlds import ProcessWorlds, World, mesh_of, no_grace, worlds
from thinwire.comm.base import Comm
from thinwire.errors import PeerLost

SPECS = [
    "local_sgd(every=2, reducer=error_feedback(maxnorm(bits=4)))",
    "diloco(every=4, fragments=2)",
    "diloco(every=4, wait=2, reducer=powersgd(rank=1))",
    "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=0)",
]
FEEDBACK = "diloco(every=4, fragments=2, reducer=error_feedback(maxnorm(bits=4)))"
EPOCHS, STEPS = 2, 5
Result = tuple[dict[str, Tensor], list[Any]]

torch.manual_seed(5)
DEEP = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


def plain() -> tuple[nn.Module, nn.Module]:
    net = copy.deepcopy(MODELS[0])
    return net, net


class Loop:
    """A loop of the user's own; `make` returns the module, and what trains it."""

    def __init__(
        self, make: Callable[[], tuple[nn.Module, nn.Module]], spec: str, shard: tw.Shard, seed: int, **about: Any
    ) -> None:
        self.make, self.spec, self.shard, self.seed, self.about = make, spec, shard, seed, about
        self.begin()

    def begin(self) -> None:
        self.net, self.trained = self.make()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.rounds = tw.rounds(self.trained, self.spec, epochs=EPOCHS, **self.about)

    def step(self, epoch: int, number: int) -> None:
        x, y = part(batches(STEPS, 24, seed=10 * self.seed + epoch)[number], self.shard)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.trained(x), y)
        loss.backward()
        self.optimizer.step()
        self.rounds.after_step(loss.detach())

    def resume(self) -> None:
        kept = copy.deepcopy([one.state_dict() for one in (self.net, self.optimizer, self.rounds)])
        self.rounds.close()
        self.begin()
        for one, state in zip((self.net, self.optimizer, self.rounds), kept, strict=True):
            one.load_state_dict(state)

    def run(self, stop: int | None = None) -> Result:
        for epoch in range(EPOCHS):
            for number in range(STEPS):
                if epoch * STEPS + number == stop:
                    self.resume()
                self.step(epoch, number)
            self.rounds.together()
        return self.finish()

    def finish(self) -> Result:
        """The whole model, and what was sent: rows of the ledger without times and the name of the link."""
        names = ("purpose", "op", "ranks", "calls", "payload_bytes", "wire_bytes", "between_bytes")
        sent = sorted([row[name] for name in names] for row in self.rounds.ledger.rows())
        self.rounds.close()
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in self.net.state_dict().items()}
        return {name: t.detach().clone() for name, t in whole.items()}, sent


# ---- plain models


def in_whole_world(comm: Comm, spec: str, seed: int) -> Result:
    return Loop(plain, spec, tw.Shard(comm.rank, comm.size), seed, comm=comm).run()


def in_split_world(comm: Comm, specs: list[str], stop: int | None = None) -> Any:
    """Ranks 0 and 2 have one spec, 1 and 3 another; no spec: they do nothing. Each part is split from the world."""
    half = comm.split([[0, 2], [1, 3]], "half")
    spec, seed = specs[comm.rank % 2], comm.rank % 2
    return Loop(plain, spec, tw.Shard(half.rank, 2), seed, comm=half).run(stop) if spec else None


def in_groups(comm: Comm, specs: list[str], stop: int | None = None) -> Any:
    """The same with torch's groups, of which one rank has a process group and another the dimension of a mesh."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    spec, seed = specs[comm.rank % 2], comm.rank % 2
    group: Any = mesh["dp"].get_group() if comm.rank < 2 else mesh["dp"]
    return Loop(plain, spec, tw.Shard(comm.rank // 2, 2), seed, group=group).run(stop) if spec else None


@worlds(threads=[4], processes=[4])
@pytest.mark.parametrize("spec", SPECS)
def test_a_part_that_was_split_off_trains_and_sends_what_a_world_of_its_size_does(
    world: World, ranks: int, spec: str
) -> None:
    wanted = [world(in_whole_world, 2, one, seed) for seed, one in enumerate((spec, FEEDBACK))]
    for rank, (found, sent) in enumerate(world(in_split_world, ranks, [spec, FEEDBACK])):
        assert same(found, wanted[rank % 2][rank // 2][0])
        assert sent == wanted[rank % 2][rank // 2][1]


@pytest.mark.parametrize("spec", SPECS)
def test_a_group_trains_and_sends_what_a_world_of_its_size_does(process_world: ProcessWorlds, spec: str) -> None:
    wanted = [process_world.run(in_whole_world, 2, one, seed) for seed, one in enumerate((spec, FEEDBACK))]
    for rank, (found, sent) in enumerate(process_world.run(in_groups, 4, [spec, FEEDBACK])):
        assert same(found, wanted[rank % 2][rank // 2][0])
        assert sent == wanted[rank % 2][rank // 2][1]


def test_other_ranks_need_do_nothing(process_world: ProcessWorlds) -> None:
    wanted = process_world.run(in_whole_world, 2, FEEDBACK, 0)
    first, second, third, fourth = process_world.run(in_groups, 4, [FEEDBACK, ""])
    assert (second, fourth) == (None, None)
    assert same(first[0], wanted[0][0])
    assert same(third[0], wanted[1][0])


@pytest.mark.parametrize("stop", [3, 7])
def test_a_part_goes_on_exactly_from_its_state(process_world: ProcessWorlds, stop: int) -> None:
    straight, resumed = (process_world.run(in_groups, 4, [FEEDBACK, SPECS[2]], one) for one in (None, stop))
    assert all(same(one[0], other[0]) for one, other in zip(straight, resumed, strict=True))


def along_both(comm: Comm, dimensions: list[str]) -> list[Result]:
    """A model along each dimension of a mesh, trained in turn; every rank is in one group of each."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    loops = {n: Loop(plain, FEEDBACK, tw.Shard(comm.rank, 4), ord(n[0]), group=mesh[n]) for n in dimensions}
    for epoch in range(EPOCHS):
        for number in range(STEPS):
            for loop in loops.values():
                loop.step(epoch, number)
        for loop in loops.values():
            loop.rounds.together()
    return [loop.finish() for loop in loops.values()]


def test_dimensions_of_a_mesh_that_overlap_do_not_disturb_each_other(process_world: ProcessWorlds) -> None:
    together = process_world.run(along_both, 4, ["dp", "tp"])
    for which, alone in enumerate(process_world.run(along_both, 4, [name]) for name in ("dp", "tp")):
        for rank in range(4):
            assert same(together[rank][which][0], alone[rank][0][0])
            assert together[rank][which][1] == alone[rank][0][1]


def two_of_one_comm(comm: Comm) -> bool:
    """Two models in one comm; one of them is closed, and the other goes on."""
    first, second = (Loop(plain, FEEDBACK, tw.Shard(comm.rank, comm.size), 0, comm=comm) for _ in range(2))
    first.rounds.close()
    second.run()
    return not comm.subgroups


@worlds(threads=[2], processes=[2])
def test_rounds_that_are_closed_close_no_others(world: World, ranks: int) -> None:
    assert world(two_of_one_comm, ranks) == [True, True]


def one_fails(comm: Comm) -> Any:
    """Rank 0 leaves in the third step; rank 2 is its only peer."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    loop = Loop(plain, "local_sgd(every=1)", tw.Shard(comm.rank // 2, 2), comm.rank % 2, group=mesh["dp"])
    for number in range(STEPS):
        if (comm.rank, number) == (0, 2):
            loop.rounds.close()
            return "left"
        try:
            with no_grace():
                loop.step(0, number)
        except PeerLost:
            loop.rounds.close()
            return f"lost in step {number}"
    loop.rounds.close()
    return weights(loop.net)


def test_an_error_reaches_the_part_of_its_rank_alone(process_world: ProcessWorlds) -> None:
    first, second, third, fourth = process_world.run(one_fails, 4)
    assert (first, third) == ("left", "lost in step 2")
    assert same(second, fourth)


# ---- replicas of several ranks


def ddp_on_nodes(comm: Comm, ranks: list[list[int]], case: str) -> Result | None:
    """DDPs on two of the ranks and on one, whose nodes are `ranks`; other ranks do nothing."""
    groups = [dist.new_group(node) for node in ranks]
    everybody = dist.new_group([rank for node in ranks for rank in node])
    mine = [i for i, node in enumerate(ranks) if comm.rank in node]
    if not mine:
        return None

    def make() -> tuple[nn.Module, nn.Module]:
        net = copy.deepcopy(DEEP)
        return net, DistributedDataParallel(net, process_group=groups[mine[0]])

    about: Any = {"world": {}, "group": {"group": everybody}}[case]
    return Loop(make, FEEDBACK, tw.Shard(everybody.rank(), everybody.size()), 1, **about).run(stop=7)


def test_a_part_of_several_nodes_with_a_ddp_each(process_world: ProcessWorlds) -> None:
    wanted = process_world.run(ddp_on_nodes, 3, [[0, 1], [2]], "world")
    nothing, *found = process_world.run(ddp_on_nodes, 4, [[1, 2], [3]], "group")
    assert nothing is None
    for (ours, our_bytes), (theirs, their_bytes) in zip(found, wanted, strict=True):
        assert same(ours, theirs)
        assert our_bytes == their_bytes


def on_mesh(comm: Comm, kind: str, what: str, shape: list[int], with_group: bool) -> Any:
    """A mesh of two dimensions, or of three: then each index of the first is a part of its own, with its own data."""
    names = ("pp", "dp", "local")[3 - len(shape) :]
    mesh = mesh_of(tuple(shape), names)
    size = shape[-1] * shape[-2]

    def make() -> tuple[nn.Module, nn.Module]:
        net: Any = copy.deepcopy(DEEP)
        if kind == "ddp":
            return net, DistributedDataParallel(net, process_group=mesh["local"].get_group())
        for layer in net[::2]:
            fully_shard(layer, mesh=mesh["local"])
        return net, fully_shard(net, mesh=mesh["local"])

    shard, about = tw.Shard(comm.rank % size, size), {"group": mesh["dp"]} if with_group else {}
    if what == "rounds":
        return Loop(make, FEEDBACK, shard, seed=comm.rank // size, **about).run(stop=7)
    net, trained = make()
    attached, optimizer = (
        tw.attach(trained, "error_feedback(maxnorm(bits=4))", **about),
        torch.optim.SGD(net.parameters(), 0.1),
    )
    for batch in batches(STEPS, 24, seed=10 * (comm.rank // size)):
        x, y = part(batch, shard)
        nn.functional.cross_entropy(trained(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = attached.ledger.wire_bytes
    attached.close()
    return {name: t.full_tensor().clone() for name, t in net.state_dict().items()}, sent


CASES = [("ddp", "rounds"), ("fsdp", "rounds"), ("fsdp", "attach")]


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_one_rank_of_each_replica_stands_for_all(process_world: ProcessWorlds, kind: str, what: str) -> None:
    wanted = process_world.run(on_mesh, 4, kind, what, [2, 2], False)
    for (ours, our_bytes), (theirs, their_bytes) in zip(
        process_world.run(on_mesh, 4, kind, what, [2, 2], True), wanted, strict=True
    ):
        assert same(ours, theirs)
        assert our_bytes == their_bytes


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_each_part_of_a_mesh_of_three_dimensions_is_a_world_of_its_own(
    process_world: ProcessWorlds, kind: str, what: str
) -> None:
    wanted = process_world.run(on_mesh, 4, kind, what, [2, 2], False)
    found = process_world.run(on_mesh, 8, kind, what, [2, 2, 2], True)
    for (ours, our_bytes), (theirs, their_bytes) in zip(found[:4], wanted, strict=True):
        assert same(ours, theirs)
        assert our_bytes == their_bytes
    assert not same(found[0][0], found[4][0]), "the other part has other data"


# ---- refusals


def refused(comm: Comm, case: str) -> str:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    about: Any = {"group": dist.new_group([0, 1])}
    net: nn.Module = nn.Linear(2, 2)
    if case == "both":
        about = {"comm": comm, "group": mesh["dp"]}
    elif case == "one rank":
        about = {"group": [dist.new_group([rank]) for rank in range(4)][comm.rank]}
        rounds = tw.rounds(net, "local_sgd(every=1)", **about)
        rounds.after_step()
        return f"{rounds.ledger.wire_bytes} bytes"
    elif case == "one replica":
        net = DistributedDataParallel(net, process_group=mesh["tp"].get_group())
        about = {"group": mesh["tp"]}
    elif case == "tensor parallel":
        net, about = parallelize_module(net, mesh["tp"], ColwiseParallel()), {"group": mesh["dp"]}
    elif comm.rank < 2:
        tw.rounds(net, "local_sgd", **about).close()
        return "a member"
    with pytest.raises(tw.UsageError) as error:
        tw.rounds(net, "local_sgd", **about)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("both", "comm and group are given"),
        ("one replica", "gradients of all 2 ranks already. Remove the DDP and give tw.rounds the plain module; or"),
        ("tensor parallel", "could differ after an exchange; use fully_shard"),
        ("not a member", "rounds: rank 3 is not in the group"),
        ("one rank", "0 bytes"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(process_world: ProcessWorlds, case: str, message: str) -> None:
    *_, last = process_world.run(refused, 4, case)
    assert message in last
