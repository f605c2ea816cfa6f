"""The sm_90 kernel by the real compiler for an H100. `make aot`; AOT=full for the whole grid.

Prints registers, spills and shared memory.
"""

import itertools
import os
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp4_gemm import codec, mosaic_gpu
from pallas_kernels.fp4_gemm import mosaic_gpu_decode as decode
from tests.pallas_kernels import mosaic_compiler, ptx_emulator

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    os.environ.get("JAXLAB_AOT") != "cuda", reason="needs JAXLAB_AOT=cuda, and its compiler"
  ),
]
# [O, K] of Qwen2.5's MLP: 7B and 32B.
SHAPES = ((18944, 3584), (3584, 18944), (27648, 5120), (5120, 27648))
# One of each kind of tile, every shape, both formats.
QUICK = [
  (1, SHAPES[1], "mxfp4"),
  (8, SHAPES[0], "nvfp4"),
  (8, SHAPES[2], "mxfp4"),
  (64, SHAPES[3], "nvfp4"),
  (4096, SHAPES[1], "nvfp4"),
]
# One row is the kernel of eight, and what was compiled before is not compiled again.
FULL = [*itertools.product((8, 40, 64, 200, 4096), SHAPES, codec.BLOCK)]
GRID = FULL if os.environ.get("AOT") == "full" else QUICK


@pytest.fixture(scope="module")
def h100():
  with mosaic_compiler.worker("h100x1") as compiler:
    yield compiler


@pytest.mark.parametrize("rows, shape, format", GRID)
def test_compiles(rows, shape, format, h100, capsys):
  compiled = h100(mosaic_compiler.matmul, rows, shape, format)
  blocks = mosaic_gpu.default_block_sizes(rows, (shape[0], shape[1] // 2), 132)
  with capsys.disabled():
    print(f"\nsm_90 {format} M={rows} OxK={shape}: {compiled.resources}")
    print(f"  {blocks}, {mosaic_gpu.shared_bytes(blocks)} B shared")
  assert " 0 bytes spill stores" in compiled.said
  assert "serialized" not in compiled.said  # ptxas, where registers do not suffice for wgmma
  assert not compiled.written
  # The registers that a CTA starts with are enough for what its threads then ask for.
  (used,) = map(int, re.findall(r"Used (\d+) registers", compiled.said))
  held = blocks.registers * blocks.warpgroups + mosaic_gpu.COPY_REGISTERS
  assert -(-used // 8) * 8 * (blocks.warpgroups + 1) >= held


def test_a_loop_over_layers_copies_no_weights(h100):
  wide, narrow = SHAPES[0]
  compiled = h100(mosaic_compiler.loop, 8, wide, narrow, "nvfp4")
  assert not compiled.written
  # Parts of the results in float32, and x: nothing of a matrix.
  assert compiled.temporaries < 0.1 * wide * narrow / 2


@pytest.mark.parametrize("format", codec.BLOCK)
def test_the_compiled_decoding_executed(format, h100):
  """PTX of the decoding alone, on numpy: operand A of all 128 threads is the permuted matrix.

  Here registers, layouts and the swizzle of shared memory meet, which interpret mode has not.
  Taken from manuals: mul.bf16x2 keeps denormals; TMA swaps the 16-byte chunks of a row.
  """
  ptx = h100(mosaic_compiler.decoding, format).ptx
  rng, count = np.random.default_rng(0), decode.GROUP // codec.BLOCK[format]
  codes = rng.integers(0, 256, (64, 128), dtype=np.uint8)
  scale = rng.integers(0 if format == "nvfp4" else 1, 127, (64, count), dtype=np.uint8)
  shared = np.zeros(16384, np.uint8)
  row, chunk = np.arange(64)[:, None], np.arange(8)
  shared[:8192].reshape(64, 8, 16)[row, chunk ^ (row % 8)] = codes.reshape(64, 8, 16)
  shared[8192 : 8192 + 1024].reshape(64, 16)[:, :count] = scale
  memory = np.zeros(4 * 64 * 64 * 2, np.uint8)
  ptx_emulator.run(ptx, shared, {"0": 0}, memory)

  a = np.concatenate(memory.view(ml_dtypes.bfloat16).reshape(4, 64, 64).astype(np.float64), axis=1)
  value = np.array(codec.E2M1_VALUES + tuple(-v for v in codec.E2M1_VALUES))
  w = value[np.stack([codes & 15, codes >> 4], -1)].reshape(64, 256)
  e4m3 = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
  factor = e4m3 if format == "nvfp4" else 2.0 ** (scale.astype(np.float64) - 127)
  w *= np.repeat(factor, codec.BLOCK[format], axis=1) * 2.0 ** decode.POWER[format]
  order = np.asarray(decode.permute(jnp.arange(256)[None]))[0]
  np.testing.assert_array_equal(a, w[:, order])
