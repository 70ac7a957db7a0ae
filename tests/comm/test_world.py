"""Which world a process is in, from what torchrun, srun and mpirun say."""

from __future__ import annotations

import pytest

from thinwire.comm.world import find_world, first_host
from thinwire.errors import UsageError


def test_torchrun() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
    }
    world = find_world(env)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 8, 1, 2)
    assert (world.address, world.port, world.launcher) == ("h", 5, "torchrun")


def test_mpirun_on_one_host_needs_no_address() -> None:
    prefix = "OMPI_COMM_WORLD_"
    env = {f"{prefix}RANK": "1", f"{prefix}SIZE": "2", f"{prefix}LOCAL_RANK": "1", f"{prefix}LOCAL_SIZE": "2"}
    world = find_world(env)
    assert world is not None
    assert (world.rank, world.size, world.address, world.port) == (1, 2, "127.0.0.1", 29500)


def test_mpirun_on_several_hosts_asks_for_the_address() -> None:
    prefix = "OMPI_COMM_WORLD_"
    env = {f"{prefix}RANK": "1", f"{prefix}SIZE": "4", f"{prefix}LOCAL_RANK": "1", f"{prefix}LOCAL_SIZE": "2"}
    with pytest.raises(UsageError, match="MASTER_ADDR is not set"):
        find_world(env)
    world = find_world({**env, "MASTER_ADDR": "10.0.0.1"})
    assert world is not None
    assert world.address == "10.0.0.1"


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}


def test_srun() -> None:
    world = find_world(SLURM)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 6, 1, 2)
    assert world.address == "node07"


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"),
    [("2(x3)", "2", 2), ("3,1", "0", 3), ("3,1", "1", 1), ("4(x2),1,2(x2)", "2", 1), ("4(x2),1,2(x2)", "4", 2)],
)
def test_nodes_of_srun_may_have_unequal_numbers_of_ranks(tasks: str, node: str, local_size: int) -> None:
    world = find_world({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert world is not None
    assert world.local_size == local_size


def test_srun_jobs_that_share_a_host_use_different_ports() -> None:
    one, two = find_world(SLURM), find_world({**SLURM, "SLURM_JOB_ID": "1235"})
    assert one is not None
    assert two is not None
    assert one.port != two.port


def test_an_sbatch_script_is_not_a_task() -> None:
    assert find_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None


def test_an_unreadable_nodelist_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot read SLURM_STEP_NODELIST '\['"):
        first_host("[")


def test_alone() -> None:
    assert find_world({}) is None


def test_nonsense_is_named() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE='many'"):
        find_world({"RANK": "0", "WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[01-04]", "n01"),
        ("n[3,5-7]-ib", "n3-ib"),
        ("a-b[1-2],c", "a-b1"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({"RANK": "1"}, "RANK=1, but WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "rank 2 of 2 ranks; possible: 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "rank -1 of 2 ranks"),
    ],
)
def test_half_a_world_is_refused(env: dict[str, str], message: str) -> None:
    """A process that trained alone, or waited for a rank that cannot come, would say nothing of it."""
    with pytest.raises(UsageError, match=message):
        find_world(env)


def test_one_rank_needs_no_number() -> None:
    assert find_world({"WORLD_SIZE": "1"}) is None
