"""attach in a part of the world: what a world of so many ranks trains and sends, whatever other ranks do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.training import DEEP, PLAIN, batches, same, sgd, weights
from tests.worlds import ProcessWorlds, mesh_of, no_grace
from thinwire.comm.base import Comm

FEEDBACK = "error_feedback(maxnorm(bits=4))"
SPECS = ["mean", FEEDBACK, "powersgd(rank=2)"]
loss = nn.functional.cross_entropy


class Training:
    """A DDP with an exchange, its optimizer and its batches, in a group."""

    def __init__(self, group: Any, spec: str, seed: int, model: nn.Module = DEEP) -> None:
        self.group, self.spec, self.model = group, spec, model
        self.data = [
            (x[group.rank() :: group.size()], y[group.rank() :: group.size()]) for x, y in batches(6, 24, seed=seed)
        ]
        self.attach()

    def attach(self) -> None:
        self.ddp = DistributedDataParallel(copy.deepcopy(self.model), process_group=self.group)
        self.attached = tw.attach(self.ddp, self.spec, bucket_mb=0.02)
        self.optimizer = sgd(self.ddp.parameters())

    def step(self, number: int) -> None:
        x, y = self.data[number]
        self.optimizer.zero_grad()
        loss(self.ddp(x), y).backward()
        self.optimizer.step()

    def resume(self) -> None:
        """Go on in a new DDP, from what was kept."""
        parts = (self.ddp.module, self.optimizer, self.attached)
        kept = copy.deepcopy([part.state_dict() for part in parts])
        self.attached.close()
        self.attach()
        for part, state in zip((self.ddp.module, self.optimizer, self.attached), kept, strict=True):
            part.load_state_dict(state)

    def finish(self) -> tuple[dict[str, Tensor], list[Any]]:
        """The weights, and what was sent: rows of the ledger without the times and the name of the link."""
        names = ("purpose", "op", "ranks", "calls", "payload_bytes", "wire_bytes", "between_bytes")
        sent = [[row[name] for name in names] for row in self.attached.ledger.rows()]
        self.attached.close()
        return weights(self.ddp.module), sent


def in_whole_world(comm: Comm, spec: str, seed: int) -> Any:
    training = Training(dist.group.WORLD, spec, seed)
    for step in range(6):
        training.step(step)
    return training.finish()


def in_halves(comm: Comm, specs: list[str], stop: int | None = None) -> Any:
    """Ranks 0 and 2 train with one spec, 1 and 3 with another, at the same time; no spec: they do nothing."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    half = comm.rank % 2
    if not specs[half]:
        return None
    training = Training(groups[half], specs[half], seed=half)
    for step in range(6):
        if step == stop:
            training.resume()
        training.step(step)
    return training.finish()


@pytest.mark.parametrize("spec", SPECS)
def test_a_part_trains_and_sends_what_a_world_of_its_size_does(process_world: ProcessWorlds, spec: str) -> None:
    wanted = [process_world.run(in_whole_world, 2, one, seed) for seed, one in enumerate((spec, "sign"))]
    for rank, (found, sent) in enumerate(process_world.run(in_halves, 4, [spec, "sign"])):
        theirs, their_sent = wanted[rank % 2][rank // 2]
        assert same(found, theirs)
        assert sent == their_sent


def test_other_ranks_need_do_nothing(process_world: ProcessWorlds) -> None:
    wanted = process_world.run(in_whole_world, 2, FEEDBACK, 0)
    first, second, third, fourth = process_world.run(in_halves, 4, [FEEDBACK, ""])
    assert (second, fourth) == (None, None)
    assert same(first[0], wanted[0][0])
    assert same(third[0], wanted[1][0])


@pytest.mark.parametrize("stop", [1, 4])
def test_a_part_goes_on_exactly_from_its_state(process_world: ProcessWorlds, stop: int) -> None:
    specs = [FEEDBACK, "error_feedback(global_randk(ratio=0.1))"]
    straight, resumed = (process_world.run(in_halves, 4, specs, one) for one in (None, stop))
    assert all(same(one[0], other[0]) for one, other in zip(straight, resumed, strict=True))


def along_both(comm: Comm, dimensions: list[str]) -> list[Any]:
    """A DDP along each dimension of a mesh, trained in turn; every rank is in one group of each."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    trainings = [Training(mesh[name].get_group(), FEEDBACK, seed=5 + len(name)) for name in dimensions]
    for step in range(6):
        for training in trainings:
            training.step(step)
    return [training.finish() for training in trainings]


def test_dimensions_of_a_mesh_that_overlap_do_not_disturb_each_other(process_world: ProcessWorlds) -> None:
    together = process_world.run(along_both, 4, ["dp", "tp"])
    for which, alone in enumerate(process_world.run(along_both, 4, [name]) for name in ("dp", "tp")):
        for rank in range(4):
            assert same(together[rank][which][0], alone[rank][0][0])
            assert together[rank][which][1] == alone[rank][0][1]


def attached_again(comm: Comm) -> list[int]:
    """The case that waited for ever: attached and closed again and again in one part, and less often in the other."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    sent = []
    for _ in range(4 - comm.rank % 2):
        training = Training(groups[comm.rank % 2], FEEDBACK, 0, PLAIN)
        training.step(0)
        sent.append(training.attached.ledger.wire_bytes)
        training.attached.close()
    return sent


def test_attached_closed_and_attached_again(process_world: ProcessWorlds) -> None:
    first, second, *_ = process_world.run(attached_again, 4)
    assert first == first[:1] * 4
    assert second == first[:1] * 3


def one_fails(comm: Comm) -> Any:
    """Rank 0 leaves in the third step; rank 2 is its only peer."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    training = Training(groups[comm.rank % 2], FEEDBACK, seed=comm.rank % 2)
    for step in range(6):
        if (comm.rank, step) == (0, 2):
            training.attached.close()
            return "left"
        try:
            with no_grace():
                training.step(step)
        except RuntimeError as error:
            training.attached.close()
            return f"step {step}: {error}"
    return training.finish()[0]


def test_an_error_reaches_the_part_of_its_rank_alone(process_world: ProcessWorlds) -> None:
    first, second, third, fourth = process_world.run(one_fails, 4)
    wanted = process_world.run(in_whole_world, 2, FEEDBACK, 1)
    assert first == "left"
    assert third.startswith("step 2: ")
    assert same(second, wanted[0][0])
    assert same(fourth, wanted[1][0])


def given_a_group(comm: Comm) -> str:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group())
    with pytest.raises(tw.UsageError) as error:
        tw.attach(ddp, "mean", group=mesh["dp"])
    return str(error.value)


def test_a_ddp_has_its_own_group(process_world: ProcessWorlds) -> None:
    assert all("leave group out" in text for text in process_world.run(given_a_group, 4))
