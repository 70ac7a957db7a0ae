"""The scripts in examples/ do what their first lines say."""

from __future__ import annotations

import pytest

from examples import sharded_loop
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm

EXACT_BYTES = 2 * 4 * 62_752 * 60  # of a gradient, from each of two nodes, in 60 steps


def on_two_nodes(comm: Comm, reducer: str, rounds: str) -> tuple[list[float], bool, int]:
    return sharded_loop.train(2, 60, reducer, rounds)


@pytest.mark.parametrize(
    ("reducer", "rounds", "sent"),
    [("error_feedback(maxnorm(bits=4))", "", EXACT_BYTES / 7.65), ("", "diloco(every=4)", EXACT_BYTES / 4)],
)
def test_a_sharded_loop_learns_and_sends_little_between_nodes(
    process_world: ProcessWorlds, reducer: str, rounds: str, sent: float
) -> None:
    for losses, are_equal, sent_bytes in process_world.run(on_two_nodes, 4, reducer, rounds):
        assert losses[-1] < losses[0] / 10
        assert are_equal
        assert sent_bytes == pytest.approx(sent, rel=0.01)
