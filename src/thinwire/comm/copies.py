"""Copies of a module on other ranks that are used some steps after they were sent, so that nobody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.work import FinishedWork, Work
from thinwire.common.tensors import flatten, from_bytes, named_tensors, num_bytes, to_bytes


class Copies:
    """A module's tensors on other ranks. They are sent every `every` steps, and used `every` steps later.

    So a copy has a whole period to arrive, and which step uses which copy does not depend on the network.
    """

    def __init__(self, comm: Comm, module: nn.Module, source: int, readers: Sequence[int], every: int) -> None:
        self.comm, self.module, self.source, self.readers, self.every = comm, module, source, readers, every
        self.sending: list[Work] = []
        self.receiving: Work | None = None

    def refresh(self, step: int) -> None:
        """Called by every rank before every step."""
        if step == 0 or step % self.every:
            return
        if self.comm.rank == self.source:
            for work in self.sending:
                work.wait()
            self.sending = [self.comm.isend(self._bytes(), reader) for reader in self.readers]
        elif self.comm.rank in self.readers:
            if self.receiving is not None:
                self._load(self.receiving.wait())
            self.receiving = self.comm.irecv(self._bytes(), self.source)

    def state_dict(self) -> dict[str, Any]:
        """The copy in flight."""
        return {"coming": self.receiving.wait()} if self.receiving is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for work in [*self.sending, *([self.receiving] if self.receiving is not None else [])]:
            work.wait()
        self.sending = []
        self.receiving = FinishedWork(state["coming"].to(self._bytes().device)) if "coming" in state else None

    def _bytes(self) -> Tensor:
        return flatten(to_bytes(t) for t in named_tensors(self.module).values())

    @torch.no_grad()
    def _load(self, data: Tensor) -> None:
        tensors = list(named_tensors(self.module).values())
        for tensor, part in zip(tensors, data.split([num_bytes(t) for t in tensors]), strict=True):
            tensor.copy_(from_bytes(part, tensor.dtype, tensor.shape))
