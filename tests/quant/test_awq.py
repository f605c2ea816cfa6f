"""AWQ: a folded model computes the same, and rounding it errs less where inputs differ in size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.quant import awq, blocks, calibrate, mr_gptq
from tests.quant import small
from tests.quant.small import SITES

pytestmark = pytest.mark.usefixtures("quick_compilation")
RTN = dataclasses.replace(mr_gptq.rtn(), awq=True)


def block():
  """(module, a layer with inputs of very different sizes, inputs): four query heads over two of
  keys and values, biases of q, k, v."""
  module = small.model().module
  layer = jax.tree.map(lambda x: x[0], small.model().params["layers"])
  for name in ("attn_norm", "mlp_norm"):
    layer[name] = layer[name].at[jnp.arange(0, 64, 16)].mul(20.0)
  return module, layer, jax.random.normal(jax.random.key(1), (4, 16, 64))


def observed(module, layer, x):
  how = calibrate.Inputs(SITES)
  return calibrate.observe(module, 0, how, layer, x, calibrate.nothing_seen(how, layer))


def test_scales_worked_by_hand():
  magnitude = jnp.float32([1, 4, 16, 0])
  np.testing.assert_allclose(awq.scales_of(magnitude, jnp.float32(0)), np.ones(4))
  half = np.array([1, 2, 4, 1]) / 2  # sqrt(m) / sqrt(4 * 1); the unseen counts as the smallest
  np.testing.assert_allclose(awq.scales_of(magnitude, jnp.float32(0.5)), half, rtol=1e-6)
  np.testing.assert_allclose(awq.scales_of(jnp.zeros(3), jnp.float32(0.5)), np.ones(3))


@pytest.mark.parametrize("rotation", [0, 16])
def test_a_folded_block_computes_the_same(rotation):
  module, layer, x = block()
  rounding = mr_gptq.PlainRounding(RTN, rotation)
  folded, ratios = awq.fold(layer, observed(module, layer, x), module.config, rounding)
  assert set(ratios) == {"q", "o", "gate", "down"} and all(0 <= r < 1 for r in ratios.values())
  assert max(ratios.values()) > 0
  changed = [n for n, w in blocks.kernels(layer).items() if (w != blocks.kernels(folded)[n]).any()]
  assert len(changed) >= 3
  expected = blocks.run(module, 0, layer, x)
  np.testing.assert_allclose(
    blocks.run(module, 0, folded, x), expected, atol=2e-5 * np.abs(expected).max()
  )


def test_rounding_after_it_errs_less():
  """Eight times the squared error of the block's outputs is left without it."""
  module, layer, x = block()
  folded, _ = awq.fold(
    layer, observed(module, layer, x), module.config, mr_gptq.PlainRounding(RTN, 0)
  )
  expected = blocks.run(module, 0, layer, x)

  def error(layer):
    rounded = {}
    for names in SITES:
      kernels = {name: blocks.kernels(layer)[name] for name in names}
      new = mr_gptq.PlainRounding(RTN, 0)(tuple(kernels.values()))
      rounded |= dict(zip(kernels, new, strict=True))
    y = blocks.run(module, 0, blocks.replace_kernels(layer, rounded), x)
    return float(jnp.sum((y - expected) ** 2))

  assert error(folded) < 0.6 * error(layer)


def test_the_best_ratio_of_the_grid_is_taken():
  """Against a loop in NumPy, with the model's own rounding."""
  module, layer, x = block()
  seen = observed(module, layer, x)["gate"]
  w = tuple(blocks.kernels(layer)[name] for name in ("gate", "up"))
  rounding = mr_gptq.PlainRounding(RTN, 0)
  scale, ratio = awq.search(w, seen.hessian_II, seen.magnitude_I, rounding)
  errors = []
  for r in np.arange(20) / 20:
    s = np.asarray(awq.scales_of(seen.magnitude_I, jnp.float32(r)), np.float64)
    new = rounding(tuple(x * jnp.float32(s)[:, None] for x in w))
    change = np.concatenate([np.asarray(a) - np.asarray(b) / s[:, None] for a, b in zip(w, new)], 1)
    errors.append(np.trace(change.T @ np.asarray(seen.hessian_II, np.float64) @ change))
  assert float(ratio) == pytest.approx(np.argmin(errors) / 20)
  np.testing.assert_allclose(scale, awq.scales_of(seen.magnitude_I, ratio), rtol=1e-6)


def test_models_whose_norms_feed_more_than_linears_are_refused():
  with pytest.raises(ValueError, match="awq: .*Llama, Qwen.*got a ModernBert. Set awq=False"):
    awq.require_decoder(small.model("modernbert").module)
