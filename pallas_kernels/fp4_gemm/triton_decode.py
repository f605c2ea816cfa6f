"""FP4 codes to bfloat16 in a GPU's registers, two values an instruction. For triton.py.

Decoding bounds a product with few rows: to read NVFP4 at the full speed of its memory an H100 may
spend 4.8 instructions a weight and a B200 2.5 (128 lanes a multiprocessor, 0.5625 bytes a weight).
The shift of a table that codec.py uses takes ten. Here pairs of codes become pairs of bfloat16 by
inline PTX, in two integer and half a floating-point instruction a weight:

  a code is s ee m, a bfloat16 is s eeeeeeee mmmmmmm. With its sign at bit 15 and its magnitude at
  bits 8..6 a code reads as its value times 2^-126 (0.5 as the subnormal 2^-127), exactly. One
  fma by the block scale times 2^126 is left; PTX defines fma.rn.bf16x2 with subnormal operands.

The largest NVFP4 scale, 448, leaves no room for 2^126: it is multiplied by 2^119, and the sums by
`UNIT`. MXFP4's powers of two use the whole range: two fma, the first by 2^126. Both are exact.

Words are eight codes, lowest nibble first. Source of the formats: codec.py.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, UInt8, UInt32

CODES = 8  # in a word
UNIT = {"nvfp4": 2.0**7, "mxfp4": 1.0}  # what sums of decoded weights are to be multiplied by
WORDS = {"nvfp4": 2, "mxfp4": 4}  # under one block scale
_ONE = {"nvfp4": 2.0**-7, "mxfp4": 1.0}  # a decoded 1 with scale 1


def factors(scale: UInt8[Array, "N b"], format: str, interpret: bool) -> BFloat16[Array, "N b"]:
  """Bytes of block scales as what codes are multiplied by: s * 2^119 (nvfp4), s (mxfp4)."""
  if format == "mxfp4":  # the byte is bfloat16's exponent; 2^-127 is subnormal, 255 is NaN
    wide = scale.astype(jnp.int32)
    bits = jnp.where(wide == 0, 0x0040, jnp.where(wide == 255, 0x7FC0, wide << 7))
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16)
  if interpret:
    value = jax.lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).astype(jnp.float32)
    return (value * 2.0**119).astype(jnp.bfloat16)
  (result,) = plgpu.elementwise_inline_asm(
    FACTORS_ASM,
    args=[scale],
    constraints="=&r,=&r,r",  # $0 is written before $2 is read for the last time
    pack=4,
    result_shape_dtypes=[jax.ShapeDtypeStruct(scale.shape, jnp.bfloat16)],
  )
  return result


# PTX: $2 four E4M3 bytes, $0 and $1 two bfloat16 each. s eeee mmm at bits 15 and 10..4 of a half
# reads as its value times 2^-120, subnormals included; 2^120 and 2^119 bring it to s * 2^119. The
# magnitude 127 is NaN: one more at bit 4 carries into bit 11 for it alone.
FACTORS_ASM = (
  """{ .reg .b32 h, m, s, n, zero, up, upper;
mov.b32 zero, 0x80008000;
mov.b32 up, 0x7b807b80;
mov.b32 upper, 0x7b007b00;
"""
  + "".join(
    f"""prmt.b32 h, $2, $2, {selector};
shr.b32 m, h, 4;
and.b32 m, m, 0x07f007f0;
add.u32 n, m, 0x00100010;
and.b32 n, n, 0x08000800;
shr.b32 n, n, 11;
mul.lo.u32 n, n, 0x7fff;
and.b32 s, h, 0x80008000;
or.b32 m, m, s;
fma.rn.bf16x2 m, m, up, zero;
fma.rn.bf16x2 m, m, upper, zero;
or.b32 {out}, m, n;
"""
    for selector, out in (("0x1100", "$0"), ("0x3322", "$1"))  # a byte in both bytes of its half
  )
  + "}"
)


def spread(tile: BFloat16[Array, "N b"], words: int) -> BFloat16[Array, "N w"]:
  """Each block's factor for each of its words."""
  features, blocks = tile.shape
  shape = (features, blocks, words // blocks)
  return jnp.broadcast_to(tile[:, :, None], shape).reshape(features, words)


def plane(
  codes: UInt32[Array, "N w"],
  factor: BFloat16[Array, "N w"],
  place: int,
  format: str,
  interpret: bool,
) -> BFloat16[Array, "N w"]:
  """The decoded weights k = 8 w + place, over `UNIT`: operands of a product over w."""
  if interpret:
    return _by_table((codes >> (4 * place)) & 15, factor, format)
  (weights,) = plgpu.elementwise_inline_asm(
    plane_asm(place, format),
    args=[codes, factor],
    constraints="=r,r,r,r",
    pack=2,  # two words and two factors give two weights
    result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
  )
  return weights


def natural(
  codes: UInt32[Array, "N w"], factor: BFloat16[Array, "N w"], format: str, interpret: bool
) -> BFloat16[Array, "N k"]:
  """All decoded weights of the words in the order of k, over `UNIT`."""
  if interpret:
    places = [_by_table((codes >> (4 * p)) & 15, factor, format) for p in range(CODES)]
    return jnp.stack(places, -1).reshape(codes.shape[0], -1)
  bits = jax.lax.bitcast_convert_type(factor, jnp.uint16).astype(jnp.int32)
  twice = bits | (bits << 16)
  # k = 8 w + 4 a + 2 b + c: the halves of a pair differ in a, pairs in b and c.
  pairs = [_pair(codes, twice, place, format) for place in range(CODES // 2)]
  even, odd = jnp.stack([pairs[0], pairs[2]], -1), jnp.stack([pairs[1], pairs[3]], -1)
  return jnp.stack([even, odd], -1).reshape(codes.shape[0], -1)


def _pair(codes, twice, place, format) -> BFloat16[Array, "N w 2"]:
  """The decoded weights k = 8 w + place and k + 4: halves of one word."""
  (both,) = plgpu.elementwise_inline_asm(
    pair_asm(place, format),
    args=[codes, twice],
    constraints="=r,r,r",
    pack=1,
    result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int32)],
  )
  halves = (both & 0xFFFF, (both >> 16) & 0xFFFF)
  as_bf16 = lambda half: jax.lax.bitcast_convert_type(half.astype(jnp.int16), jnp.bfloat16)
  return jnp.stack([as_bf16(half) for half in halves], -1)


def plane_asm(place: int, format: str) -> str:
  """PTX: $1, $2 words, $3 their factors, $0 the weights at `place` in each."""
  byte, high = divmod(place, 2)
  # Both bytes of a half are the byte that holds the code: bit 15 is a high nibble's sign already.
  selector = byte | byte << 4 | (4 + byte) << 8 | (4 + byte) << 12
  fetch = f"prmt.b32 r, $1, $2, {selector:#06x};"
  return _asm(fetch, magnitude=2 if high else 6, sign=0 if high else 4, factor="$3", format=format)


def pair_asm(place: int, format: str) -> str:
  """PTX: $1 a word, $2 its factor twice, $0 the weights at `place` and `place` + 4."""
  left = -4 * place
  return _asm("mov.b32 r, $1;", magnitude=left + 6, sign=left + 12, factor="$2", format=format)


def _asm(fetch: str, magnitude: int, sign: int, factor: str, format: str) -> str:
  """r holds two codes, one a half; both are shifted left to their places (right if negative)."""
  shift = lambda to, by: f"{'shl' if by >= 0 else 'shr'}.b32 {to}, r, {abs(by)};"
  lines = [
    "{ .reg .b32 r, s, t, one, zero;",
    fetch,
    shift("t", magnitude),
    "and.b32 t, t, 0x01c001c0;",
    shift("s", sign),
    "and.b32 s, s, 0x80008000;",
    "or.b32 t, t, s;",
    "mov.b32 zero, 0x80008000;",  # -0: adding it keeps the sign of a product
  ]
  if format == "mxfp4":
    lines += ["mov.b32 one, 0x7e807e80;", "fma.rn.bf16x2 t, t, one, zero;"]  # 2^126
  return "\n".join([*lines, f"fma.rn.bf16x2 $0, t, {factor}, zero; }}"])


def _by_table(code: UInt32[Array, "N w"], factor, format) -> BFloat16[Array, "N w"]:
  """What the instructions compute, for the interpreter, which knows none."""
  doubled = (jnp.uint32(0xC8643210) >> (4 * (code & 7))) & 15
  magnitude = doubled.astype(jnp.int32).astype(jnp.float32) * 0.5
  value = jnp.where(code >= 8, -magnitude, magnitude)
  scale = factor.astype(jnp.float32)
  if format == "nvfp4":
    scale = scale * 2.0**-126
  return (value * scale).astype(jnp.bfloat16)
