"""Statistics against scipy, the oracles of the evaluation specification, and simulation."""

import numpy as np
import pytest
from scipy import stats

from jaxlab.eval import statistics


def by_id(digits):
  return {str(i): float(c) for i, c in enumerate(digits)}


# --- worked by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "successes, n, low, high",
  [(0, 20, 0, 0.161125), (7, 10, 0.396778, 0.892209)]
  + [(31, 100, 0.227797, 0.406261), (20, 20, 0.838875, 1)],
)
def test_wilson(successes, n, low, high):
  estimate = statistics.wilson(successes, n)
  assert estimate.value == successes / n
  assert estimate.ci_low == pytest.approx(low, abs=1e-6)
  assert estimate.ci_high == pytest.approx(high, abs=1e-6)
  assert 0 <= estimate.ci_low <= estimate.ci_high <= 1
  expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
  np.testing.assert_allclose([estimate.ci_low, estimate.ci_high], expected, atol=1e-12)


def test_t_interval_is_scipys():
  x = [1.0, 2.5, 4.0, 4.5]
  estimate = statistics.mean_t(x, confidence=0.9)
  expected = stats.ttest_1samp(x, 0).confidence_interval(0.9)
  np.testing.assert_allclose([estimate.ci_low, estimate.ci_high], expected)
  assert estimate.as_dict() == {
    "value": 3.0,
    "ci_low": estimate.ci_low,
    "ci_high": estimate.ci_high,
    "n": 4,
  }
  assert statistics.mean_t([2]).ci_low is None


def test_clusters():
  x, clusters = [1, 1, 1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 2, 2]
  estimate = statistics.clustered_mean(x, clusters)
  assert estimate.value == 0.5
  assert estimate.se == pytest.approx(0.324760, abs=1e-6)  # i.i.d. would claim 0.188982
  assert estimate.ci_high - 0.5 == pytest.approx(stats.t.ppf(0.975, 2) * 0.324760, abs=1e-5)
  assert statistics.clustered_mean(x, ["a"] * 8).ci_low is None
  singletons = statistics.clustered_mean(x, range(8))
  assert singletons.se == pytest.approx(statistics.mean_t(x).se)


def test_a_ratio_of_clustered_means():
  """R = 6/12 by hand; residuals a - R b sum to 0, 1 and -1 in three clusters of two."""
  a, b = [1, 1, 2, 1, 0, 1], [2, 2, 2, 2, 2, 2]
  found = statistics.clustered_ratio(a, b, [0, 0, 1, 1, 2, 2])
  assert found.value == 0.5 and found.n == 6
  se = np.sqrt(3 / 2 * (0 + 1 + 1)) / 6 / 2
  assert found.se == pytest.approx(se)
  assert found.ci_high == pytest.approx(0.5 + stats.t.ppf(0.975, 2) * se)
  assert statistics.clustered_ratio(a, b, [0] * 6).ci_low is None
  with pytest.raises(ValueError, match="mean.b. that is not 0"):
    statistics.clustered_ratio([1, 2], [1, -1], [0, 1])


def test_duplicated_items_gain_nothing_when_they_share_a_cluster():
  x = [1.0, 0.0, 0.0, 1.0, 1.0]
  once = statistics.clustered_mean(x, range(5))
  twice = statistics.clustered_mean(x * 2, [*range(5), *range(5)])
  assert twice.se == pytest.approx(once.se)


def test_samples_of_an_item_are_not_independent():
  samples = {"a": [1, 1, 1, 1], "b": [0, 0, 0, 0], "c": [1, 0, 1, 0]}
  estimate = statistics.mean_by_item(samples)
  flat = [x for xs in samples.values() for x in xs]
  ids = [i for i, xs in samples.items() for _ in xs]
  assert estimate.n == 3
  assert estimate.se == pytest.approx(statistics.clustered_mean(flat, ids).se)
  assert estimate.se > 1.5 * statistics.mean_t(flat).se


@pytest.mark.parametrize(
  "n, correct, k, expected",
  [(10, 3, 1, 0.3), (10, 3, 5, 0.916666667), (20, 1, 10, 0.5), (10, 0, 5, 0), (10, 8, 5, 1)],
)
def test_pass_at_k(n, correct, k, expected):
  assert statistics.pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-9)


def test_paired_runs():
  a, b = by_id("1011011011"), by_id("1001010010")
  result = statistics.paired_difference(a, b)
  assert result.difference.value == pytest.approx(0.3)
  assert result.difference.se == pytest.approx(0.152753, abs=1e-6)  # unpaired: 0.223607
  assert (result.test, result.p_value) == ("mcnemar_exact", 0.25)
  assert (result.wins, result.losses) == (3, 0)
  assert result.detectable == pytest.approx(2.8016 * 0.152753, abs=1e-4)
  assert not result.seen()
  reverse = statistics.paired_difference(b, a)
  assert reverse.difference.ci_high == pytest.approx(-result.difference.ci_low)


@pytest.mark.parametrize("only_a, only_b", [(0, 0), (3, 0), (5, 5), (12, 3)])
def test_mcnemar_is_the_binomial_test(only_a, only_b):
  n = only_a + only_b
  expected = stats.binomtest(only_a, n).pvalue if n else 1.0
  assert statistics.mcnemar_exact(only_a, only_b) == pytest.approx(expected)


def test_scores_that_are_not_binary_use_sign_flips():
  rng = np.random.default_rng(0)
  d = rng.normal(0.4, 1.0, 40)
  a, b = {str(i): x for i, x in enumerate(d.tolist())}, {str(i): 0.0 for i in range(40)}
  result = statistics.paired_difference(a, b)
  assert result.test == "sign_flip"
  assert result.p_value == pytest.approx(stats.ttest_1samp(d, 0).pvalue, abs=0.01)
  assert result.p_value == statistics.paired_difference(a, b).p_value  # seeded
  assert statistics.sign_flip([0.0, 0.0]) == 1.0


def test_several_samples_and_clusters():
  a = {"a": [1, 0], "b": [1, 1], "c": [0.0, 1.0], "d": [1.0]}
  b = {"a": [0, 0], "b": [1, 0], "c": [0.0, 1.0], "d": [0.0]}
  result = statistics.paired_difference(a, b)
  assert result.difference.value == pytest.approx(np.mean([0.5, 0.5, 0, 1]))
  pictures = {"a": "p", "b": "p", "c": "q", "d": "r"}
  clustered = statistics.paired_difference(a, b, clusters=pictures)
  assert clustered.difference.method == "cr1"
  assert clustered.difference.value == result.difference.value


# --- power and coverage ---------------------------------------------------------------------------


def test_items_needed_reach_the_power_they_promise():
  sd, effect = 0.6, 0.1
  n = statistics.items_needed(effect, sd)
  assert statistics.detectable_effect(sd / np.sqrt(n)) <= effect
  assert statistics.detectable_effect(sd / np.sqrt(n - 1)) > effect
  d = np.random.default_rng(1).normal(effect, sd, (4000, n))
  found = np.abs(d.mean(1)) > 1.96 * d.std(1, ddof=1) / np.sqrt(n)
  assert found.mean() == pytest.approx(0.8, abs=0.02)


def test_a_paired_comparison_sees_what_an_unpaired_one_misses():
  rng = np.random.default_rng(0)
  base = rng.random(500) < 0.5
  better = base | (rng.random(500) < 0.06)
  a, b = ({str(i): float(x) for i, x in enumerate(run)} for run in (better, base))
  result = statistics.paired_difference(a, b)
  unpaired = np.hypot(*(np.std(list(run.values()), ddof=1) / np.sqrt(500) for run in (a, b)))
  assert result.seen()
  assert result.difference.value < 1.96 * unpaired


def test_wilson_covers_the_truth_about_as_often_as_it_says():
  draws = np.random.default_rng(0).binomial(60, 0.15, 2000)
  intervals = [statistics.wilson(int(k), 60) for k in draws]
  covered = np.mean([x.ci_low <= 0.15 <= x.ci_high for x in intervals])
  assert 0.93 < covered < 0.98


# --- error messages -------------------------------------------------------------------------------


def test_errors():
  with pytest.raises(ValueError, match="successes <= n .*got 3 of 2"):
    statistics.wilson(3, 2)
  with pytest.raises(ValueError, match="got 2, of which 1 not finite"):
    statistics.mean_t([1.0, float("nan")])
  with pytest.raises(ValueError, match="same items; got 3 and 2 with 2 in common \\(2 ..."):
    statistics.paired_difference(by_id("101"), by_id("10"))
  common = statistics.paired_difference(by_id("101"), by_id("00"), intersect=True)
  assert common.difference.n == 2
  with pytest.raises(ValueError, match="0 < |between 0 and 1; got 95"):
    statistics.wilson(1, 2, confidence=95.0)
  with pytest.raises(ValueError, match="effect != 0"):
    statistics.items_needed(0.0, 0.5)
