"""How long the end of the backward pass waits for communication."""

from __future__ import annotations

import time
from collections import deque

import torch

from thinwire.comm.background import record_event
from thinwire.comm.ledger import Ledger


class BackwardWaiting:
    """Enters in the timeline the time from the last gradient to the end of the backward pass.

    In that time there is nothing to compute. A GPU measures it by events of its own, whose times are read in a later
    step, when they have passed.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self.ledger, self.device = ledger, device
        self._last_gradient_time = 0.0
        self._last_gradient: torch.cuda.Event | None = None
        self._unread: deque[tuple[torch.cuda.Event, torch.cuda.Event, float]] = deque()  # one for each step

    def gradient_ready(self, ready: torch.cuda.Event | None) -> None:
        """Called when a gradient is ready; `ready` is the GPU's event of that."""
        self._last_gradient, self._last_gradient_time = ready, time.perf_counter()

    def backward_done(self) -> None:
        """Called when the backward pass has ended, and with it all communication."""
        end, timeline = time.perf_counter(), self.ledger.timeline
        if self._last_gradient is None:
            timeline.add_waiting_for_background(self._last_gradient_time, end)
            return
        while self._unread and self._unread[0][1].query():
            last_gradient, done, operation_seconds = self._unread.popleft()
            timeline.add_waiting(end - min(last_gradient.elapsed_time(done) / 1e3, operation_seconds), end)
        now = record_event(self.device)
        assert now is not None
        self._unread.append((self._last_gradient, now, timeline.operation_seconds))
