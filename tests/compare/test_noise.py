"""Which means can be told apart: alike for all, whatever each one's own deviation."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thinwire.compare.noise import NONE, Noise, best_of, noise_of

SEEDS = st.integers(2, 5)
MEANS = st.lists(st.integers(9000, 9900), min_size=2, max_size=7)  # in hundredths of a per cent


def around(mean: float, deviation: float, n: int) -> list[float]:
    """n values with this mean and this sample standard deviation."""
    step = deviation / statistics.stdev(range(n))
    return [mean + step * (i - (n - 1) / 2) for i in range(n)]


def marked(samples: list[list[float]], sign: int = 1) -> set[int]:
    noise = noise_of(samples)
    assert noise is not None
    return best_of(dict(enumerate(samples)), sign, noise)


def test_noise_is_not_rewarded() -> None:
    """97.08 ± 0.59 was underlined and 97.08 ± 0.20 was not."""
    calm, wild, best = around(97.08, 0.20, 3), around(97.08, 0.59, 3), around(97.50, 0.20, 3)
    others = [around(96.0, 0.25, 3), around(95.0, 0.2, 3)]
    found = marked([calm, wild, best, *others])
    assert (0 in found) == (1 in found)
    assert 2 in found
    assert not found & {3, 4}


@given(MEANS, SEEDS, st.data())
def test_equal_means_are_marked_alike_and_no_worse_one_before_a_better(
    means: list[int], n: int, data: st.DataObject
) -> None:
    deviations = [data.draw(st.integers(0, 100)) / 100 for _ in means]
    sign = data.draw(st.sampled_from([1, -1]))
    samples = [around(mean / 100, deviation, n) for mean, deviation in zip(means, deviations, strict=True)]
    found = marked(samples, sign)
    best = max(means, key=lambda mean: sign * mean)
    assert means.index(best) in found
    worst = min(sign * means[i] for i in found)
    assert found == {i for i, mean in enumerate(means) if sign * mean >= worst}


@given(MEANS, SEEDS, st.data())
def test_more_noise_in_one_never_marks_that_one_alone(means: list[int], n: int, data: st.DataObject) -> None:
    deviations = [data.draw(st.integers(0, 100)) / 100 for _ in means]
    assume(
        statistics.median(deviations) > 0
    )  # else the yardstick is the mean, and with one more that varies the median
    samples = [around(mean / 100, deviation, n) for mean, deviation in zip(means, deviations, strict=True)]
    which = data.draw(st.integers(0, len(means) - 1))
    before = marked(samples)
    samples[which] = around(means[which] / 100, 2.0, n)
    after = marked(samples)
    assert before <= after
    if which in after - before:
        assert {i for i, mean in enumerate(means) if mean >= means[which]} <= after


def test_one_wild_strategy_does_not_make_all_alike() -> None:
    samples = [around(97.5, 0.1, 3), around(96.5, 0.1, 3), around(95.5, 0.1, 3), around(60.0, 25.0, 3)]
    assert marked(samples) == {0}


def test_the_deviation_is_right_in_the_median() -> None:
    chance = random.Random(0)
    found = []
    for _ in range(400):
        noise = noise_of([[chance.gauss(90, 0.5) for _ in range(3)] for _ in range(5)])
        assert noise is not None
        found.append(noise.deviation)
    assert statistics.median(found) == pytest.approx(0.5, rel=0.05)


def test_equal_strategies_are_told_apart_about_once_in_twenty_times() -> None:
    chance = random.Random(1)
    apart = 0
    for _ in range(1000):
        samples = [[chance.gauss(90, 0.5) for _ in range(3)] for _ in range(8)]
        noise = noise_of(samples)
        assert noise is not None
        apart += not noise.can_be_equal(samples[0], samples[1])
    assert 20 <= apart <= 110


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("k", [3, 5, 8])
def test_one_of_equal_strategies_is_left_unmarked_at_most_about_once_in_twenty_times(k: int, n: int) -> None:
    chance = random.Random(k * n)
    tries = 500
    left = sum(len(marked([[chance.gauss(90, 0.5) for _ in range(n)] for _ in range(k)])) < k for _ in range(tries))
    assert left <= 0.07 * tries


def test_a_strategy_that_varies_far_more_than_the_others_is_not_told_apart_by_their_noise() -> None:
    chance = random.Random(2)
    tries, apart, missed = 500, 0, 0
    for _ in range(tries):
        samples = [[chance.gauss(90, deviation) for _ in range(3)] for deviation in (3, 0.3, 0.3, 0.3, 0.3)]
        noise = noise_of(samples)
        assert noise is not None
        apart += noise.is_different(samples[0], samples[1])
        missed += not noise.is_different([value + 5 for value in samples[2]], samples[1])
    assert apart <= 0.07 * tries
    assert missed <= 0.03 * tries, "ten deviations and more"


def test_welch() -> None:
    """Variances 0.02 and 2 of two seeds each: ν = 1.01²/(0.01² + 1²) = 1.02, t = 12.4, so means may be 12.5 apart."""
    calm, wild = [9.9, 10.1], [-1.0, 1.0]
    noise = Noise(0.01, 100)
    assert not noise.can_be_equal(calm, wild)
    assert not noise.is_different(calm, wild)
    assert not noise.is_different(calm, [-3.0, -1.0])
    assert noise.is_different(calm, [-4.0, -2.0])
    assert noise.is_different(calm, [0.0]), "one value has no variance: the yardstick alone decides"
    assert noise.is_different([1.0, 1.0], [2.0, 2.0])
    assert not noise.is_different([1.0, 1.0], [1.0, 1.0])


def test_where_half_of_the_strategies_do_not_vary_the_others_still_tell_of_noise() -> None:
    """Accuracies of 360 samples come in steps of 0.28: two seeds are often equal."""
    samples = [[97.22, 97.22], [96.94, 96.94], [97.50, 97.50], [96.94, 97.78], [96.67, 97.50]]
    noise = noise_of(samples)
    assert noise is not None
    pooled = sum(statistics.variance(sample) for sample in samples) / 5
    assert noise.deviation == pytest.approx(math.sqrt(pooled))
    assert marked(samples) == set(range(5))
    three = [[97.22] * 2, [96.94] * 2, [96.94, 97.22, 97.50, 97.22]]
    noise = noise_of(three)
    assert noise is not None
    assert noise.deviation == pytest.approx(math.sqrt(3 * statistics.variance(three[2]) / 5)), "by degrees of freedom"
    assert marked([[97.22, 97.22], [96.94, 96.94], [97.22, 97.22]]) == {0, 2}, "no noise at all"


def test_times_vary_in_proportion() -> None:
    times = [[10.0, 11.0, 10.5], [100.0, 110.0, 105.0], [112.0, 103.0, 109.0]]
    noise = noise_of(times, relative=True)
    assert noise is not None
    assert noise.can_be_equal(times[1], times[2])
    assert not noise.can_be_equal(times[0], times[1])
    assert noise.deviation == pytest.approx(0.048, rel=0.3), "5 %, whatever the size"


def test_one_seed_tells_nothing_and_bytes_have_no_noise() -> None:
    assert noise_of([[97.0], [95.0]]) is None
    assert noise_of([]) is None
    assert noise_of([[0.0, 1.0]], relative=True) is None
    assert best_of({"a": [10.0], "b": [10.0], "c": [11.0]}, -1, NONE) == {"a", "b"}
    assert best_of({}, 1, NONE) == set()


def test_t_and_the_median_of_chi_squared() -> None:
    """Two strategies of two seeds: t(0.975, 2) = 4.303, and the median of χ² with one degree of freedom is 0.4549."""
    noise = noise_of([[1.0, 2.0], [5.0, 6.0]])
    assert noise is not None
    assert isinstance(noise, Noise)
    assert noise.quantile() == pytest.approx(4.3027, rel=1e-4)
    assert noise.quantile(3) == pytest.approx(7.6488, rel=1e-4), "t(1 − 0.025/3, 2)"
    assert noise.deviation == pytest.approx(math.sqrt(0.5 / 0.4549), rel=1e-3)
