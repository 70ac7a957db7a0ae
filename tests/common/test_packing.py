"""Items into groups: every item once, in order, and no group larger than promised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thinwire.common.packing import assign_to_least_loaded, fill_groups, groups_within

Sizes = dict[str, int]
sizes_of_items = st.lists(st.integers(0, 100), max_size=30).map(lambda sizes: {f"{i}": s for i, s in enumerate(sizes)})


def in_order(groups: list[list[str]], sizes: Sizes) -> bool:
    return [name for group in groups for name in group] == list(sizes) and all(groups)


@given(sizes_of_items, st.integers(1, 150))
def test_a_group_is_full_before_the_next_begins(sizes: Sizes, capacity: int) -> None:
    groups = fill_groups(sizes, capacity, first_capacity=1)
    assert in_order(groups, sizes)
    for number, group in enumerate(groups[:-1]):
        total, room = sum(sizes[name] for name in group), capacity if number else 1
        assert total >= room > total - sizes[group[-1]]


@given(sizes_of_items, st.integers(1, 150))
def test_a_group_stays_within_its_capacity_unless_one_item_does_not(sizes: Sizes, capacity: int) -> None:
    groups = groups_within(sizes, capacity)
    assert in_order(groups, sizes)
    totals = [sum(sizes[name] for name in group) for group in groups]
    assert all(total <= capacity or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    for total, following in zip(totals, groups[1:], strict=False):
        assert total + sizes[following[0]] > capacity, "it could have taken no more"


@given(sizes_of_items, st.integers(1, 5))
def test_no_worker_has_more_than_another_by_more_than_one_item(costs: Sizes, workers: int) -> None:
    worker = assign_to_least_loaded(costs, workers)
    assert list(worker) == list(costs)
    loads = [sum(cost for name, cost in costs.items() if worker[name] == w) for w in range(workers)]
    assert max(loads) - min(loads) <= max(costs.values(), default=0)
