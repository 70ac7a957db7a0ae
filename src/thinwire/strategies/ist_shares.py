"""How many of the units each rank gets: equal numbers, given shares, or by how fast its steps are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import PositiveFloat

from thinwire.errors import UsageError
from thinwire.exchange.sharded import Contribution

Shares = Literal["equal", "measured"] | list[PositiveFloat]


def count_subnets(subnets: int | None, num_ranks: int) -> int:
    """The number of different narrow networks in a round: the one that was asked for, or one for each rank."""
    if subnets is not None and subnets > num_ranks:
        raise UsageError(f"ist: subnets={subnets} for {num_ranks} ranks; possible: 1 to {num_ranks}")
    return subnets or num_ranks


class UnitShares:
    """The share of each narrow network, and what this rank has done in the current round."""

    def __init__(self, shares: Shares, num_subnets: int, num_ranks: int) -> None:
        self.is_measured = shares == "measured"
        self.weights = [1.0] * num_subnets if isinstance(shares, str) else [float(share) for share in shares]
        owners = "ranks" if num_subnets == num_ranks else "narrow networks"
        if len(self.weights) != num_subnets:
            raise UsageError(
                f"ist: shares={self.weights} for {num_subnets} {owners}; give one number for each, as [2, 1] for two"
            )
        if self.is_measured and num_subnets < num_ranks:
            raise UsageError(
                "ist: shares=measured, but ranks with one narrow network have equal shares; leave subnets out"
            )
        self.begin_round()

    @property
    def fractions(self) -> list[float]:
        """The shares, with sum 1."""
        return [weight / sum(self.weights) for weight in self.weights]

    def begin_round(self) -> None:
        """Count steps and their time from 0."""
        self.trained_steps, self.seconds = 0, 0.0

    @contextmanager
    def counted_step(self) -> Iterator[None]:
        """Inside, this rank trains one step."""
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin
        self.trained_steps += 1

    def contribution(self, device: torch.device) -> Contribution:
        """The steps that this rank trained in this round, and how long they took."""
        if self.is_measured and device.type == "cuda":
            begin = time.perf_counter()
            torch.cuda.synchronize(device)
            self.seconds += time.perf_counter() - begin
        return Contribution(self.trained_steps, self.seconds)

    def update(self, contributions: Sequence[Contribution]) -> None:
        """Follow the measured times of all ranks, if shares are measured."""
        if self.is_measured:
            self.weights = balance(self.weights, contributions)

    def state_dict(self) -> dict[str, Any]:
        """The shares, and what was counted in the current round."""
        return {"weights": self.weights, "trained_steps": self.trained_steps, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same number of ranks."""
        self.weights = list(state["weights"])
        self.trained_steps, self.seconds = state["trained_steps"], state["seconds"]


def balance(shares: Sequence[float], contributions: Sequence[Contribution]) -> list[float]:
    """Shares with which a step takes about equally long on all ranks, half of the way there.

    They are pulled towards 1 and kept between ¼ and 4, because the time of a step may not depend on units at all.
    """
    if not all(done.steps and done.seconds for done in contributions):
        return list(shares)
    new = [share**0.9 * (done.seconds / done.steps) ** -0.5 for share, done in zip(shares, contributions, strict=True)]
    mean = sum(new) / len(new)
    return [min(4.0, max(0.25, share / mean)) for share in new]
