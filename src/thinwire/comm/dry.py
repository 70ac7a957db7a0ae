"""A rank whose peers do not exist: operations return at once and send nothing, so that a strategy can be tried out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.base import Comm, Op, find_own_group
from thinwire.comm.ledger import Ledger
from thinwire.comm.work import FinishedWork, Work


class DryComm(Comm):
    """One rank of a group like another one, with a ledger of its own.

    Results have the right shapes and no meaning: the other ranks seem to give what this one gives.

    >>> import thinwire, torch
    >>> thinwire.simulate(lambda comm: DryComm(comm).max(torch.tensor(comm.rank)).item(), ranks=2)
    [0, 1]
    """

    is_dry = True

    def __init__(self, like: Comm) -> None:
        self.rank, self.size, self.nodes, self.link = like.rank, like.size, like.nodes, like.link
        self.backend, self.is_simulated = like.backend, like.is_simulated
        self.ledger = Ledger()

    def split(self, groups: Sequence[Sequence[int]], link: str) -> DryComm:
        members = find_own_group(groups, self.rank, self.size)
        group = DryComm(self)
        group.rank, group.size, group.link = members.index(self.rank), len(members), link
        group.ledger = self.ledger
        group.nodes = tuple(self.nodes[r] for r in members)
        return group

    def _start_reduce(self, tensor: Tensor, op: Op, device: torch.device, overwrite: bool = False) -> Work:
        return FinishedWork(tensor.detach().clone())

    def _all_gather(self, tensor: Tensor, device: torch.device) -> list[Tensor]:
        return [tensor.detach().clone() for _ in range(self.size)]

    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros(part.shape, dtype=part.dtype, device=part.device) for part in like]

    def _broadcast(self, tensor: Tensor, root: int, device: torch.device) -> Tensor:
        return tensor.detach().clone()

    def _isend(self, tensor: Tensor, to: int, device: torch.device) -> Work:
        return FinishedWork(tensor)

    def _irecv(self, like: Tensor, source: int) -> Work:
        return FinishedWork(torch.zeros(like.shape, dtype=like.dtype, device=like.device))
