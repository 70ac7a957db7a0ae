"""Whether each connection of a group is to a rank that knows the secret.

gloo's listeners take whoever connects first and sends a small number, for the rank that they wait for. So a stranger
may be in the place of a rank. Every two ranks prove to each other, over the connection that they will use, that they
know the secret.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from thinwire.comm.process_groups import give_grace, meeting
from thinwire.comm.secret import NONCE_BYTES, Secret
from thinwire.errors import PeerLost, RunError, UsageError

CHECK_SECONDS = 60.0
world_secret: Secret | None = None  # that all ranks of the world know which this process has joined


@contextmanager
def joined_with(secret: Secret | None) -> Iterator[None]:
    """Inside, groups that the user's own loops are given are tried with this secret, as those of the world are."""
    global world_secret
    before, world_secret = world_secret, secret
    try:
        yield
    finally:
        world_secret = before


def agree_on_secret(store: dist.Store, rank: int, size: int, secret: Secret | None) -> None:
    """UsageError on all ranks if only some have a secret, who would wait for the others' proofs. Collective."""
    store.set(f"secret/{rank}", "no" if secret is None else "yes")
    with meeting():
        without = [one for one in range(size) if store.get(f"secret/{one}") == b"no"]
    if 0 < len(without) < size:
        raise UsageError(
            f"rank {' and '.join(map(str, without))} of {size} have no secret, and the others have one; give all ranks "
            "the same with tw.join(secret_file=…) or the variable THINWIRE_SECRET, or none"
        )


def check_peers(groups: Sequence[dist.ProcessGroup], secret: Secret | None) -> None:
    """Raise RunError if a connection of these groups is not to a rank that knows the secret. Collective, for gloo.

    PeerLost if a rank has ended.
    """
    if secret is None:
        return
    for group in groups:
        if group.size() > 1 and group.name() != "nccl":
            _check(group, secret)


def _check(group: dist.ProcessGroup, secret: Secret) -> None:
    own, name, ranks = group.rank(), group.group_name.encode(), range(group.size())
    nonces = [os.urandom(NONCE_BYTES) for _ in ranks]
    theirs = _swap(nonces, group)
    proofs = [secret.prove("peer", name, *_numbers(own, to), nonces[to], theirs[to]) for to in ranks]
    found = _swap(proofs, group)
    false = [
        peer
        for peer in ranks
        if not secret.accepts(found[peer], "peer", name, *_numbers(peer, own), theirs[peer], nonces[peer])
    ]
    if false:
        raise RunError(
            f"on rank {own}, the connection to rank {' and '.join(map(str, false))} is one to somebody who does not "
            "know the secret; close the ranks' ports to strangers by a firewall, or use another network with --iface"
        )


def _swap(parts: list[bytes], group: dist.ProcessGroup) -> list[bytes]:
    """Give each rank its part; returns the part of each. Every two ranks use their own connection."""
    sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    found = torch.empty_like(sent)
    try:
        work = dist.all_to_all_single(found, sent, group=group, async_op=True)
        assert work is not None
        work.wait(datetime.timedelta(seconds=CHECK_SECONDS))
    except RuntimeError as error:
        if "onnection" in str(error):
            give_grace()
            raise PeerLost(
                f"lost contact with another rank that was to prove the secret ({_first_line(error)})"
            ) from error
        raise RunError(
            f"ranks could not prove the secret to each other within {CHECK_SECONDS:g} s: one hangs, or a stranger "
            f"holds its connection ({_first_line(error)}); start them again"
        ) from error
    size = len(parts[0])
    whole = found.numpy().tobytes()
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _numbers(*ranks: int) -> list[bytes]:
    return [rank.to_bytes(4, "big") for rank in ranks]
