"""Statistics that say how sure they are. Host code: numpy and scipy, no arrays of a device.

  proportion     Wilson's interval                          wilson
  mean           t interval                                 mean_t
  clustered      CR1 standard error, t with C - 1 degrees   clustered_mean, clustered_ratio
  sampled run    several samples an item, item = cluster    mean_by_item, pass_at_k
  two runs       paired by item id: mean difference, exact  paired_difference
                 McNemar or sign-flip test, smallest effect
                 that would have been seen

Source: Wilson 1927; McNemar 1947; Cameron and Miller 2015 (CR1); Miller, arXiv 2411.00640 (adding
error bars to evals); pass@k: Chen et al., arXiv 2107.03374 eq. (1).
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from scipy import stats

Number = float | int
Values = Sequence[Number] | np.ndarray
FLIPS = 10_000  # sign flips of a permutation test


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A figure with its interval. None where the data cannot say (a single item has no spread)."""

  value: float
  ci_low: float | None
  ci_high: float | None
  n: int  # independent units: items, or clusters' members for `clustered_mean`
  se: float | None
  method: str

  def as_dict(self) -> dict[str, float | int | None]:
    """{value, ci_low, ci_high, n}, as result.json spells a figure."""
    return {k: getattr(self, k) for k in ("value", "ci_low", "ci_high", "n")}


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Run a against run b on the same items. A difference is never printed without its interval."""

  difference: Estimate  # mean of a - b
  p_value: float
  test: str  # "mcnemar_exact" or "sign_flip"
  wins: int  # items where a is better
  losses: int
  detectable: float | None  # the smallest true difference seen with 80 % power at this size
  sd: float | None  # of the differences an item, for `items_needed`

  def seen(self) -> bool:
    """True if the interval leaves out 0."""
    low, high = self.difference.ci_low, self.difference.ci_high
    return low is not None and high is not None and (low > 0 or high < 0)


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> Estimate:
  """Wilson's interval of a proportion; exact 0 and 1 stay inside, unlike with p +- z se."""
  if n < 1 or not 0 <= successes <= n:
    raise ValueError(f"wilson: needs 0 <= successes <= n and n >= 1; got {successes} of {n}.")
  z = _z(confidence)
  p, z2n = successes / n, z * z / n
  centre = (p + z2n / 2) / (1 + z2n)
  half = z / (1 + z2n) * math.sqrt(p * (1 - p) / n + z2n / (4 * n))
  low = 0.0 if successes == 0 else centre - half  # exact, where rounding leaves 1e-18
  high = 1.0 if successes == n else centre + half
  return Estimate(p, low, high, n, math.sqrt(p * (1 - p) / n), "wilson")


def mean_t(values: Values, *, confidence: float = 0.95) -> Estimate:
  """Mean of independent values with a t interval (None for a single value)."""
  x = _finite("mean_t", values)
  if x.size < 2:
    return Estimate(float(x.mean()), None, None, 1, None, "t")
  se = float(x.std(ddof=1)) / math.sqrt(x.size)
  return _around(float(x.mean()), se, x.size - 1, x.size, "t", confidence)


def clustered_mean(
  values: Values, clusters: Sequence[Hashable], *, confidence: float = 0.95
) -> Estimate:
  """Mean of values that hang together within clusters: CR1 standard error, t with C - 1 degrees.

  CR1^2 = C / (C - 1) * sum_c (sum_{i in c} x_i - mean)^2 / n^2. Interval None for one cluster.
  """
  x = _finite("clustered_mean", values)
  if len(clusters) != x.size:
    raise ValueError(
      f"clustered_mean: one cluster a value; got {x.size} values and {len(clusters)} clusters."
    )
  number = {c: i for i, c in enumerate(dict.fromkeys(clusters))}
  mean, count = float(x.mean()), len(number)
  if count < 2:
    return Estimate(mean, None, None, x.size, None, "cr1")
  residual_c = np.bincount([number[c] for c in clusters], weights=x - mean, minlength=count)
  se = math.sqrt(count / (count - 1) * float((residual_c**2).sum())) / x.size
  return _around(mean, se, count - 1, x.size, "cr1", confidence)


def clustered_ratio(
  a: Values, b: Values, clusters: Sequence[Hashable], *, confidence: float = 0.95
) -> Estimate:
  """R = mean(a) / mean(b) of values that come in pairs: the delta method on a - R b, clustered.

  For shares of a whole that is itself measured, such as the part of a loss that a method recovers.
  Raises: ValueError if mean(b) is 0.
  """
  x, y = _finite("clustered_ratio", a), _finite("clustered_ratio", b)
  if len(x) != len(y) or y.mean() == 0:
    raise ValueError(
      f"clustered_ratio: needs pairs and a mean(b) that is not 0; got {len(x)} and {len(y)} values "
      f"and {y.mean():g}."
    )
  ratio = float(x.mean() / y.mean())
  residual = clustered_mean(x - ratio * y, clusters)
  if residual.se is None:
    return Estimate(ratio, None, None, x.size, None, "delta_cr1")
  degrees = len(dict.fromkeys(clusters)) - 1
  se = residual.se / abs(float(y.mean()))
  return _around(ratio, se, degrees, x.size, "delta_cr1", confidence)


def mean_by_item(samples: Mapping[str, Values], *, confidence: float = 0.95) -> Estimate:
  """Mean of a sampled run (pass@1): the mean of the items' means, with the item as the unit.

  Drawing more samples of an item narrows its own mean; only more items narrow the interval much.
  """
  return mean_t(
    [float(x) for x in _item_means("mean_by_item", samples).values()], confidence=confidence
  )


def pass_at_k(n: int, correct: int, k: int) -> float:
  """Chance that k of n samples drawn without return hold a right one: 1 - C(n-c, k) / C(n, k)."""
  if not (0 <= correct <= n and 1 <= k <= n):
    raise ValueError(
      f"pass_at_k: needs 0 <= correct <= n and 1 <= k <= n; got n={n}, correct={correct}, k={k}."
    )
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mcnemar_exact(only_a: int, only_b: int) -> float:
  """Two-sided exact p of `only_a` items right in a alone and `only_b` in b alone."""
  if min(only_a, only_b) < 0:
    raise ValueError(f"mcnemar_exact: counts must be >= 0; got {only_a} and {only_b}.")
  discordant = only_a + only_b
  return min(1.0, 2 * float(stats.binom.cdf(min(only_a, only_b), discordant, 0.5)))


def sign_flip(differences: Values, *, seed: int = 0) -> float:
  """Two-sided p of a mean of paired differences under random signs; seeded, so readers agree."""
  d = _finite("sign_flip", differences)
  rng = np.random.default_rng(seed)
  observed = abs(float(d.sum())) * (1 - 1e-12)  # a tie must count whatever the order of addition
  extreme = 0
  rows = max(1, min(FLIPS, 4_000_000 // d.size))
  for start in range(0, FLIPS, rows):
    signs = rng.integers(0, 2, (min(rows, FLIPS - start), d.size), dtype=np.int8) * 2 - 1
    extreme += int((np.abs(signs @ d) >= observed).sum())
  return (extreme + 1) / (FLIPS + 1)


def paired_difference(
  a: Mapping[str, Values | Number],
  b: Mapping[str, Values | Number],
  *,
  clusters: Mapping[str, Hashable] | None = None,
  intersect: bool = False,
  confidence: float = 0.95,
) -> Comparison:
  """Compares two runs item by item; a value is a score or the scores of several samples.

  Args:
    clusters: item id -> cluster (an image, a document) for items that hang together.
    intersect: compare the common items when the sets differ, instead of refusing.
  Returns: difference a - b with its interval (t, or CR1 with clusters); exact McNemar for 0/1
    scores, a sign-flip test (of the clusters' sums) for others.
  Raises: ValueError if the runs do not hold the same items.
  """
  a, b = _item_means("paired_difference", a), _item_means("paired_difference", b)
  ids = _common_ids(a, b, intersect)
  d = np.array([a[i] - b[i] for i in ids])
  if clusters is None:
    difference, units = mean_t(d.tolist(), confidence=confidence), d
  else:
    keys = [clusters[i] for i in ids]
    difference = clustered_mean(d.tolist(), keys, confidence=confidence)
    number = {c: i for i, c in enumerate(dict.fromkeys(keys))}
    units = np.bincount([number[c] for c in keys], weights=d)
  wins, losses = int((d > 0).sum()), int((d < 0).sum())
  binary = all(x in (0.0, 1.0) for run in (a, b) for x in (run[i] for i in ids))
  exact = binary and clusters is None
  p_value = mcnemar_exact(wins, losses) if exact else sign_flip(units.tolist())
  se = difference.se
  return Comparison(
    difference=difference,
    p_value=p_value,
    test="mcnemar_exact" if exact else "sign_flip",
    wins=wins,
    losses=losses,
    detectable=None if se is None else detectable_effect(se, confidence=confidence),
    sd=None if se is None else se * math.sqrt(len(ids)),
  )


def detectable_effect(se: Number, *, power: float = 0.8, confidence: float = 0.95) -> float:
  """Smallest true difference that a comparison with this standard error sees: (1.96 + .84) se."""
  return (_z(confidence) + float(stats.norm.ppf(power))) * se


def items_needed(
  effect: Number, sd: Number, *, power: float = 0.8, confidence: float = 0.95
) -> int:
  """Items a paired comparison needs to see `effect`, given `Comparison.sd` of a pilot.

  For 0/1 scores and no pilot, sd^2 is about the share of items on which the runs disagree.
  """
  if effect == 0 or sd < 0:
    raise ValueError(f"items_needed: needs effect != 0 and sd >= 0; got {effect} and {sd}.")
  return max(
    2, math.ceil((detectable_effect(sd, power=power, confidence=confidence) / effect) ** 2)
  )


def _around(mean, se, degrees, n, method, confidence) -> Estimate:
  half = float(stats.t.ppf(0.5 + confidence / 2, degrees)) * se
  return Estimate(mean, mean - half, mean + half, n, se, method)


def _z(confidence: float) -> float:
  if not 0 < confidence < 1:
    raise ValueError(f"confidence must be between 0 and 1; got {confidence}.")
  return float(stats.norm.ppf(0.5 + confidence / 2))


def _finite(name: str, values: Values) -> np.ndarray:
  x = np.asarray(values, np.float64)
  if x.size == 0 or not np.isfinite(x).all():
    bad = int((~np.isfinite(x)).sum())
    raise ValueError(
      f"{name}: needs at least one value, all finite; got {x.size}, of which {bad} not finite. "
      "Drop unmeasured items and report their number."
    )
  return x


def _item_means(name: str, run: Mapping[str, Values | Number]) -> dict[str, float]:
  return {
    i: float(_finite(f"{name} (item {i!r})", np.atleast_1d(x)).mean()) for i, x in run.items()
  }


def _common_ids(a: Mapping, b: Mapping, intersect: bool) -> list[str]:
  common = sorted(a.keys() & b.keys())
  missing = sorted(a.keys() ^ b.keys())
  if (missing and not intersect) or not common:
    raise ValueError(
      f"paired_difference: both runs must hold the same items; got {len(a)} and {len(b)} with "
      f"{len(common)} in common ({', '.join(missing[:3])} ... in one alone). Pass intersect=True "
      "to compare the common ones."
    )
  return common
