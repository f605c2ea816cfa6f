"""The off-policy meter: each cause is found where it was put, and nowhere else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.decode import autoregressive
from jaxlab.nn import weights
from jaxlab.rl import config as rl_config
from jaxlab.rl import meter
from tests.rl import tiny

ROUNDING = 1e-5  # two float32 programs of one policy, in nats
SIGMAS = (0.0, 0.01, 0.04, 0.16)


def reading(packed_lm, sigma: float) -> tuple[dict[str, float], object]:
  """(metrics of a rollout sampled with `sigma`, its packed answers)."""
  aqn = rl_config.AQNConfig(sigma_start=sigma or 1.0, sigma_end=sigma or 1.0, stages=3)
  trainer = tiny.trainer(packed_lm, aqn=aqn, steps=3, meter_every=1, mask_truncated=False)
  work = trainer.source(1 if sigma else 0, trainer.state)  # the first stage has no noise
  assert work.metrics["aqn/sigma"] == sigma
  return work.metrics, work.batches[0]


@pytest.fixture(scope="module")
def readings(packed_lm):
  return {sigma: reading(packed_lm, sigma) for sigma in SIGMAS}


def test_by_hand():
  mu, served, noisy, old = (jnp.array([[x, 0.0]]) for x in (-1.0, -1.5, -1.25, -2.0))
  mask = jnp.array([[True, False]])
  found = meter.gaps(mu, served, noisy, old, mask)
  expected = {"total": 1.0, "noise": 0.75, "fp4": 0.25, "rest": 0.5}
  assert {k: float(v) for k, v in found.items()} == expected
  none = meter.gaps(mu, served, noisy, old, jnp.zeros((1, 2), bool))
  assert set(map(float, none.values())) == {0.0}


def test_the_mismatch_rises_with_the_noise_and_is_rounding_without(readings):
  """Pass criterion (iv) of the method's small experiment."""
  totals = [metrics["meter/total"] for metrics, _ in readings.values()]
  assert totals[0] < ROUNDING
  assert all(after > 2 * before for before, after in zip(totals[1:], totals[2:]))
  assert totals[1] > 100 * ROUNDING


def test_all_of_it_is_the_noise(readings):
  for sigma, (metrics, _) in readings.items():
    assert metrics["meter/fp4"] < ROUNDING and metrics["meter/rest"] < ROUNDING
    assert metrics["meter/noise"] == pytest.approx(metrics["meter/total"], abs=2 * ROUNDING)
    assert (metrics["meter/noise"] == 0) == (sigma == 0)


def measured(lm, packed, noise=None, **settings):
  trainer = tiny.trainer(lm, **settings)
  found = meter.measure(
    lm.module, trainer.config.loss, trainer.state.trainable, trainer.frozen, packed, noise,
    unpacked=True, micro_rows=settings.get("micro_rows"),
  )  # fmt: skip
  return {cause.removeprefix("meter/"): value for cause, value in found.items()}


def test_what_no_policy_explains_is_the_rest(packed_lm, readings):
  _, packed = readings[0.0]
  shifted = dataclasses.replace(packed, logp_rollout_RQT=packed.logp_rollout_RQT - 0.25)
  found = measured(packed_lm, shifted)
  assert found["rest"] == pytest.approx(0.25, abs=ROUNDING)
  assert found["total"] == pytest.approx(0.25, abs=ROUNDING)
  assert found["noise"] == 0 and found["fp4"] < ROUNDING


def test_kernels_that_multiply_otherwise_when_unpacked_are_found(packed_lm, readings):
  """W4A4 rounds activations in the packed product only."""
  _, packed = readings[0.0]
  w4a4 = jax.tree.map(
    lambda w: dataclasses.replace(w, activations="fp4") if weights.is_packed(w) else w,
    packed_lm.params, is_leaf=weights.is_packed,
  )  # fmt: skip
  found = measured(dataclasses.replace(packed_lm, params=w4a4), packed)
  assert found["fp4"] > 0.01
  assert found["noise"] == 0 and found["rest"] < ROUNDING  # sampled by the unpacked kernels


def test_it_does_not_depend_on_the_rows_at_once(packed_lm, readings):
  _, packed = readings[0.0]
  noise = autoregressive.Noise(jnp.float32(0.05), jax.random.key(1))
  whole, parts = (measured(packed_lm, packed, noise, micro_rows=rows) for rows in (None, 4))
  assert whole["noise"] > 0.01
  for cause, value in whole.items():
    assert parts[cause] == pytest.approx(value, abs=ROUNDING)
    assert np.isfinite(value)
