"""From the measured parts of a completion's rewards to one number."""

import math
from collections.abc import Mapping


def weighted_sum(
  parts: Mapping[str, float | None], weights: Mapping[str, float] | None = None
) -> float:
  """sum of weight * part over the measured parts (weight 1 unless given); NaN if none was measured.

  A NaN reward has advantage 0: the completion neither helps nor hurts.
  Raises: ValueError for a weight that names no part (a misspelt weight would act like 1).
  """
  weights = {} if weights is None else weights
  if unknown := sorted(weights.keys() - parts.keys()):
    raise ValueError(
      f"weighted_sum: weights must name parts of the reward; got {', '.join(unknown)}, the parts "
      f"are {', '.join(sorted(parts))}."
    )
  measured = {k: x for k, x in parts.items() if x is not None and not math.isnan(x)}
  if not measured:
    return math.nan
  return float(sum(weights.get(name, 1.0) * x for name, x in measured.items()))
