"""The sm_100 kernel by the real compiler for a B200. `make aot`; AOT=full for the whole grid."""

import itertools
import os

import pytest

from pallas_kernels.fp4_gemm import blackwell, codec
from tests.pallas_kernels import mosaic_compiler

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    os.environ.get("JAXLAB_AOT") != "cuda", reason="needs JAXLAB_AOT=cuda, and its compiler"
  ),
]
# [O, K] of Qwen2.5's MLP: 7B and 32B.
SHAPES = ((18944, 3584), (3584, 18944), (27648, 5120), (5120, 27648))
QUICK = [
  (1, SHAPES[1], "mxfp4"),
  (64, SHAPES[2], "nvfp4"),
  (200, (1024, 3584), "nvfp4"),  # pairs of CTAs and parts of tiles
  (4096, SHAPES[0], "nvfp4"),
  (4096, SHAPES[3], "mxfp4"),
]
# One row is the kernel of eight, and what was compiled before is not compiled again.
FULL = [*itertools.product((8, 64, 200, 4096), SHAPES, codec.BLOCK)]
KIND = {"nvfp4": "mxf4nvf4.block_scale.scale_vec::4X", "mxfp4": "mxf4.block_scale.scale_vec::2X"}
GRID = FULL if os.environ.get("AOT") == "full" else QUICK


@pytest.fixture(scope="module")
def b200():
  with mosaic_compiler.worker("b200x1") as compiler:
    yield compiler


@pytest.mark.parametrize("rows, shape, format", GRID)
def test_compiles(rows, shape, format, b200, capsys):
  compiled = b200(mosaic_compiler.matmul, rows, shape, format)
  blocks = blackwell.default_block_sizes(rows, (shape[0], shape[1] // 2), 148)
  with capsys.disabled():
    print(f"\nsm_100 {format} M={rows} OxK={shape}: {compiled.resources}\n  {blocks}")
  assert " 0 bytes spill stores" in compiled.said
  assert f"tcgen05.mma.cta_group::{1 + blocks.collective}.kind::{KIND[format]}" in compiled.ptx
  # Swizzled scales and padded rows are written; a layer's codes are not.
  assert all(size < shape[0] * shape[1] / 2 / 3 for _, size in compiled.written)


def test_a_loop_over_layers_copies_no_codes(b200):
  wide, narrow = SHAPES[0]
  compiled = b200(mosaic_compiler.loop, 8, wide, narrow, "nvfp4")
  codes = wide * narrow / 2
  assert all(size <= 1.01 * codes / 8 for _, size in compiled.written)  # one matrix's scales
  assert compiled.temporaries < 0.3 * codes
