"""Rows rotated, rounded to FP4 and packed in one pass on a TPU. Dims: R rows, K columns, k scales.

A block of rows is read once and lies in VMEM: it is rotated by the product that puts even columns
before odd ones (mosaic_tpu_decode), so that the codes of a byte come to lie in one lane. Then the
largest value of each block of K is found among its lanes, and scales, codes and bytes follow where
they are. XLA takes these steps over arrays whose last axis is 16, which a TPU pads to 128.

Equal to `codec.quantize_rows(codec.rotate(x))`, except on a TPU beside a tie: sums of a rotation
are added in another order (one bit of x's dtype), and a reciprocal may be off by one bit, so that a
value at the middle between two codes, or between two scales, may get the other one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, mosaic_tpu
from pallas_kernels.fp4_gemm import mosaic_tpu_decode as decode
from pallas_kernels.fp4_gemm.mosaic_tpu_decode import LANES, PAIR
from pallas_kernels.fp4_gemm.producer_triton import encode, mx_scales, nv_scales

ROWS = 64  # of x in VMEM


def why_not(
  rows: int, x_dtype: Any, features: int, format: str, rotation: int, device: target.Target
) -> str | None:
  """None if the kernel can run, else a sentence."""
  if reason := mosaic_tpu.why_not(1, jnp.bfloat16, (1, 1), format, device):
    return reason
  if rotation > PAIR:
    return f"it rotates blocks of up to {PAIR}; got {rotation}"
  needed, has = _vmem_bytes(rows, x_dtype, features), mosaic_tpu.DEVICES[device.device_kind][1]
  if needed > has:
    return (
      f"{min(rows, ROWS)} rows of {features} columns need {needed // 2**20} MiB of VMEM, and "
      f"{device.device_kind} has {has // 2**20} for it"
    )
  return None


@functools.partial(jax.jit, static_argnames=("format", "rotation", "interpret"))
def forward(
  x_RK: Float[Array, "R K"],
  format: str,
  rotation: int,
  act_scale: Float32[Array, ""] | None,
  *,
  interpret: bool | pltpu.InterpretParams = False,
) -> codec.Rows:
  """The rows of rotate(x, rotation) in FP4; `act_scale` as in `codec.quantize_rows`."""
  (rows, features), block = x_RK.shape, codec.BLOCK[format]
  plan = decode.Plan(
    generation=0, by_k=False, per=LANES * block // PAIR, tile=_rows(rows), out=0,
    features=features, scales=features // block, rotation=rotation,
  )  # fmt: skip
  given = act_scale is not None
  row = lambda width: pl.BlockSpec((plan.tile, width), lambda r: (r, 0))
  sizes = features // 2, features // block
  codes, scale, multiplier = pl.pallas_call(
    functools.partial(_kernel, plan=plan, format=format, given=given),
    grid=(pl.cdiv(rows, plan.tile),),
    out_shape=(
      *(jax.ShapeDtypeStruct((rows, size), jnp.uint8) for size in sizes),
      jax.ShapeDtypeStruct((rows, 1), jnp.float32),
    ),
    in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), row(plan.groups * PAIR)],
    out_specs=[row(plan.groups * LANES), row(pl.cdiv(plan.scales, LANES) * LANES), row(1)],
    scratch_shapes=[
      pltpu.VMEM((plan.tile, plan.groups * PAIR), x_RK.dtype),
      pltpu.VMEM((plan.tile, LANES), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",), vmem_limit_bytes=_vmem_bytes(rows, x_RK.dtype, features)
    ),
    interpret=interpret,
    name="fp4_quantize",
  )(act_scale.reshape(1) if given else jnp.ones(1, jnp.float32), x_RK)
  if format == "nvfp4":
    scale = jax.lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)
  return codec.Rows(codes, scale, multiplier[:, 0])


def _rows(rows: int) -> int:
  return min(ROWS, pl.cdiv(rows, 32) * 32)


def _vmem_bytes(rows: int, x_dtype: Any, features: int) -> int:
  wide = jnp.dtype(x_dtype).itemsize
  return _rows(rows) * features * (3 * wide + 2) + 16 * 2**20


def _kernel(given_scale, x, codes, scale, multiplier, ordered, largest, *, plan, format, given):
  """x [R, K] to codes [R, K / 2], bytes of scales [R, k] and multipliers [R, 1]."""

  def order(group, columns):
    ordered[:, decode.lanes_of(group, PAIR)] = columns
    largest[...] = jnp.maximum(largest[...], _larger_half(columns.astype(jnp.float32)))

  largest[...] = jnp.zeros_like(largest)
  decode.order_columns(x, plan, order, every_step=True)
  if format == "mxfp4":
    row = jnp.ones((plan.tile, 1), jnp.float32)
  elif given:
    row = jnp.full((plan.tile, 1), given_scale[0])
  else:
    row = largest[...].max(1, keepdims=True) * (1.0 / (codec.E2M1_MAX * codec.E4M3_MAX))
  if format == "nvfp4":
    row = jnp.maximum(row, jnp.finfo(jnp.float32).tiny / codec.E4M3_TINY)  # a row of zeros
  multiplier[...] = row
  unit = 1.0 / (codec.E2M1_MAX * row)

  def chunk(index, count, valid):
    bytes = jnp.zeros((plan.tile, LANES), jnp.float32)
    for n in range(count):
      group = index * plan.per + n
      columns = ordered[:, decode.lanes_of(group, PAIR)].astype(jnp.float32)
      amax = _of_blocks(_larger_half(columns), plan)
      if format == "mxfp4":
        byte, inverse = mx_scales(amax)
      else:
        byte, value = nv_scales(jnp.minimum(amax * unit, codec.E4M3_MAX))
        inverse = 1.0 / (value * row)
      even, odd = (encode(half * inverse) for half in (columns[:, :LANES], columns[:, LANES:]))
      codes[:, decode.lanes_of(group, LANES)] = (even | (odd << 4)).astype(jnp.uint8)
      bytes += decode.dot(
        byte.astype(jnp.float32).astype(jnp.bfloat16), _one_of(n, plan), decode.NN
      )
    scale[:, decode.lanes_of(index, LANES)] = bytes.astype(jnp.int32).astype(jnp.uint8)

  decode.for_chunks(plan, chunk)


def _larger_half(columns):
  """[R, 128]: of each byte, the larger magnitude of its two columns."""
  return jnp.maximum(jnp.abs(columns[:, :LANES]), jnp.abs(columns[:, LANES:]))


def _of_blocks(amax, plan):
  """In each lane the largest of those of its block: lanes trade over distances 1, 2, 4, ..."""
  lane = jax.lax.broadcasted_iota(jnp.int32, amax.shape, 1)
  for bit in range(decode.shift(plan)):
    other = jnp.take_along_axis(amax, lane ^ (1 << bit), axis=1, mode="promise_in_bounds")
    amax = jnp.maximum(amax, other)
  return amax


def _one_of(n, plan):
  """[128, 128] of 0 and 1: takes one lane of each block of the n-th group to its place."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
  place = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
  source = (place - n * (LANES // plan.per)) << decode.shift(plan)
  return (lane == source).astype(jnp.float32).astype(jnp.bfloat16)
