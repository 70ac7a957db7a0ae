"""The same laws with CUDA tensors; several ranks may share one GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.strategies.test_laws import batches, same, sgd, steps, weights
from tests.worlds import ProcessWorld, on_threads
from thinwire.comm.base import Comm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
NET = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def every_operation(comm: Comm) -> list[tuple[str, list[float]]]:
    tensor = torch.full((3,), float(comm.rank), device="cuda")
    results = {
        "sum": comm.sum(tensor),
        "mean": comm.mean(tensor),
        "max": comm.max(tensor),
        "broadcast": comm.broadcast(tensor, root=1),
        "gather": torch.cat(comm.gather(tensor)),
        "all_to_all": torch.cat(comm.all_to_all([tensor[:1] for _ in range(comm.size)])),
    }
    if comm.rank == 0:
        comm.send(tensor + 7, to=1)
    elif comm.rank == 1:
        results["recv"] = comm.recv(tensor, source=0)
    assert all(r.is_cuda for r in results.values())
    return [(name, result.tolist()) for name, result in results.items()]


def train(comm: Comm, spec: str) -> dict[str, Tensor]:
    model = copy.deepcopy(NET).cuda()
    strategy = tw.prepare(spec, model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm)
    steps(strategy, batches(20, 24))
    assert next(strategy.consolidate().parameters()).is_cuda
    return {name: tensor.cpu() for name, tensor in weights(strategy.consolidate()).items()}


def test_operations_on_cuda_tensors_are_those_on_threads(process_world: ProcessWorld) -> None:
    assert process_world.run(every_operation, 3) == on_threads(every_operation, 3)


@pytest.mark.parametrize("spec", ["data_parallel", "data_parallel(parcel_mb=0.005)"])
def test_n_ranks_on_a_gpu_are_one_rank(process_world: ProcessWorld, spec: str) -> None:
    alone = on_threads(train, 1, spec)[0]
    results: list[Any] = process_world.run(train, 4, spec)
    assert all(same(results[0], other) for other in results)
    for name in alone:
        torch.testing.assert_close(results[0][name], alone[name], rtol=1e-4, atol=1e-5)


def test_nccl_gives_cpu_tensors_back_whole() -> None:
    """A world of one on nccl: results of CPU tensors are copied off the GPU before anybody reads them."""
    with tw.join(backend="nccl", device="cuda:0") as comm:
        busy = torch.randn(8192, 8192, device="cuda")
        for i in range(20):
            busy = busy @ busy / 100  # work that a careless copy would not wait for
            given = torch.full((100_000,), float(i))
            assert torch.equal(comm.sum(given), given)
            assert torch.equal(comm.mean(given), given)
            assert torch.equal(comm.gather(given)[0], given)
            assert torch.equal(comm.broadcast(given), given)
            assert torch.equal(comm.all_to_all([given])[0], given)
        alone = train(comm, "data_parallel")
    for name, expected in on_threads(train, 1, "data_parallel")[0].items():
        torch.testing.assert_close(alone[name], expected, rtol=1e-4, atol=1e-5)
