"""What the FP4 product does to its operands: decode codes and scales, rotate, fake-quantise rows.

Encoding of weights, with its choice of scale rules, is `jaxlab/quant/formats.py`.

An FP4 matrix is `codes u8 [*stack, O, K/2]` (two E2M1 codes a byte, even k in the low nibble) and
one scale per block along K: `float8_e4m3fn [*stack, O, K/16]` (NVFP4) or E8M0's biased exponent as
`uint8 [*stack, O, K/32]` (MXFP4); the dtype of the scale tells the format. Element = value(code) *
scale * tensor_scale. Dims: O out, K in, H = K / 2, k = K / block.
Source: OCP Microscaling Formats v1.0 §5; arXiv 2509.23202.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from pallas_kernels import target

BLOCK = {"nvfp4": 16, "mxfp4": 32}
NF4_BLOCK = 64
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # smallest positive float8_e4m3fn
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Quantiles of the normal distribution on [-1, 1], with an exact zero. Source: QLoRA, arXiv
# 2305.14314 appendix E.
NF4_VALUES = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
  -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
  0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_LOW_HIGH_BF16 = (
  np.array(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), jnp.bfloat16)
  .view(np.uint16)
  .astype(np.uint32)
)
# Both values of a byte as two bfloat16 in one word: low nibble in the low half.
_PAIR_TABLE = _LOW_HIGH_BF16[np.arange(256) & 15] | (_LOW_HIGH_BF16[np.arange(256) >> 4] << 16)


def format_of(scale: Shaped[Array, "..."]) -> str:
  """ "nvfp4" or "mxfp4", by the dtype of the block scale.

  Raises: ValueError for any other dtype.
  """
  if scale.dtype == jnp.float8_e4m3fn:
    return "nvfp4"
  if scale.dtype == jnp.uint8:
    return "mxfp4"
  raise ValueError(
    f"fp4_matmul: scale must be float8_e4m3fn (nvfp4) or uint8 (mxfp4); got {scale.dtype}. "
    "Keep the block scales as they are in the checkpoint."
  )


def unpack_halves(
  codes: UInt8[Array, "*lead H"], dtype: jax.typing.DTypeLike
) -> tuple[Float[Array, "*lead H"], Float[Array, "*lead H"]]:
  """Values of the even and of the odd columns; exact in bfloat16 and in float32.

  Kept apart because interleaving them costs as much as decoding (README).
  """
  if target.current_target().platform == "cpu" and dtype == jnp.bfloat16:
    return _halves_by_table(codes, dtype)
  wide = codes.astype(jnp.uint32)  # GPU kernels refuse arithmetic on 8-bit types
  return _value(wide & 15, dtype), _value(wide >> 4, dtype)


def unpack_planes(
  codes: UInt8[Array, "*lead H"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*lead 2 H"]:
  """The same in one array, of one expression: the compiler of a B200 would write two, and join."""
  wide = codes.astype(jnp.uint32)[..., None, :]
  shape = (*codes.shape[:-1], 2, codes.shape[-1])
  shift = 4 * jax.lax.broadcasted_iota(jnp.uint32, shape, codes.ndim - 1)
  return _value((wide >> shift) & 15, dtype)


def _halves_by_table(codes, dtype):
  # On a CPU the arithmetic below ends in a slow int32 to bfloat16 cast; the table is 1.6 times
  # faster (README).
  pair = jnp.asarray(_PAIR_TABLE)[codes.astype(jnp.int32)]
  low, high = pair << 16, pair & jnp.uint32(0xFFFF0000)
  return tuple(jax.lax.bitcast_convert_type(b, jnp.float32).astype(dtype) for b in (low, high))


def _value(code, dtype):
  # 0xC8643210 holds the eight magnitudes doubled, four bits each: no gather, no denormals.
  doubled = (jnp.uint32(0xC8643210) >> (4 * (code & 7))) & 15
  magnitude = doubled.astype(jnp.int32).astype(dtype) * jnp.asarray(0.5, dtype)
  return jnp.where(code >= 8, -magnitude, magnitude)


def unpack_codes(codes: UInt8[Array, "*lead H"]) -> Float32[Array, "*lead K"]:
  """Values of packed codes in column order, K = 2 H."""
  return interleave(*unpack_halves(codes, jnp.float32))


def interleave(
  even: Shaped[Array, "*lead H"], odd: Shaped[Array, "*lead H"]
) -> Shaped[Array, "*lead K"]:
  """[e0, o0, e1, o1, ...] along the last axis; inverse of `deinterleave`."""
  return jnp.stack([even, odd], axis=-1).reshape(*even.shape[:-1], 2 * even.shape[-1])


def deinterleave(
  x: Shaped[Array, "*lead K"],
) -> tuple[Shaped[Array, "*lead H"], Shaped[Array, "*lead H"]]:
  """Even and odd columns. A reshape, not a strided slice: a sharded K stays where it is."""
  pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
  return pairs[..., 0], pairs[..., 1]


def decode_scale(scale: Shaped[Array, "*lead"]) -> Float32[Array, "*lead"]:
  """Block scales as float32: E4M3 as it is, E8M0 byte b as 2^(b - 127), NaN for 255."""
  if format_of(scale) == "nvfp4":
    return scale.astype(jnp.float32)
  wide = scale.astype(jnp.uint32)
  bits = jnp.where(wide == 0, jnp.uint32(1 << 22), wide << 23)  # 2^-127 is a denormal float32
  bits = jnp.where(wide == 255, jnp.uint32(0x7FC00000), bits)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_blocks(
  values: Float[Array, "*lead K"], scale: Float[Array, "*lead k"]
) -> Float[Array, "*lead K"]:
  """values * scale, each scale over K / k consecutive values."""
  blocks = values.reshape(*scale.shape, values.shape[-1] // scale.shape[-1])
  return (blocks * scale[..., None]).reshape(values.shape)


@functools.partial(jax.jit, static_argnames="dtype")
def decode(
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  dtype: jax.typing.DTypeLike,
) -> Float[Array, "*stack O K"]:
  """The dense matrix, computed in float32 and rounded once to `dtype`.

  Args:
    tensor_scale: the multiplier (1 / g where a checkpoint stores the divisor g).
  """
  blocks = scale_blocks(unpack_codes(codes), decode_scale(scale))
  return (blocks * tensor_scale[..., None, None]).astype(dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def nf4_decode(
  codes: UInt8[Array, "*stack O H"],
  absmax: Float32[Array, "*stack O k"],
  dtype: jax.typing.DTypeLike,
) -> Float[Array, "*stack O K"]:
  """The dense matrix NF4[code] * absmax, blocks of 64 along K, even k in the low nibble."""
  table = jnp.asarray(NF4_VALUES, jnp.float32)
  index = codes.astype(jnp.int32)
  values = interleave(table[index & 15], table[index >> 4])
  return scale_blocks(values, absmax).astype(dtype)


@functools.cache
def _signs(size: int) -> np.ndarray:
  """Sylvester's Hadamard matrix of +-1, [size, size], symmetric."""
  h = np.ones((1, 1), np.float32)
  while h.shape[0] < size:
    h = np.block([[h, h], [h, -h]])
  return h


def rotate(x: Float[Array, "*lead K"], size: int) -> Float[Array, "*lead K"]:
  """x @ blockdiag(H, H, ...) with H Sylvester / sqrt(size), orthonormal and its own inverse.

  Args:
    size: a power of two that divides K; 0 returns x. Sums are float32, the result has x's dtype.
  Source: arXiv 2509.23202 (MR-GPTQ), block rotation without random signs.
  """
  if size == 0:
    return x
  blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
  # The signs are exact in every dtype, 1 / sqrt(size) is not: it multiplies the float32 sums.
  sums = jnp.matmul(
    blocks,
    jnp.asarray(_signs(size), x.dtype),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  return (sums * (1 / math.sqrt(size))).astype(x.dtype).reshape(x.shape)


def rotate_by(
  x: Float[Array, "*lead K"], matrix: Float[Array, "*stack g g"]
) -> Float[Array, "*lead K"]:
  """x @ blockdiag(R, R, ...) for any R; `lead` begins with R's stack axes. Sums are float32."""
  size = matrix.shape[-1]
  blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
  fill = (1,) * (blocks.ndim - matrix.ndim)
  matrix = matrix.reshape(*matrix.shape[:-2], *fill, size, size)
  exact = jax.lax.Precision.HIGHEST
  y = jnp.matmul(
    blocks, matrix.astype(x.dtype), precision=exact, preferred_element_type=jnp.float32
  )
  return y.astype(x.dtype).reshape(x.shape)


def unrotate(w_IO: Float[Array, "*stack I O"], size: int) -> Float[Array, "*stack I O"]:
  """The kernel in the unrotated basis: x @ unrotate(w, size) = rotate(x, size) @ w; size 0 is w."""
  return jnp.swapaxes(rotate(jnp.swapaxes(w_IO, -1, -2), size), -1, -2)


def encode_e2m1(x: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
  """The code of the nearest E2M1 value: 0-7 for 0, .5, 1, 1.5, 2, 3, 4, 6, plus 8 if negative.

  Ties go to the even code, magnitudes above 6 saturate; small negatives give code 8 (-0), -0.0
  itself gives 0. A NaN would become 0: what comes from outside is checked before.
  """
  a = jnp.abs(x)
  passed = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
  code = sum(p.astype(jnp.uint8) for p in passed)
  return code + 8 * (x < 0).astype(jnp.uint8)


def pack(codes: UInt8[Array, "*lead K"]) -> UInt8[Array, "*lead H"]:
  """Two codes a byte along the last axis, even k in the low nibble; H = K / 2."""
  even, odd = deinterleave(codes)
  return even | (odd << 4)


def round_e2m1(x: Float32[Array, "*lead"]) -> Float32[Array, "*lead"]:
  """The nearest E2M1 value, ties to the even code, saturating at 6. Finite input."""
  a = jnp.abs(x)
  step = jnp.where(a < 2, 0.5, jnp.where(a < 4, 1.0, 2.0))
  return jnp.copysign(jnp.minimum(jnp.round(a / step) * step, E2M1_MAX), x)


class Rows(NamedTuple):
  """Rows in FP4: x[r, k] ~ value(codes) * scale * multiplier[r]."""

  codes: UInt8[Array, "*rows H"]
  scale: Shaped[Array, "*rows k"]  # float8_e4m3fn (nvfp4) or uint8 (mxfp4)
  multiplier: Float32[Array, "*rows"]


def quantize_rows(
  x: Float[Array, "*rows K"], format: str, act_scale: Float32[Array, ""] | None = None
) -> Rows:
  """x in FP4 along its last axis, as the operand of a W4A4 product.

  Args:
    format: "nvfp4" or "mxfp4" (block exponents by the rule `even`).
    act_scale: nvfp4 only, the static multiplier amax / 2688. None takes it from each row, so that a
      row's result never depends on its neighbours.
  """
  blocks, block, row = _row_scales(x, format, act_scale)
  codes = encode_e2m1(blocks * (1.0 / (block * row)))
  if format == "mxfp4":
    bits = jax.lax.bitcast_convert_type(block, jnp.int32)
    scale = (bits >> 23).astype(jnp.uint8)
  else:
    scale = block.astype(jnp.float8_e4m3fn)
  multiplier = jnp.broadcast_to(row[..., 0, 0], x.shape[:-1])
  return Rows(pack(codes.reshape(x.shape)), scale[..., 0], multiplier)


def decode_rows(rows: Rows, dtype: jax.typing.DTypeLike) -> Float[Array, "*rows K"]:
  """The values of `quantize_rows`; equal to `fake_quantize` bit for bit."""
  scale = decode_scale(rows.scale) * rows.multiplier[..., None]
  return scale_blocks(unpack_codes(rows.codes), scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fake_quantize(
  x: Float[Array, "*lead K"], format: str, act_scale: Float32[Array, ""] | None = None
) -> Float[Array, "*lead K"]:
  """x rounded as by `quantize_rows`, in x's dtype; straight-through gradient."""
  blocks, block, row = _row_scales(x, format, act_scale)
  scale = block * row
  return (round_e2m1(blocks * (1.0 / scale)) * scale).reshape(x.shape).astype(x.dtype)


def _row_scales(x, format, act_scale):
  """(x in blocks, their scales, what multiplies a row), float32, each with the rank of blocks.

  Reciprocals are spelled out: XLA turns some divisions into them, depending on the shape, and a
  row's last bits would depend on how many rows there are.
  """
  blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK[format])
  amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
  if format == "mxfp4":
    return blocks, _mx_scale(amax), jnp.ones((1,) * amax.ndim, jnp.float32)
  return blocks, *_nv_scale(amax, act_scale)


def _mx_scale(amax):
  # The rule `even` on the bits of a float: three quarters of a binade round up to the next.
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  biased = jnp.clip(((bits + 0x200000) >> 23) - 2, 1, 252)
  return jax.lax.bitcast_convert_type(biased << 23, jnp.float32)


def _nv_scale(amax, act_scale):
  if act_scale is None:
    row = jnp.max(amax, axis=-2, keepdims=True) * (1.0 / (E2M1_MAX * E4M3_MAX))
  else:
    row = jnp.broadcast_to(act_scale, (1,) * amax.ndim)
  row = jnp.maximum(row, jnp.finfo(jnp.float32).tiny / E4M3_TINY)  # a row of zeros
  block = jnp.minimum(amax * (1.0 / (E2M1_MAX * row)), E4M3_MAX).astype(jnp.float8_e4m3fn)
  return jnp.maximum(block.astype(jnp.float32), E4M3_TINY), row


def _fake_quantize_fwd(x, format, act_scale):
  return fake_quantize(x, format, act_scale), None


def _fake_quantize_bwd(format, residual, dy):
  return dy, None


fake_quantize.defvjp(_fake_quantize_fwd, _fake_quantize_bwd)
