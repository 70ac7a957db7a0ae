"""The parts of a sequence as plain data: which strategy each is, and in which epochs it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire import registry
from thinwire.errors import UsageError
from thinwire.spec import Spec

ROUNDING = 1e-6  # by which shares may miss a sum of 1


@dataclass(frozen=True)
class Part:
    """A strategy and its epochs: from `start` on, `epochs` of them; None = until the run ends."""

    number: int  # from 1
    strategy: Spec
    start: int
    epochs: int | None

    def __str__(self) -> str:
        return f"part {self.number}, {self.strategy}"


def plan_parts(strategies: Sequence[Spec], lengths: Sequence[float] | None, epochs: int | None) -> list[Part]:
    """The parts of a run of so many epochs; None if their number is not known.

    Lengths are whole numbers of epochs, or shares of the run; the last one may be left out.

    >>> from thinwire.spec import parse
    >>> two = [parse("ab"), parse("data_parallel")]
    >>> [(part.start, part.epochs) for part in plan_parts(two, [0.6, 0.4], epochs=30)]
    [(0, 18), (18, 12)]
    >>> [(part.start, part.epochs) for part in plan_parts(two, [4], epochs=None)]
    [(0, 4), (4, None)]
    """
    _check_strategies(strategies)
    if epochs is not None and len(strategies) > epochs:
        raise UsageError(
            f"sequence: {len(strategies)} parts in a run of {epochs} epochs, but each part has at least one; give more "
            "epochs or fewer parts"
        )
    if lengths is None:
        if epochs is None and len(strategies) > 1:
            raise UsageError(
                "sequence: to give each part an equal share it must know how long the run is: prepare(…, epochs=90), "
                "for thinwire train a stream with a __len__; or give epochs=[…], whole numbers for all but the last"
            )
        lengths = [1 / len(strategies)] * (len(strategies) - 1)
    if len(lengths) not in (len(strategies), len(strategies) - 1):
        raise UsageError(
            f"sequence: epochs={_shown(lengths)} for {len(strategies)} parts; give a number for each part, or for each "
            "but the last, which then gets the rest"
        )
    are_shares = any(length != int(length) for length in lengths)
    find_starts = _starts_of_shares if are_shares else _starts_of_numbers
    starts = [0, *find_starts(strategies, lengths, epochs)]
    ends = [*starts[1:], epochs]
    return [
        Part(number, strategy, start, None if end is None else end - start)
        for number, (strategy, start, end) in enumerate(zip(strategies, starts, ends, strict=True), 1)
    ]


def _check_strategies(strategies: Sequence[Spec]) -> None:
    if not strategies:
        raise UsageError("sequence: parts=[]; give a list of strategies, as sequence([data_parallel, local_sgd])")
    if any(strategy.name == "sequence" for strategy in strategies):
        raise UsageError("sequence: a part is a sequence itself; put its parts into one list")


def _starts_of_shares(strategies: Sequence[Spec], shares: Sequence[float], epochs: int | None) -> list[int]:
    """The first epoch of each part but the first."""
    total, is_complete = sum(shares), len(shares) == len(strategies)
    if (is_complete and abs(total - 1) > ROUNDING) or (not is_complete and total >= 1):
        what = "1" if is_complete else "less than 1, and the last part gets the rest"
        numbers = "" if epochs is None else f", or whole numbers of epochs that add up to {epochs}"
        raise UsageError(
            f"sequence: epochs={_shown(shares)} add up to {total:g}; give shares of the run that add up to {what}"
            f"{numbers}"
        )
    if epochs is None:
        raise UsageError(
            f"sequence: epochs={_shown(shares)} are shares of the run, so it must know how long the run is: "
            "prepare(…, epochs=90); or give whole numbers of epochs, and leave out the last"
        )
    starts = [round(sum(shares[: i + 1]) * epochs) for i in range(len(strategies) - 1)]
    for number, (start, end) in enumerate(zip([0, *starts], [*starts, epochs], strict=True), 1):
        if start >= end:
            raise UsageError(
                f"sequence: part {number}, {strategies[number - 1]}, has less than one of {epochs} epochs; give it a "
                "larger share, or the run more epochs"
            )
    return starts


def _starts_of_numbers(strategies: Sequence[Spec], numbers: Sequence[float], epochs: int | None) -> list[int]:
    """The first epoch of each part but the first."""
    total, is_complete = int(sum(numbers)), len(numbers) == len(strategies)
    if epochs is not None and (total != epochs if is_complete else total >= epochs):
        rest = ", or leave out the last, and that part gets the rest"
        possible = f"numbers that add up to {epochs}{rest}" if is_complete else f"less than {epochs} in all"
        raise UsageError(
            f"sequence: epochs={_shown(numbers)} are {total} epochs, but the run has {epochs}; give {possible}; or "
            "shares of the run, as [0.6, 0.4]"
        )
    return [int(sum(numbers[: i + 1])) for i in range(len(strategies) - 1)]


def with_starts(parts: Sequence[Part], starts: Sequence[int], epochs: int | None) -> list[Part]:
    """Parts that begin where they did before a run was resumed; if it has more epochs now, the last part has them."""
    if epochs is not None and epochs <= starts[-1]:
        raise UsageError(
            f"sequence: {epochs} epochs, but in the saved run the last part begins after {starts[-1]}; give more epochs"
        )
    ends = [*starts[1:], epochs]
    return [
        replace(part, start=start, epochs=None if end is None else end - start)
        for part, start, end in zip(parts, starts, ends, strict=True)
    ]


def refuse_long_climb(parts: Sequence[Part], climb: float) -> None:
    """Raise UsageError if the learning rate would climb for longer than a part."""
    for part in parts[1:]:
        if part.epochs is not None and climb > part.epochs:
            raise UsageError(f"sequence: climb={climb:g} epochs, but {part}, has {part.epochs}; try climb=0.5")


def refuse_order(parts: Sequence[Part]) -> None:
    """Raise UsageError if a part would get a low-rank model but cuts the model or replaces its layers."""
    kinds = [registry.load("strategies", part.strategy.name) for part in parts]
    first = next((i for i, kind in enumerate(kinds) if kind.makes_small_model), len(parts))
    for part, kind in list(zip(parts, kinds, strict=True))[first + 1 :]:
        if not kind.keeps_model:
            raise UsageError(
                f"sequence: {part}, cannot follow {parts[first]}, whose low-rank model it would get: it cuts the "
                "model or replaces its layers itself. Try hand_over=whole, or a part that leaves the model whole, as "
                "data_parallel or local_sgd"
            )


def _shown(lengths: Sequence[float]) -> str:
    return f"[{', '.join(f'{length:g}' for length in lengths)}]"
