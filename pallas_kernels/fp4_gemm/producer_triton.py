"""Rows rotated, rounded to FP4 and packed in one pass, in Pallas Triton. Dims: R rows, K columns.

A tile of 128 columns is rotated by one product with +-1 (blocks of the rotation on the diagonal of
a 128 x 128 matrix), rounded to x's dtype, and then scaled, encoded and packed where it lies: x is
read once and 0.56 bytes a value are written. NVFP4 with a multiplier for each row needs the largest
value of the rotated row first: that is a pass of its own over x, which writes next to nothing.

Equal to `codec.quantize_rows(codec.rotate(x))`, except on a GPU beside a tie: sums of a rotation
are added in another order (one bit of x's dtype), and a reciprocal may be off by one bit, so that a
value at the middle between two codes, or between two scales, may get the other one.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, triton

COLUMNS = 128  # of a tile; also the largest rotation


def why_not(
  rows: int, x_dtype: Any, features: int, format: str, rotation: int, device: target.Target
) -> str | None:
  """None if the kernel can run, else a sentence."""
  del rows, x_dtype, features
  if reason := triton.why_not(1, jnp.bfloat16, (1, 1), format, device):
    return reason
  if rotation > COLUMNS:
    return f"it rotates blocks of up to {COLUMNS}; got {rotation}"
  return None


def forward(
  x_RK: Float[Array, "R K"],
  format: str,
  rotation: int,
  act_scale: Float32[Array, ""] | None,
  *,
  interpret: bool = False,
) -> codec.Rows:
  """The rows of rotate(x, rotation) in FP4; `act_scale` as in `codec.quantize_rows`."""
  rows = x_RK.shape[0]
  call = functools.partial(_call, _Plan(format, rotation, *_sizes(x_RK), interpret), x_RK)
  if format == "mxfp4":
    row = jnp.ones(rows, jnp.float32)
    return codec.Rows(*call(_quantize_kernel, row, row), row)
  if act_scale is None:
    row = call(_amax_kernel)[0].max(0) * (1.0 / (codec.E2M1_MAX * codec.E4M3_MAX))
  else:
    row = jnp.broadcast_to(act_scale, (rows,))
  row = jnp.maximum(row, jnp.finfo(jnp.float32).tiny / codec.E4M3_TINY)  # a row of zeros
  codes, scale = call(_quantize_kernel, row, 1.0 / (codec.E2M1_MAX * row))
  return codec.Rows(codes, jax.lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), row)


class _Plan(NamedTuple):
  """A call's static part. rows: of a tile; parts: of K, each the work of one program."""

  format: str
  rotation: int
  rows: int
  parts: int
  interpret: bool


def _sizes(x) -> tuple[int, int]:
  """Enough programs for two on each multiprocessor; several tiles share a load of the signs."""
  gpu = target.gpu(target.current_target()) or target.gpu(target.TARGETS["h100"])  # interpreted
  rows = 16 if x.shape[0] <= 16 * gpu.multiprocessors else 64
  row_tiles, tiles = pl.cdiv(x.shape[0], rows), pl.cdiv(x.shape[1], COLUMNS)
  return rows, min(tiles, max(1, 2 * gpu.multiprocessors // row_tiles))


def _call(plan: _Plan, x, kernel, *per_row):
  rows, columns = x.shape
  out = [jax.ShapeDtypeStruct((plan.parts, rows), jnp.float32)]
  if kernel is _quantize_kernel:
    blocks = columns // codec.BLOCK[plan.format]
    shapes = (rows, columns // 2), (rows, blocks)
    out = [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]
  return pl.pallas_call(
    functools.partial(kernel, plan=plan),
    grid=(pl.cdiv(rows, plan.rows), plan.parts),
    out_shape=out,
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    name=f"fp4{kernel.__name__.removesuffix('_kernel')}",
    interpret=plan.interpret,
  )(x, jnp.asarray(signs(plan.rotation), jnp.bfloat16), *per_row)


@functools.cache
def signs(rotation: int) -> np.ndarray:
  """Sylvester's matrices of +-1 on the diagonal of [COLUMNS, COLUMNS]; ones for no rotation."""
  size = max(rotation, 1)
  i, j = np.indices((COLUMNS, COLUMNS))
  odd = np.bitwise_count((i & j) % size) % 2
  return np.where(i // size == j // size, 1 - 2.0 * odd, 0).astype(np.float32)


def _amax_kernel(x_ref, signs_ref, amax_ref, *, plan: _Plan):
  """The largest magnitude of each rotated row, in a part of K. amax [parts, R]."""
  rows = triton.Span(pl.program_id(0), plan.rows, x_ref.shape[0])

  def step(i, largest):
    return jnp.maximum(largest, jnp.abs(_rotated(x_ref, signs_ref, rows, i, plan)).max(axis=1))

  first, last = _part(x_ref, plan)
  largest = jax.lax.fori_loop(first, last, step, jnp.zeros(plan.rows, jnp.float32))
  plgpu.store(amax_ref.at[pl.program_id(1), rows.at], largest, mask=rows.inside())


def _quantize_kernel(x_ref, signs_ref, row_ref, unit_ref, codes_ref, scale_ref, *, plan: _Plan):
  """x [R, K], row and unit [R] to codes [R, K / 2] and bytes of scales [R, k]."""
  rows = triton.Span(pl.program_id(0), plan.rows, x_ref.shape[0])
  block = codec.BLOCK[plan.format]
  load = lambda ref: plgpu.load(ref.at[rows.at], mask=rows.inside(), other=_other(rows, 1.0))
  row, unit = load(row_ref), load(unit_ref)

  def step(i, carry):
    tile = _rotated(x_ref, signs_ref, rows, i, plan).reshape(plan.rows, COLUMNS // block, block)
    amax = jnp.abs(tile).max(axis=2)
    if plan.format == "mxfp4":
      scale, inverse = mx_scales(amax)
    else:
      scale, value = nv_scales(jnp.minimum(amax * unit[:, None], codec.E4M3_MAX))
      inverse = 1.0 / (value * row[:, None])
    codes = encode(tile * inverse[:, :, None]).reshape(plan.rows, COLUMNS // 2, 2)
    even, odd = jnp.unstack(codes, axis=2)
    triton.store(codes_ref, (), rows, _columns(i, 2, x_ref), (even | (odd << 4)).astype(jnp.uint8))
    triton.store(scale_ref, (), rows, _columns(i, block, x_ref), scale.astype(jnp.uint8))
    return carry

  jax.lax.fori_loop(*_part(x_ref, plan), step, 0)


def _part(x_ref, plan: _Plan):
  """The tiles of this program's part: from, to."""
  part, tiles = pl.program_id(1), pl.cdiv(x_ref.shape[1], COLUMNS)
  return part * tiles // plan.parts, (part + 1) * tiles // plan.parts


def _columns(tile, each: int, x_ref) -> triton.Span:
  return triton.Span(tile, COLUMNS // each, x_ref.shape[1] // each)


def _other(span: triton.Span, value: float):
  return None if span.inside() is None else value


def _rotated(x_ref, signs_ref, rows, tile, plan: _Plan):
  """A tile of rotate(x), rounded to x's dtype, as float32."""
  x = triton.load(x_ref, (), rows, _columns(tile, 1, x_ref))
  if not plan.rotation:
    return x.astype(jnp.float32)
  matrix = plgpu.load(signs_ref)
  rotate = lambda piece: jnp.dot(piece, matrix, preferred_element_type=jnp.float32)
  sums = rotate(x) if x.dtype == jnp.bfloat16 else sum(map(rotate, triton.pieces(x)))
  return (sums * plan.rotation**-0.5).astype(x.dtype).astype(jnp.float32)


def mx_scales(amax):
  """(bytes of the block exponents by the rule `even`, what values are multiplied by)."""
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  biased = jnp.clip(((bits + 0x200000) >> 23) - 2, 1, 252)
  return biased, jax.lax.bitcast_convert_type((254 - biased) << 23, jnp.float32)


def nv_scales(scale):
  """(E4M3 bytes of the nearest, at least 2^-9; their values) of float32 within [0, 448].

  By integers: GPUs before compute capability 8.9 have no such conversion.
  """
  bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
  to_even = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
  byte = jnp.where(scale < 2.0**-6, _units(scale, 2.0**14), to_even - (120 << 3))
  byte = jnp.maximum(byte, 1)
  normal = jax.lax.bitcast_convert_type((byte + (120 << 3)) << 20, jnp.float32)
  return byte, jnp.where(byte < 8, byte.astype(jnp.float32) * codec.E4M3_TINY, normal)


def encode(x):
  """E2M1 codes of float32 as int32, as `codec.encode_e2m1`."""
  a = jnp.abs(x)
  bits = jax.lax.bitcast_convert_type(a, jnp.int32)
  to_even = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22
  code = jnp.minimum(jnp.where(a < 1.0, _units(a, 2.0**22), to_even - 252), 7)
  return code | jnp.where(x < 0, 8, 0)


def _units(x, large: float):
  """x in units of 2^-23 `large`, to the nearest, ties to even: what adding `large` rounds to."""
  bits = lambda v: jax.lax.bitcast_convert_type(v, jnp.int32)
  return bits(x + large) - int(np.float32(large).view(np.int32))
