"""A sum and its weight, kept apart until the very end. Dims: none (scalars).

An objective returns `Weighted(total, weight)` per micro-batch; the training loop adds them over
micro-batches, `psum`s them over devices and divides once. A mean of means would weigh a token by
the micro-batch it happened to land in, so gradient accumulation would change the answer.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Weighted(NamedTuple):
  """`total / weight`, not yet divided. A pytree of two scalars, so `psum` and `tree.map` see both.

  Invariants: weight >= 0; weight == 0 means "nothing was measured" and then total == 0.
  """

  total: Float[Array, ""]
  weight: Float[Array, ""]

  def mean(self) -> Float[Array, ""]:
    """total / weight, and 0 with a zero gradient when the weight is 0 (an all-masked batch)."""
    # For a count of tokens this is the usual max(weight, 1); fractional weights stay exact.
    return self.total / jnp.where(self.weight > 0, self.weight, 1.0)

  def __add__(self, other: "Weighted") -> "Weighted":
    """Adds totals and weights (a plain NamedTuple would concatenate)."""
    if not isinstance(other, Weighted):
      return NotImplemented
    return Weighted(self.total + other.total, self.weight + other.weight)

  def __radd__(self, other: int) -> "Weighted":
    """Lets `sum(list_of_weighted)` start from its 0."""
    return self if isinstance(other, int) and other == 0 else NotImplemented
