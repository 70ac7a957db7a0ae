"""Wire bytes by formula: what one rank puts on the network in each operation."""

from __future__ import annotations

Sent = dict[int, int]  # rank of the group → bytes sent to it


def all_reduce_bytes(payload: int, ranks: int) -> int:
    """A ring: 2(n−1)/n of the payload, in n−1 steps of reduce-scatter and n−1 of all-gather."""
    return round(2 * (ranks - 1) / ranks * payload)


def all_gather_bytes(payload: int, ranks: int) -> int:
    """A ring: each rank passes on n−1 tensors of the size of its own."""
    return (ranks - 1) * payload


def all_reduce_sends(payload: int, ranks: int, rank: int) -> Sent:
    """The bytes of an all-reduce, by receiver."""
    return _to_next_rank(all_reduce_bytes(payload, ranks), ranks, rank)


def all_gather_sends(payload: int, ranks: int, rank: int) -> Sent:
    """The bytes of an all-gather, by receiver."""
    return _to_next_rank(all_gather_bytes(payload, ranks), ranks, rank)


def broadcast_sends(payload: int, ranks: int, rank: int, root: int, backend: str) -> Sent:
    """The bytes of a broadcast, by receiver.

    gloo uses a binomial tree, in which the root sends ⌈log₂ n⌉ copies. nccl uses a chain, in which all ranks but the
    last send one.
    """
    position = (rank - root) % ranks
    if backend == "nccl":
        receivers = [position + 1] if position < ranks - 1 else []
    else:
        rounds = (ranks - 1).bit_length()
        receivers = [position + 2**i for i in range(rounds) if position < 2**i and position + 2**i < ranks]
    return {(root + receiver) % ranks: payload for receiver in receivers}


def _to_next_rank(num_bytes: int, ranks: int, rank: int) -> Sent:
    return {(rank + 1) % ranks: num_bytes} if ranks > 1 else {}
