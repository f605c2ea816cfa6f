"""Inside the TPU kernels: W decoded in vector registers, x put in the order of its codes.

Dims: O out, K in, k = K / block. A group is 256 columns of K, in 128 bytes; a chunk is the groups
whose scales fill the 128 lanes of a register.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
PAIR = 2 * LANES
_SIGNS = -0x7F7F7F80  # bit 7 of the four bytes of an int32

dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Plan:
  """What the kernels know when they are traced."""

  generation: int
  by_k: bool  # the block of scales is [k, O], else [O, k]
  per: int  # groups of 128 bytes whose scales fill 128 lanes
  tile: int
  out: int
  features: int
  scales: int  # k
  rotation: int

  @property
  def groups(self) -> int:
    return pl.cdiv(self.features, PAIR)


def lanes_of(group, size, offset=0, width=None):
  """The lanes of a group of `size` columns or bytes, or `width` of them from `offset` on."""
  return pl.ds(pl.multiple_of(group * size + offset, LANES), width or size)


def for_chunks(plan, chunk):
  """chunk(index, its groups, its scales of a row) for each chunk of K."""
  whole, tail = divmod(plan.scales, LANES)
  if whole:
    pl.loop(0, whole)(lambda index: chunk(index, plan.per, LANES))
  if tail:
    chunk(whole, plan.groups - whole * plan.per, tail)


# --- x, in order


def order_columns(x, plan, order, every_step):
  """order(group, columns) for every 256 of a block of rows: rotated, in x's dtype, even ones first.

  A new block is known by its first step, unless each core has steps of its own.
  """

  def every(group, columns):
    values = x[:, lanes_of(group, PAIR)]
    if columns < PAIR:
      values = first_of(values, columns, 1)
    values = add([dot(term, matrix, NN) for term in split(values)])
    order(group, (values * norm(plan)).astype(x.dtype))

  def all_groups():
    whole, tail = divmod(plan.features, PAIR)
    if whole:
      pl.loop(0, whole)(lambda group: every(group, PAIR))
    if tail:
      every(whole, tail)

  matrix = order_matrix(plan)
  if every_step:
    all_groups()
  else:
    pl.when(pl.program_id(1) == 0)(all_groups)


def order_matrix(plan):
  """[256, 256] of 0, 1 and -1: x @ it is x rotated, but for `norm`, even columns before odd ones.

  Of the Hadamard matrix only the signs: they are exact. Sign r, c is the parity of the bits r & c.
  """
  row = jax.lax.broadcasted_iota(jnp.int32, (PAIR, PAIR), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (PAIR, PAIR), 1)
  source = jnp.where(column < LANES, 2 * column, 2 * (column - LANES) + 1)
  size = max(plan.rotation, 1)
  odd = row & source & (size - 1)
  for bits in (4, 2, 1):
    odd = odd ^ (odd >> bits)
  sign = 1 - 2 * (odd & 1)
  same_block = (row & -size) == (source & -size)
  return jnp.where(same_block, sign, 0).astype(jnp.float32).astype(jnp.bfloat16)


def norm(plan):
  return 1 / math.sqrt(plan.rotation) if plan.rotation else 1.0


def first_of(values, size, axis):
  """The first `size` along an axis. What is beyond W may be anything, NaN too, and becomes zero."""
  index = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
  wide = values.astype(jnp.float32)  # not every TPU has masks for bfloat16
  return jnp.where(index < size, wide, 0.0).astype(values.dtype)


def split(x):
  """bfloat16 terms whose sum is x, in this order of addition: leading bits first."""
  if x.dtype == jnp.bfloat16:
    return [x]
  high = _leading(x)
  middle = _leading(x - high)
  return [term.astype(jnp.bfloat16) for term in (high, middle, x - high - middle)]


def _leading(x):
  # By the bits: a compiler may take a rounding to bfloat16 and back for nothing.
  bits = jax.lax.bitcast_convert_type(x, jnp.int32) & -0x10000
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def join(sums, rows):
  return add([sums[n : n + rows] for n in range(0, sums.shape[0], rows)])


def add(terms):
  return functools.reduce(jnp.add, terms)


# --- W


def add_product(total, ordered, codes, group, first, plan, words=None, n=0):
  """total (None for zero) + `ordered` [R, K] times a group's columns of a tile of W, [R, tile]."""
  for offset, w in weights(codes, group, first, plan, words, n):
    part = dot(ordered[:, lanes_of(group, PAIR, offset, w.shape[1])], w, NT)
    total = part if total is None else total + part  # at once: to add later takes many registers
  return total


def weights(codes, group, first, plan, words=None, n=0):
  """[(offset, bfloat16 [tile, columns])] of 256 columns of W in order, scaled if `words` are given.

  words: `words_of` the scales of a chunk, of which this is the n-th group.
  """
  halves = _values(codes[pl.ds(first, plan.tile), lanes_of(group, LANES)], plan.generation)
  if words is not None:
    scales = _spread(words, n, plan).astype(halves[0].dtype)
    halves = [half * scales for half in halves]
  halves = [half.astype(jnp.bfloat16) for half in halves]
  if plan.generation == 5:  # whose MXU contracts 128 columns
    return list(zip((0, LANES), halves))
  return [(0, jnp.concatenate(halves, 1))]


def _values(packed, generation):
  """The even and the odd columns of codes, times a power of two that `_scales` takes back."""
  word = pltpu.bitcast(packed, jnp.int32)
  low, high = word << 4, word
  if generation >= 7:  # s eeee mmm, times 2^-6
    bytes = (word << 2) & 0x1C1C1C1C, (word >> 2) & 0x1C1C1C1C
    narrow = jnp.float8_e4m3fn
  else:  # s eeeee mm, times 2^-14
    bytes = (word << 1) & 0x0E0E0E0E, (word >> 3) & 0x0E0E0E0E
    narrow = jnp.float8_e5m2
  wide = jnp.float32 if generation == 5 else jnp.bfloat16  # whose vector unit lacks bfloat16
  return [
    pltpu.bitcast((sign & _SIGNS) | magnitude, narrow).astype(wide)
    for sign, magnitude in zip((low, high), bytes)
  ]


def scales_of(scale, index, first, plan, valid, left=None):
  """float32 scales of 128 blocks and a tile of O, [128, tile] or [tile, 128] as they are stored.

  valid: scales that there are, of each row. left: rows of W that there are from the first of the
    block on, if fewer.
  """
  lanes, rows = lanes_of(index, LANES), pl.ds(first, plan.tile)
  raw = scale[lanes, rows] if plan.by_k else scale[rows, lanes]
  bias = 6 if plan.generation >= 7 else 14
  if raw.dtype == jnp.uint8:
    exponent = raw.astype(jnp.int32) + bias
    bits = jnp.where(exponent >= 255, 0x7FC00000, exponent << 23)
    values = jax.lax.bitcast_convert_type(bits, jnp.float32)
  else:
    values = raw.astype(jnp.float32) * 2.0**bias
  k_axis = 0 if plan.by_k else 1
  if valid < LANES:
    values = first_of(values, valid, k_axis)
  return values if left is None else first_of(values, left - first, 1 - k_axis)


def words_of(scales, plan):
  """bfloat16 scales of two rows of W in an int32, [tile / 2, 128]."""
  scales = scales.T if plan.by_k else scales
  return pltpu.bitcast(scales.astype(jnp.bfloat16), jnp.int32)


def _spread(words, n, plan):
  """The scales of the n-th group of a chunk, one for every byte: bfloat16 [tile, 128]."""
  lane = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1)
  source = (lane >> shift(plan)) + n * (LANES // plan.per)
  spread = jnp.take_along_axis(words, source, axis=1, mode="promise_in_bounds")
  return pltpu.bitcast(spread, jnp.bfloat16)


def shift(plan):
  """log2 of the bytes of a block."""
  return plan.per.bit_length() - 1
