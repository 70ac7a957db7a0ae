"""Groups that are a part of the world: their members make them, again and again, and other ranks do nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire as tw
from tests.worlds import ProcessWorlds, World, ends_of, no_grace, worlds
from thinwire.comm.base import Comm
from thinwire.comm.user_groups import comm_like, process_group
from thinwire.errors import PeerLost

CPU = torch.device("cpu")


def split_again(comm: Comm) -> list[list[float]]:
    """Three ranks are split off, and these again, and again after that was closed; the last rank makes fewer groups."""
    part = comm.split([[0, 1, 2], [3]], "part")
    found = []
    for _ in range(3 if comm.rank < 3 else 1):
        small = part.split([[0, 2], [1]] if comm.rank < 3 else [[0]], "small")
        found.append([part.sum(torch.ones(1)).item(), *(t.item() for t in small.all_gather(torch.tensor(comm.rank)))])
        part.close_subgroups()
    return found


@worlds(threads=[4], processes=[4])
def test_a_part_can_be_split_again_and_again(world: World, ranks: int) -> None:
    assert world(split_again, ranks) == [[[3, 0, 2]] * 3, [[3, 1]] * 3, [[3, 0, 2]] * 3, [[1, 3]]]


def made_by_members(comm: Comm, num_groups: list[int]) -> list[float]:
    """Ranks 0 and 2 have a group, 1 and 3 another; each makes Comms of its own group, as many as it wants."""
    mine = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][comm.rank % 2]
    found = []
    for _ in range(num_groups[comm.rank % 2]):
        one, two = (comm_like(mine, CPU) for _ in range(2))
        sums = [c.sum(torch.tensor(float(comm.rank))) for c in (two, one)]
        assert sums[0] == sums[1]
        found.append(sums[0].item())
        assert (one.link, one.size, one.rank, one.nodes) == ("group", 2, comm.rank // 2, (0, 0))
        assert len(list(one.ledger.rows())) == 1, "a ledger of its own"
        one.close()
        two.close()
    return found


def test_members_make_groups_again_and_again_while_others_make_none(process_world: ProcessWorlds) -> None:
    """torch's own groups of members get the names of closed ones again, and then wait for ever."""
    assert process_world.run(made_by_members, 4, [3, 0]) == [[2.0] * 3, [], [2.0] * 3, []]
    assert process_world.run(made_by_members, 4, [1, 2]) == [[2.0], [4.0] * 2, [2.0], [4.0] * 2]


def beside_torch(comm: Comm) -> None:
    """Two ranks have groups of ours, when torch names a group after how many it knows on each rank."""
    mine = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][comm.rank // 2]
    ours = [comm_like(mine, CPU) for _ in range(2)] if comm.rank < 2 else []
    across: Any = dist.new_group([comm.rank % 2, comm.rank % 2 + 2], use_local_synchronization=True)
    total = torch.tensor(float(comm.rank))
    dist.all_reduce(total, group=across)
    assert total == 2 * (comm.rank % 2) + 2
    for one in ours:
        one.close()


@pytest.mark.usefixtures("process_world")  # whose fork server stays
def test_torchs_own_names_do_not_depend_on_ours() -> None:
    assert ends_of(beside_torch, [4]) == [""] * 4


def lost(comm: Comm, op: str) -> str:
    """One of two ranks closes its Comm; what the other one begins then fails, and other groups go on."""
    mine = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][comm.rank % 2]
    made = comm_like(mine, CPU)
    made.barrier()
    end = ""
    if comm.rank == 0:
        made.close()
    elif comm.rank == 2:
        with no_grace(), pytest.raises(PeerLost) as error:
            getattr(made, op)(torch.ones(1), *([0] if op == "recv" else []))
        end = str(error.value)
    else:
        made.barrier()
    made.close()
    comm.barrier()
    return end


@pytest.mark.parametrize("op", ["sum", "broadcast", "all_gather", "recv"])
def test_a_rank_of_a_part_that_leaves_is_lost_to_that_part(process_world: ProcessWorlds, op: str) -> None:
    first, second, third, fourth = process_world.run(lost, 4, op)
    assert third.startswith("lost contact with another rank")
    assert (first, second, fourth) == ("", "", "")


def of_replicas(comm: Comm, case: str) -> Any:
    """The ranks of a Comm whose group has one rank of each replica, or all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shards"))
    replica = mesh["shards"].get_group()
    if case == "one of each":
        made = comm_like(mesh["dp"].get_group(), CPU, replica)
    elif case == "all":
        made = comm_like(process_group("world", "test"), CPU, replica)
    else:
        group = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3])][comm.rank // 3]
        if comm.rank == 3:
            return "is not asked"
        with pytest.raises(tw.UsageError) as error:
            comm_like(group, CPU, replica)
        return str(error.value)
    members, total = made.members, made.sum(torch.tensor(1)).item()
    made.close()
    return members, made.rank, total, made.link


@pytest.mark.parametrize("case", ["one of each", "all"])
def test_a_group_stands_for_whole_replicas(process_world: ProcessWorlds, case: str) -> None:
    assert process_world.run(of_replicas, 4, case) == [((0, 1, 2, 3), rank, 4, "world") for rank in range(4)]


def test_a_part_of_a_replica_is_refused_on_all_ranks_of_the_group(process_world: ProcessWorlds) -> None:
    *found, _ = process_world.run(of_replicas, 4, "part of one")
    assert all("a part of a replica" in text and "1 of 2 with rank 2" in text for text in found)


def refused(comm: Comm, case: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    small = DeviceMesh("cpu", [0, 1])
    made: dict[str, Any] = {
        "new_group": dist.new_group([0, 1]), "nobody": None, "small mesh": small, "two dimensions": mesh, "text": "dp",
    }  # fmt: skip
    if case == "destroyed":
        made[case] = dist.new_group([0, 1, 2, 3])
        dist.destroy_process_group(made[case])
    if comm.rank < 2 and case in ("new_group", "small mesh"):
        return f"rank {comm.rank} of {process_group(made[case], 'rounds').size()}"
    with pytest.raises(tw.UsageError) as error:
        process_group(made[case], "rounds")
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("new_group", "rounds: rank 3 is not in the group; call it on the ranks that are"),
        ("nobody", "rank 3 is not in the group.*for the whole world, leave group out"),
        ("small mesh", "rank 3 is not in the group"),
        ("two dimensions", r'has 2 dimensions; give the one that replicas are in, as mesh\["dp"\]'),
        ("text", "group='dp'; possible: a process group"),
        ("destroyed", "the group was destroyed"),
    ],
)
def test_what_is_no_group_of_this_rank_is_refused(process_world: ProcessWorlds, case: str, message: str) -> None:
    first, *_, last = process_world.run(refused, 4, case)
    assert re.search(message, last)
    assert case not in ("new_group", "small mesh") or first == "rank 0 of 2"
