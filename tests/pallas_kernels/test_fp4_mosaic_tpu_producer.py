"""The TPU producer of FP4 rows against codec.py, in interpret mode with memory full of NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, producer_tpu

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")
RARELY = 1e-3
INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan")


def rows_of(seed, shape, dtype):
  """Rows of very different sizes, one of zeros, a block of negative zeros."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)) * 4)
  x[0], x[-1, : shape[1] // 2] = 0, -0.0
  return jnp.asarray(x, dtype)


def check(format, shape, dtype, act_scale, rotation):
  x = rows_of(1, shape, dtype)
  scale = None if act_scale is None else jnp.float32(act_scale)
  got = producer_tpu.forward(x, format, rotation, scale, interpret=INTERPRET)
  expected = jax.jit(
    lambda x, s: codec.quantize_rows(codec.rotate(x, rotation), format, s)
  )(x, scale)  # fmt: skip
  assert got.scale.dtype == expected.scale.dtype
  if not rotation:
    for part, want in zip(got, expected, strict=True):
      np.testing.assert_array_equal(np.asarray(part), np.asarray(want))
    return
  # Sums of a rotation are added in another order: beside a tie, the other neighbour is right, too.
  assert (np.asarray(got.codes) != np.asarray(expected.codes)).mean() <= RARELY
  assert (np.asarray(got.scale) != np.asarray(expected.scale)).mean() <= RARELY
  np.testing.assert_allclose(got.multiplier, expected.multiplier, rtol=1e-6)


@pytest.mark.parametrize(
  ("format", "shape", "dtype", "act_scale", "rotation"),
  [
    ("nvfp4", (3, 2096), jnp.bfloat16, None, 0),  # a whole chunk and a ragged one
    ("mxfp4", (5, 160), jnp.float32, None, 32),
  ],
)
def test_equals_the_codec(format, shape, dtype, act_scale, rotation):
  check(format, shape, dtype, act_scale, rotation)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  ("format", "shape", "act_scale", "rotation"),
  [
    ("nvfp4", (5, 400), None, 0),
    ("nvfp4", (3, 48), 0.01, 0),
    ("nvfp4", (70, 2304), None, 256),
    ("mxfp4", (17, 4352), None, 0),
    ("mxfp4", (1, 32), None, 2),
  ],
)
def test_every_kind_of_shape(format, shape, act_scale, rotation, dtype):
  check(format, shape, dtype, act_scale, rotation)


def test_why_not():
  ask = lambda device, features=18944, rotation=128: producer_tpu.why_not(
    2048, jnp.float32, features, "nvfp4", rotation, device
  )
  for name in ("v5e", "v5p", "v6e", "tpu7x"):
    assert ask(target.TARGETS[name], 27648) is None
  assert "it is for TPUs" in ask(target.TARGETS["h100"])
  assert "up to 256; got 512" in ask(target.TARGETS["v6e"], rotation=512)
  assert "64 rows of 1048576 columns need" in ask(target.TARGETS["v6e"], 2**20)
