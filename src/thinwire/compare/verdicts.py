"""The conclusion of a comparison in sentences: each strategy against data_parallel and one machine alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from thinwire.compare.noise import Noise, noise_of
from thinwire.compare.results import Entry, Measure, Results

BASELINES = {"data_parallel": "data_parallel", "alone": "one machine alone"}  # spec → its name in sentences
SAME_WORK = 0.01  # numbers of updates or samples that differ by less count as equal
ALIKE = 1.25  # times that differ by less, and not beyond noise, count as equal
MAX_GROUPS = 3  # of strategies with the same work that a sentence names


def baselines(results: Results, entry: Entry) -> dict[str, Entry]:
    """The strategies that one is compared with, by spec: data_parallel and alone, if they are there and have a value.

    Those of its own folder come first. That of another folder is used if there is one only, with the same settings.
    """
    found = {}
    for spec in BASELINES if len(results.entries) > 1 else ():
        there = [e for e in results.entries if e.spec == spec and e.spread("value") and _may_compare(results, e, entry)]
        own = [other for other in there if other.part == entry.part]
        if own or len(there) == 1:
            found[spec] = (own or there)[0]
    return found


def baseline_specs(results: Results) -> list[str]:
    """The baselines that any strategy is compared with."""
    used = {spec for entry in results.entries for spec in baselines(results, entry)}
    return [spec for spec in BASELINES if spec in used]


def _may_compare(results: Results, one: Entry, other: Entry) -> bool:
    return results.is_comparable or one.part == other.part


def speed(entry: Entry, baseline: Entry) -> float | None:
    """How many times as fast as the baseline a strategy trains: the baseline's training time over the strategy's."""
    own, other = entry.spread("train_seconds"), baseline.spread("train_seconds")
    return other.mean / own.mean if own and other and own.mean > 0 else None


def speed_against(results: Results, entry: Entry, spec: str) -> float | None:
    """How many times as fast as a baseline a strategy trains; None if it has no such baseline, or no time."""
    baseline = baselines(results, entry).get(spec)
    return speed(entry, baseline) if baseline else None


def times(factor: float) -> str:
    """A factor as text, with two digits.

    >>> times(7.16), times(0.715), times(23.4)
    ('7.2 ×', '0.71 ×', '23 ×')
    """
    return f"{factor:.{0 if factor >= 10 else 1 if factor >= 1.05 else 2}f} ×"


def verdicts(results: Results) -> dict[int, str]:
    """A sentence for each strategy that has a result, by its index; empty if fewer than two strategies have one."""
    found = {i: entry for i, entry in enumerate(results.entries) if entry.spread("value")}
    return {i: _verdict(results, entry) for i, entry in found.items()} if len(found) > 1 else {}


def remarks(results: Results) -> list[str]:
    """Sentences about the whole: how folders differ, that one machine alone wins, that strategies did unequal work."""
    if results.parts:
        wins = [f"{name}: {words}" for name, part in results.parts.items() if (words := _alone_wins(part))]
    else:
        wins = [_alone_wins(results)]
    return [words for words in (*results.notes, *wins, unequal_work(results)) if words]


class Difference(NamedTuple):
    """A measure of a strategy against another strategy's.

    `side` is 1 if it is better, −1 if it is worse, and 0 if the two cannot be told apart.
    """

    side: int
    by: float  # the difference of the means
    is_noise_known: bool


def difference(results: Results, measure: Measure, entry: Entry, other: Entry, sign: int) -> Difference | None:
    """Compare two strategies by a measure; `sign` is +1 if a higher value is better.

    They differ only by more than the noise of all strategies and their own noise explain. With one seed the noise is
    not known, and any difference counts. None if one of them has no value.
    """
    own, its = entry.spread(measure), other.spread(measure)
    if own is None or its is None:
        return None
    noise = _noise(results, measure)
    differs = own.mean != its.mean if noise is None else noise.is_different(own.values, its.values)
    side = 0 if not differs else 1 if sign * own.mean > sign * its.mean else -1
    return Difference(side, own.mean - its.mean, noise is not None)


def _noise(results: Results, measure: Measure) -> Noise | None:
    samples = [values.values for entry in results.entries if (values := entry.spread(measure))]
    return noise_of(samples, relative=measure == "train_seconds")


# ---- the verdict on a strategy


def _verdict(results: Results, entry: Entry) -> str:
    references = list(baselines(results, entry).values())
    if not references:
        references = [next(e for e in results.entries if e.spread("value") and _may_compare(results, e, entry))]
    others = [other for other in references if other is not entry]
    values = [_compare_value(results, entry, other) for other in others]
    speeds = [_compare_speed(results, entry, other) for other in others]
    names = [_called(other) for other in others]
    if not others and not results.is_comparable:
        return "nothing in its folder to compare it with"
    if len(set(values)) == 1:
        text = ", ".join([values[0], *(describe(name) for describe, name in zip(speeds, names, strict=True))])
    else:
        text = "; ".join(f"against {n} {v}, {s('')}" for n, v, s in zip(names, values, speeds, strict=True))
    role = "a baseline" if entry in references else ""
    return "; ".join(part for part in (_choice(entry), role, text) if part) + _reservations(results, entry, others)


def _choice(entry: Entry) -> str:
    """What auto took and why, for each seed unless it is the same; empty for other strategies."""
    words = [text for _, text in entry.choices]
    return words[0] if len(set(words)) == 1 else "; ".join(f"{text} (seed {seed})" for seed, text in entry.choices)


def _reservations(results: Results, entry: Entry, others: list[Entry]) -> str:
    """In brackets after a verdict: seeds without a value, on either side, and that the noise is not known."""
    found = [_missing(entry), *(_missing(other, f"{_called(other)}: ") for other in others)]
    if others and _noise(results, "value") is None:
        found.append("one seed: noise unknown")
    text = "; ".join(one for one in found if one)
    return f" ({text})" if text else ""


def _called(entry: Entry) -> str:
    """A strategy as sentences name it."""
    name = BASELINES.get(entry.spec, entry.spec)
    return f"{name} · {entry.label}" if entry.label else name


def _missing(entry: Entry, prefix: str = "") -> str:
    found = entry.spread("value")
    have, expected = len(found.values) if found else 0, len(entry.records)
    return f"{prefix}{have} of {expected} seeds" if have < expected else ""


def _compare_value(results: Results, entry: Entry, other: Entry) -> str:
    """As "0.12 points higher accuracy", or "same accuracy within noise"."""
    found = difference(results, "value", entry, other, results.sign)
    assert found is not None
    digits, unit = (2, " points") if results.metric == "accuracy" else (4, "")
    amount = f"{abs(found.by):.{digits}f}"
    rounds_to_zero = not float(amount)
    if found.side == 0 or (rounds_to_zero and not found.is_noise_known):
        return f"same {results.metric}{' within noise' * found.is_noise_known}"
    amount = f"less than {10**-digits:.{digits}f}" if rounds_to_zero else amount
    return f"{amount}{unit} {'higher' if found.by > 0 else 'lower'} {results.metric}"


def _compare_speed(results: Results, entry: Entry, other: Entry) -> Callable[[str], str]:
    """A function of the other strategy's name that returns "7.2 × faster than NAME"; for "" just "7.2 × faster"."""
    found, factor = difference(results, "train_seconds", entry, other, -1), speed(entry, other)
    if found is None or factor is None:
        return lambda name: " with ".join(filter(None, ("no training time to compare", name)))
    ratio = max(factor, 1 / factor)
    amount = times(ratio) if ratio >= 1.1 else f"{100 * (ratio - 1):.0f} %"
    rounds_to_zero = amount == "0 %"
    word = "faster" if factor > 1 else "slower"
    if found.side == 0 and ratio > ALIKE:
        doubt = f" by the means, but {_seeds(entry, other)} not tell it from noise"
        return lambda name: " than ".join(filter(None, (f"{amount} {word}", name))) + doubt
    if found.side == 0 or (rounds_to_zero and not found.is_noise_known):
        return lambda name: " as ".join(filter(None, ("as fast", name))) + " within noise" * found.is_noise_known
    amount = "less than 1 %" if rounds_to_zero else amount
    return lambda name: " than ".join(filter(None, (f"{amount} {word}", name)))


def _seeds(entry: Entry, other: Entry) -> str:
    """The seeds with a training time, of the strategy that has fewer, as the subject of a sentence."""
    found = [values for one in (entry, other) if (values := one.spread("train_seconds"))]
    least = min(len(spread.values) for spread in found)
    return f"{least} seeds do" if least > 1 else "1 seed does"


# ---- remarks on the whole comparison


def _alone_wins(results: Results) -> str:
    """A sentence if every other strategy is worse than one machine alone, or as good and slower; else empty."""
    found = [entry for entry in results.entries if entry.spec == "alone" and entry.spread("value")]
    alone = found[0] if found else None
    others = [entry for entry in results.entries if entry is not alone and entry.spread("value")]
    if alone is None or not others:
        return ""
    for other in others:
        pairs = [difference(results, measure, alone, other, sign)
                 for measure, sign in (("value", results.sign), ("train_seconds", -1))]  # fmt: skip
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
    """A sentence if strategies did different numbers of updates or trained on different numbers of samples."""
    counts = (("steps", "took", "updates"), ("samples", "trained on", "samples"))
    found = [words for count in counts if (words := _unequal(results, *count))]
    return f"Not the same work: {'; '.join(found)}." if found else ""


def is_unequal(results: Results, key: str) -> bool:
    """Does a count (its mean over seeds) differ between strategies by more than the last batches of epochs explain?"""
    counts = [found.mean for entry in results.entries if (found := entry.spread(key))]
    return bool(counts) and max(counts) > (1 + SAME_WORK) * min(counts)


def _unequal(results: Results, key: str, verb: str, noun: str) -> str:
    if not is_unequal(results, key):
        return ""
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for entry in results.entries:
        if found := entry.spread(key):
            count = round(found.mean)
            groups[next((near for near in groups if abs(near - count) <= SAME_WORK * near), count)].append(entry.name)
    if len(groups) > MAX_GROUPS:
        low, high = min(groups), max(groups)
        return f"from {low:,} {noun} ({groups[low][0]}) to {high:,} ({groups[high][0]})"
    usual = max(groups, key=lambda count: len(groups[count]))
    unusual = [(count, specs) for count, specs in sorted(groups.items(), reverse=True) if count != usual]
    parts = [f"{' and '.join(specs)} {verb} {count:,} {noun}" for count, specs in unusual]
    others = "the others" if len(groups[usual]) > 1 else groups[usual][0]
    return ", ".join([*parts, f"{others} {usual:,}"])
