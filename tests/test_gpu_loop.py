"""The training loop on a GPU: nothing in a step waits for it, batches are there in time, results are the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import thinwire as tw
from tests.test_gpu import on_cpu
from tests.training import batches, same, seeded, steps, weights
from tests.worlds import on_threads
from thinwire import registry
from thinwire.common import fetching
from thinwire.config import RunConfig
from thinwire.run import worker
from thinwire.run.evaluation import evaluate
from thinwire.tasks.base import Task
from thinwire.tasks.cifar10 import crop_and_flip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
GPU = torch.device("cuda", 0)
OPTIMIZERS = {"sgd": "sgd(nesterov=True, weight_decay=0.0005)", "adamw": "adamw"}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


NET = seeded(0, net)


def images(count: int = 96) -> TensorDataset:
    inputs, targets = batches(1, count, (3, 12, 12))[0]
    return TensorDataset(inputs, targets)


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """The same images, not as a TensorDataset."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = images()[index]
        return inputs, targets


@pytest.fixture
def no_waiting() -> Iterator[Any]:
    """Call it to let everything that waits for the GPU raise RuntimeError from then on."""
    yield lambda mode="error": torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.set_sync_debug_mode("default")


def prepared(
    comm: tw.Comm, spec: str, optimizer: str = "sgd", device: Any = GPU, dropout: float = 0.1, **options: Any
) -> Any:
    make = registry.build("optimizers", OPTIMIZERS[optimizer], 0.01)
    model = copy.deepcopy(NET).to(device)
    model[3].p = dropout
    loss = nn.functional.cross_entropy
    return tw.prepare(spec, model=model, optimizer=make, loss=loss, comm=comm, clip_norm=1.0, **options)


@pytest.mark.parametrize("spec", ["alone", "local_sgd(every=100)", "data_parallel"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("share", [0.1, 0.0])
def test_nothing_in_a_step_waits_for_the_gpu(
    spec: str, optimizer: str, share: float, no_waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "GPU_SHARE", share)
    with tw.join(device=GPU) as comm:
        trainer = prepared(comm, spec, optimizer, autocast=True, schedule=lambda step: 0.9**step)
        batches = tw.loader(images(), trainer.shard, batch_size=8, device=GPU)
        for i, batch in enumerate(tw.epoch(trainer, batches, comm)):
            if i == 3:
                no_waiting()
            trainer.step(batch)
            if i == 10:
                no_waiting("default")


def augmented(inputs: Tensor, generator: Generator | None) -> Tensor:
    return crop_and_flip(inputs, generator) if generator else inputs


def task(data: Path | None, seed: int, /) -> Task:
    """Images for a run."""
    return Task(
        images(), images(24), (3, 12, 12), 3, lambda: copy.deepcopy(NET), transform=augmented,
        defaults={"epochs": 1, "batch_size": 8, "lr": 0.01},
    )  # fmt: skip


def test_nothing_in_a_run_waits_between_checks(
    tmp_path: Path, no_waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tw.join(device=GPU) as comm:
        config = RunConfig(task="tests.test_gpu_loop:task", strategy="alone", autocast=True, epochs=1, out=tmp_path)
        run = worker.Run(config, comm, GPU)
        step, end_epoch, read_losses = run.strategy.step, run.strategy.end_epoch, run._read_losses

        def checked_step(batch: Any) -> Tensor:
            no_waiting("error" if run.at.step > 2 else "default")
            return step(batch)

        def read_and_wait(samples_per_second: float) -> None:
            no_waiting("default")
            read_losses(samples_per_second)

        monkeypatch.setattr(run.strategy, "step", checked_step)
        monkeypatch.setattr(run.strategy, "end_epoch", lambda: (no_waiting("default"), end_epoch()))
        monkeypatch.setattr(run, "_read_losses", read_and_wait)
        assert run.run()["steps"] == 12


@pytest.mark.parametrize("dataset", [images(), Lines()], ids=["tensors", "lines"])
@pytest.mark.parametrize(("share", "num_workers"), [(0.1, 0), (0.0, 0), (0.0, 1)])
def test_batches_on_a_gpu_are_those_of_a_cpu(
    dataset: Any, share: float, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "GPU_SHARE", share)
    here = tw.loader(dataset, tw.Shard(1, 2), 8)
    there = tw.loader(dataset, tw.Shard(1, 2), 8, num_workers=num_workers, device="cuda")
    for start in (0, 4):
        busy = torch.randn(4096, 4096, device=GPU)
        for cpu, gpu in zip(here.batches(1, start), there.batches(1, start), strict=True):
            busy = busy @ busy / 100  # so that a batch whose memory is used again too early is found
            assert all(tensor.is_cuda for tensor in gpu)
            assert all(torch.equal(a, b.cpu()) for a, b in zip(cpu, gpu, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_states_go_on_exactly_and_on_another_device(
    optimizer: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    given = [(x, y) for x, y in batches(8, 8, (3, 12, 12))]
    with tw.join(device=GPU) as comm:
        first, second = (prepared(comm, "alone", optimizer, device) for device in (before, after))
        steps(first, given[:4])
        state = copy.deepcopy(first.state_dict())
        second.load_state_dict(state)
        is_fused = second.learner.optimizer.param_groups[0]["fused"]
        assert is_fused if after == "cuda" else not is_fused
        assert (not second.model[0].weight.is_contiguous()) == (after == "cuda")
        if before == after:
            for trainer in (first, second):
                torch.manual_seed(1)
                steps(trainer, given[4:])
            assert same(weights(first.consolidate()), weights(second.consolidate()))
        else:
            assert all(torch.isfinite(torch.tensor(steps(second, given[4:]))))


def resumed(comm: tw.Comm, spec: str, optimizer: str) -> bool:
    """Whether a trainer that goes on from a saved state, which was on the CPU meanwhile, trains the same model."""
    given = batches(14, 16, (3, 12, 12))
    straight, other = (prepared(comm, spec, optimizer, dropout=0.0) for _ in range(2))
    steps(straight, given[:7])
    other.load_state_dict(on_cpu(straight.state_dict()))
    for trainer in (straight, other):
        steps(trainer, given[7:])
    return same(weights(straight.consolidate()), weights(other.consolidate()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("spec", ["ist(local_steps=3)", "ab(sync_every=3, warmup=2, cutoff=0.9, moments=rotate)"])
def test_strategies_that_make_new_optimizers_go_on_exactly(
    spec: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert all(on_threads(resumed, 2, spec, optimizer))


def test_a_gpu_trains_and_tests_as_a_cpu_does() -> None:
    given = task(None, 0)
    plain = copy.deepcopy(NET)
    with tw.join(device=GPU) as comm:
        results = [
            evaluate(copy.deepcopy(plain).to(device), given, comm, device, batch_size=10)
            for device in (GPU, torch.device("cpu"))
        ]
        trainers = [prepared(comm, "alone", device=device, dropout=0.0) for device in (GPU, "cpu")]
        losses = [steps(trainer, batches(6, 8, (3, 12, 12))) for trainer in trainers]
    assert results[0] == pytest.approx(results[1], rel=1e-3)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_a_compiled_model_trains_on_a_gpu() -> None:
    with tw.join(device=GPU) as comm:
        spec = "data_parallel(reducer=fp16)"  # one rank with an exact reducer would need no DDP
        trainers = [prepared(comm, spec, dropout=0.0, compile=compile) for compile in (False, True)]
        first, second = (steps(trainer, batches(6, 8, (3, 12, 12))) for trainer in trainers)
    assert first == pytest.approx(second, rel=2e-2)
