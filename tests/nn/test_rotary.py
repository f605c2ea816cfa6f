"""Rotary tables against the formulas in float64, and rotation against complex numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import rotary

LLAMA31 = rotary.RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)  # its released config.json


def test_default_frequencies_by_hand():
  found = rotary.inverse_frequencies(rotary.RopeConfig(10_000.0), 4)
  np.testing.assert_allclose(found, [1.0, 0.01], rtol=1e-6)  # 10000^0, 10000^(-2/4)


def test_linear_scaling_divides_every_frequency():
  plain = rotary.inverse_frequencies(rotary.RopeConfig(1e4), 16)
  scaled = rotary.inverse_frequencies(rotary.RopeConfig(1e4, "linear", 4.0), 16)
  np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


def test_llama3_scaling_band_by_band():
  """Wavelengths below 8192/4 keep, above 8192/1 divide by 8, between is a mean of the two."""
  freq_h = 5e5 ** (-np.arange(0, 128, 2) / 128)
  wavelength_h = 2 * math.pi / freq_h
  expected = []
  for freq, wavelength in zip(freq_h, wavelength_h, strict=True):
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    if wavelength < 8192 / 4:
      expected.append(freq)
    elif wavelength > 8192:
      expected.append(freq / 8)
    else:
      expected.append((1 - smooth) * freq / 8 + smooth * freq)
  found = rotary.inverse_frequencies(LLAMA31, 128)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert len(set((wavelength_h < 2048) + 2 * (wavelength_h > 8192))) == 3  # all bands met


def test_rotation_is_a_complex_phase_of_pairs_half_a_head_apart():
  config, h = rotary.RopeConfig(100.0), 8
  positions_BT = jnp.array([[0, 3, 7], [2, 2, 50]])
  x_BTNH = np.random.RandomState(0).standard_normal((2, 3, 2, h)).astype(np.float32)
  found = rotary.rope_at(config, h, positions_BT)(jnp.asarray(x_BTNH))
  angle = np.asarray(positions_BT)[..., None, None] * 100.0 ** (-np.arange(0, h, 2) / h)
  z = (x_BTNH[..., : h // 2] + 1j * x_BTNH[..., h // 2 :]) * np.exp(1j * angle)
  np.testing.assert_allclose(found, np.concatenate([z.real, z.imag], -1), atol=1e-5)


def test_scores_depend_on_distance_only():
  x = jnp.asarray(np.random.RandomState(1).standard_normal((1, 1, 1, 16)), jnp.float32)
  at = lambda p: rotary.rope_at(rotary.RopeConfig(), 16, jnp.array([[p]]))(x)
  score = lambda p, q: float(jnp.sum(at(p) * at(q)))
  assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
  assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_bfloat16_is_rotated_in_float32():
  x = jnp.asarray(np.random.RandomState(2).standard_normal((1, 1, 1, 16)), jnp.bfloat16)
  rope = rotary.rope_at(rotary.RopeConfig(), 16, jnp.array([[1000]]))
  found = rope(x)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, rope(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_an_unknown_scaling_is_named():
  with pytest.raises(ValueError, match="must be default, linear or llama3; got 'yarn'"):
    rotary.RopeConfig(kind="yarn")
