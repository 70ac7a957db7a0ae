"""The heads of blocks that train with local losses, and the copies of the model's last layer that some of them use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.copies import Copies
from thinwire.common.seeding import seeded
from thinwire.strategies.stages.cut_model import CutModel
from thinwire.strategies.stages.windows import LossWindow
from thinwire.surgery.heads.base import Boundary, Head
from thinwire.surgery.heads.readout import Readout


def build_heads(
    head: Head,
    window: LossWindow,
    modules: Sequence[nn.Module],
    passed: Sequence[Tensor],
    ends: Sequence[int],
    seed: int,
) -> list[nn.Module | None]:
    """A head for each block whose loss is used, and none for the last block, which ends with the model's own output.

    `modules` are the segments; `passed` has an example of what goes into each, and of the model's output. Block k goes
    up to segment `ends[k]`.
    """
    num_blocks = len(ends)
    with seeded(torch.device("cpu"), seed):
        return [
            head.build(Boundary(passed[end], passed[-1], modules[end:], passed[end:-1], k, num_blocks))
            if k < num_blocks - 1 and window.is_used(k)
            else None
            for k, end in enumerate(ends)
        ]


def copies_of_last_layer(cut_model: CutModel, comm: Comm) -> Copies | None:
    """The copies of the model's last layer in all readout heads of this replica; None if there are no such heads."""
    readers = {k: stage.head for k, stage in enumerate(cut_model.stages) if isinstance(stage.head, Readout)}
    if not readers:
        return None
    layout, own_head = cut_model.layout, cut_model.stage.head
    last_layer = list(cut_model.stage.block.children())[-1]
    copied = own_head.last_segment if isinstance(own_head, Readout) else last_layer
    source = layout.rank_of(layout.num_stages - 1, layout.replica)
    ranks = [layout.rank_of(k, layout.replica) for k in readers]
    return Copies(comm, copied, source, ranks, next(iter(readers.values())).every)
