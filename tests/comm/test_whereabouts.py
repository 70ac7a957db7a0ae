"""Who is late, from what ranks know of each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.whereabouts import Operation, Whereabouts, describe, find_late

NUM_RANKS = 5
GROUPS = {"world": (0, 1, 2, 3, 4), "a": (0, 1), "b": (1, 2, 3), "c": (3, 4), "d": (0, 4)}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[list[str]], list[int]]:
    """The groups in which each rank has operations, in an order that all ranks share; and where each would stop."""
    order = draw(st.lists(st.sampled_from(sorted(GROUPS)), min_size=1, max_size=12))
    plans = [[name for name in order if rank in GROUPS[name]] for rank in range(NUM_RANKS)]
    return plans, [draw(st.integers(0, len(plan))) for plan in plans]


def at_rest(plans: list[list[str]], stops: list[int]) -> dict[int, Whereabouts]:
    """Run the plans until nobody can go on: a rank computes for ever before the operation at which it stops."""
    begun = [0] * NUM_RANKS
    done = [0] * NUM_RANKS

    def count(rank: int, key: str) -> int:
        return plans[rank][: begun[rank]].count(key)

    changed = True
    while changed:
        changed = False
        for rank, plan in enumerate(plans):
            if done[rank] == begun[rank] < stops[rank]:
                begun[rank] += 1
                changed = True
            elif done[rank] < begun[rank]:
                key = plan[done[rank]]
                if all(count(other, key) >= count(rank, key) for other in GROUPS[key]):
                    done[rank] += 1
                    changed = True
    found = {}
    for rank, plan in enumerate(plans):
        waiting = None
        if done[rank] < begun[rank]:
            key = plan[done[rank]]
            waiting = Operation(key, count(rank, key), GROUPS[key], "all_reduce", "train")
        found[rank] = Whereabouts(1, "", {key: count(rank, key) for key in GROUPS}, waiting)
    return found


@given(schedules())
def test_those_who_hold_up_others_are_named_and_nobody_who_waits(given: tuple[list[list[str]], list[int]]) -> None:
    found = at_rest(*given)
    for rank, here in found.items():
        if here.waiting is not None:
            late = find_late(here.waiting, found)
            assert late, "plans in one order never block each other"
            for one, operation in late.items():
                assert one != rank
                assert found[one].waiting is None
                assert found[one].counts[operation.key] < operation.number


@given(schedules(), st.sets(st.integers(0, NUM_RANKS - 1), max_size=3))
def test_a_silent_rank_is_late_where_it_is_waited_for(
    given: tuple[list[list[str]], list[int]], silent: set[int]
) -> None:
    found = at_rest(*given)
    for here in found.values():
        if here.waiting is not None:
            late = find_late(here.waiting, found, silent)
            assert silent & set(here.waiting.members) <= set(late)
            assert all(one in silent or found[one].waiting is None for one in late)


def test_messages_that_are_on_their_way_make_nobody_late() -> None:
    recv = Operation("world>0", 2, (0,), "recv", "train")  # rank 1 waits for rank 0's second message
    send = Operation("world<0", 1, (1,), "send", "train")
    assert list(find_late(recv, {0: Whereabouts(counts={"world>1": 2}), 1: Whereabouts(waiting=recv)})) == [0]
    sent = {0: Whereabouts(counts={"world>0": 2}), 1: Whereabouts(waiting=recv)}
    assert find_late(recv, sent) == {}
    assert (
        describe({}, {}, 40, recv)
        == "all ranks are in recv of training, for 40 s: the network is slow, or stands still"
    )
    both = {0: Whereabouts(waiting=send), 1: Whereabouts(waiting=recv)}
    assert find_late(recv, both) == {}  # each waits for the other: nobody in particular is late


@given(
    st.integers(0, 2**62), st.text(max_size=9), st.dictionaries(st.text(max_size=5), st.integers(0, 2**62), max_size=3)
)
def test_what_a_rank_tells_is_what_others_read(beat: int, doing: str, counts: dict[str, int]) -> None:
    for waiting in (None, Operation("world", 3, (0, 1), "broadcast", "start", 7)):
        here = Whereabouts(beat, doing, counts, waiting)
        assert Whereabouts.from_json(here.to_json()) == here


def test_who_is_late_in_words() -> None:
    step = Operation("world", 3, (0, 1, 2, 3), "all_reduce", "train", 12)
    test = Operation("pair", 1, (2, 3), "broadcast", "eval")
    assert describe({1: step}, {1: ""}, 40, step) == "rank 1 has not reached all_reduce of training, step 12, for 40 s"
    assert describe({1: step, 2: step, 3: test}, {2: "busy"}, 75, step) == (
        "rank 1, rank 2 (busy) and rank 3 have not reached all_reduce of training, step 12 and broadcast of evaluation"
        ", for 1:15"
    )
