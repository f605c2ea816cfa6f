"""x @ W for a packed W on NVIDIA GPUs (W4A16), in Pallas Triton. Dims: M, O out, K in, W = K / 8.

Codes are read as words of eight, straight from the stack [L, O, W], at a layer index that the
kernel loads itself: nothing is sliced, copied or repacked before. Decoded weights (triton_decode)
meet bfloat16 x on the tensor cores; sums are float32, and the tensor scale multiplies them last.

Two kernels:
- planes, for up to 32 rows, and for more where mma.sync is all there is: y^T = W x^T, one product
  for each of the eight places in a word. The decoded weights are operand A and never leave their
  registers, so x has to come in eight planes [8, M, W] (k = 8 w + place): XLA writes those, in the
  operation before if it can.
- natural, for more rows on Hopper (wgmma) and B200 (tcgen05), and everywhere for dx = dy @ W^T: a
  tile of W is put into the order of k, through shared memory, and multiplied as a whole.
With few tiles the contraction is cut into parts, which XLA adds: the order of sums is fixed.

float32 x is exact, too: three bfloat16 pieces make up its 24 bits, as three times the rows.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, triton_decode

FEW_ROWS = 32  # above, a thread's sums do not fit its registers beside decoded weights
# By the major compute capability: wgmma and tcgen05 take a decoded tile from shared memory.
DECODED_IN_SHARED_MEMORY = (9, 10)
RESIDENT = {2: 6, 4: 2, 8: 1}  # programs of so many warps that fit a multiprocessor
PIECES = 3  # of a float32 in bfloat16
GROUP = 8  # tiles of rows that share tiles of W while those are in the L2 cache
MAX_PARTS = 16


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """How the work is cut.

  rows: of x a tile. features, words: of W a tile; words are eight codes.
  planes: whether decoded weights stay in registers, and x comes in planes.
  parts: of the contraction, each with sums of its own.
  """

  rows: int
  features: int
  words: int
  planes: bool
  warps: int
  stages: int
  parts: int = 1


def default_block_sizes(
  rows: int, codes_shape: tuple[int, ...], format: str, transposed: bool, gpu: target.Gpu
) -> BlockSizes:
  """Sizes for x [rows, K], or dy [rows, O] where `transposed`, and codes [..., O, K / 2].

  Chosen by counting (README): what a tile reads, the instructions and registers of the compiled
  loops, and the shared memory that lets several programs share a multiprocessor, of which some
  decode while others multiply. None is measured on a device.
  """
  sizes = _backward_tile(rows, format, gpu) if transposed else _forward_tile(rows, format, gpu)
  features, words = codes_shape[-2], codes_shape[-1] // 4
  feature_tiles, word_tiles = pl.cdiv(features, sizes.features), pl.cdiv(words, sizes.words)
  tiles, steps = (word_tiles, feature_tiles) if transposed else (feature_tiles, word_tiles)
  parts = _parts(
    tiles * pl.cdiv(rows, sizes.rows), steps, rows, features if transposed else 8 * words,
    gpu.multiprocessors, RESIDENT[sizes.warps],
  )  # fmt: skip
  return dataclasses.replace(sizes, parts=parts)


def _forward_tile(rows, format, gpu) -> BlockSizes:
  if rows <= FEW_ROWS:
    return BlockSizes(16 if rows <= 16 else 32, 64, 32, planes=True, warps=2, stages=3)
  if gpu.capability[0] not in DECODED_IN_SHARED_MEMORY:
    if rows <= 64:
      return BlockSizes(64, 128, 16, planes=True, warps=4, stages=3)
    return BlockSizes(128, 128, 16, planes=True, warps=8, stages=3)
  if rows <= 64:
    return BlockSizes(64, 128, 16, planes=False, warps=4, stages=3)
  if format == "mxfp4":  # half as many scales: a copy of four bytes needs twice the depth
    return BlockSizes(128, 128, 16, planes=False, warps=4, stages=2)
  if rows > 128 and gpu.capability[0] == 10:  # where tcgen05 runs on while others decode
    return BlockSizes(256, 128, 16, planes=False, warps=8, stages=2)
  return BlockSizes(128, 128, 8, planes=False, warps=4, stages=3)


def _backward_tile(rows, format, gpu) -> BlockSizes:
  depth = 128 if format == "mxfp4" else 64
  if rows <= 64:
    return BlockSizes(max(16, pl.next_power_of_2(rows)), depth, 16, False, warps=4, stages=3)
  if gpu.capability[0] not in DECODED_IN_SHARED_MEMORY:
    return BlockSizes(128, 64, 16, planes=False, warps=8, stages=3)
  if format == "mxfp4":
    return BlockSizes(128, depth, 16, planes=False, warps=4, stages=2)
  if rows > 128 and gpu.capability[0] == 10:
    return BlockSizes(256, 128, 16, planes=False, warps=8, stages=2)
  return BlockSizes(128, depth, 16, planes=False, warps=4, stages=3)


def _parts(tiles, steps, rows, width, multiprocessors, resident) -> int:
  """The cheapest number of parts by an estimate of time over that of reading W; not measured."""

  def cost(parts):
    ctas = tiles * parts / multiprocessors
    idle = math.ceil(ctas) / ctas  # multiprocessors without work in the last round
    waiting = max(0.0, 1 - ctas / resident)  # for memory, with too few loads under way
    # float32 sums written and read, half as dear as W: they stay in the L2 cache.
    sums = 0.5 * 8 * rows * parts / (0.5625 * width) if parts > 1 else 0.0
    return idle + waiting + sums

  return min(range(1, max(1, min(MAX_PARTS, steps // 4)) + 1), key=cost)


def why_not(
  rows: int, x_dtype: Any, codes_shape: tuple[int, ...], format: str, device: target.Target
) -> str | None:
  """None if the kernel can run, else a sentence."""
  del rows, x_dtype
  if device.platform != "cuda":
    return f"it needs an NVIDIA GPU; this is {device.device_kind}"
  gpu = target.gpu(device)
  if gpu is None:
    return f"the compute capability of {device.device_kind} is not in pallas_kernels/target.py"
  if gpu.capability < (8, 0):
    return (
      f"it needs the bfloat16 units of compute capability 8.0; {device.device_kind} has "
      f"{gpu.capability[0]}.{gpu.capability[1]}"
    )
  scales = 2 * math.prod(codes_shape) // codec.BLOCK[format]
  if 2**31 <= scales <= 2**32:  # Pallas then counts in 32 bits, which Triton takes as signed
    return f"it cannot address between 2 and 4 GiB of block scales; got {scales} bytes"
  return None


def forward(
  x_MK: Float[Array, "M K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None,
  *,
  interpret: bool = False,
) -> Float[Array, "M O"]:
  """x @ W of a layer, in x's dtype, with float32 sums."""
  return _product(x_MK, codes, scale, tensor_scale, layer, False, interpret)


def backward(
  dy_MO: Float[Array, "M O"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None,
  *,
  interpret: bool = False,
) -> Float[Array, "M K"]:
  """dy @ W^T of a layer, in dy's dtype, with float32 sums."""
  return _product(dy_MO, codes, scale, tensor_scale, layer, True, interpret)


class _Plan(NamedTuple):
  """A call's static part."""

  sizes: BlockSizes
  format: str
  transposed: bool
  interpret: bool


def _product(x, codes, scale, tensor_scale, layer, transposed, interpret):
  if layer is None:
    codes, scale, tensor_scale = codes[None], scale[None], tensor_scale[None]
    layer = jnp.zeros((), jnp.int32)
  dtype, rows, format = x.dtype, x.shape[0], codec.format_of(scale)
  x = x if dtype == jnp.bfloat16 else split_float32(x)
  gpu = target.gpu(target.current_target()) or target.gpu(target.TARGETS["h100"])  # interpreted
  sizes = default_block_sizes(x.shape[0], codes.shape, format, transposed, gpu)
  plan = _Plan(sizes, format, transposed, interpret)
  # Neither view copies: XLA keeps the stack and changes its type (asserted by the `aot` tests).
  words = jax.lax.bitcast_convert_type(
    codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4), jnp.uint32
  )
  scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
  whole = dtype == jnp.bfloat16 and sizes.parts == 1  # the kernel writes y itself
  y = _call(plan, x, words, scale, tensor_scale, layer, dtype if whole else jnp.float32)
  if whole:
    return y[0]
  y = y.reshape(-1, rows, y.shape[-1]).sum(0)
  layer = jnp.clip(layer, 0, codes.shape[0] - 1)  # as the kernel does
  scale_of_layer = jax.lax.dynamic_index_in_dim(tensor_scale, layer, 0, keepdims=False)
  return (y * (scale_of_layer * triton_decode.UNIT[format])).astype(dtype)


def split_float32(x_MK: Float32[Array, "M K"]) -> BFloat16[Array, "N K"]:
  """Three bfloat16 matrices one below the other (N = 3 M) whose sum is x, exactly.

  Eight bits each, by truncation, which no compiler takes for a pair of casts to leave out. Bits
  below 2^-133 are lost; of what is not finite the first piece is all.
  """
  return jnp.concatenate(pieces(x_MK))


def pieces(x: Float32[Array, "*shape"]) -> list[BFloat16[Array, "*shape"]]:
  """The three matrices, also for use in a kernel."""
  found = []
  for _ in range(PIECES):
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    piece = jax.lax.bitcast_convert_type(bits, jnp.float32)
    x = jnp.where(jnp.abs(piece) < jnp.inf, x - piece, 0.0)
    found.append(piece.astype(jnp.bfloat16))
  return found


def _call(plan: _Plan, x, words, scale, tensor_scale, layer, dtype):
  """[parts, M, out]: y, or sums of parts where dtype is float32."""
  sizes, (_, features, width) = plan.sizes, words.shape
  rows = x.shape[0]
  row_tiles = pl.cdiv(rows, sizes.rows)
  if plan.transposed:
    tiles, columns = pl.cdiv(width, sizes.words), 8 * width
  else:
    tiles, columns = pl.cdiv(features, sizes.features), features
  if sizes.planes:
    x = x.reshape(rows, width, triton_decode.CODES).transpose(2, 0, 1)
  return pl.pallas_call(
    functools.partial(_planes_kernel if sizes.planes else _natural_kernel, plan=plan),
    grid=(row_tiles * tiles, sizes.parts),
    out_shape=jax.ShapeDtypeStruct((sizes.parts, rows, columns), dtype),
    compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
    name=f"fp4_{'dx' if plan.transposed else 'planes' if sizes.planes else 'natural'}",
    interpret=plan.interpret,
  )(layer.reshape(1), x, words, scale, tensor_scale)


class Span(NamedTuple):
  """The `size` indices of a tile of an axis of `limit`. Its start is a visible multiple of `size`:
  the compiler copies whole words only where it can tell that they are aligned."""

  tile: Any
  size: int
  limit: int

  @property
  def at(self):
    return pl.ds(self.tile * self.size, self.size)

  def inside(self):
    """Which are indices of the axis; None where all are."""
    if self.limit % self.size == 0:
      return None
    return self.tile * self.size + jnp.arange(self.size) < self.limit


def _codes(words: Span) -> Span:
  return Span(words.tile, 8 * words.size, 8 * words.limit)


def _where(rows: Span, columns: Span):
  inside_rows, inside_columns = rows.inside(), columns.inside()
  if inside_rows is None and inside_columns is None:
    return None
  everywhere = lambda span: jnp.ones(span.size, jnp.bool_)
  inside_rows = everywhere(rows) if inside_rows is None else inside_rows
  inside_columns = everywhere(columns) if inside_columns is None else inside_columns
  return inside_rows[:, None] & inside_columns[None, :]


def load(ref, lead, rows: Span, columns: Span):
  """ref[lead, rows, columns]; zeros outside of the array."""
  where = _where(rows, columns)
  at = ref.at[(*lead, rows.at, columns.at)]
  return plgpu.load(at, mask=where, other=None if where is None else jnp.zeros((), ref.dtype))


def store(ref, lead, rows: Span, columns: Span, values):
  """ref[lead, rows, columns] = values, inside of the array."""
  plgpu.store(ref.at[(*lead, rows.at, columns.at)], values, mask=_where(rows, columns))


def _finish(ref, rows: Span, columns: Span, sums, tensor_ref, layer, plan: _Plan):
  """Stores y, or this part's sums."""
  if ref.dtype != jnp.float32:
    sums = sums * (tensor_ref[layer] * triton_decode.UNIT[plan.format])
  store(ref, (pl.program_id(1),), rows, columns, sums.astype(ref.dtype))


def _weights(codes_ref, scale_ref, layer, features: Span, words: Span, plan: _Plan):
  """A tile of packed words and the factor of each."""
  codes = load(codes_ref, (layer,), features, words)
  per_block = triton_decode.WORDS[plan.format]
  blocks = Span(words.tile, words.size // per_block, scale_ref.shape[-1])
  scale = load(scale_ref, (layer,), features, blocks)
  factors = triton_decode.factors(scale, plan.format, plan.interpret)
  return codes, triton_decode.spread(factors, words.size)


def _loop(steps: int, plan: _Plan, step, shape):
  """Sums of this program's part of `steps`."""
  part, parts = pl.program_id(1), plan.sizes.parts
  first, last = part * steps // parts, (part + 1) * steps // parts
  return jax.lax.fori_loop(first, last, step, jnp.zeros(shape, jnp.float32))


def _dot(a, b, contracted):
  return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


def _planes_kernel(layer_ref, x_ref, codes_ref, scale_ref, tensor_ref, y_ref, *, plan: _Plan):
  """y^T = W x^T. x [8, M, W] in planes, codes [L, O, W], scale [L, O, k], y [parts, M, O]."""
  sizes, (layers, features, width) = plan.sizes, codes_ref.shape
  layer = jnp.clip(layer_ref[0], 0, layers - 1)
  rows, outputs = _tile(sizes, x_ref.shape[1], sizes.features, features)

  def step(i, sums):
    words = Span(i, sizes.words, width)
    codes, factors = _weights(codes_ref, scale_ref, layer, outputs, words, plan)
    for place in range(triton_decode.CODES):
      w = triton_decode.plane(codes, factors, place, plan.format, plan.interpret)
      sums += _dot(w, load(x_ref, (jnp.int32(place),), rows, words), ((1,), (1,)))
    return sums

  sums = _loop(pl.cdiv(width, sizes.words), plan, step, (sizes.features, sizes.rows))
  _finish(y_ref, rows, outputs, sums.T, tensor_ref, layer, plan)


def _natural_kernel(layer_ref, x_ref, codes_ref, scale_ref, tensor_ref, y_ref, *, plan: _Plan):
  """y = x W, or dx = dy W^T. x [M, in], codes [L, O, W], scale [L, O, k], y [parts, M, out]."""
  sizes, (layers, features, width) = plan.sizes, codes_ref.shape
  layer = jnp.clip(layer_ref[0], 0, layers - 1)
  if plan.transposed:
    rows, kept = _tile(sizes, x_ref.shape[0], sizes.words, width)
  else:
    rows, kept = _tile(sizes, x_ref.shape[0], sizes.features, features)

  def step(i, sums):
    if plan.transposed:
      outputs, words = Span(i, sizes.features, features), kept
    else:
      outputs, words = kept, Span(i, sizes.words, width)
    codes, factors = _weights(codes_ref, scale_ref, layer, outputs, words, plan)
    w = triton_decode.natural(codes, factors, plan.format, plan.interpret)
    x = load(x_ref, (), rows, outputs if plan.transposed else _codes(words))
    return sums + _dot(x, w, ((1,), (0,) if plan.transposed else (1,)))

  steps = pl.cdiv(features, sizes.features) if plan.transposed else pl.cdiv(width, sizes.words)
  columns = _codes(kept) if plan.transposed else kept
  sums = _loop(steps, plan, step, (sizes.rows, columns.size))
  _finish(y_ref, rows, columns, sums, tensor_ref, layer, plan)


def _tile(sizes: BlockSizes, rows: int, size: int, columns: int) -> tuple[Span, Span]:
  """This program's rows and columns: GROUP tiles of rows beside each other, then the columns."""
  program = pl.program_id(0)
  row_tiles, column_tiles = pl.cdiv(rows, sizes.rows), pl.cdiv(columns, size)
  if row_tiles == 1:
    return Span(0, sizes.rows, rows), Span(program, size, columns)
  first = program // (GROUP * column_tiles) * GROUP
  group = jnp.minimum(row_tiles - first, GROUP)
  within = program - first * column_tiles
  return Span(first + within % group, sizes.rows, rows), Span(within // group, size, columns)
