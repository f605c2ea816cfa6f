"""NF4 against its definition in NumPy (arXiv 2305.14314 §3, appendix E)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlab.nn import weights
from jaxlab.quant import nf4
from pallas_kernels.fp4_gemm import codec

pytestmark = pytest.mark.usefixtures("strict_dtypes")
TABLE = np.array(codec.NF4_VALUES)


def test_the_table_holds_normal_quantiles():
  """Appendix E: 8 quantiles above zero and 7 below, scaled to reach 1, and an exact 0."""
  offset = 0.9677083
  above = scipy.stats.norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
  below = -scipy.stats.norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
  expected = np.sort(np.concatenate([above, [0.0], below])) / above.max()
  np.testing.assert_allclose(TABLE, expected, atol=1e-6)


def test_codes_are_the_nearest_to_what_is_read_back():
  w = jax.random.normal(jax.random.key(0), (128, 6))
  packed = nf4.quantize(w)
  absmax = np.asarray(packed.scale, np.float32) * packed.scale_step + packed.scale_min
  unit = np.asarray(w).T.reshape(6, 2, 64) / np.asarray(absmax)[..., None]
  nearest = np.abs(unit[..., None] - TABLE).argmin(-1).reshape(6, 128)
  codes = np.asarray(packed.codes)
  np.testing.assert_array_equal(codes & 15, nearest[:, ::2])
  np.testing.assert_array_equal(codes >> 4, nearest[:, 1::2])
  dense = (TABLE[nearest].reshape(6, 2, 64) * np.asarray(absmax)[..., None]).reshape(6, 128).T
  np.testing.assert_allclose(nf4.dequantize(packed), dense, rtol=1e-5)


def test_double_quantisation_costs_little():
  w = jax.random.normal(jax.random.key(1), (512, 512))
  blocks = np.asarray(w, np.float64).T.reshape(512, -1, 64)
  absmax = np.abs(blocks).max(-1, keepdims=True)
  single = TABLE[np.abs((blocks / absmax)[..., None] - TABLE).argmin(-1)] * absmax
  single_mse = ((single - blocks) ** 2).mean()
  mse = float(jnp.mean((nf4.dequantize(nf4.quantize(w)) - w) ** 2))
  assert mse < 1.02 * single_mse


def test_small_and_zero_blocks_survive_beside_large_ones():
  w = np.ones((192, 1), np.float32) * 1000
  w[:64], w[64:128] = 0, 0.5
  back = np.asarray(nf4.dequantize(nf4.quantize(jnp.asarray(w))))
  np.testing.assert_allclose(back, w, rtol=1e-5)


def test_a_zero_matrix_stays_zero():
  np.testing.assert_array_equal(nf4.dequantize(nf4.quantize(jnp.zeros((64, 2)))), np.zeros((64, 2)))


def test_product_and_dtype():
  w = nf4.quantize(jax.random.normal(jax.random.key(2), (64, 8)).astype(jnp.bfloat16))
  x = jax.random.normal(jax.random.key(3), (3, 64))
  np.testing.assert_allclose(weights.matmul(x, w), x @ nf4.dequantize(w), rtol=1e-5, atol=1e-5)
  assert nf4.dequantize(w, jnp.bfloat16).dtype == jnp.bfloat16
