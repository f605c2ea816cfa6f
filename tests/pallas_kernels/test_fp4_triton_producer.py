"""The Triton producer of FP4 rows against codec.py and ml_dtypes, in interpret mode."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, producer_triton

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")


def produce(x, format, rotation=0, act_scale=None):
  call = lambda x, s: producer_triton.forward(x, format, rotation, s, interpret=True)
  return jax.jit(call)(x, act_scale)


expected_rows = jax.jit(
  lambda x, format, rotation, s: codec.quantize_rows(codec.rotate(x, rotation), format, s),
  static_argnums=(1, 2),
)


def check_equal(rows, expected):
  np.testing.assert_array_equal(rows.codes, expected.codes)
  assert rows.scale.dtype == expected.scale.dtype
  np.testing.assert_array_equal(np.asarray(rows.scale), np.asarray(expected.scale))
  np.testing.assert_array_equal(rows.multiplier, expected.multiplier)


# --- pieces, by all the values that matter


def test_scales_are_the_nearest_e4m3():
  """Every E4M3 value, the middles between neighbours, and what is just beside them."""
  every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  middles = (every[:-1] + every[1:]) / 2
  x = np.concatenate([every, middles, np.nextafter(middles, 0), np.nextafter(middles, 999)])
  byte, value = producer_triton.nv_scales(jnp.asarray(x))
  expected = np.maximum(x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), 1)
  np.testing.assert_array_equal(byte, expected)
  np.testing.assert_array_equal(value, expected.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_codes_are_the_nearest_e2m1():
  grid = np.linspace(-7, 7, 14 * 64 + 1).astype(np.float32)  # holds all ties
  x = np.concatenate([grid, np.nextafter(grid, 9), np.nextafter(grid, -9), [1e30, -np.inf]])
  codes = np.asarray(producer_triton.encode(jnp.asarray(x, jnp.float32)))
  expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
  found = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(codes, codec.encode_e2m1(jnp.asarray(x, jnp.float32)))


@pytest.mark.parametrize("rotation", [0, 2, 16, 128])
def test_signs_rotate_like_the_codec(rotation):
  x = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
  found = x @ producer_triton.signs(rotation) * max(rotation, 1) ** -0.5
  np.testing.assert_allclose(found, codec.rotate(jnp.asarray(x), rotation), atol=2e-6)


# --- the kernel


def rows_of(rng, shape, dtype):
  """Rows of very different sizes, one of zeros, a block of zeros, negative zeros."""
  x = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)) * 4)
  x[0], x[-1, : shape[1] // 2] = 0, -0.0
  return jnp.asarray(x, dtype)


@pytest.mark.parametrize(
  "format, shape, dtype, act_scale",
  [
    ("nvfp4", (5, 400), jnp.bfloat16, None),  # no multiple of a tile
    ("nvfp4", (3, 48), jnp.float32, 0.01),
    ("mxfp4", (17, 160), jnp.bfloat16, None),
  ],
)
def test_equals_the_codec(format, shape, dtype, act_scale):
  x = rows_of(np.random.default_rng(1), shape, dtype)
  scale = None if act_scale is None else jnp.float32(act_scale)
  check_equal(produce(x, format, 0, scale), expected_rows(x, format, 0, scale))


@pytest.mark.parametrize(
  "format, rotation, dtype", [("nvfp4", 16, jnp.bfloat16), ("mxfp4", 128, jnp.float32)]
)
def test_rotates_exactly_where_sums_are_exact(format, rotation, dtype):
  """Small integers: the sums are exact in any order, and so is all that follows."""
  x = jnp.asarray(np.random.default_rng(2).integers(-3, 4, (6, 256)), dtype)
  check_equal(produce(x, format, rotation), expected_rows(x, format, rotation, None))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rotation", [2, 32, 128])
def test_random_rows_differ_beside_ties_only(format, dtype, rotation):
  """A sum in another order moves a value by one bit of x's dtype, a code by one step at most."""
  x = rows_of(np.random.default_rng(rotation), (70, 384), dtype)
  found, expected = produce(x, format, rotation), expected_rows(x, format, rotation, None)
  codes = [
    np.stack([np.asarray(r.codes) & 15, np.asarray(r.codes) >> 4]) for r in (found, expected)
  ]
  values = [c.view(ml_dtypes.float4_e2m1fn).astype(np.float32) for c in codes]
  differ = values[0] != values[1]
  assert differ.mean() < 2e-3
  assert (np.abs(values[0] - values[1])[differ] <= 2).all()


def test_why_not():
  b200, v6e = target.TARGETS["b200"], target.TARGETS["v6e"]
  assert producer_triton.why_not(1, jnp.bfloat16, 512, "nvfp4", 128, b200) is None
  assert "up to 128; got 256" in producer_triton.why_not(1, jnp.bfloat16, 512, "nvfp4", 256, b200)
  assert "NVIDIA GPU" in producer_triton.why_not(1, jnp.bfloat16, 512, "nvfp4", 0, v6e)
