"""The same laws with CUDA tensors; several ranks may share one GPU."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.reducers.test_laws import SPECS, tensors
from tests.reducers.test_laws import steps as reducer_steps
from tests.training import batches, epochs, same, seeded, sgd, steps, weights
from tests.worlds import ProcessWorlds, on_threads
from thinwire.comm.base import Comm
from thinwire.reducers.base import Named

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
NET = seeded(0, lambda: nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)))


def every_operation(comm: Comm) -> list[tuple[str, list[float]]]:
    tensor = torch.full((3,), float(comm.rank), device="cuda")
    results = {
        "sum": comm.sum(tensor),
        "mean": comm.mean(tensor),
        "max": comm.max(tensor),
        "broadcast": comm.broadcast(tensor, root=1),
        "gather": torch.cat(comm.all_gather(tensor)),
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


def test_operations_on_cuda_tensors_are_those_on_threads(process_world: ProcessWorlds) -> None:
    assert process_world.run(every_operation, 3) == on_threads(every_operation, 3)


@pytest.mark.parametrize("spec", ["data_parallel", "data_parallel(bucket_mb=0.005)"])
def test_n_ranks_on_a_gpu_are_one_rank(process_world: ProcessWorlds, spec: str) -> None:
    alone = on_threads(train, 1, spec)[0]
    results: list[Any] = process_world.run(train, 4, spec)
    assert all(same(results[0], other) for other in results)
    for name in alone:
        torch.testing.assert_close(results[0][name], alone[name], rtol=1e-4, atol=1e-5)


def reduced(comm: Comm, spec: str, dtype: torch.dtype) -> list[tuple[Named, Named, Named]]:
    sizes = [(64, 3, 3, 3), (64,), (), (0,), (33, 700)]
    given = [{n: t.cuda() for n, t in tensors(comm.rank, i, sizes, dtype).items()} for i in range(3)]
    results = []
    for grads, out in zip(given, reducer_steps(comm, spec, given), strict=True):
        assert all(t.is_cuda for t in (*out.mean.values(), *out.error().values()))
        results.append(tuple({n: t.cpu() for n, t in part.items()} for part in (grads, out.mean, out.error())))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_reducers_on_cuda_tensors_give_every_rank_the_mean_of_what_was_sent(
    process_world: ProcessWorlds, spec: str, dtype: torch.dtype
) -> None:
    results: list[Any] = process_world.run(reduced, 4, spec, dtype)
    for step in range(3):
        assert all(same(results[0][step][1], other[step][1]) for other in results)
        for name, mean in results[0][step][1].items():
            sent = torch.stack([r[step][0][name].double() - r[step][2][name].double() for r in results]).mean(0)
            coarse = 0.05 if dtype == torch.bfloat16 or "16" in spec else 1e-5
            if "sign" not in spec:
                torch.testing.assert_close(mean.double(), sent, rtol=coarse, atol=coarse * (1 + 4 * ("error" in spec)))


@pytest.mark.parametrize("reducer", ["error_feedback(maxnorm(bits=4))", "maxnorm(predicted=True)", "powersgd(rank=2)"])
def test_compressed_training_on_a_gpu_keeps_ranks_equal(process_world: ProcessWorlds, reducer: str) -> None:
    results: list[Any] = process_world.run(train, 4, f"data_parallel(reducer={reducer}, bucket_mb=0.005)")
    assert all(same(results[0], other) for other in results)


ON_A_SCHEDULE = [
    "local_sgd(every=3)",
    "diloco(every=4, fragments=2, reducer=error_feedback(maxnorm(bits=4)))",
    "daso(ranks_per_node=2, warmup_epochs=1, cooldown_epochs=0, reducer=mean)",
    "daso(ranks_per_node=2, warmup_epochs=0, cooldown_epochs=0, merge=delta)",
]


def train_in_epochs(comm: Comm, spec: str, device: str) -> dict[str, Tensor]:
    model = copy.deepcopy(NET).to(device)
    strategy = tw.prepare(spec, model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm, epochs=2)
    epochs(strategy, batches(10, 24), 5)
    strategy.load_state_dict(strategy.state_dict())
    epochs(strategy, batches(7, 24), 5)
    return {name: tensor.cpu() for name, tensor in weights(strategy.consolidate()).items()}


@pytest.mark.parametrize("spec", ON_A_SCHEDULE)
def test_parameters_exchanged_beside_a_gpu_are_those_of_a_cpu(process_world: ProcessWorlds, spec: str) -> None:
    results: list[Any] = process_world.run(train_in_epochs, 4, spec, "cuda")
    assert all(same(results[0], other) for other in results)
    on_cpu = on_threads(train_in_epochs, 4, spec, "cpu")[0]
    coarse = 1e-4 if "mean" in spec or "local_sgd" in spec else 2e-2  # a rounding may fall the other way
    for name, expected in on_cpu.items():
        torch.testing.assert_close(results[0][name], expected, rtol=coarse, atol=coarse)


def on_cpu(tree: Any) -> Any:
    """A state as a checkpoint's files give it back."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: on_cpu(value) for key, value in tree.items()}
    return [on_cpu(value) for value in tree] if isinstance(tree, list) else tree


def stopped_and_not(comm: Comm, spec: str, device: str, num_steps: int, optimizer: Any = sgd) -> list[Any]:
    """A trainer, and one that went on from its state after 9 steps; through the CPU, as files take it."""
    strategies = [
        tw.prepare(
            spec, model=copy.deepcopy(NET).to(device), optimizer=optimizer, loss=nn.functional.cross_entropy, comm=comm
        )
        for _ in range(2)
    ]
    data = batches(num_steps, 24)
    steps(strategies[0], data[:9])
    strategies[1].load_state_dict(on_cpu(strategies[0].state_dict()))
    for strategy in strategies:
        steps(strategy, data[9:])
    return strategies


def factored(comm: Comm, spec: str, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Stop in mid-phase; then the model with factors."""
    strategies = stopped_and_not(comm, spec, device, 20)
    ends = [{name: t.cpu() for name, t in weights(s.consolidate()).items()} for s in strategies]
    small = strategies[0].consolidate(factored=True)
    assert next(small.parameters()).device.type == device
    return ends[0], ends[1], strategies[0].status()


@pytest.mark.parametrize("options", ["sync=learned", "sync=full, moments=rotate", "sync=stale, moments=slice"])
def test_factors_trained_on_a_gpu_are_those_of_a_cpu(process_world: ProcessWorlds, options: str) -> None:
    spec = f"ab(sync_every=6, warmup=4, rebound=2, climb=2, cutoff=0.6, {options})"
    on_gpu, on_cpu = process_world.run(factored, 4, spec, "cuda"), on_threads(factored, 4, spec, "cpu")
    for straight, resumed, status in on_gpu:
        assert same(straight, resumed)
        assert same(straight, on_gpu[0][0])
        assert status == on_cpu[0][2]
        assert status["layer_ranks"]["2"][0] < 32
        for name, value in on_cpu[0][0].items():
            torch.testing.assert_close(straight[name], value, rtol=1e-3, atol=1e-4)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def dealt(comm: Comm, spec: str, device: str, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Stop in mid-round; then test the whole layer by layer."""
    strategies = stopped_and_not(comm, spec, device, 14, optimizer)
    wholes = [strategy.consolidate().eval() for strategy in strategies]
    strategies[0].whole_gb = 1e-9
    inputs = batches(1, 24)[0][0].to(device)
    with torch.no_grad():
        streamed = torch.allclose(strategies[0].eval_model().eval()(inputs), wholes[0](inputs), rtol=1e-4, atol=1e-5)
    first, second = ({name: t.cpu() for name, t in weights(whole).items()} for whole in wholes)
    assert next(strategies[0].model.parameters()).device.type == device
    return first, second, streamed


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("options", ["", ", scale=train", ", optimizer_state=reset"])
def test_narrow_networks_on_a_gpu_are_those_of_a_cpu(
    process_world: ProcessWorlds, options: str, optimizer: Any
) -> None:
    spec = f"ist(local_steps=4{options})"
    on_gpu = process_world.run(dealt, 4, spec, "cuda", optimizer)
    expected = on_threads(dealt, 4, spec, "cpu", optimizer)[0][0]
    for straight, resumed, streamed in on_gpu:
        assert same(straight, resumed)
        assert same(straight, on_gpu[0][0])
        assert streamed
        for name, value in expected.items():
            torch.testing.assert_close(straight[name], value, rtol=1e-2, atol=1e-3)


def in_blocks(comm: Comm, spec: str, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Stop in mid-epoch; then the whole model, and its early exits."""
    strategies = stopped_and_not(comm, spec, device, 14)
    first, second = ({name: t.cpu() for name, t in weights(s.consolidate()).items()} for s in strategies)
    assert next(strategies[0].model.parameters()).device.type == device
    exits = strategies[0].exits()
    assert all(exit(batches(1, 4)[0][0].to(device)).shape == (4, 3) for exit in exits)
    return first, second, len(exits)


@pytest.mark.parametrize(
    "options", ["", "window=2", "window=3, losses=farthest, microbatches=2", "wire=bf16", "wire=int8"]
)
def test_blocks_on_a_gpu_are_those_of_a_cpu(process_world: ProcessWorlds, options: str) -> None:
    spec = f"local_parallel({options})"
    on_gpu, on_cpu = process_world.run(in_blocks, 3, spec, "cuda"), on_threads(in_blocks, 3, spec, "cpu")
    for straight, resumed, exits in on_gpu:
        assert same(straight, resumed)
        assert same(straight, on_gpu[0][0])
        assert exits == on_cpu[0][2]
        for name, value in on_cpu[0][0].items():
            torch.testing.assert_close(straight[name], value, rtol=1e-2, atol=1e-3)


def piped(comm: Comm) -> str:
    try:
        train(comm, "pipeline")
    except tw.UsageError as error:
        return str(error)
    return ""


def test_torchs_pipelines_need_nccl(process_world: ProcessWorlds) -> None:
    assert all("need nccl" in message for message in process_world.run(piped, 2))


def test_nccl_gives_cpu_tensors_back_whole() -> None:
    """A world of one on nccl: results of CPU tensors are copied off the GPU before anybody reads them."""
    with tw.join(backend="nccl", device="cuda:0") as comm:
        busy = torch.randn(8192, 8192, device="cuda")
        for i in range(20):
            busy = busy @ busy / 100  # work that a careless copy would not wait for
            given = torch.full((100_000,), float(i))
            assert torch.equal(comm.sum(given), given)
            assert torch.equal(comm.mean(given), given)
            assert torch.equal(comm.all_gather(given)[0], given)
            assert torch.equal(comm.broadcast(given), given)
            assert torch.equal(comm.all_to_all([given])[0], given)
        alone = train(comm, "data_parallel")
    for name, expected in on_threads(train, 1, "data_parallel")[0].items():
        torch.testing.assert_close(alone[name], expected, rtol=1e-4, atol=1e-5)


def waits(comm: Comm) -> dict[str, float]:
    """Seconds on the GPU, and seconds booked as waiting, of an operation that comes after them and of training."""
    timeline = comm.ledger.timeline
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    with timeline.step(0):
        for _ in range(100):
            busy = busy @ busy / 100
        comm.mean(torch.ones(10, device="cuda"))
    operation, computed = timeline.waiting_seconds, time.perf_counter() - began
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    strategy = tw.prepare("data_parallel", model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm)
    batch = torch.randn(16384, 2048, device="cuda"), torch.zeros(16384, dtype=torch.long, device="cuda")
    for i in range(5):
        with timeline.step(i):
            strategy.step(batch)
    torch.cuda.synchronize()
    booked = timeline.waiting_seconds - operation
    return {
        "operation": operation,
        "computed": computed,
        "training": booked,
        "took": time.perf_counter() - began - computed,
    }


def test_what_a_gpu_computes_is_not_booked_as_waiting(process_world: ProcessWorlds) -> None:
    (alone,) = process_world.run(waits, 1)
    print(alone)
    assert alone["operation"] < 0.1 * alone["computed"]
    assert alone["training"] < 0.5 * alone["took"], "one rank has nobody to wait for, only its copies"
    for found in process_world.run(waits, 2):
        print(found)
        assert 0 < found["training"] < found["took"]


class Waves(nn.Module):
    """A convolution in channels_last, and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.spread = nn.Conv2d(2, 4, 3, bias=False).to(memory_format=torch.channels_last)
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        spread = self.spread(x.unflatten(1, (2, 3, 1)).expand(-1, -1, -1, 3)).flatten(1)
        return (spread.to(torch.complex64) @ self.turn).abs()


WAVES = seeded(3, Waves)


def waves_trained(comm: Comm, device: str, reducer: str) -> dict[str, Tensor]:
    strategy = tw.prepare(
        f"data_parallel(reducer={reducer})", model=copy.deepcopy(WAVES).to(device), comm=comm,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01), loss=nn.functional.cross_entropy,
    )  # fmt: skip
    steps(strategy, batches(8, 24))
    return {name: tensor.cpu() for name, tensor in weights(strategy.consolidate()).items()}


@pytest.mark.parametrize("reducer", ["mean", "maxnorm(bits=8)", "powersgd(rank=2)"])
def test_complex_and_strided_parameters_on_a_gpu_are_those_of_a_cpu(process_world: ProcessWorlds, reducer: str) -> None:
    results: list[Any] = process_world.run(waves_trained, 2, "cuda", reducer)
    assert same(*results)
    coarse = 1e-4 if reducer == "mean" else 2e-2
    for name, expected in on_threads(waves_trained, 2, "cpu", reducer)[0].items():
        torch.testing.assert_close(results[0][name], expected, rtol=coarse, atol=coarse)


def large_means(comm: Comm) -> float:
    return comm.mean(torch.full((3,), 30000.0, dtype=torch.float16, device="cuda")).max().item()


def test_means_of_float16_on_a_gpu_do_not_overflow(process_world: ProcessWorlds) -> None:
    assert process_world.run(large_means, 4) == [30000.0] * 4


def blocks_given(comm: Comm, device: str) -> dict[str, Tensor]:
    strategy = tw.prepare(
        "local_parallel", model=copy.deepcopy(NET).cuda(), optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm
    )
    steps(strategy, [(x.to(device), y.to(device)) for x, y in batches(6, 24)])
    strategy.end_epoch()
    return {name: tensor.cpu() for name, tensor in weights(strategy.consolidate()).items()}


def test_stages_compare_targets_wherever_they_are(process_world: ProcessWorlds) -> None:
    from_gpu, from_cpu = (process_world.run(blocks_given, 2, device)[0] for device in ("cuda", "cpu"))
    assert same(from_gpu, from_cpu)
