"""The sm_90 kernel in Mosaic-GPU interpret mode, its arithmetic on plain numpy, and its schedule.

What runs here: the copying and multiplying warpgroups with their rings and barriers (with a race
detector), the cutting of work, the decoding arithmetic. Registers do not exist here: the compiled
decoding is executed by test_fp4_mosaic_gpu_aot.py.
"""

import functools
import re

import hypothesis as hp
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, mosaic_gpu, reference
from pallas_kernels.fp4_gemm import mosaic_gpu_decode as decode
from pallas_kernels.fp4_gemm import mosaic_gpu_schedule as schedules

H100, BLOCK = target.TARGETS["h100"], mosaic_gpu.BlockSizes
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BF16 = ml_dtypes.bfloat16


def halves(words) -> np.ndarray:
  """The two bfloat16 of int32 words, low half first."""
  return np.asarray(words, np.int32)[..., None].view(np.uint16).view(BF16).astype(np.float64)


# --- the arithmetic, on numpy: IEEE with denormals, as PTX promises


@pytest.mark.parametrize("n", range(decode.PAIRS))
def test_a_pair_is_two_codes_of_a_word(n):
  rng = np.random.default_rng(n)
  codes = rng.integers(0, 16, (4096, 8))
  codes[:16] = np.arange(16)[:, None]
  words = (codes << (4 * np.arange(8))).sum(-1).astype(np.uint32).view(np.int32)
  pairs = halves(decode.pair_bits(words, n)) * 2.0**126
  np.testing.assert_array_equal(pairs, VALUES[codes[:, [n, n + 4]]])
  assert (np.signbit(pairs) == (codes[:, [n, n + 4]] >= 8)).all()


def test_every_block_scale():
  byte = np.arange(256, dtype=np.uint8)
  both = byte.astype(np.int32) | byte[::-1].astype(np.int32) << 16
  nv = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
  mx = np.where(byte == 255, np.nan, 2.0 ** (byte.astype(np.float64) - 127))
  for format, expected, power in (("nvfp4", nv, 2.0**120), ("mxfp4", mx, 1.0)):
    scales = halves(decode.scale_bits(both, format)) * power
    np.testing.assert_array_equal(scales, np.stack([expected, expected[::-1]], -1))


@pytest.mark.parametrize("format", codec.BLOCK)
def test_places_of_scales(format):
  """Word w of a thread has weights 8 w to 8 w + 7, of the thread's 64."""
  count = 64 // codec.BLOCK[format]
  word = sum((10 + i) << (8 * i) for i in range(count))
  split = np.array(
    [b & 0xFFFF for both in decode.split_bytes(word, format) for b in (both, both >> 16)]
  )
  found = [split[decode.place_of_scale(w, format)] for w in range(decode.WORDS)]
  assert found == [10 + 8 * w // codec.BLOCK[format] for w in range(decode.WORDS)]


@pytest.mark.parametrize("format", codec.BLOCK)
def test_a_decoded_group_is_the_permuted_matrix(format, strict_dtypes):
  codes, scale = packed(1, 64, 256, format, exact=False)
  pieces = decode.decode_by_jax(codes[0], scale[0], format)
  w = codec.decode(codes[0], scale[0], jnp.float32(1), jnp.float32)
  a = np.concatenate([np.asarray(p, np.float32) for p in pieces], axis=1)
  np.testing.assert_array_equal(a * 2.0 ** -decode.POWER[format], decode.permute(w))
  assert sorted(np.asarray(decode.permute(jnp.arange(512)[None]))[0]) == list(range(512))


# --- the schedule


@hp.given(
  st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), st.booleans()
)
@hp.settings(max_examples=25)
def test_each_step_of_each_tile_is_done_once(row_tiles, feature_tiles, steps, ctas, split):
  work = row_tiles * feature_tiles * (steps if split else 1)
  schedule = schedules.Schedule(row_tiles, feature_tiles, steps, min(ctas, work), split)
  done, parts, loads = {}, {}, []
  for cta in range(schedule.ctas):
    share = schedule.share(np.int32(cta))
    turns = [
      (i, turn) for i in range(int(share.tiles)) for turn in range(*map(int, share.turns(i)))
    ]
    assert [turn for _, turn in turns] == list(range(int(share.steps)))
    loads.append(len(turns))
    for i, turn in turns:
      tile, step = map(int, share.at(np.int32(turn)))
      assert tile == share.tile(i)
      assert done.setdefault((tile, step), cta) == cta
      parts.setdefault(tile, {})[int(schedule.part(np.int32(cta), np.int32(tile)))] = cta
  assert len(done) == schedule.tiles * steps
  assert max(loads) - min(loads) <= (1 if split else steps)
  counts = schedule.parts_of_tiles()
  assert all(sorted(parts[tile]) == list(range(counts[tile])) for tile in range(schedule.tiles))
  places = {tuple(map(int, schedule.coordinates(np.int32(t)))) for t in range(schedule.tiles)}
  assert places == {(r, f) for r in range(row_tiles) for f in range(feature_tiles)}


@hp.given(
  st.integers(1, 5000),
  st.sampled_from([64, 192, 512, 576, 3584, 5120, 18944, 27648, 152064]),
  st.sampled_from([512, 3584, 5120, 18944, 27648]),
)
@hp.settings(max_examples=60)
def test_default_blocks_fit_the_device(rows, features, width):
  blocks = mosaic_gpu.default_block_sizes(rows, (2, features, width // 2), 132)
  assert blocks.rows % 8 == 0 and blocks.rows <= 256
  assert features % (64 * blocks.warpgroups) == 0
  assert mosaic_gpu.shared_bytes(blocks) <= mosaic_gpu.SHARED_BYTES
  parts = 256 // blocks.columns
  assert blocks.stages >= 2 and blocks.x_stages >= parts + 1  # one slot more than is held
  # What threads hand back must cover what others ask for, or setmaxnreg never returns.
  held = blocks.registers * blocks.warpgroups + mosaic_gpu.COPY_REGISTERS
  assert held <= blocks.pool <= 512 and blocks.registers % 8 == 0
  assert -(-rows // blocks.rows) * blocks.rows < rows + max(8, rows // 4 + 8)


# --- the kernel in interpret mode


def packed(layers, features, width, format, *, exact=True, seed=0):
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 256, (layers, features, width // 2), dtype=np.uint8)
  shape = (layers, features, width // codec.BLOCK[format])
  if format == "nvfp4":
    scale = rng.choice([0.5, 1, 2], shape) if exact else rng.uniform(2**-9, 448, shape)
    return jnp.asarray(codes), jnp.asarray(scale, jnp.float8_e4m3fn)
  scale = rng.integers(126, 129, shape) if exact else rng.integers(100, 150, shape)
  return jnp.asarray(codes), jnp.asarray(scale, jnp.uint8)


CASES = {
  # Three CTAs share two tiles of four steps; rings of two slots; three rows of eight.
  "split": (3, 128, 1024, "mxfp4", BLOCK(8, 1, 256, 2, 2, 3, True)),
  # Two warpgroups, two slots of x a step, and one CTA with two tiles.
  "tiles": (13, 256, 512, "nvfp4", BLOCK(16, 2, 128, 2, 3, 1, False)),
  # Four slots of x a step, two tiles of rows.
  "rows": (70, 64, 512, "nvfp4", BLOCK(40, 1, 64, 2, 5, 2, False)),
  "one": (1, 192, 512, "mxfp4", BLOCK(8, 1, 128, 3, 4, 2, True)),
  # The products are waited for before the next weights are decoded.
  "waits": (61, 256, 256, "nvfp4", BLOCK(64, 4, 128, 2, 4, 1, False)),
}
QUICK = ("split", "tiles")


@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_exact_sums_are_bitwise_equal(case):
  """Integers times halves below 2^22: any order of the sum gives the same float32."""
  rows, features, width, format, blocks = CASES[case]
  codes, scale = packed(2, features, width, format)
  x = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (rows, width)), jnp.bfloat16)
  tensor_scale = jnp.asarray([3.0, 0.5], jnp.float32)
  run = functools.partial(mosaic_gpu.forward, blocks=blocks, interpret=interpret())
  y = run(x, codes, scale, tensor_scale, jnp.int32(1))
  np.testing.assert_array_equal(y, reference.forward(x, codes, scale, tensor_scale, jnp.int32(1)))
  assert not gpu_callbacks.get_races().races_found


def interpret() -> InterpretGPUParams:
  return InterpretGPUParams(detect_races=True)


@pytest.mark.slow
@pytest.mark.parametrize("format", codec.BLOCK)
def test_random_data_is_within_rounding(format):
  rng = np.random.default_rng(0)
  codes, scale = packed(1, 64, 512, format, exact=False)
  codes = codes.at[0, 0].set(0).at[0, 1].set(0x77).at[0, 2].set(0x88)  # zeros, largest, -0
  x = jnp.asarray(rng.normal(size=(5, 512)), jnp.bfloat16)
  blocks = BLOCK(8, 1, 256, 2, 2, 1, False)
  y = mosaic_gpu.forward(
    x, codes[0], scale[0], jnp.float32(0.37), blocks=blocks, interpret=interpret()
  )
  w = np.asarray(codec.decode(codes[0], scale[0], jnp.float32(0.37), jnp.float32), np.float64)
  exact = np.asarray(x, np.float64) @ w.T
  sums = np.abs(np.asarray(x, np.float64)) @ np.abs(w).T
  # float32 sums, then half a unit of the last of bfloat16's eight bits
  bound = 1e-5 * sums + 2.0**-8 * np.abs(exact)
  assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()
  assert (np.asarray(y)[:, [0, 2]] == 0).all()


# --- what it refuses


@pytest.mark.parametrize(
  "rows, dtype, shape, format, device, reason",
  [
    (8, jnp.bfloat16, (4, 3584, 1792), "nvfp4", H100, None),
    (8, jnp.bfloat16, (3584, 1792), "mxfp4", target.TARGETS["h200"], None),
    (8, jnp.bfloat16, (3584, 1792), "nvfp4", target.TARGETS["b200"], "sm_90.*B200"),
    (8, jnp.bfloat16, (3584, 1792), "nvfp4", target.TARGETS["cpu"], "sm_90"),
    (8, jnp.float32, (3584, 1792), "nvfp4", H100, "bfloat16.*float32"),
    (8, jnp.bfloat16, (96, 1792), "nvfp4", H100, "multiple of 64.*96"),
    (8, jnp.bfloat16, (576, 288), "nvfp4", H100, "multiple of 256.*576"),
    (8, jnp.bfloat16, (576, 384), "mxfp4", H100, "multiple of 512.*768"),
    (0, jnp.bfloat16, (3584, 1792), "nvfp4", H100, "row.*0"),
  ],
)
def test_reasons(rows, dtype, shape, format, device, reason):
  found = mosaic_gpu.why_not(rows, jnp.dtype(dtype), shape, format, device)
  assert found is None if reason is None else re.search(reason, found)
