"""The strategy that a plan chooses, for the network on which the run begins."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.link_probe import LARGEST_BYTES, PairLink, measure_ring
from thinwire.common.formats import format_rate
from thinwire.common.messages import quiet, say
from thinwire.common.tensors import num_bytes
from thinwire.data import Batch, Shard
from thinwire.netlab.link import Link
from thinwire.plan.measured import REFERENCE, is_safe, qualities
from thinwire.plan.planner import Forecast, Study, study
from thinwire.plan.recorded_run import Training
from thinwire.plan.timing import Effort
from thinwire.plan.wire import Frames, Wire
from thinwire.spec import parse
from thinwire.strategies.base import Artifact, Strategy
from thinwire.strategies.prepare import make_strategy
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import known_equal
from thinwire.surgery.moments import OptimizerState

REDUCERS = ("maxnorm(bits=4)", "maxnorm", *(f"error_feedback(maxnorm(bits={b}))" for b in (4, 2)), "powersgd(rank=4)")
DILOCO = ("diloco", "diloco(fragments=4)", "diloco(fragments=4, reducer=maxnorm(bits=4))")
OTHERS = ("local_sgd", *DILOCO, "daso(warmup_epochs=1, cooldown_epochs=1)")
CANDIDATES = (REFERENCE, *(f"{REFERENCE}(reducer={reducer})" for reducer in REDUCERS), *OTHERS)
QUICK_LINK_SECONDS, QUICK_SECONDS = 0.15, 0.05  # for a first look at the link, and at steps of data_parallel
LINK_SECONDS, LINK_MEASUREMENTS, STUDY_SECONDS = 0.5, 3, 0.2  # at most: for the link, and for each other candidate
FEWEST_BYTES = 2**18  # of the largest message of a first look
PROBE_SHARE, WAITING_SHARE = 0.05, 0.1  # that the probe may take of a run with data_parallel, and of its waiting
WORTH = 0.8  # a candidate must take at most this share of data_parallel's time: forecasts may be off by so much


class Auto(Strategy):
    """Measure the network and the model, and train with the strategy that is fastest for them.

    The first step begins with a probe: the link between nodes, and a few steps of data_parallel on a copy of the model.
    If data_parallel waits for less than a fifth of its time, it is taken. Otherwise the probe goes on with the others,
    for at most a twentieth of the run's time with data_parallel, or a tenth of what that waits. Candidates lost at most
    `loss_allowed` points wherever they were measured in runs like this one (`thinwire.plan.measured.qualities`), and
    must save a fifth of the time. The choice is part of the state: a resumed run does not choose again. Wire bytes:
    those of the chosen strategy, and in the beginning the probe's.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        loss_allowed: Annotated[float, Field(ge=0)] = 0.5,  # points of accuracy that a strategy may lose
    ) -> None:
        self.given, self.recipe, self.comm, self.loss_allowed = model, recipe, comm, loss_allowed
        self.shard = Shard(comm.rank, comm.size)
        self.choice, self.reason = "", ""
        self.epoch_steps: int | None = None
        self.groups: list[Comm] = []  # that the strategy made
        self._use(REFERENCE)

    def _use(self, spec: str) -> None:
        self.comm.close_subgroups(self.groups)
        groups = self.comm.subgroups
        self.strategy: Strategy = make_strategy(spec, self.given, replace(self.recipe, compile=False), self.comm)
        self.groups = [group for group in self.comm.subgroups if group not in groups]

    @property
    def model(self) -> nn.Module:
        """What this rank trains."""
        found: nn.Module = self.strategy.model  # type: ignore[attr-defined]
        return found

    # ---- training

    def begin_epoch(self, num_steps: int | None) -> None:
        self.epoch_steps = num_steps
        if self.choice:
            self.strategy.begin_epoch(num_steps)

    def step(self, batch: Batch) -> Tensor:
        if not self.choice:
            self._choose(batch)
        return self.strategy.step(batch)

    def end_epoch(self) -> None:
        self.strategy.end_epoch()

    def _choose(self, batch: Batch) -> None:
        """Probe, and let all ranks take the same strategy. Collective."""
        begin = time.perf_counter()
        if self.comm.size == 1 or self.comm.is_simulated or self.comm.is_dry:
            self.choice, self.reason = REFERENCE, "there is no network"
        elif self.comm.backend != "gloo":
            self.choice, self.reason = REFERENCE, f"networks of {self.comm.backend} cannot be forecast yet"
        else:
            say("auto: probing the network and what strategies compute", self.comm.rank)
            with self.comm.ledger.purpose("start", instead_of="train"):
                link, forecasts = self._probe(_OneBatch(self.given, self.recipe, batch, self.epoch_steps), begin)
            self._decide(forecasts, link)
            with known_equal(self.given):  # made anew also if it is the same: the factory's last optimizer is in use
                self._use(self.choice)
        took = time.perf_counter() - begin
        say(f"auto: {self.choice}: {self.reason} (the probe took {took:.2f} s)", self.comm.rank)
        self.strategy.begin_epoch(self.epoch_steps)

    def _probe(self, workload: _OneBatch, begin: float) -> tuple[PairLink | None, list[Forecast]]:
        """The link, and forecasts of data_parallel and, if it waits much, of what there is time for. Collective."""
        sent = sum(num_bytes(p) for p in self.given.parameters() if p.requires_grad)
        link = measure_ring(self.comm, QUICK_LINK_SECONDS, largest=max(FEWEST_BYTES, min(LARGEST_BYTES, 2 * sent)))
        plain = _study(REFERENCE, workload, self.comm, QUICK_SECONDS)
        quick = self._agree(plain, link)
        if link is None or quick is None or quick.waiting_share < 1 - WORTH:
            return link, [quick] if quick else []
        num_steps = self.recipe.steps or workload.epoch_steps * (self.recipe.epochs or math.inf)
        run_seconds = quick.seconds_per_step * num_steps
        allowed, last = run_seconds * max(PROBE_SHARE, WAITING_SHARE * quick.waiting_share), self._longest(begin)
        if allowed > 10 * QUICK_LINK_SECONDS:
            link = self._measure_link(min(LINK_SECONDS, allowed / 10)) or link
        found = [self._agree(plain, link)]
        for spec in (spec for spec in CANDIDATES if spec != REFERENCE and self._is_possible(spec, num_steps)):
            if self._longest(begin) + last > allowed:
                break
            now = time.perf_counter()
            found.append(self._agree(_study(spec, workload, self.comm, min(STUDY_SECONDS, allowed / 10)), link))
            last = self._longest(now)
        return link, [forecast for forecast in found if forecast is not None]

    def _is_possible(self, spec: str, num_steps: float) -> bool:
        optimizer = type(self.strategy.learner.optimizer).__name__.lower()  # type: ignore[attr-defined]
        is_possible = self.recipe.epochs is not None or not registry.load("strategies", parse(spec).name).has_phases
        return is_possible and is_safe(spec, qualities(spec, optimizer, updates=num_steps), self.loss_allowed)

    def _measure_link(self, seconds: float) -> PairLink | None:
        """The median of a few measurements, by rate. Collective."""
        found = [measure_ring(self.comm, seconds) for _ in range(LINK_MEASUREMENTS)]
        links = sorted(link for link in found if link is not None)
        return links[len(links) // 2] if links else None

    def _longest(self, begin: float) -> float:
        """The seconds since then on the rank that has spent most. Collective."""
        return self.comm.max(torch.tensor([time.perf_counter() - begin], dtype=torch.float64)).item()

    def _agree(self, studied: Study | None, link: PairLink | None) -> Forecast | None:
        """The forecast of the slowest rank; None if a rank has none. All ranks study at once, as they will compute."""
        own = studied.forecast(wire_of(link, self.comm)) if studied is not None and link is not None else None
        seconds, waiting = (-1.0, 0.0) if own is None else (own.seconds_per_step, own.waiting_share)
        worst = self.comm.max(torch.tensor([seconds, waiting], dtype=torch.float64)).tolist()
        fails = self.comm.min(torch.tensor([seconds], dtype=torch.float64)).item() < 0
        return None if own is None or fails else own._replace(seconds_per_step=worst[0], waiting_share=worst[1])

    def _decide(self, forecasts: Sequence[Forecast], link: PairLink | None) -> None:
        plain = next((f for f in forecasts if f.strategy == REFERENCE), None)
        self.choice = REFERENCE
        if plain is None or link is None:
            self.reason = "the network could not be measured"
            return
        best = min(forecasts, key=lambda f: f.seconds_per_step)
        at = f"at {format_rate(link.rate_mbit)} Mbit/s and {link.latency_ms:.2g} ms"
        if len(forecasts) == 1 and plain.waiting_share > 1 - WORTH:
            self.reason = f"{at} it waits {plain.waiting_share:.0%}; too short a run to try more"
        elif best.seconds_per_step > WORTH * plain.seconds_per_step:
            self.reason = f"{at} it waits {plain.waiting_share:.0%}, and nothing is much faster"
        else:
            self.choice = best.strategy
            self.reason = (
                f"{at} it would wait {best.waiting_share:.0%} and take {1e3 * best.seconds_per_step:.3g} ms a step, "
                f"{REFERENCE} {plain.waiting_share:.0%} and {1e3 * plain.seconds_per_step:.3g} ms"
            )

    # ---- results and states

    def status(self) -> dict[str, Any]:
        """The choice, its reason, and the status of the chosen strategy."""
        return {"choice": self.choice, "reason": self.reason, **self.strategy.status()}

    def consolidate(self) -> nn.Module:
        return self.strategy.consolidate()

    def eval_model(self) -> nn.Module:
        return self.strategy.eval_model()

    def optimizer_state(self) -> dict[str, OptimizerState] | None:
        return self.strategy.optimizer_state()

    def artifacts(self) -> list[Artifact]:
        return self.strategy.artifacts()

    def state_dict(self) -> dict[str, Any]:
        return {"choice": self.choice, "reason": self.reason, "strategy": self.strategy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the strategy that was chosen."""
        if state["choice"] != self.choice and (state["choice"] or REFERENCE) != (self.choice or REFERENCE):
            with quiet():
                self._use(state["choice"] or REFERENCE)
        self.choice, self.reason = state["choice"], state["reason"]
        self.strategy.load_state_dict(state["strategy"])


class _OneBatch:
    """The workload of a run whose first batch is known."""

    is_timed = True

    def __init__(self, model: nn.Module, recipe: Recipe, batch: Batch, epoch_steps: int | None) -> None:
        self.model, self.recipe, self.batch = model, replace(recipe, optimizer_state={}), batch
        self.epochs, self.epoch_steps = recipe.epochs or 2, epoch_steps or 64

    def steps_per_epoch(self, ranks: int) -> int:
        return self.epoch_steps

    def training(self, ranks: int, epochs: int, most_steps: int) -> Training:
        return Training(self.model, self.recipe, lambda shard: [self.batch] * most_steps, epochs)

    stand_in = training

    def effort(self, ranks: int) -> Effort:
        return Effort()


def _study(spec: str, workload: _OneBatch, comm: Comm, seconds: float) -> Study | None:
    """None if the strategy cannot train this model here."""
    devices = {p.device for p in workload.model.parameters() if p.is_cuda}
    with quiet(), torch.random.fork_rng(devices=devices):
        try:
            return study(spec, workload, comm.nodes, seconds)
        except Exception as error:  # of one rank alone, perhaps: the others must learn of it
            reason = str(error).partition("\n")[0]
    say(f"auto: {spec} is left out: {reason}", once=True)
    return None


def wire_of(link: PairLink, comm: Comm) -> Wire:
    """The network of a world, as its ranks measured it: rates are of data, and latencies of messages."""
    wire = Wire(Link(*link), Frames(header_bytes=0), hop_seconds=0.0)
    if len(set(comm.nodes)) > 1:
        return wire
    return replace(wire, hop_seconds=link.latency_ms / 1e3, loopback_mbit=comm.size * link.rate_mbit)
