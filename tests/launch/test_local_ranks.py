"""How ranks end together."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest

from thinwire.launch.local_ranks import Finished

pytestmark = pytest.mark.usefixtures("process_world")  # whose fork server stays


def wait(finished: Finished) -> None:
    finished.wait()


def test_a_rank_that_was_killed_while_it_waited_for_the_end_holds_up_nobody() -> None:
    """With an Event of multiprocessing, `set` would wait for it for ever."""
    finished, context = Finished(), multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=wait, args=(finished,)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    time.sleep(0.3)  # they wait
    ranks[1].kill()
    setter = threading.Thread(target=finished.set, daemon=True)
    setter.start()
    setter.join(30)
    assert not setter.is_alive()
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [0, -9, 0]


def test_ranks_that_wait_for_the_end_go_on_if_the_launcher_is_gone() -> None:
    finished = Finished()
    rank = multiprocessing.get_context("forkserver").Process(target=wait, args=(finished,))
    rank.start()
    finished.writer.close()
    rank.join(30)
    assert rank.exitcode == 0
