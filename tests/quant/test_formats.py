"""Encoding of E2M1, E4M3 and E8M0. Oracles: ml_dtypes, the thresholds and rules of the formats."""

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlab.quant import formats
from pallas_kernels.fp4_gemm import codec

pytestmark = pytest.mark.usefixtures("strict_dtypes")


# --- worked by hand


def test_all_codes_round_trip():
  codes = np.arange(16, dtype=np.uint8)
  values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  expected = np.where(codes == 8, 0, codes)  # -0.0 is written as 0
  np.testing.assert_array_equal(formats.encode_e2m1(jnp.asarray(values)), expected)


def test_ties_go_to_the_even_code():
  ties = jnp.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
  np.testing.assert_array_equal(formats.encode_e2m1(ties), [0, 2, 2, 4, 4, 6, 6])


def test_small_negatives_keep_their_sign_and_large_values_saturate():
  got = formats.encode_e2m1(jnp.asarray([-0.1, -0.0, 1e30, -7.0]))
  np.testing.assert_array_equal(got, [8, 0, 7, 15])


def test_packing_puts_even_columns_low():
  packed = formats.pack(jnp.asarray([[1, 2, 15, 7]], jnp.uint8))
  np.testing.assert_array_equal(packed, [[0x21, 0x7F]])


def test_e4m3_saturates_where_a_cast_gives_nan():
  x = jnp.asarray([464.0, 465.0, 1e9, -1e9])
  np.testing.assert_array_equal(
    formats.to_e4m3(x).astype(jnp.float32), [448.0, 448.0, 448.0, -448.0]
  )
  assert np.isnan(float(jnp.float32(465).astype(jnp.float8_e4m3fn)))


@pytest.mark.parametrize(
  ("rule", "exponents"),
  [
    # A =       1   1.5  1.74  1.75  3.5   6  6.1  7   8
    ("floor", [-2, -2, -2, -2, -1, 0, 0, 0, 1]),
    ("even", [-2, -2, -2, -1, 0, 0, 0, 1, 1]),
    ("ceil", [-2, -2, -1, -1, 0, 0, 1, 1, 1]),
    ("fp43", [0, 0, 0, 0, 1, 2, 2, 2, 3]),
  ],
)
def test_scale_rules(rule, exponents):
  amax = jnp.asarray([1, 1.5, 1.74, 1.75, 3.5, 6, 6.1, 7, 8], jnp.float32)
  got = np.asarray(formats.e8m0_byte(amax, rule), np.int32) - 127
  np.testing.assert_array_equal(got, exponents)


def test_quest_clips_at_2_92_deviations_rounded_down():
  """std of (+1, -1, ...) is 1: the scale .487 is rounded down to 2^-2, that of 2.1 to 2^0."""
  signs = np.tile([1.0, -1.0], 16).astype(np.float32)
  blocks = jnp.asarray(np.stack([signs, 2.1 * signs, 1e-12 * signs]))
  got = np.asarray(formats.quest_byte(blocks), np.int32) - 127
  np.testing.assert_array_equal(got, [-2, 0, np.floor(np.log2(2.92247856 / 6 * 1e-12))])


def test_quest_does_not_clip_a_constant_block_to_nothing():
  block = jnp.full((1, 32), 5.0).at[0, 0].set(5.01)
  np.testing.assert_array_equal(
    formats.quest_byte(block), formats.e8m0_byte(jnp.max(block, axis=-1), "even")
  )


@pytest.mark.parametrize(
  ("entry", "offset"),
  [
    ((0, 3), 3), ((1, 0), 16), ((32, 0), 4), ((33, 2), 22), ((127, 3), 511), ((5, 4), 592),
    ((128, 0), 1024),
  ],
)  # fmt: skip
def test_swizzled_offsets_for_eight_columns(entry, offset):
  scale = jnp.zeros((160, 8), jnp.uint8).at[entry].set(7)
  flat = np.asarray(formats.swizzle(scale)).ravel()
  assert flat.size == 256 * 8 and np.flatnonzero(flat).tolist() == [offset]


# --- property


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (127, 5), (128, 8), (300, 12)])
def test_the_swizzle_pads_with_zero_bytes_and_comes_back(rows, columns, e4m3):
  bits = np.random.default_rng(rows).integers(1, 127, (rows, columns), np.uint8)
  scale = jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn) if e4m3 else bits)
  tiles = formats.swizzle(scale)
  assert tiles.dtype == scale.dtype and tiles.shape == (-(-rows // 128), -(-columns // 4), 32, 16)
  flat = np.asarray(tiles).view(np.uint8).ravel()
  wide = 4 * -(-columns // 4)
  r, c = np.indices(bits.shape)
  offset = (r // 128 * (wide // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
  np.testing.assert_array_equal(flat[offset], bits)
  assert np.count_nonzero(flat) == bits.size
  back = formats.unswizzle(tiles, rows, columns)
  np.testing.assert_array_equal(np.asarray(back).view(np.uint8), bits)


def test_the_swizzle_moves_bytes_of_any_value_in_every_matrix_of_a_stack():
  bits = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(2, 64, 4)  # NaN, negative E4M3
  scale = jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn))
  tiles = formats.swizzle(scale)
  np.testing.assert_array_equal(
    np.asarray(tiles[1]).view(np.uint8), np.asarray(formats.swizzle(scale[1])).view(np.uint8)
  )
  back = formats.unswizzle(tiles, 64, 4)
  np.testing.assert_array_equal(np.asarray(back).view(np.uint8), bits)


@hypothesis.settings(max_examples=50)
@hypothesis.given(seed=st.integers(0, 999), power=st.integers(-110, 110), mean=st.floats(0, 2))
def test_quest_follows_its_formula(seed, power, mean):
  blocks = np.random.default_rng(seed).normal(mean, size=(1, 32)).astype(np.float32)
  blocks *= np.float32(2.0**power)
  got = int(formats.quest_byte(jnp.asarray(blocks))[0]) - 127
  exact = np.log2(2.92247856 / 6 * blocks.astype(np.float64).std())
  # Float32 may round a deviation across a power of two.
  assert np.floor(exact - 1e-5) <= got <= np.floor(exact + 1e-5)


def test_encoding_agrees_with_ml_dtypes_on_a_grid():
  grid = np.linspace(-6, 6, 140001).astype(np.float32)
  got = np.asarray(formats.encode_e2m1(jnp.asarray(grid)))
  np.testing.assert_array_equal(got, grid.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_encoding_is_monotone_and_agrees_with_the_kernel_folder():
  x = jnp.sort(jax.random.normal(jax.random.key(0), (4096,)) * 4)
  values = codec.unpack_codes(formats.pack(formats.encode_e2m1(x)))
  assert (jnp.diff(values) >= 0).all()
  np.testing.assert_array_equal(values, codec.round_e2m1(x))


@hypothesis.settings(max_examples=200)
@hypothesis.given(
  amax=st.floats(2.0**-125, 2.0**126, width=32),
  rule=st.sampled_from(["even", "floor", "ceil", "fp43"]),
)
def test_scale_rules_follow_their_formulas(amax, rule):
  got = int(formats.e8m0_byte(jnp.float32(amax), rule)) - 127
  mantissa, exponent = np.frexp(np.float64(amax))
  k = int(exponent) - 1  # floor(log2 amax)
  formula = {
    "floor": k - 2,
    "even": int(np.frexp(np.float64(amax) / 1.75)[1]) - 2,
    "ceil": k - 2 + (2 * mantissa > 1.5),
    "fp43": k,
  }[rule]
  low_exponent = formats.FP43_MIN if rule == "fp43" else formats.E8M0_MIN
  assert got == np.clip(formula, low_exponent, formats.E8M0_MAX)
  scaled = amax / 2.0**got
  low, high = {"floor": (4, 8), "even": (3.5, 7), "ceil": (3, 6.0001), "fp43": (1, 2)}[rule]
  assert formula != got or low <= scaled < high


def test_extremes_are_clamped_to_normal_scales():
  tiny = np.float32(1e-45)
  amax = jnp.asarray([0.0, tiny, np.finfo(np.float32).max], jnp.float32)
  got = np.asarray(formats.e8m0_byte(amax, "floor"), np.int32) - 127
  np.testing.assert_array_equal(got, [formats.E8M0_MIN, formats.E8M0_MIN, formats.E8M0_MAX])


@pytest.mark.parametrize("rule", ["even", "floor", "ceil", "fp43"])
def test_a_maximum_that_is_no_number_gives_the_byte_of_nan(rule):
  amax = jnp.asarray([np.inf, np.nan, 1.0], jnp.float32)
  byte = np.asarray(formats.e8m0_byte(amax, rule))
  assert byte[:2].tolist() == [255, 255] and byte[2] < 255


def test_vanished_blocks_are_counted_by_their_bits():
  """A denormal is something, though XLA computes with zero; all-zero blocks lose nothing."""
  w = np.zeros((64, 2), np.float32)
  w[3, 0], w[16, 1], w[33, 1], w[60, 0] = 1e-42, -0.25, -0.26, 2
  w[20, 0] = -0.0
  count = jax.jit(formats.vanished)
  assert int(count(jnp.asarray(w), jnp.ones((2, 4)))) == 2
  assert int(count(jnp.asarray(w), jnp.ones((2, 2)))) == 2
  assert int(count(jnp.asarray(w), jnp.full((2, 4), 0.5))) == 1


# --- error messages


def test_errors():
  with pytest.raises(ValueError, match="got 'up'. Use one of even, floor, ceil, fp43, quest"):
    formats.e8m0_byte(jnp.ones(2), "up")
  with pytest.raises(ValueError, match="'quest' takes blocks, not maxima. Use quest_byte"):
    formats.e8m0_byte(jnp.ones(2), "quest")
  with pytest.raises(ValueError, match=r"130 x 5 .* \(2, 2, 32, 16\); got \(1, 2, 32, 16\)"):
    formats.unswizzle(jnp.zeros((1, 2, 32, 16), jnp.uint8), 130, 5)
  with pytest.raises(ValueError, match="where: weights must be finite; got 2 of 4 NaN or inf"):
    formats.require_finite("where", jnp.asarray([1, np.nan, np.inf, 0]))
  jax.jit(lambda x: formats.require_finite("traced", x))(jnp.ones(2))  # cannot be read: no error
