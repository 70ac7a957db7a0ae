"""What people do in loops of their own: torch's schedulers, gradients that something else left, stop and resume."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import thinwire as tw
from tests.strategies.test_laws import STRATEGIES
from tests.training import MODELS, batches, same, sgd, spec_of, steps, trainer, weights
from tests.worlds import ProcessWorlds, World, no_grace, on_threads
from thinwire.comm.base import Comm

RENEWING = ("ab", "ist", spec_of("sequence"))  # make a new optimizer in mid-run
FACTORS = [1.0, 0.0, 0.25, 2.0, 0.5, 1.0]


def run_of(spec: str, processes: ProcessWorlds) -> World:
    """Threads, but processes for what cannot run on threads."""
    return processes.run if spec.startswith("pipeline") else on_threads


# ---- learning rates


class Scheduled:
    """An optimizer factory that makes one of torch's schedulers with each optimizer."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.schedulers: list[LRScheduler] = []

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        self.schedulers.append(self.make(optimizer))
        return optimizer


def factor(step: int) -> float:
    return FACTORS[step]


def by_scheduler_and_by_schedule(comm: Comm, spec: str) -> list[dict[str, Tensor]]:
    """The same learning rates, set by torch's scheduler and by ours."""
    found = []
    for by_torch in (True, False):
        optimizer = Scheduled(lambda made: LambdaLR(made, factor))
        strategy = tw.prepare(
            spec, model=copy.deepcopy(MODELS[0]), optimizer=optimizer if by_torch else sgd, comm=comm, epochs=8,
            loss=nn.functional.cross_entropy, **({} if by_torch else {"schedule": factor}),
        )  # fmt: skip
        for batch in batches(5, 24):
            steps(strategy, [batch])
            if by_torch:
                optimizer.schedulers[-1].step()
        found.append(weights(strategy.consolidate()))
    return found


@pytest.mark.parametrize("spec", [s for s in STRATEGIES if s not in RENEWING])
def test_a_scheduler_made_in_the_optimizer_factory_sets_the_learning_rate(
    process_world: ProcessWorlds, spec: str
) -> None:
    by_torch, by_us = run_of(spec, process_world)(by_scheduler_and_by_schedule, 2, spec)[0]
    assert same(by_torch, by_us)


@pytest.mark.parametrize("scheduled", [False, True])
def test_schedulers_that_go_on_from_the_last_learning_rate_are_scaled_not_overwritten(scheduled: bool) -> None:
    """CosineAnnealingLR computes the next learning rate from the one that it finds in the optimizer."""
    ours = Scheduled(lambda made: CosineAnnealingLR(made, 4))
    theirs = Scheduled(lambda made: CosineAnnealingLR(made, 4))
    net = copy.deepcopy(MODELS[0])
    optimizer = theirs(net.parameters())

    def train_ours(comm: Comm) -> dict[str, Tensor]:
        extra = {"schedule": factor} if scheduled else {}
        strategy = tw.prepare(
            "data_parallel", model=copy.deepcopy(MODELS[0]), optimizer=ours, comm=comm,
            loss=nn.functional.cross_entropy, **extra,
        )  # fmt: skip
        for batch in batches(5, 24):
            strategy.step(batch)
            ours.schedulers[-1].step()
        return weights(strategy.consolidate())

    for i, (x, y) in enumerate(batches(5, 24)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        before = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= factor(i) if scheduled else 1.0
        optimizer.step()
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
        theirs.schedulers[-1].step()
    assert same(tw.simulate(train_ours, ranks=1)[0], weights(net))


@pytest.mark.parametrize("spec", RENEWING)
def test_strategies_that_renew_their_optimizer_refuse_its_scheduler(spec: str) -> None:
    def prepare(comm: Comm) -> None:
        tw.prepare(
            spec, model=copy.deepcopy(MODELS[0]), optimizer=Scheduled(lambda made: LambdaLR(made, factor)), comm=comm,
            loss=nn.functional.cross_entropy, epochs=8,
        )  # fmt: skip

    with pytest.raises(
        tw.UsageError, match=rf"{spec.partition('(')[0]}: .*scheduler.*new optimizer.*schedule=lambda step"
    ):
        tw.simulate(prepare, ranks=2)


@pytest.mark.parametrize(
    "schedule",
    [
        CosineAnnealingLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), 4),
        CosineAnnealingLR,
        lambda optimizer: CosineAnnealingLR(optimizer, 4),
        "cosine",
        0.5,
        lambda step: None,
        lambda step: float("nan"),
        lambda done, total: 1.0,
    ],
)
def test_a_schedule_that_is_none_is_refused_before_the_first_step(schedule: Any) -> None:
    with pytest.raises(tw.UsageError, match=r"schedule=.*lambda step"), tw.join() as comm:
        trainer(comm, "data_parallel", schedule=schedule)


class Failing(torch.optim.SGD):
    """Runs out of memory in its first step."""

    def step(self, closure: Any = None) -> None:
        if not getattr(self, "failed", False):
            self.failed = True
            raise MemoryError
        super().step()


def test_a_step_that_fails_leaves_the_learning_rate_as_it_was() -> None:
    made = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(Failing(parameters, 0.1))
        return made[-1]

    with tw.join() as comm:
        strategy = tw.prepare(
            "data_parallel", model=copy.deepcopy(MODELS[0]), optimizer=optimizer, comm=comm,
            loss=nn.functional.cross_entropy, schedule=lambda step: 0.5,
        )  # fmt: skip
        with pytest.raises(MemoryError):
            strategy.step(batches(1, 24)[0])
        assert made[0].param_groups[0]["lr"] == 0.1


def with_a_scheduler_saved(comm: Comm, spec: str, stop: int) -> dict[str, Tensor]:
    """Nine steps, stopped after some of them, with the states of trainer and scheduler."""
    data, saved = batches(9, 24), None
    for begin, end in ((0, stop), (stop, 9)):
        optimizer = Scheduled(lambda made: CosineAnnealingLR(made, 9))
        strategy = tw.prepare(
            spec, model=copy.deepcopy(MODELS[0]), optimizer=optimizer, comm=comm, epochs=8,
            loss=nn.functional.cross_entropy, schedule=lambda step: 1 / (1 + step),
        )  # fmt: skip
        if saved is not None:
            strategy.load_state_dict(saved["trainer"])
            optimizer.schedulers[-1].load_state_dict(saved["scheduler"])
        for batch in data[begin:end]:
            steps(strategy, [batch])
            optimizer.schedulers[-1].step()
        if end == stop:
            states = {"trainer": strategy.state_dict(), "scheduler": optimizer.schedulers[-1].state_dict()}
            saved = saved_and_loaded(states)
    return weights(strategy.consolidate())


@pytest.mark.parametrize("spec", [s for s in STRATEGIES if s not in RENEWING])
def test_a_scheduler_goes_on_with_its_state(process_world: ProcessWorlds, spec: str) -> None:
    run = run_of(spec, process_world)
    one, other = (run(with_a_scheduler_saved, 2, spec, stop)[0] for stop in (2, 6))
    assert same(one, other)


# ---- gradients


def with_gradients_left(comm: Comm, spec: str) -> list[dict[str, Tensor]]:
    found = []
    for left in (False, True):
        strategy = trainer(comm, spec)
        for batch in batches(5, 24):
            steps(strategy, [batch])
            for parameter in strategy.model.parameters():
                if left and parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 100.0)
        found.append(weights(strategy.consolidate()))
    return found


@pytest.mark.parametrize("spec", STRATEGIES)
def test_gradients_that_something_else_left_are_not_part_of_a_step(world: World, spec: str) -> None:
    without, left = world(with_gradients_left, 2, spec)[0]
    assert same(without, left)


# ---- stop and resume


class Words(Dataset[tuple[Tensor, Tensor]]):
    """Map-style: torch's DataLoader fetches its samples."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.rand(()), y  # augmented with torch's random numbers


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(52, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (52,), generator=generator))


def saved_and_loaded(state: Any) -> Any:
    """As a file would give it back, without unpickling anything but tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stopped_in_own_loop(comm: Comm, spec: str, stop: int, between: bool, map_style: bool) -> list[dict[str, Tensor]]:
    """Three epochs in one go, and in two runs with a stop after so many steps, or between two epochs."""
    data = Words(samples()) if map_style else samples()
    found = []
    for stops in (False, True):
        torch.manual_seed(7)
        strategy, state, done = trainer(comm, spec, epochs=3), None, 0
        loader = tw.loader(data, strategy.shard, 4, seed=2)

        def keep(strategy: tw.Strategy = strategy, loader: Any = loader) -> Any:
            state = {"trainer": strategy.state_dict(), "loader": loader.state_dict(), "random": torch.get_rng_state()}
            return saved_and_loaded(state)

        while loader.epoch < 3 and state is None:
            for batch in tw.epoch(strategy, loader, comm):
                strategy.step(batch)
                done += 1
                if stops and not between and done == stop:
                    state = keep()
                    break
            if stops and between and done >= stop and state is None:
                state = keep()
        if state is not None:
            strategy = trainer(comm, spec, MODELS[3], epochs=3)
            loader = tw.loader(data, strategy.shard, 4, seed=2)
            torch.rand(3)
            strategy.load_state_dict(state["trainer"])
            loader.load_state_dict(state["loader"])
            torch.set_rng_state(state["random"])
            while loader.epoch < 3:
                for batch in tw.epoch(strategy, loader, comm):
                    strategy.step(batch)
        found.append(weights(strategy.consolidate()))
    return found


SAVING = [s for s in STRATEGIES if s not in ("ist", "daso")] + [
    "ist(local_steps=3)", "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=1)"
]  # fmt: skip


@pytest.mark.parametrize("spec", SAVING)
@pytest.mark.parametrize(("stop", "between"), [(9, False), (13, False), (1, True)])
def test_a_loop_of_ones_own_goes_on_bit_for_bit(
    process_world: ProcessWorlds, spec: str, stop: int, between: bool
) -> None:
    for one_go, two_runs in run_of(spec, process_world)(stopped_in_own_loop, 2, spec, stop, between, False):
        assert same(one_go, two_runs)


@pytest.mark.parametrize("stop", [2, 13, 30])
def test_random_numbers_go_on_too_where_torch_fetches_the_samples(stop: int) -> None:
    one_go, two_runs = on_threads(stopped_in_own_loop, 1, "data_parallel", stop, False, True)[0]
    assert same(one_go, two_runs)


def going_on_from_another_place(comm: Comm, spec: str) -> str:
    """Rank 1 was killed before it saved what rank 0 has saved."""
    strategy, states = trainer(comm, spec, epochs=3), []
    loader = tw.loader(samples(), strategy.shard, 4, seed=2)
    for batch in tw.epoch(strategy, loader, comm):
        strategy.step(batch)
        states.append(copy.deepcopy({"trainer": strategy.state_dict(), "loader": loader.state_dict()}))
    state = states[2 if comm.rank == 0 else 1]
    strategy = trainer(comm, spec, epochs=3)
    loader = tw.loader(samples(), strategy.shard, 4, seed=2)
    strategy.load_state_dict(state["trainer"])
    loader.load_state_dict(state["loader"])
    try:
        list(tw.epoch(strategy, loader, comm))
    except tw.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spec", [s for s in SAVING if s != "pipeline"])
def test_ranks_that_go_on_from_different_places_are_stopped(spec: str) -> None:
    for told in on_threads(going_on_from_another_place, 2, spec):
        assert "rank 0 at batch 3 of epoch 0, rank 1 at batch 2 of epoch 0" in told
        assert "state of the same step" in told


# ---- batches of other ranks


def with_a_distributed_sampler(comm: Comm, spec: str, right: bool) -> tuple[str, int]:
    """As people write it for DDP, or as stages need it: what this rank was told, and after how many steps."""
    with no_grace():
        return sampled(comm, spec, right)


def sampled(comm: Comm, spec: str, right: bool) -> tuple[str, int]:
    strategy, data = trainer(comm, spec), samples()
    count, index = (strategy.shard.count, strategy.shard.index) if right else (comm.size, comm.rank)
    sampler: DistributedSampler[Any] = DistributedSampler(data, count, index, seed=3)
    done, told = 0, ""
    try:
        for batch in DataLoader(data, batch_size=4, sampler=sampler):
            strategy.step(batch)
            done += 1
        strategy.end_epoch()
    except tw.UsageError as error:
        told = str(error)
    except tw.RunError as error:  # another rank was told, and left
        told = type(error).__name__
    del strategy
    gc.collect()  # and with it its groups, as when the process ends
    return told, done


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["local_parallel", "local_parallel(window=2, microbatches=2)", "pipeline"])
def test_stages_that_read_different_batches_are_stopped_in_the_first_step(world: World, spec: str) -> None:
    (_, _), (told, done) = world(with_a_distributed_sampler, 2, spec, False)
    assert done == 0
    assert "stage 2 of 2 was given other targets than stage 1" in told
    assert "DistributedSampler(data, num_replicas=trainer.shard.count, rank=trainer.shard.index)" in told
    for told, done in world(with_a_distributed_sampler, 2, spec, True):
        assert (told, done) == ("", 13)


def with_batches_of_other_sizes(comm: Comm, spec: str) -> str:
    with no_grace():
        return of_other_sizes(comm, spec)


def of_other_sizes(comm: Comm, spec: str) -> str:
    strategy, told = trainer(comm, spec), ""
    try:
        strategy.step(batches(1, 8)[0])
        strategy.step(batches(1, 8 if comm.rank == 0 else 4)[0])
        strategy.end_epoch()
    except tw.UsageError as error:
        told = str(error)
    except tw.RunError as error:
        told = type(error).__name__
    del strategy
    gc.collect()
    return told


@pytest.mark.parametrize("spec", ["local_parallel", "pipeline"])
def test_stages_whose_batches_differ_in_size_are_stopped(world: World, spec: str) -> None:
    told = world(with_batches_of_other_sizes, 2, spec)[1]
    assert "stage 2 of 2 was given other targets than stage 1 in step 2" in told


# ---- parameters and batches that are not what they should be


@pytest.mark.parametrize("spec", STRATEGIES)
def test_an_optimizer_of_other_parameters_is_refused(process_world: ProcessWorlds, spec: str) -> None:
    """A factory that takes parameters from elsewhere would train what nobody uses."""
    for told in run_of(spec, process_world)(with_other_parameters, 2, spec):
        assert "lambda parameters: torch.optim.SGD(parameters, 0.1)" in told


@pytest.mark.parametrize("spec", ["data_parallel", "local_parallel"])
def test_a_loss_is_a_tensor(spec: str) -> None:
    def number(output: Tensor, targets: Tensor) -> float:
        return nn.functional.cross_entropy(output, targets).item()

    with tw.join() as comm:
        strategy = tw.prepare(spec, model=copy.deepcopy(MODELS[0]), optimizer=sgd, loss=number, comm=comm)
        with pytest.raises(tw.UsageError, match=r"loss .*returned a float; .*tensor"):
            strategy.step(batches(1, 24)[0])


def with_other_parameters(comm: Comm, spec: str) -> str:
    elsewhere = copy.deepcopy(MODELS[0])
    try:
        strategy = tw.prepare(
            spec, model=copy.deepcopy(MODELS[0]), optimizer=lambda parameters: sgd(elsewhere.parameters()), comm=comm,
            loss=nn.functional.cross_entropy, epochs=8,
        )  # fmt: skip
        steps(strategy, batches(1, 24))
    except tw.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spec", ["data_parallel", "local_parallel"])
@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(4, 6), "y": torch.zeros(4)},
        (torch.zeros(4, 6),),
        (torch.zeros(4, 6), torch.zeros(4), torch.zeros(4)),
        torch.zeros(2, 6),
    ],
    ids=["dict", "one", "three", "tensor"],
)
def test_a_batch_is_inputs_and_targets(spec: str, batch: Any) -> None:
    with pytest.raises(tw.UsageError, match=r"a batch .* give \(inputs, targets\)"), tw.join() as comm:
        trainer(comm, spec).step(batch)


def test_blocks_pass_on_two_tensors() -> None:
    with pytest.raises(tw.UsageError, match=r"a batch .* of Tensor, list; give \(inputs, targets\)"), tw.join() as comm:
        trainer(comm, "local_parallel").step((torch.zeros(4, 6), [0, 1, 2, 0]))
