"""Every kind of parameter that torch can train: ranks stay equal, or it is refused before the first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.reducers.test_laws import SPECS
from tests.training import same, weights
from tests.worlds import ProcessWorlds
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.common.dtypes import AVERAGED, refuse_unfit
from thinwire.reducers.base import Named, on_reals

World = Callable[..., list[Any]]
COMPLEX = [torch.complex64, torch.complex128]
loss = nn.functional.cross_entropy


class Wave(nn.Module):
    """Complex parameters of several shapes, one real layer; the gradient of `phase` comes conjugated."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)  # this process's models are those of others
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(6, 12, dtype=dtype, generator=generator))
        self.turned = nn.Parameter(torch.randn(12, 9, dtype=dtype, generator=generator).t().contiguous().t())
        self.phase = nn.Parameter(torch.randn((), dtype=dtype, generator=generator))
        self.none = nn.Parameter(torch.zeros(0, dtype=dtype))
        self.last = nn.Linear(9, 5)
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wave = (x.to(self.first.dtype) @ self.first).tanh() @ self.turned * self.phase.conj() + self.none.sum()
        with torch.no_grad():
            self.seen += wave.mean()
        out: Tensor = self.last(wave.abs().float())
        return out


MODELS = {dtype: Wave(dtype) for dtype in COMPLEX}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def batches(rank: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(count)]


def in_own_loop(comm: Comm, model: nn.Module, spec: str | None) -> dict[str, Tensor]:
    """A DDP loop, with thinwire's exchange or without."""
    ddp = DistributedDataParallel(copy.deepcopy(model))
    attached = None if spec is None else tw.attach(ddp, spec, bucket_mb=0.001)
    optimizer = sgd(ddp.parameters())
    for x, y in batches(comm.rank):
        optimizer.zero_grad()
        loss(ddp(x), y).backward()
        optimizer.step()
    if attached is not None:
        attached.close()
    return dict(ddp.module.named_parameters())


def prepared(comm: Comm, model: nn.Module, spec: str) -> dict[str, Tensor]:
    trainer = tw.prepare(spec, model=copy.deepcopy(model), optimizer=sgd, loss=loss, comm=comm, clip_norm=5.0, epochs=2)
    for batch in batches(comm.rank):
        trainer.step(batch)
    trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
    trainer.end_epoch()
    return weights(trainer.consolidate())


REDUCERS = ["mean", "maxnorm(bits=4)", "error_feedback(topk(ratio=0.1))", "powersgd(rank=2)", "bf16"]


def all_loops(comm: Comm, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [in_own_loop(comm, MODELS[dtype], spec) for spec in REDUCERS]


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_ranks_stay_equal_with_complex_parameters_under_attach(
    process_world: ProcessWorlds, dtype: torch.dtype
) -> None:
    first, *others = process_world.run(all_loops, 4, dtype)
    for number in range(len(first)):
        assert all(same(first[number], other[number]) for other in others), REDUCERS[number]
        moved = [name for name, p in MODELS[dtype].named_parameters() if not torch.equal(first[number][name], p)]
        assert set(moved) >= {"first", "turned", "phase", "last.weight"}


def with_and_without(comm: Comm, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return in_own_loop(comm, MODELS[dtype], "mean"), in_own_loop(comm, MODELS[dtype], None)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_the_exact_mean_of_complex_gradients_is_plain_ddps(process_world: ProcessWorlds, dtype: torch.dtype) -> None:
    """On two ranks a sum has one order and a half is exact: bit for bit."""
    for ours, plain in process_world.run(with_and_without, 2, dtype):
        assert same(ours, plain)


STRATEGIES = [
    "data_parallel", "data_parallel(reducer=maxnorm(bits=4))", "data_parallel(reducer=powersgd(rank=2))",
    "local_sgd(every=2)", "diloco(every=2, fragments=2, reducer=error_feedback(maxnorm(bits=4)))",
    "daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=0)",
]  # fmt: skip


def all_prepared(comm: Comm, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [prepared(comm, MODELS[dtype], spec) for spec in STRATEGIES]


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_ranks_stay_equal_with_complex_parameters_under_prepare(world: World, dtype: torch.dtype) -> None:
    first, second = world(all_prepared, 2, dtype)
    for number, spec in enumerate(STRATEGIES):
        assert same(first[number], second[number]), spec
        assert not torch.equal(first[number]["first"], MODELS[dtype].first), spec


def seen(comm: Comm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A buffer on this rank, and in the model that is put together."""
    trainer = tw.prepare("data_parallel", model=copy.deepcopy(MODELS[dtype]), optimizer=sgd, loss=loss, comm=comm)
    trainer.step(batches(comm.rank)[0])
    return trainer.model.get_buffer("seen").clone(), trainer.consolidate().get_buffer("seen")


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_buffers_are_averaged(world: World, dtype: torch.dtype) -> None:
    (first, mean), (second, same_mean) = world(seen, 2, dtype)
    assert torch.equal(mean, same_mean)
    assert not torch.equal(first, second)
    torch.testing.assert_close(mean, (first + second) / 2)


def test_processes_train_complex_parameters_as_threads_do(process_world: ProcessWorlds) -> None:
    """Also those that are not contiguous: elements that share a scale, and matrices, are the same."""
    for dtype in COMPLEX:
        threads = tw.simulate(lambda comm, dtype=dtype: all_prepared(comm, dtype), ranks=2)[0]
        for spec, here, there in zip(STRATEGIES, threads, process_world.run(all_prepared, 2, dtype)[0], strict=True):
            assert same(here, there), spec


def reduced(comm: Comm, spec: str, dtype: torch.dtype) -> tuple[Named, list[Named], int]:
    generator = torch.Generator().manual_seed(comm.rank)
    given = {"w": torch.randn(9, 14, dtype=dtype, generator=generator), "b": torch.randn(14, generator=generator)}
    reducer = on_reals(registry.build("reducers", spec))
    state, means = reducer.init(given), []
    for _ in range(3):
        out = reducer.reduce(given, state, comm)
        out.error()
        state = out.state
        means.append(out.mean)
    return given, means, comm.ledger.wire_bytes


@pytest.mark.parametrize("spec", SPECS)
def test_every_reducer_takes_complex_tensors(spec: str) -> None:
    for dtype in COMPLEX:
        results = tw.simulate(lambda comm, dtype=dtype: reduced(comm, spec, dtype), ranks=3)
        for step in range(3):
            for _, means, _ in results:
                assert same(means[step], results[0][1][step])
                assert means[step]["w"].dtype == dtype
                assert means[step]["w"].shape == (9, 14)
        if spec == "mean":
            truth = torch.stack([given["w"] for given, _, _ in results]).mean(0)
            torch.testing.assert_close(results[0][1][0]["w"], truth)
            assert results[0][2] == pytest.approx(3 * 4 / 3 * (9 * 14 * dtype.itemsize + 14 * 4), abs=6)


# ---- ranges


class Steep(nn.Module):
    """Parameters in float16 whose gradients, of every rank, are 30,000."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(20).half())

    def forward(self, x: Tensor) -> Tensor:
        return self.w.float() * 30_000


def total(out: Tensor, y: Tensor) -> Tensor:
    return out.sum()


def steep(comm: Comm) -> list[Tensor]:
    """The gradient of an attached DDP, and weights after one step of a trainer."""
    found = []
    if comm.is_async:
        ddp = DistributedDataParallel(Steep())
        attached = tw.attach(ddp, "mean")
        ddp(torch.ones(1)).sum().backward()
        attached.close()
        found = [ddp.module.w.grad]
    for strategy in ("data_parallel", "local_sgd(every=1)", "daso(warmup_epochs=0, cooldown_epochs=0)"):
        trainer = tw.prepare(
            strategy, model=Steep(), optimizer=lambda p: torch.optim.SGD(p, 1.0), loss=total, comm=comm, epochs=1
        )
        trainer.step((torch.ones(1), torch.ones(1)))
        trainer.end_epoch()
        found.append(-trainer.consolidate().get_parameter("w").detach())
    return found


def test_gradients_in_float16_whose_sum_would_overflow_are_averaged(world: World) -> None:
    for found in world(steep, 4):
        assert len(found) >= 3
        for gradient in found:
            assert torch.equal(gradient, torch.full((20,), 30_000.0).half())


# ---- layouts


class Turned(nn.Sequential):
    """A weight that is stored column by column, and a convolution with its channels last."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        convolution = nn.Conv2d(2, 4, (1, 2))
        linear = nn.Linear(8, 5)
        for p in (convolution.weight, convolution.bias, linear.weight, linear.bias):
            p.data = torch.randn(p.shape, generator=generator)
        linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
        super().__init__(nn.Unflatten(1, (2, 1, 3)), convolution, nn.Flatten(), linear)
        self.to(memory_format=torch.channels_last)


TURNED = Turned()


def turned_loops(comm: Comm) -> list[dict[str, Tensor]]:
    found = [prepared(comm, TURNED, f"data_parallel(reducer={spec})") for spec in REDUCERS]
    if comm.backend == "gloo" and comm.is_async:
        plain, ours = in_own_loop(comm, TURNED, None), in_own_loop(comm, TURNED, "mean")
        assert same(plain, ours)
    return found


def test_gradients_that_are_not_contiguous_are_seen_as_they_are(process_world: ProcessWorlds) -> None:
    """DDP hands them over in the order of memory: a matrix of rank 1 was none any more for powersgd."""
    threads, processes = tw.simulate(turned_loops, ranks=2), process_world.run(turned_loops, 2)
    for spec, here, there, other in zip(REDUCERS, threads[0], *processes, strict=True):
        assert same(here, there), spec
        assert same(there, other), spec


# ---- what is refused


class Looked(nn.Module):
    """Looks words up, with sparse gradients of which its modules tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.ones(10, 5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x[:, 0].abs().long().clamp(max=9), self.words, sparse=True)


def of_dtype(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(6, 5)
    model.odd = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=dtype.is_floating_point)
    return model


UNFIT = {
    "0 (Embedding) has sparse=True; possible: dense gradients": lambda: nn.Sequential(nn.Embedding(9, 5, sparse=True)),
    "bag (EmbeddingBag) has sparse=True": lambda: nn.ModuleDict({"bag": nn.EmbeddingBag(9, 5, sparse=True)}),
    "odd is torch.float8_e4m3fn, torch.strided; possible: dense parameters of float32": lambda: of_dtype(
        torch.float8_e4m3fn
    ),
    "weight has no shape yet": lambda: nn.LazyLinear(5),
}


@pytest.mark.parametrize("message", UNFIT)
def test_what_cannot_be_averaged_is_refused_before_the_first_step(message: str) -> None:
    for spec in ("data_parallel", "local_sgd"):
        with pytest.raises(tw.UsageError) as caught:
            tw.simulate(lambda comm, spec=spec: prepared(comm, UNFIT[message](), spec), ranks=2)
        assert f"prepare: {message}" in str(caught.value)


@pytest.mark.parametrize("spec", ["data_parallel", "local_sgd", "ab", "local_parallel"])
def test_a_model_without_values_is_refused_where_all_of_it_is_needed(spec: str) -> None:
    layers = [nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)]
    model = nn.Sequential(*layers).to("meta")
    with pytest.raises(tw.UsageError, match=r"0\.weight is on the meta device and has no values; make the model on a"):
        tw.simulate(lambda comm: prepared(comm, model, spec), ranks=1)


def test_what_is_not_trained_may_be_anything() -> None:
    flagged = nn.Linear(3, 2)
    flagged.sparse = True  # a word of somebody's own, about something else
    refuse_unfit(flagged, "prepare")
    frozen = nn.Embedding(9, 5, sparse=True).requires_grad_(False)
    refuse_unfit(nn.Sequential(frozen, nn.Linear(3, 2), of_dtype(torch.int8)), "prepare")
    refuse_unfit(nn.Sequential(nn.Embedding(9, 5, sparse=True)), "attach", ignored=["0.weight"])
    for dtype in AVERAGED:
        refuse_unfit(nn.Linear(3, 2, dtype=dtype), "prepare")


def refused(comm: Comm) -> list[str]:
    found = []
    with pytest.raises(tw.UsageError) as caught:
        in_own_loop(comm, nn.Sequential(nn.Embedding(9, 5, sparse=True)), "mean")
    found.append(str(caught.value))
    for spec in ("data_parallel", "local_sgd"):
        with pytest.raises(tw.UsageError) as caught:
            prepared(comm, Looked(), spec)
        found.append(str(caught.value))
    return found


def test_sparse_gradients_are_refused_under_attach_and_where_they_could_not_be_foreseen(
    process_world: ProcessWorlds,
) -> None:
    for known, *unforeseen in process_world.run(refused, 2):
        assert known.startswith("attach: 0 (Embedding) has sparse=True")
        assert all("words got a gradient that is torch.sparse_coo" in message for message in unforeseen), unforeseen
    with pytest.raises(tw.UsageError, match=r"words got a gradient that is torch\.sparse_coo; possible: dense"):
        tw.simulate(lambda comm: prepared(comm, Looked(), "data_parallel"), ranks=2)
