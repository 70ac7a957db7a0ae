"""auto: what it decides with given forecasts, that ranks agree, and that a resumed run does not choose again."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.training import MODELS, batches, same, steps, trainer, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.comm.link_probe import PairLink
from thinwire.netlab.link import Link
from thinwire.plan import auto as module
from thinwire.plan.auto import CANDIDATES, Auto, wire_of
from thinwire.plan.measured import Quality, compare_cells, is_safe, qualities, shipped
from thinwire.plan.planner import Forecast

LINK = PairLink(100.0, 1.0)


def forecast(spec: str, seconds: float, waiting: float = 0.5) -> Forecast:
    return Forecast(spec, seconds, 10 * seconds, waiting, 0.0, 0.0, 0.0, 0)


def decided(*forecasts: Forecast, link: PairLink | None = LINK) -> tuple[str, str]:
    def decide(comm: Comm) -> tuple[str, str]:
        strategy = trainer(comm, "auto")
        assert isinstance(strategy, Auto)
        strategy._decide(forecasts, link)
        return strategy.choice, strategy.reason

    return tw.simulate(decide, ranks=1)[0]


def test_it_takes_the_fastest_and_says_why() -> None:
    choice, reason = decided(forecast("data_parallel", 0.2, 0.9), forecast("diloco", 0.05, 0.1))
    assert choice == "diloco"
    assert reason == "at 100 Mbit/s and 1 ms it would wait 10% and take 50 ms a step, data_parallel 90% and 200 ms"


def test_what_saves_less_than_five_per_cent_is_not_worth_it() -> None:
    choice, reason = decided(forecast("data_parallel", 0.100, 0.1), forecast("diloco", 0.097))
    assert choice == "data_parallel"
    assert "nothing is much faster" in reason


class Studied:
    """A study with one forecast for every network."""

    def __init__(self, made: Forecast) -> None:
        self.made = made

    def forecast(self, wire: object) -> Forecast:
        return self.made


def probed(
    monkeypatch: pytest.MonkeyPatch, waiting: float, step_seconds: float, study_seconds: float = 0.0,
    **recipe: int | None,
) -> tuple[list[str], str]:  # fmt: skip
    """What is studied, and the reason of the choice, in a run of 10 steps of data_parallel that wait so much."""
    studied: list[str] = []

    def study(spec: str, workload: object, comm: Comm, seconds: float) -> Studied:
        if comm.rank == 0:
            studied.append(spec)
        time.sleep(study_seconds)
        is_plain = spec == "data_parallel"
        return Studied(forecast(spec, step_seconds if is_plain else step_seconds / 10, waiting if is_plain else 0.0))

    monkeypatch.setattr(module, "measure_ring", lambda comm, seconds, largest=0: LINK)
    monkeypatch.setattr(module, "_study", study)

    def probe(comm: Comm) -> str:
        strategy = trainer(comm, "auto", epochs=2)
        assert isinstance(strategy, Auto)
        strategy.recipe = replace(strategy.recipe, **recipe)
        workload = module._OneBatch(strategy.given, strategy.recipe, batches(1, 24)[0], epoch_steps=5)
        link, forecasts = strategy._probe(workload, time.perf_counter())
        strategy._decide(forecasts, link)
        return strategy.reason

    reasons = tw.simulate(probe, ranks=2)
    assert reasons[0] == reasons[1]
    return studied, reasons[0]


def test_if_data_parallel_waits_little_nothing_else_is_studied(monkeypatch: pytest.MonkeyPatch) -> None:
    studied, reason = probed(monkeypatch, waiting=0.1, step_seconds=100.0)
    assert studied == ["data_parallel"]
    assert "nothing is much faster" in reason


def test_in_a_long_run_every_safe_candidate_is_studied(monkeypatch: pytest.MonkeyPatch) -> None:
    studied, reason = probed(monkeypatch, waiting=0.9, step_seconds=100.0)
    assert studied == [spec for spec in CANDIDATES if is_safe(spec, qualities(spec, "sgd", updates=10), 0.5)]
    assert len(studied) > 2
    assert not any("diloco" in spec for spec in studied), "it lost much in the shortest runs that were measured"
    assert "it would wait 0%" in reason


def test_in_a_run_of_many_updates_what_lost_little_in_such_runs_is_studied(monkeypatch: pytest.MonkeyPatch) -> None:
    studied, _ = probed(monkeypatch, waiting=0.9, step_seconds=100.0, epochs=1000)
    assert studied == [spec for spec in CANDIDATES if is_safe(spec, qualities(spec, "sgd", updates=5000), 0.5)]
    assert "diloco(fragments=4, reducer=maxnorm(bits=4))" in studied


@pytest.mark.parametrize("recipe", [{}, {"epochs": None, "steps": 10}])  # the second: a stream without a length
def test_a_short_run_is_not_made_longer_by_more_than_a_tenth(
    monkeypatch: pytest.MonkeyPatch, recipe: dict[str, int | None]
) -> None:
    studied, reason = probed(monkeypatch, 0.9, step_seconds=0.2, study_seconds=0.1, **recipe)  # a probe of 0.18 s
    assert studied == ["data_parallel"]
    assert "too short a run to try more" in reason


def test_without_a_measured_network_it_stays_with_data_parallel() -> None:
    assert decided(forecast("data_parallel", 1.0), forecast("diloco", 0.1), link=None)[0] == "data_parallel"


def test_only_what_was_measured_to_keep_the_accuracy_is_considered() -> None:
    assert is_safe("data_parallel", [], 0.5)
    assert not is_safe("diloco", [], 0.5)
    assert not is_safe("diloco", [Quality(-0.2, 2, ""), Quality(-3.0, 1, "")], 0.5)
    assert is_safe("diloco", [Quality(-0.2, 2, ""), Quality(+3.0, 1, "")], 0.5)
    allowed = {x: [spec for spec in CANDIDATES if is_safe(spec, qualities(spec, "sgd"), x)] for x in (0.5, 100.0)}
    assert "data_parallel(reducer=maxnorm(bits=4))" in allowed[0.5]
    assert "diloco" not in allowed[0.5]
    assert set(allowed[100.0]) > set(allowed[0.5])


def test_runs_with_the_same_optimizer_decide_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    by_sgd, by_adam, unknown = Quality(0.1, 1, "a", "sgd"), Quality(-2.0, 1, "b", "adamw"), Quality(-0.1, 1, "c")
    monkeypatch.setattr("thinwire.plan.measured.shipped", lambda: {"diloco": [by_sgd, by_adam], "daso": [by_adam]})
    assert qualities("diloco", "sgd(momentum=0.5)") == [by_sgd]
    assert qualities("diloco", "adamw") == [by_adam]
    assert qualities("diloco", "adamw", {"diloco": [unknown]}) == [unknown, by_adam], "of an unknown one, too"
    assert qualities("diloco", "torch.optim:SGD") == [by_sgd]
    assert qualities("diloco") == qualities("diloco", "torch.optim:RAdam") == [by_sgd, by_adam]
    assert qualities("diloco", "radam", {"diloco": [unknown]}) == [unknown, by_sgd, by_adam], "it hides nothing"
    assert qualities("daso", "sgd") == [by_adam], "rather than nothing"


def test_runs_of_about_the_same_length_decide_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    short, medium, long = (Quality(-8.0 / updates, 1, "", "sgd", updates) for updates in (200, 2000, 3000))
    monkeypatch.setattr("thinwire.plan.measured.shipped", lambda: {"diloco": [long, short, medium]})

    def found(updates: int | None) -> list[Quality]:
        return qualities("diloco", "sgd", updates=updates)

    assert found(None) == [long, short, medium], "of an unknown length"
    assert found(199) == [long, short, medium], "none was as short: the worst of all counts"
    assert found(200) == found(1999) == [short], "what a longer run lost says nothing"
    assert found(2000) == [medium], "and a much shorter one says nothing either"
    assert found(3000) == found(10**6) == [long, medium], "half as long is about the same"
    own = Quality(-1.0, 1, "own runs of any length")
    assert qualities("diloco", "sgd", {"diloco": [own]}, updates=3000) == [own, long, medium]


def test_a_shipped_measurement_knows_how_long_its_runs_were() -> None:
    found = {quality.updates for several in shipped().values() for quality in several}
    assert found == {256, 2640, 2940}, "8 epochs of 4,000 images by 128; 30 of 45,000 and of 50,000 by 512"


def test_qualities_compare_runs_of_the_same_setting_and_seed_alone() -> None:
    cells = [
        {"strategy": "data_parallel", "seed": 0, "accuracy": 90.0, "setting": "a"},
        {"strategy": "diloco()", "seed": 0, "accuracy": 88.0, "setting": "a"},
        {"strategy": "diloco", "seed": 1, "accuracy": 10.0, "setting": "a"},
        {"strategy": "diloco", "seed": 0, "accuracy": 50.0, "setting": "b"},
    ]
    assert compare_cells(cells) == {"diloco": [Quality(-2.0, 1, "a")]}
    by_adam = [{**cell, "optimizer": "adamw(weight_decay=0.1)"} for cell in cells]
    assert compare_cells(by_adam) == {"diloco": [Quality(-2.0, 1, "a", "adamw")]}


def test_the_wire_of_one_node_is_its_loopback() -> None:
    def ask(comm: Comm) -> tuple[Link, float, float]:
        wire = wire_of(LINK, comm)
        return wire.link, wire.loopback_mbit, wire.hop_seconds

    assert tw.simulate(ask, ranks=2)[0] == (Link(100.0, 1.0), 200.0, 1e-3)
    assert tw.simulate(ask, ranks=2, nodes=2)[0][2] == 0.0


def chosen_on_processes(comm: Comm, slow: bool) -> tuple[str, str, bool, bool]:
    """Train with a network that seems slow, go on from a state that was saved, and tell the choices."""
    before = module.measure_ring
    module.measure_ring = lambda comm, seconds, largest=0: PairLink(0.01, 1e-3) if slow else PairLink(1e6, 1e-4)
    try:
        strategy = trainer(comm, "auto")
        torch_state = torch.get_rng_state()
        steps(strategy, batches(1, 24))
        drew_nothing = torch.equal(torch_state, torch.get_rng_state())
        state = copy.deepcopy(strategy.state_dict())
        steps(strategy, batches(3, 24, seed=2))
        module.measure_ring = lambda comm, seconds, largest=0: pytest.fail("a resumed run must not choose again")
        resumed = trainer(comm, "auto", MODELS[3])
        resumed.load_state_dict(state)
        steps(resumed, batches(3, 24, seed=2))
        equal = same(weights(strategy.consolidate()), weights(resumed.consolidate()))
        return strategy.status()["choice"], resumed.status()["choice"], equal, drew_nothing
    finally:
        module.measure_ring = before


@pytest.mark.parametrize("slow", [True, False])
def test_ranks_choose_alike_and_a_resumed_run_keeps_the_choice(process_world: ProcessWorlds, slow: bool) -> None:
    results = process_world.run(chosen_on_processes, 2, slow)
    choices = {choice for first, second, _, _ in results for choice in (first, second)}
    assert len(choices) == 1
    assert all(equal and drew_nothing for *_, equal, drew_nothing in results)
    assert (choices == {"data_parallel"}) is not slow


class InPlace(torch.nn.Module):
    """A model that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mul_(0.5))


def beside_a_group_of_the_user(comm: Comm) -> tuple[float, int, bool, int]:
    """Prepare auto with a group of one's own, an optimizer that is remembered, and a model that changes its input."""
    mine = comm.split([range(comm.size)], "mine")
    made = []

    def factory(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, 0.1))
        return made[-1]

    strategy = tw.prepare("auto", model=InPlace(), optimizer=factory, loss=torch.nn.functional.cross_entropy, comm=comm)
    batch = batches(1, 24)[0]
    before = batch[0].clone()
    strategy.step((batch[0], batch[1]))
    assert isinstance(strategy, Auto)
    in_use = strategy.strategy.learner.optimizer  # type: ignore[attr-defined]
    broadcast = sum(row["payload_bytes"] for row in comm.ledger.rows() if row["op"] == "broadcast")
    return (batch[0] / before).mean().item(), int(mine.sum(torch.ones(1))), in_use is made[-1], broadcast


def test_the_probe_leaves_batch_groups_and_optimizer_as_they_are(process_world: ProcessWorlds) -> None:
    for scale, ranks, is_last, broadcast in process_world.run(beside_a_group_of_the_user, 2):
        assert scale == pytest.approx(0.5)  # of one step, and not of the probe's too
        assert ranks == 2
        assert is_last
        assert broadcast == 4 * (6 * 3 + 3)  # the model goes over the network once


def test_what_the_package_says_of_accuracy_is_what_results_json_says() -> None:
    from benchmarks import measured

    assert measured.FILE.read_text() == measured.text(), "run: python benchmarks/measured.py"
