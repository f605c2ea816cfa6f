"""From FP4 bytes in shared memory to wgmma's operand A in registers (sm_90), and the same on a CPU.

A warpgroup decodes [64, 256] weights at a time: 64 rows of 128 bytes. In operand A a thread holds
two neighbouring columns of a row, 8 columns further the next two, and so on; a row is shared by the
four threads of a quad. To move nothing between threads, quad thread q takes the 32 bytes
[32 q, 32 q + 32) of the row instead, two 16-byte loads, and what column of A a weight becomes
follows from that: the columns are permuted, the same for every row, and `permute` puts x into that
order. A sum does not depend on the order of its terms.

A thread's bytes are eight 32-bit words of eight weights. Nibbles n and n + 4 of a word make one
pair of bfloat16: sign to bit 15 and 31, the three other bits to the end of the exponent and the
start of the mantissa. That is the value times 2^-126, denormals included, so one exact product with
2^126 gives it (PTX: mul.bf16x2 keeps denormals), a second one with the block scale the operand.
E4M3 scales take the same way, 2^-120. About 2.5 instructions a weight; a table look-up takes ten.

Written with &, |, <<, >> only, so that the very functions that run on registers run on numpy.
Dims: G groups of 256 columns, q quad threads, w words, n pairs, e halves of a pair.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.fp4_gemm import codec

ROWS = 64  # of W that one warpgroup multiplies
GROUP = 256  # columns of W that it decodes at a time
BYTES = GROUP // 2
PIECE = 64  # columns of one wgmma
PIECES = GROUP // PIECE
QUAD = 4  # threads that share a row
WORDS = 8  # of a thread in a row
PAIRS = 4  # of a word
SCALE_BYTES = 16  # of a row in shared memory: the least that TMA moves
_SIGNS = -0x7FFF8000  # 0x80008000

# Operand A is 2^POWER times the weight: NVFP4 scales, at most 448, and 2^126 in one factor.
POWER = {"nvfp4": -8, "mxfp4": 0}

# [64, 128] bytes: 16 consecutive ones a load, two loads a thread and row.
CODES_LAYOUT = mgpu.TiledLayout(
  fa.Tiling(((64, 128), (16, 128), (8, 128), (32,), (16,))),
  warp_dims=(-8,),
  lane_dims=(-4, -3),
  vector_dim=-1,
)
# [64, 4] words, one a thread and row.
WORD_LAYOUT = mgpu.TiledLayout(
  fa.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
# The scales of a thread's 64 weights: four bytes of 16, or two of 8.
SCALE_LAYOUT = {"nvfp4": fa.WGMMA_LAYOUT_8BIT, "mxfp4": fa.WGMMA_LAYOUT}
CODES_TRANSFORMS = (plgpu.TilingTransform((8, BYTES)), plgpu.SwizzleTransform(128))


def permute(x_MK: Shaped[Array, "M K"]) -> Shaped[Array, "M K"]:
  """The columns of x in the order in which the weights become columns of operand A."""
  rows, width = x_MK.shape
  x_MGqwen = x_MK.reshape(rows, width // GROUP, QUAD, WORDS, 2, PAIRS)
  return jnp.transpose(x_MGqwen, (0, 1, 3, 5, 2, 4)).reshape(rows, width)


def pair_bits(word: Any, n: int) -> Any:
  """Nibbles n (low half) and n + 4 (high half) as two bfloat16 of 2^-126 times their value.

  Args:
    word: int32, of numpy, jax or a FragmentedArray; so is the result.
  """
  sign = word << (12 - 4 * n) if n < 3 else word
  shift = 4 * n - 6
  magnitude = word >> shift if shift > 0 else word << -shift
  return (sign & _SIGNS) | (magnitude & 0x01C001C0)


def scale_bits(bytes_: Any, format: str) -> Any:
  """Two block scales, in the halves of a word, as two bfloat16; E4M3 as 2^-120 times its value.

  NaN stays NaN: 127 and 255 of E4M3, 255 of E8M0. E8M0's 0 is 2^-127.
  """
  if format == "nvfp4":
    magnitude = bytes_ & 0x007F007F
    is_nan = (magnitude + 0x00010001) & 0x00800080
    return ((bytes_ << 8) & _SIGNS) | (magnitude << 4) | is_nan * 255
  special = ((bytes_ + 0x00010001) | (0x01000100 - bytes_)) & 0x01000100  # 255 or 0
  return (bytes_ << 7) | (special >> 2)


def split_bytes(word: Any, format: str) -> list[Any]:
  """The scales of a thread's row, two in each word: the n-th and the (n + PAIRED)-th."""
  if format == "nvfp4":
    return [word & 0x00FF00FF, (word >> 8) & 0x00FF00FF]
  return [(word | (word << 8)) & 0x00FF00FF]


def place_of_scale(word: int, format: str) -> int:
  """Where the scale of a thread's word (0..7) is: 2 * (index into `split_bytes`) + half of it."""
  scale = word * 8 // codec.BLOCK[format]
  return 2 * (scale % 2) + scale // 2 if format == "nvfp4" else scale


def factors_in_registers(scale_ref: Any, format: str) -> list[Array]:
  """What a group's weights are multiplied with, for `decode_in_registers`; GPU only.

  Args:
    scale_ref: the group's scales in shared memory, [64, 16] (nvfp4) or [64, 8] (mxfp4).
  Returns: by place (`place_of_scale`), bfloat16 [64, 8] in wgmma's layout, both of a pair the same.
  """
  one = plgpu.ShapeDtypeStruct((ROWS, 8), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
  places = GROUP // QUAD // codec.BLOCK[format]

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[one] * places)
  def factors(context, scale):
    del context
    loaded = _load_scales(scale, format)
    return [f for both in split_bytes(loaded, format) for f in _factors(both, format)]

  return factors(scale_ref)


def decode_in_registers(
  codes_ref: Any, factors: list[Array], half: int, format: str
) -> list[Array]:
  """Half of a group as two pieces of operand A, [64, 64] bfloat16 in wgmma's layout; GPU only.

  Args:
    codes_ref: uint8 [64, 128] in shared memory, tiled and swizzled by CODES_TRANSFORMS.
    factors: from `factors_in_registers`.
  """
  layout = plgpu.Layout.WGMMA
  piece = plgpu.ShapeDtypeStruct((ROWS, PIECE), jnp.bfloat16, layout=layout)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(CODES_TRANSFORMS), [layout] * len(factors)), return_type=[piece] * 2
  )
  def pieces(context, codes, factors):
    del context
    tiles = []
    for w, word in enumerate(_load_words(codes, half)):
      factor = factors[place_of_scale(WORDS // 2 * half + w, format)]
      for n in range(PAIRS):
        pair = _as_bf16(pair_bits(word, n))
        if format == "mxfp4":
          pair = pair * _constant(2.0**126)
        tiles.append(pair * factor)
    return [_join(tiles[i : i + PIECE // 8]) for i in range(0, len(tiles), PIECE // 8)]

  return pieces(codes_ref, factors)


def _load_words(codes, half):
  """Four of a thread's words of a row, each an int32 array [64, 4]."""
  loaded = fa.FragmentedArray.load_tiled(codes, swizzle=128, layout=CODES_LAYOUT, is_signed=False)
  four = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
  registers = [vector.bitcast(four, r) for r in loaded.registers[..., half, :].flat]
  return [
    _words([mgpu.utils.vector_slice(r, slice(j, j + 1)) for r in registers]) for j in range(4)
  ]


def _load_scales(scale, format):
  """A thread's scales of a row, in one int32 array [64, 4]: four bytes, or two."""
  loaded = fa.FragmentedArray.load_untiled(
    scale,
    layout=SCALE_LAYOUT[format],
    is_signed=None if format == "nvfp4" else False,
    optimized=False,
  )
  integer = ir.IntegerType.get_signless(8 * SCALE_LAYOUT[format].vector_length)
  registers = [
    vector.bitcast(ir.VectorType.get((1,), integer), _bytes(register))
    for register in loaded.registers.flat
  ]
  words = _words(registers)
  return words.astype(ir.IntegerType.get_signless(32), is_signed=False)


def _bytes(register):
  i8 = ir.IntegerType.get_signless(8)
  return vector.bitcast(ir.VectorType.get(register.type.shape, i8), register)


def _words(registers):
  shape = WORD_LAYOUT.registers_shape((ROWS, QUAD))
  array = np.asarray(registers, dtype=object).reshape(shape)
  return fa.FragmentedArray(_registers=array, _layout=WORD_LAYOUT, _is_signed=False)


def _as_bf16(words):
  """Pairs in [64, 4] words as [64, 8] bfloat16: the same registers in wgmma's layout."""
  two = ir.VectorType.get((2,), ir.BF16Type.get())
  array = np.empty_like(words.registers)
  for i, register in np.ndenumerate(words.registers):
    array[i] = vector.bitcast(two, register)
  return _bf16(array)


def _bf16(registers):
  return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def _factors(both, format):
  """What pairs are multiplied with, [64, 8] bfloat16, for each of the two scales of a word."""
  scales = _as_bf16(scale_bits(both, format))
  if format == "nvfp4":
    scales = scales * _constant(2.0**120) * _constant(2.0 ** (126 + POWER["nvfp4"]))
  halves = []
  for half in range(2):
    array = np.empty_like(scales.registers)
    for i, register in np.ndenumerate(scales.registers):
      array[i] = mgpu.utils.vector_concat(
        [mgpu.utils.vector_slice(register, slice(half, half + 1))] * 2
      )
    halves.append(_bf16(array))
  return halves


def _constant(value):
  return mgpu.utils.c(value, ir.BF16Type.get())


def _join(tiles):
  return _bf16(np.concatenate([tile.registers for tile in tiles], axis=1))


def decode_by_jax(
  codes: UInt8[Array, "64 128"], scale: Shaped[Array, "64 k"], format: str
) -> list[Float[Array, "64 64"]]:
  """The same by the same arithmetic, for interpret mode and tests; bfloat16.

  Args:
    scale: the group's scales, [64, 16] float8_e4m3fn (nvfp4) or [64, 8] uint8 (mxfp4).
  """
  words_Oqw = jax.lax.bitcast_convert_type(codes.reshape(ROWS, QUAD, WORDS, 4), jnp.int32)
  bytes_ = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32).reshape(ROWS, QUAD, -1)
  word = sum(bytes_[..., i] << 8 * i for i in range(bytes_.shape[-1]))
  exponent = 120 if format == "nvfp4" else 0
  halves = [_times_power(scale_bits(b, format), exponent) for b in split_bytes(word, format)]
  places = [divmod(place_of_scale(w, format), 2) for w in range(WORDS)]
  factors_Oqw = jnp.stack([halves[i][..., half] for i, half in places], axis=-1)
  factors_Oqw = factors_Oqw * 2.0 ** POWER[format]
  pairs_Oqwn = jnp.stack([pair_bits(words_Oqw, n) for n in range(PAIRS)], axis=-1)
  values = _times_power(pairs_Oqwn, 126) * factors_Oqw[..., None, None]  # [O, q, w, n, e]
  a = jnp.transpose(values.astype(jnp.bfloat16), (0, 2, 3, 1, 4)).reshape(ROWS, GROUP)
  return [a[:, i : i + PIECE] for i in range(0, GROUP, PIECE)]


def _times_power(pairs, exponent):
  """The two bfloat16 of a word times 2^exponent, float32: a CPU would flush the denormals."""
  bits = jnp.stack([pairs & 0xFFFF, (pairs >> 16) & 0xFFFF], axis=-1)
  normal = jax.lax.bitcast_convert_type((bits << 16) + (exponent << 23), jnp.float32)
  magnitude = (bits & 0x7F).astype(jnp.float32) * 2.0 ** (exponent - 133)
  denormal = jnp.where(bits >> 15 == 1, -magnitude, magnitude)
  is_nan = (bits & 0x7FFF) > 0x7F80
  return jnp.where(is_nan, jnp.nan, jnp.where((bits & 0x7F80) == 0, denormal, normal))
