"""Which means over seeds can be told apart.

What is marked as best goes by one yardstick for all strategies of a comparison. Each strategy's own deviation would
reward noise: over two or three seeds it is a matter of luck, and of two equal means the noisier one would count as good
as the best one and the calmer one would not. What is said of two strategies must also hold by their own deviations:
one that varies far more than the others is not worse because it was unlucky.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

TAIL = 0.025  # one side of 5 %
EXACT = 1e-9  # relative: means that differ by less are equal
Name = TypeVar("Name", bound=Hashable)


class Noise(NamedTuple):
    """The deviation of one run from seed to seed, and the degrees of freedom that it is known by."""

    deviation: float
    freedom: float
    scale: Callable[[float], float] = float

    def quantile(self, pairs: int = 1) -> float:
        """How many deviations of a difference may come by chance, in 5 of 100 cases in any of so many pairs."""
        return _quantile(self.freedom, pairs)

    def alike(self, one: Sequence[float], other: Sequence[float], pairs: int = 1) -> bool:
        """Can these two samples not be told apart by the common yardstick? |x̄ − ȳ| ≤ t·s·√(1/n + 1/m)."""
        deviation = self.deviation * math.sqrt(1 / len(one) + 1 / len(other))
        return self._within(one, other, self.quantile(pairs) * deviation if deviation else 0.0)

    def apart(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Are these two samples told apart by the common yardstick, and by Welch's test of their own variances?

        Welch: |x̄ − ȳ| > t·√(v + w), v = s₁²/n, w = s₂²/m, where t has (v + w)²/(v²/(n − 1) + w²/(m − 1)) degrees of
        freedom. A single value has no variance, then the yardstick decides.

        >>> Noise(0.1, 8).apart([97.1, 97.3], [95.0, 95.2]), Noise(0.1, 8).apart([97.1, 97.3], [91.0, 99.0])
        (True, False)
        """
        if self.alike(one, other):
            return False
        if min(len(one), len(other)) < 2:
            return True
        v, w = (statistics.variance(map(self.scale, sample)) / len(sample) for sample in (one, other))
        if v + w == 0:
            return True
        freedom = (v + w) ** 2 / (v**2 / (len(one) - 1) + w**2 / (len(other) - 1))
        return not self._within(one, other, _quantile(freedom) * math.sqrt(v + w))

    def _within(self, one: Sequence[float], other: Sequence[float], reach: float) -> bool:
        x, y = (statistics.fmean(sample) for sample in (one, other))
        return math.isclose(x, y, rel_tol=EXACT) or abs(self.scale(x) - self.scale(y)) <= reach


NONE = Noise(0.0, 1.0)  # of figures that do not depend on chance


def _quantile(freedom: float, pairs: int = 1) -> float:
    """Of Student's t for 5 of 100 cases on both sides, shared out among so many pairs (Bonferroni)."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - TAIL / pairs))


def noise_of(samples: Sequence[Sequence[float]], relative: bool = False) -> Noise | None:
    """What seeds do to a figure, from the values of all strategies; None where no strategy has two of them.

    s² is the median over strategies of the sample variance, each divided by the median of χ²/ν with its ν = n − 1
    degrees of freedom: one wild strategy does not make all alike. Where most strategies do not vary at all, the median
    is 0, and s² is the mean of the variances, weighted by ν. t has Σν degrees of freedom. With `relative`, deviations
    are those of logarithms: times and speeds vary in proportion to their size.

    >>> noise = noise_of([[97.1, 97.3], [95.0, 95.2]])
    >>> noise.alike([97.1, 97.3], [95.0, 95.2]), noise.alike([97.1, 97.3], [97.0, 97.2])
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
    """The sample with the best mean (the highest for sign = 1, the lowest for −1) and all that are alike to it.

    Of k samples with the same true mean, all are in it in about 95 of 100 cases: any of the k(k − 1)/2 pairs may be the
    best and the worst, so t is that for 5 of 100 cases shared out among them.

    >>> sorted(best_of({"a": [97.1, 97.3], "b": [95.0, 95.2], "c": [96.9, 97.4]}, 1, Noise(0.1, 3)))
    ['a', 'c']
    """
    if not samples:
        return set()
    best = max(samples.values(), key=lambda sample: sign * statistics.fmean(sample))
    pairs = max(1, math.comb(len(samples), 2))
    return {name for name, sample in samples.items() if noise.alike(sample, best, pairs)}
