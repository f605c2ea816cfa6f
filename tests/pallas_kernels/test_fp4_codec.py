"""Decoding of FP4 and NF4, block Hadamard, fake quantisation. Oracles: ml_dtypes and the formats'
tables; specs of arXiv 2509.23202 (oracles 1, 4)."""

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec

pytestmark = pytest.mark.usefixtures("strict_dtypes")
ALL_BYTES = np.arange(256, dtype=np.uint8)


# --- worked by hand


@pytest.mark.parametrize("device", ["cpu", "h100", "v6e"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_byte_decodes_low_nibble_first(device, dtype):
  with target.use_target(device):
    even, odd = codec.unpack_halves(jnp.asarray(ALL_BYTES), dtype)
    planes = codec.unpack_planes(jnp.asarray(ALL_BYTES), dtype)
  values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  assert even.dtype == odd.dtype == dtype
  np.testing.assert_array_equal(np.asarray(even, np.float32), values[ALL_BYTES & 15])
  np.testing.assert_array_equal(np.asarray(odd, np.float32), values[ALL_BYTES >> 4])
  np.testing.assert_array_equal(np.asarray(planes), np.stack([even, odd]))


def test_unpacked_columns_are_in_order():
  got = codec.unpack_codes(jnp.asarray([[0x21, 0xF7]], jnp.uint8))
  np.testing.assert_array_equal(got, [[0.5, 1.0, 6.0, -6.0]])


def test_e4m3_scales_decode_as_ml_dtypes():
  scale = ALL_BYTES.view(ml_dtypes.float8_e4m3fn)
  np.testing.assert_array_equal(codec.decode_scale(jnp.asarray(scale)), scale.astype(np.float32))


def test_e8m0_scales_are_powers_of_two():
  got = np.asarray(codec.decode_scale(jnp.asarray(ALL_BYTES)), np.float64)
  np.testing.assert_array_equal(got[1:255], 2.0 ** (np.arange(1.0, 255) - 127))
  assert np.isnan(got[255])
  # 2^-127 is a denormal: its bits are right, whatever the platform does with them.
  bits = jax.lax.bitcast_convert_type(codec.decode_scale(jnp.zeros(1, jnp.uint8)), jnp.uint32)
  assert int(bits[0]) == 1 << 22


def test_a_scaled_value_is_exact_in_bfloat16():
  """All 127 scales times 8 magnitudes: the operand of the bfloat16 product loses nothing."""
  scale = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
  products = scale[:, None] * np.array(codec.E2M1_VALUES)
  np.testing.assert_array_equal(products.astype(ml_dtypes.bfloat16).astype(np.float64), products)


def test_decode_is_value_times_scale_times_tensor_scale():
  codes = jnp.full((2, 3, 16), 0x72, jnp.uint8)  # columns 1, 6, 1, 6, ...
  scale = jnp.asarray([[[0.5, 2.0]] * 3] * 2, jnp.float8_e4m3fn)
  got = codec.decode(codes, scale, jnp.asarray([1.0, 10.0]), jnp.float32)
  row = np.tile([1.0, 6.0], 16) * np.repeat([0.5, 2.0], 16)
  np.testing.assert_array_equal(got, np.array([1.0, 10.0])[:, None, None] * np.stack([row] * 3))


def test_nf4_decodes_by_table():
  codes = jnp.asarray(np.tile(np.array([0xF0, 0x17], np.uint8), (1, 32)))
  got = codec.nf4_decode(codes, jnp.asarray([[2.0, 3.0]]), jnp.float32)
  row = np.tile([-1.0, 1.0, 0.0, codec.NF4_VALUES[1]], 32) * np.repeat([2.0, 3.0], 64)
  np.testing.assert_allclose(got[0], row, rtol=1e-7)


def test_hadamard_of_a_unit_vector():
  x = np.zeros((1, 32), np.float32)
  x[0, 3] = 8
  signs = np.tile([1, -1, -1, 1], 4)
  expected = np.concatenate([2.0 * signs, np.zeros(16)])[None]
  np.testing.assert_array_equal(codec.rotate(jnp.asarray(x), 16), expected)


# --- property


@pytest.mark.parametrize("size", [0, 2, 16, 128])
def test_rotation_is_its_own_inverse_and_cancels_in_a_product(size):
  kx, kw = jax.random.split(jax.random.key(size))
  x, w_KO = jax.random.normal(kx, (5, 128)), jax.random.normal(kw, (128, 7))
  np.testing.assert_allclose(codec.rotate(codec.rotate(x, size), size), x, atol=4e-6)
  product = codec.rotate(x, size) @ codec.unrotate(w_KO, size)
  np.testing.assert_allclose(product, x @ w_KO, atol=2e-5)


def test_rounding_agrees_with_ml_dtypes():
  grid = np.concatenate([np.linspace(-7, 7, 140001), np.arange(-6, 6.25, 0.25)]).astype(np.float32)
  expected = grid.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
  np.testing.assert_array_equal(codec.round_e2m1(jnp.asarray(grid)), expected)


@hypothesis.settings(max_examples=20)
@hypothesis.given(
  scale=st.floats(1e-6, 1e6), seed=st.integers(0, 99), fmt=st.sampled_from(["nvfp4", "mxfp4"])
)
def test_fake_quantized_rows_are_close_and_independent(scale, seed, fmt):
  x = scale * jax.random.normal(jax.random.key(seed), (3, 64))
  fake_quantize = jax.jit(codec.fake_quantize, static_argnums=1)
  y, alone = fake_quantize(x, fmt), fake_quantize(x[1:2], fmt)
  np.testing.assert_array_equal(y[1:2], alone)
  amax = np.abs(x).reshape(3, -1, codec.BLOCK[fmt]).max(-1).repeat(codec.BLOCK[fmt], -1)
  # Half the widest gap (2 of 6) and 1/16 for the scale; mxfp4 clips amax of up to 7 units at 6.
  assert (np.abs(y - x) <= amax * (1 / 6 + 1 / 16) + 1e-30).all()


def test_a_static_activation_scale_is_used():
  x = jnp.linspace(-1.0, 1.0, 16)[None]
  # The multiplier amax / 2688 gives the block a scale of 448; a 100 times larger one, 4.5 (4.48).
  exact = codec.fake_quantize(x, "nvfp4", jnp.float32(1 / 2688))
  coarse = codec.fake_quantize(x, "nvfp4", jnp.float32(100 / 2688))
  np.testing.assert_allclose(exact, codec.fake_quantize(x, "nvfp4"), rtol=1e-6)
  np.testing.assert_allclose(coarse[0, -1], 6 * 4.5 * 100 / 2688, rtol=1e-6)


def test_zero_rows_stay_zero():
  x = jnp.zeros((2, 32))
  for fmt in ("nvfp4", "mxfp4"):
    np.testing.assert_array_equal(codec.fake_quantize(x, fmt), x)


def test_fake_quantization_passes_the_gradient_through():
  x = jax.random.normal(jax.random.key(0), (2, 32))
  dx = jax.grad(lambda x: jnp.sum(codec.fake_quantize(x, "nvfp4") * 3))(x)
  np.testing.assert_array_equal(dx, np.full(x.shape, 3.0))


# --- error messages


def test_another_scale_dtype_is_refused():
  with pytest.raises(ValueError, match="float8_e4m3fn .* or uint8 .*; got float32"):
    codec.decode_scale(jnp.ones((2, 2)))
