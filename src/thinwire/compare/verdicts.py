"""What a comparison comes to: a verdict on each strategy, against data_parallel and one machine alone; results.json."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from thinwire.comm.ledger import LINKS, TRAINING
from thinwire.compare.noise import Noise, noise_of
from thinwire.compare.results import FORMAT, Entry, Figure, Results, Spread, on_link, sent

BASELINES = {"data_parallel": "data_parallel", "alone": "one machine alone"}  # by spec, as people call them
SAME_WORK = 0.01  # numbers of updates or samples that differ by less count as equal
MOST_GROUPS = 3  # of strategies with the same work that a sentence names


def baselines(results: Results) -> list[Entry]:
    """What the others are held against: data_parallel and one machine alone, where they are there and have a value."""
    if len(results.entries) < 2:
        return []
    return [entry for spec in BASELINES for entry in results.entries if entry.spec == spec and entry.spread("value")]


def speed(entry: Entry, baseline: Entry) -> float | None:
    """How many times as fast as another strategy: that one's training time over this one's."""
    own, other = entry.spread("train_seconds"), baseline.spread("train_seconds")
    return other.mean / own.mean if own and other and own.mean > 0 else None


def times(factor: float) -> str:
    """A factor as people write it.

    >>> times(7.16), times(0.715), times(23.4)
    ('7.2 ×', '0.71 ×', '23 ×')
    """
    return f"{factor:.{0 if factor >= 10 else 1 if factor >= 1.05 else 2}f} ×"


def verdicts(results: Results) -> dict[int, str]:
    """A sentence for each strategy that has a result, by its place; none where there is nothing to compare."""
    found = {i: entry for i, entry in enumerate(results.entries) if entry.spread("value")}
    return {i: _sentence(results, entry) for i, entry in found.items()} if len(found) > 1 else {}


def remarks(results: Results) -> list[str]:
    """What must be said of the comparison as a whole: that one machine alone wins, that the work was not the same."""
    return [words for words in (_alone_wins(results), unequal_work(results)) if words]


class Difference(NamedTuple):
    """A strategy's figure against another's: −1 worse, 1 better, 0 not to be told apart, and by how much."""

    side: int
    by: float
    known: bool  # is the noise?


def difference(results: Results, figure: Figure, entry: Entry, other: Entry, sign: int) -> Difference | None:
    """Compare two strategies by the noise of all, and by their own; with one seed by their values alone."""
    own, its = entry.spread(figure), other.spread(figure)
    if own is None or its is None:
        return None
    noise = _noise(results, figure)
    apart = own.mean != its.mean if noise is None else noise.apart(own.values, its.values)
    side = 0 if not apart else 1 if sign * own.mean > sign * its.mean else -1
    return Difference(side, own.mean - its.mean, noise is not None)


def _noise(results: Results, figure: Figure) -> Noise | None:
    found = [values.values for entry in results.entries if (values := entry.spread(figure))]
    return noise_of(found, relative=figure == "train_seconds")


def _sentence(results: Results, entry: Entry) -> str:
    measures = baselines(results) or [next(e for e in results.entries if e.spread("value"))]
    others = [other for other in measures if other is not entry]
    values = [_value_words(results, entry, other) for other in others]
    paces = [_pace_words(results, entry, other) for other in others]
    names = [BASELINES.get(other.spec, other.spec) for other in others]
    if len(set(values)) == 1:
        said = ", ".join([values[0], *(pace(name) for pace, name in zip(paces, names, strict=True))])
    else:
        said = "; ".join(f"against {n} {v}, {p('')}" for n, v, p in zip(names, values, paces, strict=True))
    role = "a baseline" if entry in measures else ""
    return "; ".join(part for part in (role, said) if part) + _doubts(results, entry, others)


def _doubts(results: Results, entry: Entry, others: list[Entry]) -> str:
    """What stands in brackets behind a verdict: seeds without a value, on either side, and that noise is unknown."""
    doubts = [_missing(entry), *(_missing(other, f"{BASELINES.get(other.spec, other.spec)}: ") for other in others)]
    if others and _noise(results, "value") is None:
        doubts.append("one seed: noise unknown")
    said = "; ".join(doubt for doubt in doubts if doubt)
    return f" ({said})" if said else ""


def _missing(entry: Entry, whose: str = "") -> str:
    found = entry.spread("value")
    have, asked = len(found.values) if found else 0, len(entry.records)
    return f"{whose}{have} of {asked} seeds" if have < asked else ""


def _value_words(results: Results, entry: Entry, other: Entry) -> str:
    found = difference(results, "value", entry, other, results.sign)
    assert found is not None
    digits, unit = (2, " points") if results.metric == "accuracy" else (4, "")
    amount = f"{abs(found.by):.{digits}f}"
    is_small = not float(amount)
    if found.side == 0 or (is_small and not found.known):
        return f"same {results.metric}{' within noise' * found.known}"
    amount = f"less than {10**-digits:.{digits}f}" if is_small else amount
    return f"{amount}{unit} {'higher' if found.by > 0 else 'lower'} {results.metric}"


def _pace_words(results: Results, entry: Entry, other: Entry) -> Callable[[str], str]:
    """As "7.2 × faster than …", for the name of what it is held against, or for none."""
    found, factor = difference(results, "train_seconds", entry, other, -1), speed(entry, other)
    if found is None or factor is None:
        return lambda name: " with ".join(filter(None, ("no training time to compare", name)))
    ratio = max(factor, 1 / factor)
    amount = times(ratio) if ratio >= 1.1 else f"{100 * (ratio - 1):.0f} %"
    is_small = amount == "0 %"
    if found.side == 0 or (is_small and not found.known):
        return lambda name: " as ".join(filter(None, ("as fast", name))) + " within noise" * found.known
    amount = "less than 1 %" if is_small else amount
    word = "faster" if factor > 1 else "slower"
    return lambda name: " than ".join(filter(None, (f"{amount} {word}", name)))


def _alone_wins(results: Results) -> str:
    """Said plainly where every other strategy is worse than one machine by itself, or as good and slower."""
    alone = next((entry for entry in baselines(results) if entry.spec == "alone"), None)
    others = [entry for entry in results.entries if entry is not alone and entry.spread("value")]
    if alone is None or not others:
        return ""
    for other in others:
        pairs = [difference(results, figure, alone, other, sign)
                 for figure, sign in (("value", results.sign), ("train_seconds", -1))]  # fmt: skip
        sides = [pair.side for pair in pairs if pair]
        if min(sides) < 0 or max(sides) == 0:
            return ""
    more = "higher" if results.sign > 0 else "lower"
    beyond = " beyond noise" if _noise(results, "value") else " (one seed: noise unknown)"
    return (
        f"One machine alone beats every other strategy here: none is faster, and none has a {more} "
        f"{results.metric}{beyond}."
    )


def unequal_work(results: Results) -> str:
    """Said where strategies took different numbers of updates, or trained on different numbers of samples."""
    said = [_unequal(results, *what) for what in (("steps", "took", "updates"), ("samples", "trained on", "samples"))]
    found = [words for words in said if words]
    return f"Not the same work: {'; '.join(found)}." if found else ""


def is_unequal(results: Results, key: str) -> bool:
    """Does a count (its mean over seeds) differ between strategies, by more than the last batches of epochs may?"""
    counts = [found.mean for entry in results.entries if (found := entry.spread(key))]
    return bool(counts) and max(counts) > (1 + SAME_WORK) * min(counts)


def _unequal(results: Results, key: str, verb: str, noun: str) -> str:
    if not is_unequal(results, key):
        return ""
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for entry in results.entries:
        if found := entry.spread(key):
            count = round(found.mean)
            groups[next((near for near in groups if abs(near - count) <= SAME_WORK * near), count)].append(entry.spec)
    if len(groups) > MOST_GROUPS:
        low, high = min(groups), max(groups)
        return f"from {low:,} {noun} ({groups[low][0]}) to {high:,} ({groups[high][0]})"
    usual = max(groups, key=lambda count: len(groups[count]))
    few = [(count, specs) for count, specs in sorted(groups.items(), reverse=True) if count != usual]
    first, *rest = [f"{' and '.join(specs)} {verb} {count:,} {noun}" for count, specs in few]
    others = "the others" if len(groups[usual]) > 1 else groups[usual][0]
    return ", ".join([first, *rest, f"{others} {usual:,}"])


def as_json(results: Results) -> dict[str, Any]:
    """results.json: the settings that all runs share, and each strategy's figures over its seeds with its verdict."""
    example, said = results.example or {}, verdicts(results)
    shared = ("task", "model", "metric", "ranks", "nodes", "link", "versions")
    return {
        "format": FORMAT,
        "command": results.command,
        "target": results.target,
        **{name: example.get(name) for name in shared},
        "remarks": remarks(results),
        "strategies": [{**_figures(results, entry), "verdict": said.get(i)} for i, entry in enumerate(results.entries)],
    }


def _figures(results: Results, entry: Entry) -> dict[str, Any]:
    figures = (
        "value", "best", "seconds", "train_seconds", "steps", "samples", "samples_per_second", "waiting_share",
        "wire_bytes_per_rank", "kernel_bytes_per_rank", "peak_memory_bytes",
    )  # fmt: skip
    row: dict[str, Any] = {"strategy": entry.spec, "seeds": [record.seed for record in entry.finished]}
    for name in ("link_state", "link_measured", "epochs"):  # of each seed
        row[name] = [record.summary[name] for record in entry.finished if record.summary]
    row |= {name: _spread(entry.spread(name)) for name in figures}
    for who, link in itertools.product(("wire", "kernel"), LINKS):
        row[f"{who}_bytes_{link}"] = _spread(entry.spread(on_link(who, link)))
    row["training_bytes_per_rank"] = _spread(entry.spread(sent(TRAINING)))
    for link in LINKS:
        row[f"training_bytes_{link}"] = _spread(entry.spread(sent(TRAINING, link)))
    row["times_as_fast_as"] = {other.spec: speed(entry, other) for other in baselines(results)}
    if results.target is not None:
        row["seconds_to_target"] = _spread(entry.seconds_to(results.target))
    return {**row, "errors": entry.errors}


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    return spread._asdict() if spread is not None else None
