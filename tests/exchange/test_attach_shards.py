"""attach on a model that fully_shard divides over the ranks of a node: reducers between nodes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import thinwire as tw
from tests.golden import runs
from tests.training import batches, part, same
from tests.worlds import ProcessWorlds, mesh_of
from thinwire.comm.base import Comm
from thinwire.common import messages

torch.manual_seed(7)
MODEL = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3))
FEEDBACK = "error_feedback(maxnorm(bits=4))"
STEPS = 6


def mesh_with(dimensions: int) -> Any:
    mesh = mesh_of((2, 2), ("nodes", "shards"))
    return mesh if dimensions == 2 else mesh["shards"]


def sharded(dimensions: int = 1, **options: Any) -> nn.Module:
    model = copy.deepcopy(MODEL)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh_with(dimensions), **options)
    return fully_shard(model, mesh=mesh_with(dimensions), **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.full_tensor().clone() for name, t in model.state_dict().items()}


def train(
    comm: Comm, spec: str, stop: int | None = None, micro_batches: int = 1, options: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], int]:
    """Returns the whole model, and the bytes that this rank sent to other nodes. Without a spec: torch's own HSDP."""

    def make() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = sharded(1 if spec else 2, **(options or {}))
        return model, torch.optim.AdamW(model.parameters(), 0.01), tw.attach(model, spec) if spec else None

    model, optimizer, attached = make()
    for number, batch in enumerate(batches(STEPS, 32, seed=3), 1):
        x, y = part(batch, tw.Shard(comm.rank, comm.size))
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            out = model(x[i::micro_batches])
            (nn.functional.cross_entropy(out.float(), y[i::micro_batches]) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == stop:
            kept = copy.deepcopy([model.state_dict(), optimizer.state_dict(), attached.state_dict()])
            attached.close()
            model, optimizer, attached = make()
            for one, state in zip((model, optimizer, attached), kept, strict=True):
                one.load_state_dict(state)
    rows = attached.ledger.rows() if attached else []
    sent = sum(row["wire_bytes"] for row in rows if row["purpose"] == "train")
    if attached:
        attached.close()
    return whole(model), sent


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_mean_is_what_torchs_own_hsdp_computes(process_world: ProcessWorlds, micro_batches: int) -> None:
    ours = process_world.run(train, 4, "mean", None, micro_batches)
    torchs = process_world.run(train, 4, "", None, micro_batches)
    for (found, _), (wanted, _) in zip(ours, torchs, strict=True):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def columns_where_they_are_even(parameter: nn.Parameter) -> Shard:
    return Shard(int(parameter.dim() > 1 and parameter.shape[1] % 2 == 0))


def test_the_mean_of_columns_is_what_torchs_own_hsdp_computes(process_world: ProcessWorlds) -> None:
    options = {"shard_placement_fn": columns_where_they_are_even}
    (found, _), (wanted, _) = (process_world.run(train, 4, spec, None, 1, options)[0] for spec in ("mean", ""))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", [spec for specs in runs.reducers().values() for spec in specs])
def test_replicas_stay_equal_with_every_reducer(process_world: ProcessWorlds, spec: str) -> None:
    models = [model for model, _ in process_world.run(train, 4, spec)]
    assert all(same(models[0], model) for model in models[1:])
    assert not same(models[0], dict(MODEL.state_dict()))


def test_four_bits_send_less_than_a_sixth(process_world: ProcessWorlds) -> None:
    exact, coded = ([sent for _, sent in process_world.run(train, 4, spec)] for spec in ("mean", "maxnorm(bits=4)"))
    numel = sum(p.numel() for p in MODEL.parameters())
    assert sum(exact) == 2 * STEPS * 4 * numel  # each of the two nodes sends its gradients to the other one
    assert sum(coded) < sum(exact) / 6


@pytest.mark.parametrize("spec", [FEEDBACK, "powersgd(rank=2)"])
def test_a_run_that_goes_on_from_its_state_ends_bit_for_bit_the_same(process_world: ProcessWorlds, spec: str) -> None:
    straight, resumed = (process_world.run(train, 4, spec, stop) for stop in (None, 3))
    assert all(same(one[0], other[0]) for one, other in zip(straight, resumed, strict=True))


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision(process_world: ProcessWorlds, reduce_dtype: torch.dtype) -> None:
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)}
    models = [model for model, _ in process_world.run(train, 4, FEEDBACK, None, 1, options)]
    assert all(same(models[0], model) for model in models[1:])
    found, wanted = (process_world.run(train, 4, spec, None, 1, options)[0][0] for spec in ("mean", ""))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def beginning(comm: Comm, case: str) -> bool:
    """Begin in unusual ways; returns whether all ranks have the same weights after a few steps."""
    torch.manual_seed(comm.rank if case == "other weights" else 0)
    model: Any = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1), nn.Linear(1, 3))  # a layer of one row
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh_with(1))
    fully_shard(model, mesh=mesh_with(1))
    if case == "after a forward pass":
        model(torch.ones(2, 6))
    attached = tw.attach(model, FEEDBACK)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches(3, 8, seed=comm.rank):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    attached.close()
    mine = torch.cat([t.flatten() for t in whole(model).values()])
    return all(torch.equal(mine, other) for other in comm.all_gather(mine))


@pytest.mark.parametrize("case", ["few rows", "other weights", "after a forward pass"])
def test_nodes_are_equal_however_they_begin(process_world: ProcessWorlds, case: str) -> None:
    assert all(process_world.run(beginning, 4, case))


def on_two_meshes() -> nn.Module:
    """Weights over one dimension of the mesh and biases over the other, as experts and the rest may be: two groups."""
    mesh = mesh_with(2)
    kinds = [FSDPMeshInfo(mesh[name], shard_mesh_dim=0) for name in ("nodes", "shards")]
    model = copy.deepcopy(MODEL)
    return fully_shard(
        model, mesh=mesh["shards"], shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), kinds[p.dim() - 1])
    )


def refused(comm: Comm, case: str) -> str:
    model = on_two_meshes() if case == "two groups" else sharded(2 if case == "two dimensions" else 1)
    if case in ("state of another shard", "unfrozen"):
        model[0].requires_grad_(case != "unfrozen")
        attached = tw.attach(model, FEEDBACK)
        state = all_states(comm, attached)
        with pytest.raises((tw.UsageError, tw.RunError)) as wrong:
            attached.load_state_dict(state) if case != "unfrozen" else _train_unfrozen(model)
        attached.close()
        return str(wrong.value)
    if case == "unused":
        attached, layer = tw.attach(model, "mean"), model[0]
        layer.forward = lambda x: nn.functional.linear(x, layer.weight)  # the bias gets no gradient
        loss = layer(torch.ones(2, 6)).sum()
        with pytest.raises(tw.RunError) as lost:
            loss.backward()
        attached.close()
        return str(lost.value)
    if case == "twice":
        attached = tw.attach(model, "mean")
    with pytest.raises(tw.UsageError) as error:
        tw.attach(nn.Linear(2, 2) if case == "plain" else model, "mean")
    if case == "twice":
        attached.close()
    return str(error.value)


def all_states(comm: Comm, attached: Any) -> dict[str, Any]:
    """The state of the other rank of this node: its tensors have the same shapes."""
    state = copy.deepcopy(attached.state_dict())
    state["rank"] = f"{comm.rank ^ 1} of {comm.size}"
    return state


def _train_unfrozen(model: nn.Module) -> None:
    model.requires_grad_(True)
    model(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("state of another shard", "the state is of rank"),
        ("unfrozen", "was frozen or unfrozen after attach"),
        ("two dimensions", 'fully_shard(module, mesh=mesh["shards"])'),
        ("two groups", "possible: one mesh of one dimension, the ranks of a node"),
        ("plain", "wrap the model in DistributedDataParallel first, or shard it by fully_shard"),
        ("twice", "it takes one for its whole life"),
        ("unused", "set_reduce_scatter_unused_params(True)"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(process_world: ProcessWorlds, case: str, message: str) -> None:
    for found in process_world.run(refused, 4, case):
        assert message in found


def test_a_single_process_exchanges_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_said", set())
    assert not dist.is_initialized()
    attached = tw.attach(nn.Linear(2, 2), FEEDBACK)
    attached.load_state_dict(attached.state_dict())
    attached.close()
    assert attached.ledger.wire_bytes == 0
    assert "nothing to exchange" in capsys.readouterr().err
