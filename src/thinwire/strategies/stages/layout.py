"""Which rank trains which stage: ranks are stages × replicas."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.data import Shard
from thinwire.errors import UsageError
from thinwire.surgery.segments import Segment


class StageLayout:
    """The stage and the replica of this rank, and the groups that it communicates in.

    The replicas of a stage are neighbouring ranks, so that the gradients which they exchange stay on one node if they
    can. The stages of a replica read the same batches.
    """

    def __init__(self, comm: Comm, num_stages: int) -> None:
        self.num_stages, self.num_replicas = num_stages, comm.size // num_stages
        self.stage_index, self.replica = divmod(comm.rank, self.num_replicas)
        self.is_first, self.is_last = self.stage_index == 0, self.stage_index == num_stages - 1
        self.shard = Shard(self.replica, self.num_replicas)
        all_stages = [[self.rank_of(s, r) for s in range(num_stages)] for r in range(self.num_replicas)]
        all_replicas = [[self.rank_of(s, r) for r in range(self.num_replicas)] for s in range(num_stages)]
        self.stages = comm.split(all_stages, "stages")  # the group of this replica's stages, in order
        self.replicas = comm.split(all_replicas, "replicas")  # the group of this stage's replicas

    def rank_of(self, stage_index: int, replica: int) -> int:
        """The rank, in the world, that trains a stage of a replica."""
        return stage_index * self.num_replicas + replica


def choose_num_stages(
    strategy: str, cut_at: Sequence[str], blocks: int | None, segments: Sequence[Segment], comm: Comm
) -> int:
    """As many stages as asked for; else as many as there are ranks, or fewer if the model has fewer segments."""
    asked = len(cut_at) + 1 if cut_at else blocks
    possible = [k for k in range(1, comm.size + 1) if comm.size % k == 0 and k <= len(segments)]
    if asked is None:
        if possible[-1] < comm.size:
            say(
                f"{strategy}: {possible[-1]} blocks on {comm.size // possible[-1]} ranks each: {comm.size} ranks, and "
                f"a model that can be cut into {len(segments)}",
                comm.rank,
                once=True,
            )
        return possible[-1]
    if asked > len(segments):
        raise UsageError(
            f"{strategy}: {asked} blocks, but the model can be cut into {len(segments)}, which begin at "
            f"{', '.join(segment.name for segment in segments)}; use fewer blocks or a deeper model"
        )
    if comm.size % asked:
        ranks, enough = f"{comm.size} rank{'s' if comm.size > 1 else ''}", -(-comm.size // asked) * asked
        numbers = " or ".join(str(k - 1 if cut_at else k) for k in possible)
        fewer = f"{numbers} cuts" if cut_at else f"blocks={numbers}"
        raise UsageError(f"{strategy}: {ranks} cannot share {asked} blocks equally; try {fewer}, or {enough} ranks")
    if blocks not in (None, asked):
        raise UsageError(f"{strategy}: {len(cut_at)} cut(s) make {asked} blocks; leave out blocks={blocks}")
    return asked
