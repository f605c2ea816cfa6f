"""What surrounds the sm_100 kernel: scales' layout, padding, parts. The kernel itself runs nowhere
here: no interpreter knows tcgen05 (test_fp4_blackwell_aot.py compiles it).
"""

import functools
import re

import hypothesis as hp
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.fp4_gemm import blackwell, codec

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
B200, BLOCK = target.TARGETS["b200"], blackwell.BlockSizes


def offset(r: int, c: int, columns: int) -> int:
  """cuBLAS's 128x4 layout of scales. Source: spec mr_gptq 5.3, worked numbers below."""
  return (
    ((r // 128) * (columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
  )


def test_swizzled_scales():
  worked = {(0, 3): 3, (1, 0): 16, (32, 0): 4, (33, 2): 22, (127, 3): 511, (5, 4): 592}
  assert all(offset(*at, 8) == expected for at, expected in {**worked, (128, 0): 1024}.items())
  scale = np.random.default_rng(0).integers(1, 255, (2, 200, 8), dtype=np.uint8)
  flat = np.asarray(blackwell.swizzle(jnp.asarray(scale))).reshape(2, -1)
  assert flat.shape == (2, 256 * 8)
  for r in range(256):
    for c in range(8):
      expected = scale[:, r, c] if r < 200 else 0
      np.testing.assert_array_equal(flat[:, offset(r, c, 8)], expected)


def model_of_the_kernel(plan, rows, features, y_dtype):
  """What `_call`'s kernel computes, tile by tile and part by part; NaN where nothing is stored.

  The tensor core takes scale (r, c) from its place in the swizzled array.
  """
  schedule = plan.schedule

  def values(x, scale):
    x, flat = np.asarray(x, np.float64), np.asarray(scale).reshape(-1)
    columns = x.shape[-1] // (256 // plan.scales)
    r, c = np.indices((x.shape[0], columns))
    at = np.vectorize(functools.partial(offset, columns=columns))(r, c)
    return x * np.repeat(flat[at].astype(np.float64), x.shape[-1] // columns, axis=1)

  def call(layer, x, w, x_scale, w_scale, factor):
    out = np.full((schedule.parts, rows, features), np.nan)
    a, b = values(x, x_scale), values(w[int(layer[0])], w_scale)
    assert a.shape[0] == rows  # of x and y alike
    for cta in range(schedule.ctas):
      share = schedule.share(np.int32(cta))
      for i in range(int(share.tiles)):
        tile, (begin, end) = int(share.tile(i)), map(int, share.turns(np.int32(i)))
        steps = [int(share.at(np.int32(turn))[1]) for turn in range(begin, end)]
        k = slice(256 * steps[0], 256 * (steps[-1] + 1))
        row_tile, feature_tile = map(int, schedule.coordinates(np.int32(tile)))
        m = slice(row_tile * plan.tile, min((row_tile + 1) * plan.tile, rows))
        o = slice(feature_tile * plan.tile, (feature_tile + 1) * plan.tile)
        part = int(schedule.part(np.int32(cta), np.int32(tile)))
        sums = a[m, k] @ b[o, k].T
        out[part, m, o] = sums * np.asarray(factor, np.float64)[m, None]
    return jnp.asarray(out, y_dtype)

  return call


CASES = {
  "parts": (5, 256, 512, "nvfp4", BLOCK(False, 3, True)),
  "tiles": (140, 256, 256, "mxfp4", BLOCK(False, 3, False)),
  "pairs": (300, 512, 512, "nvfp4", BLOCK(True, 3, False)),
  "parts of pairs": (130, 256, 768, "mxfp4", BLOCK(True, 2, True)),
}


def operand(rng, shape, format):
  """Codes and scales of [..., K], and their values in float64."""
  *lead, width = shape
  codes = rng.integers(0, 256, (*lead, width // 2), dtype=np.uint8)
  blocks = (*lead, width // codec.BLOCK[format])
  values = VALUES[np.stack([codes & 15, codes >> 4], -1)].reshape(shape)
  if format == "nvfp4":
    scale = rng.choice([0.5, 1, 2], blocks).astype(ml_dtypes.float8_e4m3fn)
    factor = scale.astype(np.float64)
  else:
    scale = rng.integers(126, 129, blocks, dtype=np.uint8)
    factor = 2.0 ** (scale.astype(np.float64) - 127)
  values = values * np.repeat(factor, codec.BLOCK[format], axis=-1)
  return jnp.asarray(codes), jnp.asarray(scale), values


@pytest.mark.parametrize("case", CASES)
def test_around_the_kernel(case, monkeypatch):
  """All factors are powers of two, so the sums are exact, and so is the result."""
  rows, features, width, format, blocks = CASES[case]
  monkeypatch.setattr(blackwell, "_call", model_of_the_kernel)
  rng = np.random.default_rng(0)
  x_codes, x_scale, x = operand(rng, (rows, width), format)
  codes, scale, w = operand(rng, (2, features, width), format)
  factor = 2.0 ** rng.integers(-3, 3, rows)
  run = functools.partial(
    blackwell.forward_rows,
    codec.Rows(x_codes, x_scale, jnp.asarray(factor, jnp.float32)),
    dtype=jnp.float32,
    blocks=blocks,
  )
  y = run(codes, scale, jnp.asarray([1, 0.25], jnp.float32), jnp.int32(1))
  np.testing.assert_array_equal(y, x @ w[1].T * factor[:, None] * 0.25)
  if case == "parts":
    kept = blackwell.swizzle(scale[1])
    one = run(codes[1], scale[1], jnp.float32(0.25), None, swizzled=kept)
    np.testing.assert_array_equal(one, y)


@hp.given(
  st.integers(1, 5000),
  st.sampled_from([128, 512, 3584, 5120, 18944, 27648, 152064]),
  st.sampled_from([256, 3584, 5120, 18944]),
)
@hp.settings(max_examples=40)
def test_default_blocks(rows, features, width):
  blocks = blackwell.default_block_sizes(rows, (2, features, width // 2), 148)
  tile = 128 * (1 + blocks.collective)
  assert features % tile == 0 and 1 <= blocks.ctas <= 148 // (1 + blocks.collective)
  assert blocks.collective or rows <= 128 or features % 256


@pytest.mark.parametrize(
  "rows, shape, device, reason",
  [
    (8, (4, 3584, 1792), B200, None),
    (8, (3584, 1792), target.TARGETS["h100"], "sm_100.*H100"),
    (8, (576, 1792), B200, "multiple of 128.*576"),
    (8, (3584, 288), B200, "multiple of 256.*576"),
    (0, (3584, 1792), B200, "row.*0"),
  ],
)
def test_reasons(rows, shape, device, reason):
  found = blackwell.why_not(rows, jnp.dtype(jnp.bfloat16), shape, "nvfp4", device)
  assert found is None if reason is None else re.search(reason, found)
