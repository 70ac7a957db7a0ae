"""Laws that every registered strategy keeps, on threads and on processes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.training import MODELS, batches, epochs, same, spec_of, steps, trainer, weights
from tests.worlds import ProcessWorlds, World, on_threads, worlds
from thinwire import registry
from thinwire.comm.base import Comm

STRATEGIES = sorted(map(spec_of, registry.TABLE["strategies"]))
VARIANTS = [
    *STRATEGIES,
    "local_sgd(every=2, reducer=error_feedback(maxnorm(bits=4)))",
    "diloco(every=4, fragments=2)",
    "diloco(every=3, wait=2, reducer=powersgd(rank=1))",
    "daso(ranks_per_node=1)",
    "daso(ranks_per_node=1, warmup_epochs=0)",
    "daso(ranks_per_node=1, warmup_epochs=0, merge=delta, max_global_skips=2, reducer=mean)",
    "ab(sync_every=3, warmup=1, cutoff=0.7)",
    "ab(sync_every=6, warmup=3, rebound=2, climb=0, cutoff=0.6, sync=stale, moments=rotate)",
    "ab(sync_every=3, warmup=0, cutoff=0.7, sync=full, moments=slice, reducer=error_feedback(maxnorm(bits=4)))",
    "ab(unit=epochs, sync_every=0.6, warmup=0.2, rebound=0.2, joint=6.8, cutoff=0.7)",
    "ist(local_steps=2)",
    "local_parallel(window=2, microbatches=2, wire=bf16, head=readout(every=2), reducer=error_feedback(maxnorm))",
    "pipeline(schedule=gpipe, microbatches=3, reducer=error_feedback(maxnorm(bits=4)))",
    "sequence([local_sgd(every=2), data_parallel(reducer=error_feedback(maxnorm(bits=4)))], [1])",
    "sequence([ab(sync_every=3, warmup=1, cutoff=0.7), diloco(every=4, fragments=2)], [1])",
]
# Ranks of these train different things: only the models that they consolidate to are equal.
APART = ("ab", "ist", "local_parallel", "pipeline", "sequence([ab")


def train_from_different_weights(comm: Comm, spec: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy = trainer(comm, spec, MODELS[comm.rank])
    steps(strategy, batches(5, 24))
    return weights(strategy.consolidate()), train_from_equal_weights(comm, spec)


@worlds(threads=[1, 2, 3, 4], processes=[1, 3])
@pytest.mark.parametrize("spec", VARIANTS)
def test_consolidated_models_are_equal_and_begin_from_rank_0(world: World, spec: str, ranks: int) -> None:
    results = world(train_from_different_weights, ranks, spec)
    for from_different, from_equal in results:
        assert same(from_different, results[0][0])
        assert same(from_equal, results[0][0])


def train_from_equal_weights(comm: Comm, spec: str) -> dict[str, Tensor]:
    strategy = trainer(comm, spec)
    steps(strategy, batches(5, 24))
    return weights(strategy.consolidate())


def after_each_epoch(comm: Comm, spec: str) -> list[dict[str, Tensor]]:
    strategy = trainer(comm, spec)
    found = []
    for epoch in range(3):
        steps(strategy, batches(5 - epoch, 24))
        strategy.end_epoch()
        found.append(dict(strategy.consolidate().named_parameters()))
        if not spec.startswith(APART):
            found.append({name: tensor.detach().clone() for name, tensor in strategy.model.named_parameters()})
    return found


@worlds(threads=[1, 2, 4], processes=[4])
@pytest.mark.parametrize("spec", VARIANTS)
def test_all_ranks_are_equal_after_each_epoch(world: World, spec: str, ranks: int) -> None:
    results = world(after_each_epoch, ranks, spec)
    for models in zip(*results, strict=True):
        assert all(same(models[0], other) for other in models)
    if not spec.startswith(APART):
        for consolidated, live in zip(results[0][::2], results[0][1::2], strict=True):
            assert same(live, consolidated)


def consolidate_in_between(comm: Comm, spec: str) -> tuple[dict[str, Tensor], str, bool]:
    strategy = trainer(comm, spec)
    for batch in batches(5, 24):
        steps(strategy, [batch])
        with torch.no_grad():
            for parameter in strategy.consolidate().parameters():
                parameter.zero_()
    whole = strategy.consolidate()
    return weights(whole), type(whole).__name__, any(p.grad is not None for p in whole.parameters())


@pytest.mark.parametrize("spec", VARIANTS)
def test_consolidate_gives_an_ordinary_module_apart_from_the_one_in_training(world: World, spec: str) -> None:
    state, kind, has_gradients = world(consolidate_in_between, 2, spec)[0]
    assert kind == "Sequential"
    assert not has_gradients
    assert same(state, world(train_from_equal_weights, 2, spec)[0])


def stop_and_go(comm: Comm, spec: str, stops: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Train 9 steps, saving now and then; then go on from each save in a new strategy that began elsewhere."""
    data = batches(9, 24)
    straight = trainer(comm, spec)
    saved = {}
    for i, batch in enumerate(data):
        if i in stops:
            saved[i] = copy.deepcopy(straight.state_dict())
        epochs(straight, [batch], 5, start=i)
    found = [weights(straight.consolidate())]
    for stop, state in saved.items():
        after = trainer(comm, spec, MODELS[3])
        after.load_state_dict(state)
        epochs(after, data[stop:], 5, start=stop)
        found.append(weights(after.consolidate()))
    return found


@worlds(threads=[1, 3, 4], processes=[1, 3])
@pytest.mark.parametrize("spec", VARIANTS)
def test_a_resumed_run_ends_bit_for_bit_where_the_other_does(world: World, spec: str, ranks: int) -> None:
    stops = (1, 4) if ranks != 3 else (0, 1, 3, 4, 5, 6) if world is on_threads else (1, 4, 5)  # 5 steps an epoch
    for straight, *resumed in world(stop_and_go, ranks, spec, stops):
        for stop, one in zip(stops, resumed, strict=True):
            assert same(straight, one), f"after {stop} steps"


def gone_on_from_twice(comm: Comm, spec: str) -> bool:
    strategy = trainer(comm, spec)
    epochs(strategy, batches(9, 24)[:4], 5)
    state = copy.deepcopy(strategy.state_dict())
    ends = []
    for _ in range(2):
        after = trainer(comm, spec, MODELS[3])
        after.load_state_dict(state)
        epochs(after, batches(9, 24)[4:], 5, start=4)
        ends.append(weights(after.consolidate()))
    return same(*ends)


@pytest.mark.parametrize("spec", VARIANTS)
def test_a_state_can_be_gone_on_from_twice(process_world: ProcessWorlds, spec: str) -> None:
    run = process_world.run if spec.startswith("pipeline") else on_threads
    assert all(run(gone_on_from_twice, 2, spec)), "training changed a state that was loaded"


def with_and_without_saving(comm: Comm, spec: str) -> list[dict[str, Tensor]]:
    found = []
    for saves in (True, False):
        strategy = trainer(comm, spec)
        for i, batch in enumerate(batches(9, 24)):
            if saves:
                strategy.state_dict()
            epochs(strategy, [batch], 5, start=i)
        found.append(weights(strategy.consolidate()))
    return found


@pytest.mark.parametrize("spec", VARIANTS)
def test_saving_changes_nothing(world: World, spec: str) -> None:
    assert same(*world(with_and_without_saving, 2, spec)[0])


def accumulated(comm: Comm, spec: str, pieces: int) -> dict[str, Tensor]:
    strategy = trainer(comm, spec, accumulate=pieces)
    for module in strategy.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()  # its statistics are per piece, on purpose
    steps(strategy, batches(5, 26))
    return dict(strategy.consolidate().named_parameters())


@pytest.mark.parametrize("spec", STRATEGIES)
def test_a_batch_in_pieces_gives_the_same_update(world: World, spec: str) -> None:
    whole = world(accumulated, 2, spec, 1)[0]
    for pieces in (2, 3, 100):
        parts = world(accumulated, 2, spec, pieces)[0]
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-6)


def with_schedule(comm: Comm, spec: str, factor: float, clip: float | None) -> float:
    strategy = trainer(comm, spec, schedule=lambda step: factor if step > 1 else 0.0, clip_norm=clip)
    steps(strategy, batches(1, 24))  # which may cut the model
    before = weights(strategy.model)
    steps(strategy, batches(1, 24))
    assert all(torch.equal(p, before[n]) for n, p in strategy.model.named_parameters()), "factor 0 moves nothing"
    steps(strategy, batches(1, 24))
    strategy.end_epoch()
    return sum((p - before[n]).square().sum().item() for n, p in strategy.model.named_parameters()) ** 0.5


@pytest.mark.parametrize("spec", STRATEGIES)
def test_schedule_and_clipping_bound_the_update(world: World, spec: str) -> None:
    free, half = world(with_schedule, 2, spec, 1.0, None)[0], world(with_schedule, 2, spec, 0.5, None)[0]
    assert half == pytest.approx(free / 2, rel=1e-4)
    clipped = world(with_schedule, 2, spec, 1.0, 1e-3)[0]
    assert clipped <= 0.1 * (1 + 0.9 + 0.81) * 1e-3 * 1.001  # momentum of three steps


def in_bfloat16(comm: Comm, spec: str) -> tuple[bool, bool, str]:
    strategy = trainer(comm, spec, autocast=True)
    losses = steps(strategy, batches(1, 48) * 20)
    return strategy.sees_loss, losses[-1] < losses[0], str(next(strategy.consolidate().parameters()).dtype)


@pytest.mark.parametrize("spec", STRATEGIES)
def test_autocast_trains_with_float32_weights(world: World, spec: str) -> None:
    results = world(in_bfloat16, 2, spec)
    assert any(sees for sees, _, _ in results)
    for sees, learns, dtype in results:
        assert learns or not sees
        assert dtype == "torch.float32"


def in_halves(comm: Comm, spec: str) -> dict[str, Tensor]:
    return train_from_equal_weights(comm.split([[0, 2], [1, 3]], comm.link), spec)


@pytest.mark.parametrize("spec", ["data_parallel", "daso", "ab", "ist", "local_parallel"])
def test_a_part_of_the_world_trains_what_a_world_of_its_size_does(process_world: ProcessWorlds, spec: str) -> None:
    wanted = process_world.run(train_from_equal_weights, 2, spec)
    assert all(same(found, wanted[rank // 2]) for rank, found in enumerate(process_world.run(in_halves, 4, spec)))


def a_pipeline_on_a_half(comm: Comm) -> None:
    trainer(comm.split([[0, 2], [1, 3]], comm.link), "pipeline")


def test_torchs_pipelines_need_the_whole_world(process_world: ProcessWorlds) -> None:
    with pytest.raises(AssertionError, match=r"UsageError: pipeline: .* give the comm of tw.join"):
        process_world.run(a_pipeline_on_a_half, 4)
