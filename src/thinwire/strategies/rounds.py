"""Rounds: ranks train separately, and average their parameters every few steps. Any loop can make the steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.errors import RunError
from thinwire.exchange.parameters import ParameterAverager
from thinwire.strategies.base import Strategy


class InRounds(Strategy, abstract=True):
    """A strategy that a loop of the user's own can use (tw.rounds): there it has no learner, and sees parameters alone.

    Then `end_epoch` and `meet` make all ranks equal, and `state_dict` has neither model nor optimizer.
    """

    @abstractmethod
    def after_step(self, loss: Tensor | None = None) -> None:
        """Called after each step of the optimizer: start and merge what is due. Collective."""

    @abstractmethod
    def meet(self) -> None:
        """Make all ranks equal, also in the middle of an epoch, which goes on. Collective."""

    @abstractmethod
    def use_replicas(self, replicas: Sequence[Sequence[int]]) -> None:
        """Called if the ranks of each replica exchange gradients in every step, and so are equal. Collective."""


class Rounds:
    """Every `every` steps each fragment of the parameters is averaged, and merged `delay` steps later.

    Fragments take turns, evenly spread over the `every` steps, so that one at a time is in flight.
    """

    def __init__(self, averaging: ParameterAverager, every: int, delay: int) -> None:
        self.averaging, self.every, self.delay = averaging, every, delay
        fragments = len(averaging.fragments)
        starts = [(i + 1) * every // fragments % every for i in range(fragments)]
        self.fragment_at = {steps: fragment for fragment, steps in enumerate(starts)}  # steps modulo `every`
        self.num_steps = 0  # since all ranks were equal by `together`
        self.steps_in_flight = 0  # since the last exchange began
        self.has_local_steps = [False] * fragments  # since each fragment was last exchanged

    def after_step(self) -> None:
        """Called after each step: start and merge what is due. Collective."""
        self.has_local_steps = [True] * len(self.has_local_steps)
        self.num_steps += 1
        self.steps_in_flight += 1
        is_due = bool(self.averaging.in_flight) and self.steps_in_flight == self.delay
        fragment = self.fragment_at.get(self.num_steps % self.every)
        if is_due and self.averaging.in_flight[0].fragment == fragment:
            self.averaging.merge()
            is_due = False
        if fragment is not None:  # sent before the wait for the last one, so that the wire is not idle between the two
            self._start_exchange(fragment, with_snapshot=self.delay > 0)
        if is_due or (fragment is not None and not self.delay):
            self.averaging.merge()  # waits, if the result has not arrived

    def together(self) -> None:
        """Average all that ranks have learned since: afterwards they are equal, and a new round begins. Collective."""
        if self.averaging.in_flight:
            self.averaging.merge()
        fragments = [i for i, has_steps in enumerate(self.has_local_steps) if has_steps]
        for fragment in fragments:
            self._start_exchange(fragment, with_snapshot=False)
        for _ in fragments:
            self.averaging.merge()
        self.num_steps = 0

    def _start_exchange(self, fragment: int, with_snapshot: bool) -> None:
        """With a snapshot if training continues before the merge."""
        self.averaging.start(fragment, with_snapshot=with_snapshot)
        self.has_local_steps[fragment] = False
        self.steps_in_flight = 0

    @property
    def is_in_sync(self) -> bool:
        """Whether all ranks have the same parameters."""
        return not self.averaging.in_flight and not any(self.has_local_steps)

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on exactly, besides its model and optimizer; each rank has its own."""
        return {
            "averaging": self.averaging.state_dict(), "num_steps": self.num_steps,
            "steps_in_flight": self.steps_in_flight, "has_local_steps": list(self.has_local_steps),
            "period": [self.every, self.delay],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the model must have the weights that it had then."""
        if (len(state["has_local_steps"]), *state["period"]) != (len(self.has_local_steps), self.every, self.delay):
            raise RunError("the saved state is of other options: every, wait or fragments; use the same ones")
        self.averaging.load_state_dict(state["averaging"])
        self.num_steps, self.steps_in_flight = state["num_steps"], state["steps_in_flight"]
        self.has_local_steps = list(state["has_local_steps"])
