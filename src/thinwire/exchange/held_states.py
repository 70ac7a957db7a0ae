"""States of a reducer under a loss scaler, which skips a step in which any gradient is not finite."""

from __future__ import annotations

from thinwire.reducers.base import ReducerState


class HeldStates:
    """New states of buckets, held until all are reduced: then all are taken, or none if the step is skipped."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self._held: dict[int, ReducerState] = {}
        self._finite = True

    def hold(self, bucket: int, state: ReducerState, is_finite: bool, states: list[ReducerState]) -> list[ReducerState]:
        """Hold the new state of one bucket; returns the states that are valid now, one per bucket."""
        self._held[bucket] = state
        self._finite = self._finite and is_finite
        if len(self._held) < self.num_buckets:
            return states
        new = [self._held[i] for i in range(self.num_buckets)] if self._finite else states
        self._held, self._finite = {}, True
        return new
