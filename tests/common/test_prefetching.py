"""Batches that a thread makes ahead: the same ones, its errors in their place, and no thread that stays."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.common.batches import map_tensors
from thinwire.common.prefetching import made_ahead


def num_threads() -> int:
    return sum(thread.name == "prefetching" for thread in threading.enumerate())


@given(st.integers(0, 9), st.integers(1, 4))
def test_the_items_are_the_same_in_the_same_order(count: int, depth: int) -> None:
    assert list(made_ahead(iter(range(count)), depth)) == list(range(count))
    assert num_threads() == 0


def test_no_more_items_are_made_than_places_are_free() -> None:
    made = []

    def items() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    ahead = made_ahead(items(), depth=2)
    for used in range(1, 6):
        next(ahead)
        assert len(made) <= used + 2
    ahead.close()
    assert num_threads() == 0
    assert len(made) < 20


def broken() -> Iterator[int]:
    yield 1
    raise ZeroDivisionError("in the dataset")


def test_an_error_comes_after_the_items_before_it() -> None:
    ahead = made_ahead(broken())
    assert next(ahead) == 1
    with pytest.raises(ZeroDivisionError, match="in the dataset"):
        next(ahead)
    assert num_threads() == 0


def test_a_loop_that_is_left_ends_the_thread() -> None:
    for item in made_ahead(iter(range(1000))):
        if item == 3:
            break
    assert num_threads() == 0


def test_nothing_runs_before_the_first_item_is_asked_for() -> None:
    made_ahead(broken())
    assert num_threads() == 0


def test_threads_of_torch_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    list(made_ahead(iter(range(3))))
    assert torch.get_num_threads() == before
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [before]


class Pair(NamedTuple):
    x: Tensor
    y: list[Tensor]


def test_every_tensor_of_a_batch_is_found() -> None:
    batch = {"a": Pair(torch.zeros(2), [torch.zeros(3), torch.zeros(4)]), "b": (torch.zeros(5), "text")}
    assert map_tensors(batch, len) == {"a": Pair(2, [3, 4]), "b": (5, "text")}  # type: ignore[arg-type]


def test_a_process_ends_well_while_items_are_being_made() -> None:
    """An iterator that was left early, and that a module still holds when Python ends."""
    program = """
import torch
from thinwire.common.prefetching import made_ahead
x, order = torch.randn(20000, 200), torch.randperm(20000).split(8192) * 20
ahead = made_ahead(x[indices] for indices in order)
next(ahead)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_containers_keep_their_class() -> None:
    class Items(list[Tensor]):
        name = "mine"

    class Pair(tuple[Tensor, Tensor]):
        def __new__(cls, one: Tensor, other: Tensor) -> Pair:
            return super().__new__(cls, (one, other))

    ordered = map_tensors(OrderedDict(a=torch.ones(2), b=[torch.ones(3)]), len)
    assert ordered == OrderedDict(a=2, b=[3])
    assert type(ordered) is OrderedDict
    items = map_tensors(Items([torch.ones(4)]), len)
    assert (items, type(items)) == ([4], Items)
    pair = Pair(torch.ones(1), torch.ones(1))
    assert map_tensors(pair, len) is pair  # how to make one is not known


def test_a_process_ends_although_the_next_item_never_comes() -> None:
    program = """
import threading
from thinwire.common.prefetching import made_ahead
def stream():
    yield 1
    threading.Event().wait()
ahead = made_ahead(stream())
next(ahead)
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 3


def test_counters_and_results_of_torch_are_filled_anew() -> None:
    assert map_tensors(Counter(a=2), len) == Counter(a=2)
    found = map_tensors(torch.ones(3, 2).max(1), lambda t: t + 1)
    assert type(found) is torch.return_types.max
    assert found.values.tolist() == [2, 2, 2]
