"""Which means over seeds can be told apart.

One yardstick serves all strategies of a comparison. Each strategy's own deviation would reward noise: over two or
three seeds it is a matter of luck, and of two equal means the noisier one would count as good as the best one and the
calmer one would not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

CONFIDENCE = 0.975  # one side of 95 %
EXACT = 1e-9  # relative: means that differ by less are equal
Name = TypeVar("Name", bound=Hashable)


class Noise(NamedTuple):
    """The deviation of one run from seed to seed, and how many of them two means may lie apart by chance."""

    deviation: float
    quantile: float
    scale: Callable[[float], float] = float

    def alike(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Can these two samples not be told apart? |x̄ − ȳ| ≤ t·s·√(1/n + 1/m)."""
        x, y = (statistics.fmean(sample) for sample in (one, other))
        reach = self.quantile * self.deviation * math.sqrt(1 / len(one) + 1 / len(other))
        return math.isclose(x, y, rel_tol=EXACT) or abs(self.scale(x) - self.scale(y)) <= reach


NONE = Noise(0.0, 0.0)  # of figures that do not depend on chance


def noise_of(samples: Sequence[Sequence[float]], relative: bool = False) -> Noise | None:
    """What seeds do to a figure, from the values of all strategies; None where no strategy has two of them.

    s² is the median over strategies of the sample variance, each divided by the median of χ²/ν with its ν = n − 1
    degrees of freedom: one wild strategy does not make all alike. t has Σν degrees of freedom. With `relative`,
    deviations are those of logarithms: times and speeds vary in proportion to their size.

    >>> noise = noise_of([[97.1, 97.3], [95.0, 95.2]])
    >>> noise.alike([97.1, 97.3], [95.0, 95.2]), noise.alike([97.1, 97.3], [97.0, 97.2])
    (False, True)
    """
    from scipy.special import chdtri, stdtrit

    scale = math.log if relative else float
    several = [sample for sample in samples if len(sample) > 1]
    if not several or (relative and min(map(min, several)) <= 0):
        return None
    variances = []
    for sample in several:
        freedom = len(sample) - 1
        variances.append(statistics.variance(map(scale, sample)) * freedom / float(chdtri(freedom, 0.5)))
    quantile = float(stdtrit(sum(len(sample) - 1 for sample in several), CONFIDENCE))
    return Noise(math.sqrt(statistics.median(variances)), quantile, scale)


def best_of(samples: Mapping[Name, Sequence[float]], sign: int, noise: Noise) -> set[Name]:
    """The sample with the best mean (the highest for sign = 1, the lowest for −1) and all that are alike to it.

    >>> sorted(best_of({"a": [97.1, 97.3], "b": [95.0, 95.2], "c": [96.9, 97.4]}, 1, Noise(0.1, 3.2)))
    ['a', 'c']
    """
    if not samples:
        return set()
    best = max(samples.values(), key=lambda sample: sign * statistics.fmean(sample))
    return {name for name, sample in samples.items() if noise.alike(sample, best)}
