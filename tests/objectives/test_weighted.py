"""Sums with weights: worked by hand, then as a pytree."""

import jax
import jax.numpy as jnp
import pytest

from jaxlab.objectives.weighted import Weighted


def weighted(total, weight):
  return Weighted(jnp.float32(total), jnp.float32(weight))


def test_mean_of_a_sum_is_not_the_mean_of_means():
  parts = [weighted(6.0, 1.0), weighted(3.0, 3.0)]
  assert float(sum(parts).mean()) == 9.0 / 4.0  # the mean of means would be 3.5


def test_nothing_measured_gives_zero_with_zero_gradient():
  assert float(weighted(0.0, 0.0).mean()) == 0.0
  grad = jax.grad(lambda x: Weighted(x * 0.0, jnp.float32(0.0)).mean())(jnp.float32(3.0))
  assert float(grad) == 0.0


def test_fractional_weights_are_exact():
  assert float(weighted(0.1, 0.25).mean()) == pytest.approx(0.4)


def test_is_a_pytree_and_refuses_to_concatenate():
  doubled = jax.tree.map(lambda x: 2 * x, weighted(1.0, 2.0))
  assert isinstance(doubled, Weighted)
  assert float(doubled.weight) == 4.0
  with pytest.raises(TypeError):
    weighted(1.0, 2.0) + (1.0, 2.0)
