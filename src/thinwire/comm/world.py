"""The world that this process is part of, from the variables of torchrun, srun or mpirun."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, and the address of the store."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    launcher: str


def place(ranks: int, nodes: int) -> list[int]:
    """The node of each rank: consecutive ranks share a node, and nodes have equally many if possible.

    >>> place(5, 2)
    [0, 0, 0, 1, 1]
    """
    if not 1 <= nodes <= ranks:
        raise UsageError(f"{nodes} nodes for {ranks} ranks; possible: 1 to {ranks}, so that every node has a rank")
    return [rank * nodes // ranks for rank in range(ranks)]


def host_id() -> int:
    """A number that differs between hosts: between machines, and between network namespaces of one machine."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/net")]
    return int.from_bytes(hashlib.sha256("".join(facts).encode()).digest()[:7], "big")


def node_key(world: World) -> tuple[int, int]:
    """What ranks of one node share: their host, and the first rank of the torchrun that started them."""
    has_agents = world.launcher == "torchrun" and world.local_size < world.size  # one for each node, ranks in order
    return host_id(), world.rank - world.local_rank if has_agents else 0


def number_nodes(keys: Sequence[Hashable]) -> list[int]:
    """The node of each rank, from the key of each, numbered in rank order.

    >>> number_nodes([(7, 0), (7, 0), (5, 2)])
    [0, 0, 1]
    """
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def find_world(env: Mapping[str, str] = os.environ) -> World | None:
    """The world that a launcher made for this process, or None when it was started by hand.

    >>> find_world({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).rank
    1
    >>> find_world({}) is None
    True
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _world(env, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "OMPI_COMM_WORLD_SIZE" in env:
        prefix = "OMPI_COMM_WORLD_"
        names = (f"{prefix}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        return _world(env, "mpirun", *names)
    if "PMI_SIZE" in env and "PMI_RANK" in env and "SLURM_STEP_NUM_TASKS" not in env:
        return _world(env, "mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if "SLURM_STEP_NUM_TASKS" in env:  # set by srun for its tasks, not by sbatch for its script
        return _world(env, "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
    for given, missing in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")):
        if env.get(given) and (given, env[given]) != ("WORLD_SIZE", "1"):
            raise UsageError(
                f"the environment has {given}={env[given]}, but {missing} is not set; set both, with ranks from 0 on, "
                f"or neither, to train alone: unset {given}"
            )
    return None


def _world(env: Mapping[str, str], launcher: str, rank: str, size: str, local_rank: str, local_size: str) -> World:
    num_ranks = _int(env, size, 1)
    own_rank = _int(env, rank)
    if not 0 <= own_rank < num_ranks:
        raise UsageError(f"{rank}={own_rank} is rank {own_rank} of {num_ranks} ranks; possible: 0 to {num_ranks - 1}")
    own_place = _int(env, local_rank, 0) if local_rank in env else 0
    num_local = _int(env, local_size, 1) if local_size in env else _slurm_local_size(env, num_ranks)
    if launcher != "srun" and not own_place < num_local <= num_ranks:
        raise UsageError(
            f"the environment has {local_rank}={own_place}, {local_size}={num_local} and {size}={num_ranks}; a rank of "
            f"a machine is one of its ranks, and these are at most all; set the three as {launcher} does"
        )
    return World(
        rank=own_rank,
        size=num_ranks,
        local_rank=own_place,
        local_size=num_local,
        address=env.get("MASTER_ADDR") or _address(env, launcher, num_ranks == num_local),
        port=_int(env, "MASTER_PORT", 1, 65535) if env.get("MASTER_PORT") else _port(env),
        launcher=launcher,
    )


def _address(env: Mapping[str, str], launcher: str, one_host: bool) -> str:
    if "SLURM_STEP_NODELIST" in env and launcher == "srun":
        return first_host(env["SLURM_STEP_NODELIST"])
    if one_host:
        return "127.0.0.1"
    raise UsageError(
        f"{launcher} started ranks on several hosts, but MASTER_ADDR is not set; "
        "set it to the address of rank 0's host and pass it on to every rank"
    )


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[03-07,9],login1"), first_host("a1,a2"), first_host("rack[1-2]n[5,7]")
    ('gpu03', 'a1', 'rack1n5')
    """
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", host):
        raise UsageError(f"cannot read SLURM_STEP_NODELIST '{nodelist}'; set MASTER_ADDR to rank 0's host")
    return host


def _slurm_local_size(env: Mapping[str, str], num_ranks: int) -> int:
    """Ranks of this node. Slurm writes "2(x3),1" for 2, 2, 2 and 1; without it, assume one host."""
    node = _int(env, "SLURM_NODEID", 0) if "SLURM_NODEID" in env else 0
    for size, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        node -= int(times or 1)
        if node < 0:
            return int(size) if 0 < int(size) <= num_ranks else num_ranks
    return num_ranks


def _port(env: Mapping[str, str]) -> int:
    """A port for each Slurm job step, so that jobs on one host do not use the same one."""
    if "SLURM_JOB_ID" in env:
        step = _int(env, "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else 0
        return 20000 + (_int(env, "SLURM_JOB_ID") * 37 + step) % 10000
    return DEFAULT_PORT


def _int(env: Mapping[str, str], name: str, least: int | None = None, most: int = 2**31 - 1) -> int:
    try:
        number = int(env[name])
    except KeyError:
        raise UsageError(
            f"the environment lacks {name}, which the launcher sets; set it, or start the ranks anew"
        ) from None
    except ValueError:
        raise UsageError(f"the environment has {name}={env[name]!r}; expected a whole number") from None
    if abs(number) > most or (least is not None and number < least):
        raise UsageError(f"the environment has {name}={number}; possible: {least or 0} to {most}")
    return number
