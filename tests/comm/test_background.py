"""The thread that communicates while the main thread computes."""

from __future__ import annotations

import threading

import pytest
import torch

from thinwire.comm.background import BackgroundWork, CommThread
from thinwire.comm.ledger import Ledger


def test_it_computes_on_one_core_and_leaves_the_others_their_number() -> None:
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        thread, done = CommThread("test", Ledger()), threading.Event()
        thread.submit(lambda: (found.append(torch.get_num_threads()), done.set())[0])
        assert done.wait(10)
        assert found == [1]
        assert torch.get_num_threads() == 2
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert found == [1, 2]
        thread.close()
    finally:
        torch.set_num_threads(before)


def test_work_is_done_in_order_and_under_the_purpose_of_whoever_gave_it() -> None:
    ledger, found = Ledger(), []
    thread = CommThread("test", ledger)
    with ledger.purpose("sync"):
        thread.submit(lambda: found.append(("first", ledger.current_purpose)))
    thread.submit(lambda: found.append(("second", ledger.current_purpose)))
    thread.close()
    assert found == [("first", "sync"), ("second", "train")]


def test_a_result_or_an_error_waits_for_whoever_asks() -> None:
    background: BackgroundWork[int] = BackgroundWork(Ledger())
    background.run(lambda: 7)
    assert background.wait() == background.wait() == 7
    failed: BackgroundWork[float] = BackgroundWork(Ledger())
    failed.run(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
