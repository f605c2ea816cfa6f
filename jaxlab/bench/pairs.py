"""Interleaved pairs: the only way to time on a shared machine. Dims: none."""

import time
from collections.abc import Callable

import numpy as np

PAIRS = 7  # the least that a median is quoted from


def interleaved(
  ours: Callable[[], object], theirs: Callable[[], object], *, pairs: int = PAIRS
) -> dict[str, float]:
  """Runs both in turn, after one unmeasured run of each.

  Both must block until their result is there. A ratio is taken within each pair, so what slows the
  machine for a while slows both sides of it.

  Returns: {"seconds", "baseline_seconds", "ratio", "ratio_low", "ratio_high"}: medians, and the
    quartiles of baseline seconds / our seconds.
  Raises: ValueError for fewer than seven pairs.
  """
  if pairs < PAIRS:
    raise ValueError(f"interleaved: needs at least {PAIRS} pairs; got {pairs}.")
  ours(), theirs()
  times = np.asarray([(_seconds(ours), _seconds(theirs)) for _ in range(pairs)])
  ratio = times[:, 1] / times[:, 0]
  low, middle, high = np.quantile(ratio, (0.25, 0.5, 0.75))
  mine, other = np.median(times, axis=0)
  return {
    "seconds": float(mine), "baseline_seconds": float(other), "ratio": float(middle),
    "ratio_low": float(low), "ratio_high": float(high),
  }  # fmt: skip


def _seconds(run: Callable[[], object]) -> float:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start
