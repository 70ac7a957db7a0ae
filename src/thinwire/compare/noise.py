"""Which means over seeds differ by more than chance explains.

To mark the best values of a column, one deviation is used for all strategies of a comparison. Each strategy's own
deviation would reward noise: over two or three seeds it is a matter of luck, and of two equal means the noisier one
would count as equal to the best and the less noisy one would not.

To say that two strategies differ, the difference must also exceed their own deviations: a strategy that varies far more
than the others is not worse because it was unlucky.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

TAIL = 0.025  # one side of 5 %
REL_TOL = 1e-9  # means that differ by less, relatively, are equal
Name = TypeVar("Name", bound=Hashable)


class Noise(NamedTuple):
    """The standard deviation of one run from seed to seed, and the degrees of freedom of this estimate.

    Values are transformed by `scale` before they are compared: `math.log` for values that vary in proportion to their
    size.
    """

    deviation: float
    freedom: float
    scale: Callable[[float], float] = float

    def quantile(self, pairs: int = 1) -> float:
        """By how many standard deviations any of `pairs` pairs differs by chance in 5 of 100 cases."""
        return _quantile(self.freedom, pairs)

    def can_be_equal(self, one: Sequence[float], other: Sequence[float], pairs: int = 1) -> bool:
        """Does the common deviation explain the difference of these samples? |x̄ − ȳ| ≤ t·s·√(1/n + 1/m)."""
        deviation = self.deviation * math.sqrt(1 / len(one) + 1 / len(other))
        return self._within(one, other, self.quantile(pairs) * deviation if deviation else 0.0)

    def is_different(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Do these samples differ by more than the common deviation explains, and by Welch's test of their variances?

        Welch: |x̄ − ȳ| > t·√(v + w), v = s₁²/n, w = s₂²/m, where t has (v + w)²/(v²/(n − 1) + w²/(m − 1)) degrees of
        freedom. A single value has no variance; then the common deviation alone decides.

        >>> noise = Noise(0.1, 8)
        >>> noise.is_different([97.1, 97.3], [95.0, 95.2]), noise.is_different([97.1, 97.3], [91.0, 99.0])
        (True, False)
        """
        if self.can_be_equal(one, other):
            return False
        if min(len(one), len(other)) < 2:
            return True
        v, w = (statistics.variance(map(self.scale, sample)) / len(sample) for sample in (one, other))
        if v + w == 0:
            return True
        freedom = (v + w) ** 2 / (v**2 / (len(one) - 1) + w**2 / (len(other) - 1))
        return not self._within(one, other, _quantile(freedom) * math.sqrt(v + w))

    def _within(self, one: Sequence[float], other: Sequence[float], limit: float) -> bool:
        x, y = (statistics.fmean(sample) for sample in (one, other))
        return math.isclose(x, y, rel_tol=REL_TOL) or abs(self.scale(x) - self.scale(y)) <= limit


NONE = Noise(0.0, 1.0)  # for measures that do not depend on chance


def _quantile(freedom: float, pairs: int = 1) -> float:
    """The two-sided 5 % quantile of Student's t, divided among `pairs` comparisons (Bonferroni)."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - TAIL / pairs))


def noise_of(samples: Sequence[Sequence[float]], relative: bool = False) -> Noise | None:
    """The noise of a measure, estimated from a sample for each strategy; None if no sample has two values.

    s² is the median over strategies of the sample variance, each divided by the median of χ²/ν with its ν = n − 1
    degrees of freedom: one strategy with much noise does not make all look equal. If most strategies do not vary at
    all, the median is 0, and s² is the mean of the variances, weighted by ν. t has Σν degrees of freedom. With
    `relative`, the deviation is that of logarithms: times and speeds vary in proportion to their size.

    >>> noise = noise_of([[97.1, 97.3], [95.0, 95.2]])
    >>> noise.can_be_equal([97.1, 97.3], [95.0, 95.2]), noise.can_be_equal([97.1, 97.3], [97.0, 97.2])
    (False, True)
    """
    from scipy.special import chdtri

    scale = math.log if relative else float
    several = [sample for sample in samples if len(sample) > 1]
    if not several or (relative and min(map(min, several)) <= 0):
        return None
    freedoms = [len(sample) - 1 for sample in several]
    squares = [nu * statistics.variance(map(scale, sample)) for nu, sample in zip(freedoms, several, strict=True)]
    median = statistics.median(s / float(chdtri(nu, 0.5)) for nu, s in zip(freedoms, squares, strict=True))
    return Noise(math.sqrt(median or sum(squares) / sum(freedoms)), sum(freedoms), scale)


def best_of(samples: Mapping[Name, Sequence[float]], sign: int, noise: Noise) -> set[Name]:
    """The sample with the best mean (the highest for sign = 1, the lowest for −1) and all that can be equal to it.

    If k samples have the same true mean, all are returned in about 95 of 100 cases: any of the k(k − 1)/2 pairs may be
    the best and the worst, so the 5 % are divided among the pairs.

    >>> sorted(best_of({"a": [97.1, 97.3], "b": [95.0, 95.2], "c": [96.9, 97.4]}, 1, Noise(0.1, 3)))
    ['a', 'c']
    """
    if not samples:
        return set()
    best = max(samples.values(), key=lambda sample: sign * statistics.fmean(sample))
    pairs = max(1, math.comb(len(samples), 2))
    return {name for name, sample in samples.items() if noise.can_be_equal(sample, best, pairs)}
