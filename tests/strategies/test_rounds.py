"""tw.rounds in loops that are not ours: what tw.prepare would train, on whole models, DDPs inside nodes, and shards."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.training import MODELS, batches, part, same, sgd, weights
from tests.worlds import ProcessWorlds, World, mesh_of, worlds
from thinwire.comm.base import Comm
from thinwire.common import messages

SPECS = [
    "local_sgd(every=3)",
    "local_sgd(every=2, reducer=error_feedback(maxnorm(bits=4)))",
    "diloco(every=4)",
    "diloco(every=4, fragments=2)",
    "diloco(every=4, wait=2, reducer=powersgd(rank=1))",
    "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=0)",
]
EPOCHS, STEPS = 3, 5
SHARDED = [
    "local_sgd(every=2)",
    "diloco(every=4, fragments=2)",
    "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=0)",
]

torch.manual_seed(5)
DEEP = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


def model() -> nn.Sequential:
    return copy.deepcopy(DEEP)


def data(epoch: int) -> list[tuple[Tensor, Tensor]]:
    return batches(STEPS, 24, seed=epoch)


def take_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def sent(ledger: Any) -> dict[tuple[str, str], int]:
    """Bytes by purpose and operation; what tw.epoch asks all ranks about their batches is left out."""
    found: dict[tuple[str, str], int] = {}
    for row in ledger.rows():
        key = row["purpose"], row["op"]
        if row["purpose"] in ("train", "sync") and key != ("sync", "all_gather"):
            found[key] = found.get(key, 0) + row["wire_bytes"]
    return found


# ---- whole models


def by_prepare(comm: Comm, spec: str) -> tuple[dict[str, Tensor], Any]:
    trainer = tw.prepare(
        spec, model=copy.deepcopy(MODELS[0]), comm=comm, loss=nn.functional.cross_entropy, optimizer=sgd, epochs=EPOCHS
    )
    for epoch in range(EPOCHS):
        for batch in tw.epoch(trainer, [part(b, trainer.shard) for b in data(epoch)], comm):
            trainer.step(batch)
    return weights(trainer.model), sent(comm.ledger)  # type: ignore[attr-defined]


def by_rounds(comm: Comm, spec: str, stop: int | None = None) -> tuple[dict[str, Tensor], Any]:
    """A loop of the user's own; with `stop` another one goes on after so many steps, from what this one kept."""
    net = copy.deepcopy(MODELS[0])
    optimizer = sgd(net.parameters())
    rounds = tw.rounds(net, spec, comm=comm, epochs=EPOCHS)
    shard, num_steps = tw.Shard(comm.rank, comm.size), 0
    for epoch in range(EPOCHS):
        for batch in data(epoch):
            rounds.after_step(take_step(net, optimizer, part(batch, shard)))
            num_steps += 1
            if num_steps == stop:
                kept = copy.deepcopy([net.state_dict(), optimizer.state_dict(), rounds.state_dict()])
                net = copy.deepcopy(MODELS[0])
                optimizer = sgd(net.parameters())
                rounds = tw.rounds(net, spec, comm=comm, epochs=EPOCHS)
                for one, state in zip((net, optimizer, rounds), kept, strict=True):
                    one.load_state_dict(state)
        rounds.together()
    return weights(net), sent(comm.ledger)


@worlds(threads=[3], processes=[2])
@pytest.mark.parametrize("spec", SPECS)
def test_an_own_loop_trains_and_sends_what_prepare_does(world: World, ranks: int, spec: str) -> None:
    for (ours, our_bytes), (theirs, their_bytes) in zip(
        world(by_rounds, ranks, spec), world(by_prepare, ranks, spec), strict=True
    ):
        assert same(ours, theirs)
        assert our_bytes == their_bytes


@worlds(threads=[3], processes=[2])
@pytest.mark.parametrize("spec", SPECS)
def test_a_loop_that_goes_on_from_its_state_ends_bit_for_bit_the_same(world: World, ranks: int, spec: str) -> None:
    whole, resumed = world(by_rounds, ranks, spec), world(by_rounds, ranks, spec, 8)
    assert all(same(one[0], other[0]) for one, other in zip(whole, resumed, strict=True))


def meeting_in_every_step(comm: Comm, spec: str) -> tuple[bool, Any]:
    """Whether ranks are equal after each of these meetings; and the state at the end."""
    net, equal = copy.deepcopy(MODELS[0]), []
    optimizer = sgd(net.parameters())
    rounds = tw.rounds(net, spec, comm=comm, epochs=EPOCHS)
    for epoch in range(EPOCHS):
        for batch in data(epoch):
            rounds.after_step(take_step(net, optimizer, part(batch, tw.Shard(comm.rank, comm.size))))
            rounds.together(ends_epoch=False)
            equal.append(are_equal(comm, net))
        rounds.together()
    return all(equal), rounds.state_dict()["rounds"]


@pytest.mark.parametrize("spec", SPECS)
def test_meetings_in_the_middle_of_an_epoch_make_ranks_equal_and_do_not_end_it(spec: str) -> None:
    for equal, state in tw.simulate(lambda comm: meeting_in_every_step(comm, spec), ranks=3):
        assert equal
        assert state.get("counts", {}).get("epoch", EPOCHS) == EPOCHS


def with_everything(comm: Comm) -> tuple[bool, int]:
    """Two models with an optimizer each, parameter groups, a schedule, frozen and tied weights, an EMA, compiled."""
    generator, critic = copy.deepcopy(MODELS[0]), nn.Linear(3, 3)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    tied[2].weight, tied[1].weight.requires_grad = tied[0].weight, False
    both = nn.ModuleDict({"generator": generator, "critic": critic, "tied": tied})
    with torch.no_grad():
        for p in both.parameters():
            p.add_(0.1 * comm.rank * p.requires_grad)
    rounds = tw.rounds(both, "diloco(every=2, fragments=2)", comm=comm)
    first = torch.optim.AdamW(
        [{"params": list(generator.parameters()), "lr": 0.01}, {"params": list(tied.parameters())}]
    )
    second = torch.optim.SGD(critic.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(first, 2)
    average = torch.optim.swa_utils.AveragedModel(both)
    compiled = torch.compile(generator, backend="eager")
    for x, y in batches(5, 8, seed=comm.rank):
        out = tied(compiled(x))
        (nn.functional.cross_entropy(out, y) + critic(out).square().mean()).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        rounds.after_step()
        average.update_parameters(both)
    rounds.together()
    mine = torch.cat([p.detach().flatten() for p in both.parameters()])
    return all(torch.equal(mine, other) for other in comm.all_gather(mine)), len(list(average.parameters()))


def test_whatever_else_the_loop_does_ranks_meet(process_world: ProcessWorlds) -> None:
    assert all(equal and count for equal, count in process_world.run(with_everything, 2))


# ---- ranks of a node together, by DDP or fully_shard


def node_mesh(comm: Comm) -> Any:
    return mesh_of((comm.size // 2, 2), ("nodes", "shards"))["shards"]


def on_nodes(comm: Comm, kind: str, spec: str, stop: int | None = None) -> tuple[dict[str, Tensor], int]:
    """Train with two ranks a node; returns the whole model, and the bytes that this rank sent to other nodes."""
    mesh = node_mesh(comm)

    def make() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Any]:
        plain = model()
        trained: nn.Module = plain
        if kind == "ddp":
            trained = DistributedDataParallel(plain, process_group=mesh.get_group())
        else:
            for layer in plain[::2]:
                fully_shard(layer, mesh=mesh)
            fully_shard(plain, mesh=mesh)
        return (
            plain,
            trained,
            torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9),
            tw.rounds(trained, spec, epochs=EPOCHS),
        )

    plain, trained, optimizer, rounds = make()
    shard, num_steps = tw.Shard(comm.rank, comm.size), 0
    for epoch in range(EPOCHS):
        for batch in data(epoch):
            rounds.after_step(take_step(trained, optimizer, part(batch, shard)))
            num_steps += 1
            if num_steps == stop:
                kept = copy.deepcopy([plain.state_dict(), optimizer.state_dict(), rounds.state_dict()])
                rounds.close()
                plain, trained, optimizer, rounds = make()
                for one, state in zip((plain, optimizer, rounds), kept, strict=True):
                    one.load_state_dict(state)
        rounds.together()
    between = sum(
        row["wire_bytes"] for row in rounds.ledger.rows() if row["link"] == "between" and row["purpose"] == "train"
    )
    rounds.close()
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in plain.state_dict().items()}
    return {name: t.detach().clone() for name, t in whole.items()}, between


def reference(comm: Comm, spec: str) -> dict[str, Tensor]:
    """One rank for each node, with the batch of both of its ranks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    rounds = tw.rounds(net, spec, comm=comm, epochs=EPOCHS)
    for epoch in range(EPOCHS):
        for batch in data(epoch):
            mine = [part(batch, tw.Shard(2 * comm.rank + i, 2 * comm.size)) for i in (0, 1)]
            rounds.after_step(
                take_step(net, optimizer, (torch.cat([x for x, _ in mine]), torch.cat([y for _, y in mine])))
            )
        rounds.together()
    return weights(net)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("spec", SHARDED)
def test_nodes_that_train_together_are_one_replica(process_world: ProcessWorlds, kind: str, spec: str) -> None:
    wanted = tw.simulate(lambda comm: reference(comm, spec), ranks=2)[0]
    spec = spec.replace("ranks_per_node=1", "ranks_per_node=2") if kind == "ddp" else spec
    for found, _ in process_world.run(on_nodes, 4, kind, spec):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "stop"), [("ddp", 7), ("fsdp", 7), ("fsdp", 9)])
def test_nodes_go_on_exactly_in_the_middle_of_a_round(process_world: ProcessWorlds, kind: str, stop: int) -> None:
    spec = "diloco(every=4, fragments=2, reducer=error_feedback(maxnorm(bits=4)))"
    whole, resumed = (process_world.run(on_nodes, 4, kind, spec, one) for one in (None, stop))
    assert all(same(one[0], other[0]) for one, other in zip(whole, resumed, strict=True))


def test_each_rank_sends_its_own_rows_or_one_rank_of_a_node_sends_for_all(process_world: ProcessWorlds) -> None:
    spec, count = "local_sgd(every=5)", sum(p.numel() for p in model().parameters())
    sharded = [between for _, between in process_world.run(on_nodes, 4, "fsdp", spec)]
    together = [between for _, between in process_world.run(on_nodes, 4, "ddp", spec)]
    assert sum(sharded) == sum(together) == 2 * EPOCHS * 4 * count
    assert together[1] == together[3] == 0
    assert max(sharded) < 0.6 * max(together)


def in_unequal_nodes(comm: Comm) -> bool:
    """Nodes of two ranks and of one, each with a DDP."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
    net = DistributedDataParallel(model(), process_group=groups[comm.rank // 2])
    rounds, optimizer = tw.rounds(net, "local_sgd(every=2)"), torch.optim.SGD(net.parameters(), 0.1)
    for batch in batches(3, 8, seed=comm.rank):
        take_step(net, optimizer, batch)
        rounds.after_step()
    rounds.together()
    rounds.close()
    return are_equal(comm, net)


def are_equal(comm: Comm, net: nn.Module) -> bool:
    tensors = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in net.state_dict().values()]
    mine = torch.cat([t.detach().flatten().float() for t in tensors])
    return all(torch.equal(mine, other) for other in comm.all_gather(mine))


def test_nodes_may_have_unequal_numbers_of_ranks(process_world: ProcessWorlds) -> None:
    assert all(process_world.run(in_unequal_nodes, 3))


def with_statistics(comm: Comm) -> tuple[bool, str]:
    """Shards of a model with BatchNorm that has run before, and daso's defaults; then parameters are unfrozen."""
    net: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net[2].weight.requires_grad_(False)
    fully_shard(net, mesh=node_mesh(comm))
    net(torch.ones(2, 6))
    rounds, optimizer = tw.rounds(net, "daso", epochs=9), torch.optim.SGD(net.parameters(), 0.1)
    for batch in batches(3, 8, seed=comm.rank):
        rounds.after_step(take_step(net, optimizer, batch).item())
    rounds.together()
    equal = are_equal(comm, net)
    net[2].weight.requires_grad_(True)
    with pytest.raises(tw.UsageError) as error:
        rounds.after_step()
    rounds.close()
    return equal, str(error.value)


def test_statistics_of_shards_are_averaged_and_unfrozen_parameters_refused(process_world: ProcessWorlds) -> None:
    for equal, message in process_world.run(with_statistics, 4):
        assert equal
        assert "some were frozen or unfrozen" in message


def closed_again(comm: Comm) -> int:
    for _ in range(3):
        tw.rounds(model(), "local_sgd", comm=comm).close()
    return len(comm.subgroups)


@worlds(threads=[2], processes=[2])
def test_rounds_that_are_closed_leave_no_group(world: World, ranks: int) -> None:
    assert world(closed_again, ranks) == [0, 0]


# ---- refusals


def refused(comm: Comm, case: str) -> str:
    mesh = mesh_of((2, comm.size // 2), ("nodes", "shards"))
    net: nn.Module = model()
    spec = "diloco"
    if case == "one replica":
        net = DistributedDataParallel(net)
    elif case == "one sharded replica":
        net = fully_shard(net)
    elif case == "two dimensions":
        net = fully_shard(net, mesh=mesh)
    elif case == "other nodes":
        net, spec = DistributedDataParallel(net, process_group=mesh["shards"].get_group()), "daso(ranks_per_node=1)"
    elif case == "few rows":
        net = nn.Sequential(nn.Linear(6, 1, bias=False), nn.Linear(1, 3, bias=False))
        net, spec = fully_shard(net, mesh=mesh["shards"]), "diloco(fragments=2)"
    elif case == "another shard":
        net = fully_shard(net, mesh=mesh["shards"])
        rounds = tw.rounds(net, "local_sgd(every=2)")
        state = {**rounds.state_dict(), "rank": f"{comm.rank ^ 1} of {comm.size}"}
        with pytest.raises(tw.UsageError) as error:
            rounds.load_state_dict(state)
        rounds.close()
        return str(error.value)
    elif case == "other state":
        state = tw.rounds(model(), "local_sgd(every=2)").state_dict()
        with pytest.raises(tw.UsageError) as error:
            tw.rounds(net, spec, epochs=9).load_state_dict(state)
        return str(error.value)
    with pytest.raises(tw.UsageError) as error:
        tw.rounds(net, spec, epochs=9)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("one replica", r"this DDP averages the gradients of all 4 ranks already\. Remove the DDP and give"),
        ("one replica", r"the plain module; or, with several ranks on each node, make DDP\(model, process_group=…\)"),
        ("one sharded replica", "all 4 ranks train one replica, each with a shard, .* mesh of fully_shard of"),
        ("two dimensions", r'fully_shard\(module, mesh=mesh\["shards"\]\)'),
        ("other nodes", r"those that exchange gradients are \[\[0, 1\], \[2, 3\]\]"),
        ("few rows", r"fragments=2, but the model has 1 parameter tensors"),
        ("another shard", r"the state is of rank . of 4, and this is rank . of 4"),
        ("other state", r"the state is of strategy local_sgd\(every=2\)"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(process_world: ProcessWorlds, case: str, message: str) -> None:
    for found in process_world.run(refused, 4, case):
        assert re.search(message, found)


@pytest.mark.parametrize("spec", ["data_parallel", "ist", "maxnorm(bits=4)"])
def test_what_has_no_rounds_is_refused(spec: str) -> None:
    with pytest.raises(tw.UsageError, match=r"local_sgd, diloco, daso|not a strategy"):
        tw.rounds(model(), spec)


def test_a_single_process_has_nobody_to_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_said", set())
    assert not dist.is_initialized()
    net = model()
    before = weights(net)
    rounds = tw.rounds(net, "local_sgd(every=1)")
    rounds.after_step()
    rounds.together()
    rounds.load_state_dict(rounds.state_dict())
    rounds.close()
    assert same(before, weights(net))
    assert rounds.ledger.wire_bytes == 0
    assert "nothing to average" in capsys.readouterr().err
