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


# --- property


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
  amax=st.floats(2.0**-125, 2.0**126, width=32), rule=st.sampled_from(formats.E8M0_RULES)
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
  assert got == np.clip(formula, formats.E8M0_MIN, formats.E8M0_MAX)
  scaled = amax / 2.0**got
  low, high = {"floor": (4, 8), "even": (3.5, 7), "ceil": (3, 6.0001), "fp43": (1, 2)}[rule]
  assert formula != got or low <= scaled < high


def test_extremes_are_clamped_to_normal_scales():
  tiny = np.float32(1e-45)
  amax = jnp.asarray([0.0, tiny, np.finfo(np.float32).max], jnp.float32)
  got = np.asarray(formats.e8m0_byte(amax, "floor"), np.int32) - 127
  np.testing.assert_array_equal(got, [formats.E8M0_MIN, formats.E8M0_MIN, formats.E8M0_MAX])


# --- error messages


def test_errors():
  with pytest.raises(ValueError, match="got 'quest'. Use one of even, floor, ceil, fp43"):
    formats.e8m0_byte(jnp.ones(2), "quest")
  with pytest.raises(ValueError, match="where: weights must be finite; got 2 of 4 NaN or inf"):
    formats.require_finite("where", jnp.asarray([1, np.nan, np.inf, 0]))
  jax.jit(lambda x: formats.require_finite("traced", x))(jnp.ones(2))  # cannot be read: no error
