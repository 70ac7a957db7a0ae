"""Data parallelism is what it says: one big batch, cut in pieces."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.training import DEEP, MODELS, PLAIN, batches, same, seeded, sgd, steps, trained_by_torch, trainer, weights
from tests.worlds import World, on_threads
from thinwire.comm.base import Comm
from thinwire.comm.wire_bytes import all_reduce_bytes
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState
from thinwire.reducers.error_feedback import error_feedback
from thinwire.reducers.global_randk import global_randk
from thinwire.reducers.mean import mean
from thinwire.strategies.data_parallel import DataParallel
from thinwire.strategies.recipe import Recipe


def train_plain(comm: Comm, spec: str) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy
    strategy = tw.prepare(spec, model=copy.deepcopy(PLAIN), optimizer=sgd, loss=loss, comm=comm)
    steps(strategy, batches(20, 24))
    return weights(strategy.consolidate())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("spec", ["data_parallel", "data_parallel(bucket_mb=0.001)"])
def test_n_ranks_with_batch_b_are_one_rank_with_batch_nb(world: World, ranks: int, spec: str) -> None:
    wanted = trained_by_torch(PLAIN, batches(20, 24))
    for result in world(train_plain, ranks, spec):
        for name, expected in wanted.items():
            torch.testing.assert_close(result[name], expected, rtol=1e-5, atol=1e-6)


def test_two_processes_compute_bit_for_bit_what_two_threads_do(process_world: Any) -> None:
    on_threads = tw.simulate(lambda comm: train_plain(comm, "data_parallel"), ranks=2)
    on_processes = process_world.run(train_plain, 2, "data_parallel")
    assert same(on_threads[0], on_processes[0])


@pytest.mark.parametrize("ranks", [3, 4])
def test_buckets_do_not_change_the_result_of_a_process_rank(process_world: Any, ranks: int) -> None:
    """Small buckets travel one by one; the sums are the same to rounding."""
    whole = process_world.run(train_plain, ranks, "data_parallel")[0]
    small = process_world.run(train_plain, ranks, "data_parallel(bucket_mb=0.0005)")[0]
    for name in whole:
        torch.testing.assert_close(whole[name], small[name], rtol=1e-5, atol=1e-6)


def straight_and_resumed(begin: Callable[[], Any], data: list[Any], cut: int) -> tuple[Any, Any]:
    """A strategy that took all steps, and one that was begun anew from another's state after some of them."""
    straight, before, after = begin(), begin(), begin()
    steps(straight, data)
    steps(before, data[:cut])
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    steps(after, data[cut:])
    return straight, after


def resume_deep(comm: Comm, spec: str) -> list[dict[str, Tensor]]:
    def begin() -> tw.Strategy:
        loss = nn.functional.cross_entropy
        return tw.prepare(spec, model=copy.deepcopy(DEEP), optimizer=sgd, loss=loss, comm=comm)

    straight, after = straight_and_resumed(begin, batches(8, 24), cut=4)
    return [weights(straight.consolidate()), weights(after.consolidate())]


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("spec", ["data_parallel", "data_parallel(bucket_mb=0.02)"])
def test_resume_is_exact_although_ddp_regroups_its_buckets(process_world: Any, ranks: int, spec: str) -> None:
    """Plain DDP fails this test from three ranks on: a ring's sums depend on an element's place in its bucket."""
    straight, resumed = process_world.run(resume_deep, ranks, spec)[0]
    assert same(straight, resumed)


def ledger_rows(comm: Comm, num_steps: int) -> list[dict[str, Any]]:
    strategy = trainer(comm, "data_parallel")
    steps(strategy, batches(num_steps, 24))
    strategy.consolidate()
    return comm.ledger.rows()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_byte_is_booked_under_its_purpose(world: World, ranks: int) -> None:
    model = MODELS[0]
    gradients = 4 * sum(p.numel() for p in model.parameters())
    state = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    for rows in world(ledger_rows, ranks, 3):
        by_purpose = {p: [r for r in rows if r["purpose"] == p] for p in ("start", "train", "sync")}
        assert sum(r["payload_bytes"] for r in by_purpose["start"]) == state + 1  # whether weights differed
        given = 3 * gradients if ranks > 1 else 0  # one rank exchanges nothing
        assert sum(r["payload_bytes"] for r in by_purpose["train"]) == given
        assert sum(r["wire_bytes"] for r in by_purpose["train"]) == 3 * all_reduce_bytes(gradients, ranks)
        assert sum(r["payload_bytes"] for r in by_purpose["sync"]) == 2 * 16 * 4 + 8  # mean, variance, counter


def statistics(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    strategy = trainer(comm, "data_parallel")
    steps(strategy, batches(3, 24))
    local, whole = strategy.model[1], strategy.consolidate()[1]
    return local.running_mean.clone(), whole.running_mean, whole.num_batches_tracked


def test_batchnorm_statistics_are_local_in_training_and_averaged_in_the_result(world: World) -> None:
    results = world(statistics, 3)
    locals_ = torch.stack([r[0] for r in results])
    assert not torch.equal(locals_[0], locals_[1])
    for _, whole, counter in results:
        torch.testing.assert_close(whole, locals_.mean(0))
        assert counter == 3


def counting() -> Reducer:
    """The exact mean, plus how often each parameter was reduced: a state that every step needs and changes."""

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        THREADS.add(threading.current_thread().name)
        out = mean().reduce(tensors, {}, comm)
        counted = {name: state[name] + 1 for name in tensors}
        return Reduced({n: t + counted[n] * 1e-3 for n, t in out.mean.items()}, out.error, counted)

    return Reducer(lambda tensors: {name: torch.zeros(()) for name in tensors}, reduce)


THREADS: set[str] = set()


def with_counting(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int], set[str]]:
    THREADS.clear()

    def begin() -> DataParallel:
        recipe = Recipe(nn.functional.cross_entropy, sgd)
        return DataParallel(copy.deepcopy(DEEP), recipe, comm, reducer=counting(), bucket_mb=0.02)

    straight, after = straight_and_resumed(begin, batches(6, 24), cut=2)
    counts = sorted({int(c) for state in after.exchange.states for c in state.values()})
    return weights(straight.consolidate()), weights(after.consolidate()), counts, set(THREADS)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reducer_state_goes_from_step_to_step_and_through_a_resume(world: World, ranks: int) -> None:
    for straight, resumed, counts, _ in world(with_counting, ranks):
        assert counts == [6]
        assert same(straight, resumed)


def test_processes_reduce_on_the_communication_thread(process_world: Any) -> None:
    for *_, threads in process_world.run(with_counting, 2):
        assert threads == {"thinwire-world"}


def test_buckets_that_span_ddp_buckets_give_the_means_of_the_whole(process_world: Any) -> None:
    """Threads exchange after the backward pass, processes bucket by bucket."""
    (on_threads, *_), *_ = tw.simulate(with_counting, ranks=4)
    for on_processes, *_ in process_world.run(with_counting, 4):
        for name in on_threads:
            torch.testing.assert_close(on_threads[name], on_processes[name], rtol=1e-4, atol=1e-5)


def forgotten_trainers(comm: Comm) -> int:
    models = []
    for _ in range(3):
        strategy = trainer(comm, "data_parallel")
        steps(strategy, batches(2, 24))
        models.append(weakref.ref(strategy.model))
        del strategy
    gc.collect()
    return sum(model() is not None for model in models)


def test_a_trainer_that_is_no_longer_used_is_freed(world: World) -> None:
    assert world(forgotten_trainers, 2) == [0, 0]


def accumulated_bytes(comm: Comm, pieces: int) -> int:
    strategy = trainer(comm, "data_parallel", accumulate=pieces)
    steps(strategy, batches(2, 24))
    return sum(row["wire_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train")


def test_pieces_of_a_batch_are_sent_once(world: World) -> None:
    assert world(accumulated_bytes, 2, 3) == world(accumulated_bytes, 2, 1)


def autocast_differs(comm: Comm) -> bool:
    results = []
    for autocast in (False, True):
        strategy = trainer(comm, "data_parallel", autocast=autocast)
        steps(strategy, batches(2, 24))
        results.append(weights(strategy.consolidate()))
    return same(*results)


def test_autocast_is_used(world: World) -> None:
    assert world(autocast_differs, 2) == [False, False]


class Broken(Exception):
    """Not a RuntimeError, so nothing of torch's could be mistaken for it."""


def broken_reducer(comm: Comm) -> str:
    def reduce(tensors: Any, state: Any, comm: Comm) -> Any:
        raise Broken("the reducer's own error")

    recipe = Recipe(nn.functional.cross_entropy, sgd)
    strategy = DataParallel(copy.deepcopy(PLAIN), recipe, comm, reducer=Reducer(lambda tensors: {}, reduce))
    with pytest.raises(Broken, match="the reducer's own error"):
        steps(strategy, batches(1, 24))
    return "seen"


def test_an_error_on_the_communication_thread_is_the_one_that_is_raised(world: World) -> None:
    assert world(broken_reducer, 2) == ["seen", "seen"]


class Branches(nn.Module):
    """Uses one of two layers, depending on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


BRANCHES = seeded(1, Branches)


def train_branches(comm: Comm, spec: str) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy
    strategy = tw.prepare(spec, model=copy.deepcopy(BRANCHES), optimizer=sgd, loss=loss, comm=comm)
    steps(strategy, batches(4, 24))
    return weights(strategy.consolidate())


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_without_gradient_are_allowed_on_request(world: World, ranks: int) -> None:
    results = world(train_branches, ranks, "data_parallel(unused_parameters=True)")
    assert all(same(results[0], other) for other in results)
    alone = tw.simulate(lambda comm: train_branches(comm, "data_parallel(unused_parameters=True)"), ranks=1)[0]
    for name in alone:
        torch.testing.assert_close(results[0][name], alone[name], rtol=1e-5, atol=1e-6)


def refuse_branches(comm: Comm) -> str:
    loss = nn.functional.cross_entropy
    strategy = tw.prepare("data_parallel", model=copy.deepcopy(BRANCHES), optimizer=sgd, loss=loss, comm=comm)
    before = weights(strategy.model)
    with pytest.raises(tw.UsageError) as caught:
        steps(strategy, batches(1, 24))
    assert same(before, weights(strategy.model)), "nothing is done with half of the gradients"
    return str(caught.value)


def used_map_bytes(comm: Comm) -> list[int]:
    train_branches(comm, "data_parallel(unused_parameters=True)")
    return [row["payload_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train"]


def test_the_map_of_used_parameters_is_booked(world: World) -> None:
    gradients, used_map = 4 * 2 * (6 * 3 + 3), 4 * 4
    assert world(used_map_bytes, 2) == [[4 * (gradients + used_map)]] * 2


def test_parameters_without_gradient_are_explained_otherwise(world: World) -> None:
    assert all("unused_parameters=True" in message for message in world(refuse_branches, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": nn.CrossEntropyLoss}, "loss=<class .*CrossEntropyLoss'>; give a function"),
        ({"model": nn.Linear}, "model=<class .*give a module"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0; possible: more than 0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan; possible"),
        ({"epochs": 0}, "epochs=0; give the number of epochs"),
        ({"epochs": 2.5}, "epochs=2.5; give the number of epochs"),
    ],
)
def test_what_cannot_be_trained_with_is_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with tw.join() as comm, pytest.raises(tw.UsageError, match=message):
        tw.prepare(
            **{
                "spec": "data_parallel", "model": copy.deepcopy(PLAIN), "optimizer": sgd,
                "loss": nn.functional.cross_entropy, "comm": comm, **changes,
            }
        )  # fmt: skip


def test_a_ddp_is_not_averaged_a_second_time() -> None:
    with tw.join() as comm:
        ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(PLAIN))
        for model in (ddp, torch.compile(ddp)):
            with pytest.raises(
                tw.UsageError, match=r"wrapped in Distributed.*give the wrapped model, model.module, or .*att"
            ):
                tw.prepare("local_sgd", model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm)


def test_an_optimizer_in_place_of_its_factory_is_explained() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(tw.UsageError, match="give a factory, not an optimizer"):
        tw.simulate(
            lambda comm: tw.prepare(
                "data_parallel", model=model, optimizer=sgd(model.parameters()), loss=nn.MSELoss(), comm=comm
            ),
            ranks=1,
        )


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(tw.UsageError, match="no parameter to train"):
        tw.simulate(
            lambda comm: tw.prepare("data_parallel", model=model, optimizer=sgd, loss=nn.MSELoss(), comm=comm), ranks=1
        )


REDUCERS = [
    "bf16", "maxnorm", "maxnorm(predicted=True)", "maxnorm_multiscale(bits=4)", "error_feedback(maxnorm(bits=2))",
    "error_feedback(global_randk(ratio=0.3, inner=maxnorm))", "powersgd(rank=2)", "partition(error_feedback(terngrad))",
    "warmup(error_feedback(topk(ratio=0.05)), steps=2)", "sign",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_compressed_training_keeps_ranks_equal_and_resumes_bit_for_bit(world: World, reducer: str, ranks: int) -> None:
    """State is kept by parameter and bucket, so that DDP's regrouping of buckets changes nothing."""
    results = world(resume_deep, ranks, f"data_parallel(reducer={reducer}, bucket_mb=0.02)")
    for straight, resumed in results:
        assert same(straight, resumed)
        assert same(straight, results[0][0])


def losses(comm: Comm, spec: str) -> list[float]:
    loss = nn.functional.cross_entropy
    model = copy.deepcopy(PLAIN)
    strategy = tw.prepare(spec, model=model, optimizer=sgd, loss=loss, comm=comm, clip_norm=1.0, accumulate=2)
    return steps(strategy, batches(1, 24) * 60)


@pytest.mark.parametrize("reducer", REDUCERS)
def test_compressed_training_with_accumulation_and_clipping_learns(process_world: Any, reducer: str) -> None:
    for found in process_world.run(losses, 2, f"data_parallel(reducer={reducer})"):
        assert found[-1] < 0.8 * found[0], found


def late_gradients(comm: Comm) -> tuple[float, float]:
    """One parameter is used only in the first step; what feedback kept of it comes in later ones."""
    model = nn.ModuleDict({"now": nn.Linear(6, 3), "once": nn.Linear(6, 3)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = copy.deepcopy(model)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.parts["now"](x) + (self.parts["once"](x) if self.calls == 1 else 0.0)

    plain = torch.optim.SGD
    recipe = Recipe(nn.functional.cross_entropy, lambda p: plain(p, 0.1))
    strategies = [
        DataParallel(Net(), recipe, comm, reducer=reducer, unused_parameters=True)
        for reducer in (mean(), error_feedback(global_randk(ratio=0.1)))
    ]
    moved = []
    for strategy in strategies:
        before = weights(strategy.model)
        steps(strategy, batches(1, 24) * 60)
        after = weights(strategy.model)
        moved.append(sum((after[k] - before[k]).abs().sum().item() for k in before if "once" in k))
    return moved[0], moved[1]


def test_what_feedback_kept_of_an_unused_parameter_is_applied_later(world: World) -> None:
    for exact, late in world(late_gradients, 2):
        assert late == pytest.approx(exact, rel=0.25), "not only the first tenth of it"


def gradient_with_nan(comm: Comm, spec: str, clip_norm: float | None) -> str:
    strategy = trainer(comm, spec, clip_norm=clip_norm)
    data = batches(5, 24)
    data[2][0][comm.size - 1] = float("nan")  # in the last rank's share, for a loss that stays finite
    strategy.learner.recipe = replace(strategy.learner.recipe, loss=_finite_loss)
    with pytest.raises(tw.RunError) as caught:
        steps(strategy, data)
    assert all(t.isfinite().all() for t in strategy.model.parameters()), "no step was made with it"
    return str(caught.value)


class _Sick(torch.autograd.Function):
    """A loss that is finite although its gradient is not."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, targets: Tensor) -> Tensor:
        ctx.shape, ctx.sick = output.shape, bool(output.isnan().any())
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.full(ctx.shape, float("nan") if ctx.sick else 0.01), None


def _finite_loss(output: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = _Sick.apply(output, targets)  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("reducer", ["mean", "maxnorm", "error_feedback(global_randk(ratio=0.05))", "powersgd(rank=1)"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_on_one_rank_is_reported_by_all_with_its_step(
    world: World, reducer: str, clip_norm: float | None
) -> None:
    messages = world(gradient_with_nan, 2, f"data_parallel(reducer={reducer})", clip_norm)
    assert all("the gradient is not finite at step 3" in message for message in messages)


def without_residual(comm: Comm) -> str:
    spec = "data_parallel(reducer=error_feedback(maxnorm(bits=4)))"
    strategy = trainer(comm, spec)
    steps(strategy, batches(2, 24))
    state = copy.deepcopy(strategy.state_dict())
    del state["reducer"][0]["residual/0.weight"]
    with pytest.raises(tw.RunError) as caught:
        trainer(comm, spec).load_state_dict(state)
    with pytest.raises(tw.RunError, match="state of the reducer does not fit"):
        trainer(comm, "data_parallel").load_state_dict(strategy.state_dict())
    return str(caught.value)


def test_a_state_without_its_residual_is_refused(world: World) -> None:
    assert all("it lacks residual/0.weight" in message for message in world(without_residual, 2))


def test_different_weights_at_the_start_are_made_equal_and_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    tw.simulate(lambda comm: trainer(comm, "data_parallel", MODELS[min(comm.rank, 1)]), ranks=3)
    assert "the model differed between ranks; 2 of 3 now begin with rank 0's weights" in capfd.readouterr().err
    tw.simulate(lambda comm: trainer(comm, "data_parallel"), ranks=3)
    assert capfd.readouterr().err == ""


# ---- one rank, which exchanges nothing


def state_of(comm: Comm) -> dict[str, Any]:
    one = trainer(comm, "data_parallel")
    steps(one, batches(2))
    return copy.deepcopy(one.state_dict())


def test_one_rank_goes_on_from_a_state_of_two() -> None:
    state = on_threads(state_of, 2)[0]

    def loaded(comm: Comm) -> int:
        one = trainer(comm, "data_parallel")
        one.load_state_dict(state)
        steps(one, batches(1))
        count: int = one.learner.num_steps
        return count

    assert on_threads(loaded, 1) == [3]


@pytest.mark.parametrize("spec", ["data_parallel", "data_parallel(unused_parameters=True)"])
def test_one_rank_tells_of_a_missing_gradient_too(spec: str) -> None:
    """The same script on two ranks would."""
    model = nn.Sequential(nn.Linear(6, 3))
    model.unused = nn.Linear(2, 2)

    def run(comm: Comm) -> None:
        one = trainer(comm, spec, First(model))
        if "unused" in spec:
            steps(one, batches(1))
        else:
            with pytest.raises(tw.UsageError, match="some parameters got no gradient"):
                steps(one, batches(1))

    on_threads(run, 1)


class First(nn.Module):
    """Uses the first layer of another model alone."""

    def __init__(self, whole: nn.Sequential) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.whole[0](x)
        return out
