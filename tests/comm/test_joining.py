"""Processes join with a secret, or are told why not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import programs
from tests.comm.test_store import free_port
from thinwire.comm import process_groups
from thinwire.comm.join import _init_process_group
from thinwire.comm.store import local_store
from thinwire.comm.world import World
from thinwire.errors import PeerLost, RunError

SCRIPT = """
import torch
import thinwire as tw
with tw.join() as comm:
    torch.manual_seed(comm.rank)
    x = torch.randn(1000)
    for _ in range(5):
        x = comm.mean(x) * (1 + comm.rank)
    pair = comm.split([[0], [1, 2]], "part") if comm.size == 3 else comm
    print(x.double().sum().item(), pair.mean(x).double().sum().item())
"""
ATTACH = """
import os
import torch
import torch.distributed as dist
import thinwire as tw
from thinwire.comm import peers
from thinwire.comm.secret import Secret
from thinwire.comm.user_groups import comm_like, process_group
with tw.join() as comm:
    if comm.rank == int(os.environ["IMPOSTOR"]):  # stands for who took the place of a rank after it had joined
        peers.world_secret = Secret("a secret that was changed yesterday")
    try:
        group = comm_like(process_group("world", "attach"), torch.device("cpu"))
        print(group.split([[0, 1]], "part").sum(torch.ones(1)).item())
    except tw.RunError as error:
        print(error)
assert peers.world_secret is None, "the next world has another one"
"""
OWN_GROUP = """
import torch
import torch.distributed as dist
import thinwire as tw
dist.init_process_group("gloo")
try:
    with tw.join() as comm:
        part = comm.split([[0, 1]], "part")
        print(part.sum(torch.ones(1)).item(), part.secret)
except (tw.RunError, tw.UsageError) as error:
    print(error)
dist.destroy_process_group()
"""
SECRET, OTHER = "a secret that no other program knows", "a secret that was changed yesterday"

pytestmark = pytest.mark.usefixtures("program_server")


def join(
    folder: Path,
    secrets: Sequence[str | None],
    wait_for: Sequence[int],
    port: str = "",
    program: str = SCRIPT,
    **more: str,
) -> list[str]:
    """Start a rank with each secret, and wait for some of them; what those print, errors too."""
    script = folder / "joins.py"
    script.write_text(program)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port("127.0.0.1"), "WORLD_SIZE": str(len(secrets))}
    env = {**os.environ, **world, "PYTHONPATH": str(programs.ROOT), **more}
    started = [
        subprocess.Popen(
            [*programs.PYTHON, str(script)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**env, "RANK": str(rank)} | ({"THINWIRE_SECRET": secret} if secret is not None else {}),
        )
        for rank, secret in enumerate(secrets)
    ]  # fmt: skip
    try:
        return [started[rank].communicate(timeout=60)[0] for rank in wait_for]
    finally:
        for one in started:
            one.kill()
            one.communicate()


def test_ranks_with_a_secret_get_what_ranks_without_one_get(tmp_path: Path) -> None:
    with_secret = join(tmp_path, [SECRET] * 3, range(3))
    assert with_secret == join(tmp_path, [None] * 3, range(3))
    assert all(len(printed.split()) == 2 for printed in with_secret)


def test_groups_for_loops_that_are_not_ours_are_tried_too(tmp_path: Path) -> None:
    """Those of attach and rounds, which their members alone make, in a world that was joined with a secret."""
    for impostor, said in ((-1, "2.0"), (1, "somebody who does not know the secret")):
        found = join(tmp_path, [SECRET] * 2, range(2), program=ATTACH, IMPOSTOR=str(impostor))
        assert all(said in printed for printed in found), found


def test_a_process_group_that_was_there_before_is_tried_when_it_is_joined(tmp_path: Path) -> None:
    found = join(tmp_path, [SECRET] * 2, range(2), program=OWN_GROUP)
    assert all("2.0 Secret(hidden)" in printed for printed in found), found
    found = join(tmp_path, [SECRET, OTHER], range(2), program=OWN_GROUP)
    assert all("somebody who does not know the secret" in printed for printed in found), found
    found = join(tmp_path, [None] * 2, range(2), program=OWN_GROUP)
    assert all("2.0 None" in printed for printed in found), found


def test_in_a_process_group_that_was_there_all_ranks_name_those_without_a_secret(tmp_path: Path) -> None:
    found = join(tmp_path, [None, SECRET, None], range(3), program=OWN_GROUP)
    assert all("rank 0 and 2 of 3 have no secret, and the others have one; give" in printed for printed in found), found


def test_under_torchrun_the_store_with_a_secret_is_beside_that_of_torchrun(tmp_path: Path) -> None:
    torchruns = local_store(2)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7"}
    first, second = join(tmp_path, [SECRET] * 2, range(2), port=str(torchruns.port), **torchrun)
    assert [len(printed.split()) for printed in (first, second)] == [2, 2], first
    assert first.split()[1] == second.split()[1]
    assert torchruns.num_keys() <= 1, "nobody has written to it but itself"


@pytest.mark.parametrize(
    ("secrets", "why"),
    [
        ((SECRET, OTHER), "refused this rank: its secret is another one; give all ranks the same"),
        ((SECRET, None), "asks for a secret, and this rank has none; give it the file of rank 0"),
        ((None, SECRET), "this rank has a secret, but the store at 127.0.0.1:"),
        ((SECRET, "short"), "THINWIRE_SECRET: a secret has 16 to 4096 characters"),
    ],
    ids=["another", "none", "open store", "too short"],
)
def test_a_rank_that_may_not_join_says_why(secrets: tuple[str | None, ...], why: str, tmp_path: Path) -> None:
    (printed,) = join(tmp_path, secrets, [1])
    assert why in printed
    assert not any(secret in printed for secret in (SECRET, OTHER, "short;"))


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (RuntimeError("gloo connectFullMesh failed"), PeerLost, "thinwire doctor tries every link"),
        (dist.DistStoreError("wait timeout after 8000ms, keys: /0/1"), PeerLost, "thinwire doctor tries every link"),
        (dist.DistBackendError("NCCL error"), RunError, "NCCL error"),
    ],
    ids=["firewall", "who is gone", "another error"],
)
def test_a_rank_whose_connections_fail_says_that_it_could_not_join(
    error: Exception, kind: type[RunError], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", fail)
    with (
        process_groups.without_grace(),
        pytest.raises(RunError, match="rank 1 could not join 2 ranks: .*" + advice) as e,
    ):
        _init_process_group(World(1, 2, 1, 2, "127.0.0.1", 0, "none"), dist.HashStore(), "gloo", 5.0)
    assert type(e.value) is kind
