"""Learning rates against the formulas of transformers' schedules, in float64."""

import math

import numpy as np
import pytest

from jaxlab.optim import schedules

LR, TOTAL, WARMUP = 3e-4, 50, 5
# Optax computes in float32: a few rounding errors of 2^-24 each.
RTOL = 1e-5


def cosine(step, final=0.0):
  if step < WARMUP:
    return LR * step / WARMUP
  share = min(1.0, (step - WARMUP) / (TOTAL - WARMUP))
  return LR * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share)))


def linear(step):
  return LR * min(step / WARMUP, max(0.0, (TOTAL - step) / (TOTAL - WARMUP)))


@pytest.mark.parametrize("warmup", [5, 0.1])  # updates, or a share of them
def test_warmup_cosine(warmup):
  rate = schedules.warmup_cosine(LR, TOTAL, warmup)
  np.testing.assert_allclose(
    [rate(i) for i in range(60)], [cosine(i) for i in range(60)], RTOL, atol=1e-10
  )
  rate = schedules.warmup_cosine(LR, TOTAL, warmup, final=0.1)
  np.testing.assert_allclose([rate(i) for i in (20, 50)], [cosine(20, 0.1), LR / 10], RTOL)


def test_linear_to_zero():
  rate = schedules.linear_to_zero(LR, TOTAL, WARMUP)
  np.testing.assert_allclose(
    [rate(i) for i in range(60)], [linear(i) for i in range(60)], RTOL, atol=1e-10
  )


def test_constant():
  rate = schedules.constant(LR, warmup=WARMUP)
  np.testing.assert_allclose([rate(i) for i in (0, 1, 5, 999)], [0, LR / 5, LR, LR], RTOL)
  assert schedules.constant(LR)(0) == LR  # no warm-up: the first update counts


@pytest.mark.parametrize(
  "make, text",
  [
    (lambda: schedules.warmup_cosine(LR, 10, 10), "total_steps=10 and 10 steps of warm-up"),
    (lambda: schedules.warmup_cosine(LR, 10, 1.5), "share in .0, 1.; got 1.5"),
    (lambda: schedules.warmup_cosine(LR, 10, final=2.0), "final must be in .0, 1.; got 2.0"),
    (lambda: schedules.linear_to_zero(-1.0, 10), "lr must be >= 0; got -1.0"),
    (lambda: schedules.constant(LR, warmup=-3), "warmup must be >= 0; got -3"),
  ],
)
def test_errors_name_the_values(make, text):
  with pytest.raises(ValueError, match=text):
    make()
