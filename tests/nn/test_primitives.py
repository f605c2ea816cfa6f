"""Norms and linears against NumPy in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import primitives

pytestmark = pytest.mark.usefixtures("strict_dtypes")
EPS = 1e-5


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms_are_those_of_numpy(name):
  x = np.random.default_rng(0).normal(3, 2, (4, 5, 48))  # a mean that matters
  gain = np.random.default_rng(1).normal(1, 0.3, 48)
  centred = x - x.mean(-1, keepdims=True) if name == "layer_norm" else x
  want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * gain
  run = getattr(primitives, name)
  found = run(jnp.asarray(x, jnp.float32), jnp.asarray(gain, jnp.float32), EPS)
  np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)
  half = run(jnp.asarray(x, jnp.bfloat16), jnp.asarray(gain, jnp.bfloat16), EPS)
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(jnp.float32), want, rtol=0, atol=0.05)


class Two(nn.Module):
  """Two linears of one input, the second with a bias."""

  def setup(self):
    for name, use_bias in (("a", False), ("b", True)):
      primitives.declare_linear(
        self, name, 6, 4, use_bias=use_bias, dtype=jnp.float32, kernel_init=nn.initializers.ones
      )

  def __call__(self, x):
    return primitives.project(self, x, "a", "b")


def test_linears_are_declared_once_and_projected_together():
  x = jnp.asarray(np.arange(12).reshape(2, 6), jnp.float32)
  params = Two().init(jax.random.key(0), x)["params"]
  assert params["a"].keys() == {"kernel"} and params["b"].keys() == {"kernel", "bias"}
  params["b"]["bias"] = jnp.asarray([1, 2, 3, 4], jnp.float32)
  a, b = Two().apply({"params": params}, x)
  np.testing.assert_array_equal(a, [[15] * 4, [51] * 4])
  np.testing.assert_array_equal(b, [[16, 17, 18, 19], [52, 53, 54, 55]])


def test_tied_logits_are_float32_of_any_rows():
  embed = jnp.asarray(np.random.default_rng(0).normal(size=(7, 6)), jnp.bfloat16)
  for shape in ((6,), (3, 6), (2, 3, 6)):
    rows = jnp.ones(shape, jnp.bfloat16)
    found = primitives.tied_logits(rows, embed)
    assert found.dtype == jnp.float32 and found.shape == (*shape[:-1], 7)
    want = np.broadcast_to(np.asarray(embed, np.float64).sum(-1), found.shape)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
