"""Items of different sizes into groups: in order, or each to whom has least to do.

Items have names, sizes are numbers of bytes or elements, and groups are lists of names.
"""

from __future__ import annotations

from collections.abc import Mapping


def fill_groups(sizes: Mapping[str, int], capacity: float, first_capacity: float | None = None) -> list[list[str]]:
    """In order; a group takes items until it is full, so the last one may go beyond its capacity.

    >>> fill_groups({"a": 1, "b": 3, "c": 2, "d": 2}, capacity=4, first_capacity=1)
    [['a'], ['b', 'c'], ['d']]
    """
    groups: list[list[str]] = []
    room = 0.0
    for name, size in sizes.items():
        if room <= 0:
            room = capacity if groups or first_capacity is None else first_capacity
            groups.append([])
        groups[-1].append(name)
        room -= size
    return groups


def groups_within(sizes: Mapping[str, int], capacity: float) -> list[list[str]]:
    """In order; no group is larger than its capacity, except for one with a single item.

    >>> groups_within({"a": 1, "b": 3, "c": 2, "d": 9}, capacity=4)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > capacity:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def similar_groups(sizes: Mapping[str, int], num_groups: int) -> list[list[str]]:
    """In order, in so many groups of about equal size, none of them empty.

    >>> similar_groups({"a": 3, "b": 1, "c": 4}, 2)
    [['a', 'b'], ['c']]
    """
    assert num_groups <= len(sizes), "no group is empty"
    groups: list[list[str]] = [[]]
    total, done = sum(sizes.values()), 0
    for i, (name, size) in enumerate(sizes.items()):
        is_full = done + size / 2 > total * len(groups) / num_groups
        is_last_chance = len(sizes) - i <= num_groups - len(groups)  # each item left begins a group
        if groups[-1] and len(groups) < num_groups and (is_full or is_last_chance):
            groups.append([])
        groups[-1].append(name)
        done += size
    return groups


def assign_to_least_loaded(costs: Mapping[str, int], num_workers: int) -> dict[str, int]:
    """The worker of each item: items are given away in order, each to the worker with the least cost so far.

    >>> assign_to_least_loaded({"a": 3, "b": 2, "c": 2, "d": 1}, num_workers=2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    load = [0] * num_workers
    worker = {}
    for name, cost in costs.items():
        worker[name] = load.index(min(load))
        load[worker[name]] += cost
    return worker
