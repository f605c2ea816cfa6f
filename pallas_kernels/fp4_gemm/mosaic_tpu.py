"""x @ W for a packed W (W4A16) on a TPU: codes are read packed, from the stack, decoded in VMEM.

Dims: M rows, O out, K in, H = K / 2 bytes of a row of W, k = K / block scales of a row.

- A byte holds an even and an odd column, and W is never interleaved. Instead x is put into the
  order [128 even | 128 odd] of every 256 columns, once per block of rows, by a product with a 0/1
  matrix, which is exact.
- Four bytes are decoded in one 32-bit word: the sign, exponent and mantissa of E2M1 are moved to
  where an 8-bit float has its own, whose subnormals are those of E2M1; the conversion to a wider
  float is one of the hardware. The power of two between the formats is put back with the scale of
  the block, so that an MXFP4 scale of 2^114 or more becomes NaN: it is never a wrong number.
- Many rows: the weights are multiplied by their scales (exact in bfloat16), which one gather along
  the lanes of a word of two rows spreads over their columns. Sums are float32.
- Few rows: each block of K gets a row of the left operand of its own, zero elsewhere. The product
  returns the sums of the blocks, and scaling these is cheaper than scaling the weights.
- A TPU keeps scales whose k fills its 128 lanes badly with O as the minor dimension. They are read
  in that order and turned in VMEM; else XLA would copy the whole stack at every call.
- float32 operands are split into three bfloat16 terms, rows of one product.

README.md says what the tiles need and what the compilers make of them.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec
from pallas_kernels.fp4_gemm import mosaic_tpu_decode as decode
from pallas_kernels.fp4_gemm.mosaic_tpu_decode import LANES, PAIR

SLAB = 16  # blocks that a product keeps apart, with few rows: the rows of a bfloat16 tile
FEW = 4  # rows up to which the sums of the blocks are scaled; by the compiled code, README
MAX_ROTATION = PAIR
MAX_ROWS = 512  # of x that share a decoded weight: the MXU then takes longer than the decoding
MIB = 2**20
# Generation, and bytes of VMEM of a core; an eighth of what it has is left to the compiler.
DEVICES = {
  "TPU v5 lite": (5, 112 * MIB),
  "TPU v5": (5, 56 * MIB),
  "TPU v6 lite": (6, 112 * MIB),
  "TPU7x": (7, 56 * MIB),
}
TWO_CORES = "TPU v5"  # the two cores of a chip are one device and divide the grid


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """What one step of the grid works on."""

  rows: int  # of x
  out: int  # of W
  tile: int  # rows of W decoded for one product; divides `out`
  vmem_bytes: int  # of all buffers of the kernel


def why_not(
  rows: int, x_dtype: jax.typing.DTypeLike, codes_shape: tuple, format: str, device: target.Target
) -> str | None:
  """None if the kernel can run, else one sentence with the numbers."""
  if device.platform != "tpu":
    return f"it is for TPUs, and this is {device.device_kind}"
  if device.device_kind not in DEVICES:
    return f"it knows {', '.join(DEVICES)}, and this is {device.device_kind}"
  sizes = block_sizes(rows, x_dtype, codes_shape, format, device)
  limit = DEVICES[device.device_kind][1]
  if sizes.vmem_bytes > limit:
    return (
      f"{sizes.rows} rows of {2 * codes_shape[-1]} columns need {sizes.vmem_bytes // MIB} MiB of "
      f"VMEM, and {device.device_kind} has {limit // MIB} for it"
    )
  return None


def block_sizes(
  rows: int, x_dtype: jax.typing.DTypeLike, codes_shape: tuple, format: str, device: target.Target
) -> BlockSizes:
  """Tiles of `forward`: as many rows as fit, up to 512, and several steps where O allows it."""
  generation, limit = _device(device)
  out, half = codes_shape[-2:]
  # The bytes of the first step arrive before anything is computed: they should be a small part.
  steps = 1 if rows > LANES else 12 if generation == 5 else 6
  out_block = next((n for n in (512, 256) if out >= steps * n), LANES)
  bytes_of = functools.partial(_vmem_bytes, rows, x_dtype, _up(2 * half, PAIR), format, generation)
  for blocks in itertools.count(pl.cdiv(rows, MAX_ROWS)):
    block = _up(pl.cdiv(rows, blocks), 16)
    for size in (out_block, min(out_block, 256)):
      vmem = bytes_of(block, size)
      if vmem <= limit or block == 16:
        return BlockSizes(block, size, min(size, 256 if generation == 5 else 512), vmem)
  raise AssertionError("16 rows end the loop")


def _vmem_bytes(rows, dtype, features, format, generation, block, out):
  parts, wide = _parts(dtype), jnp.dtype(dtype).itemsize
  operands = parts * (SLAB * rows if parts * rows <= FEW else block)
  scales = _up(features // codec.BLOCK[format], LANES)
  # Registers that are spilled, by what the compilers asked for. A 7x adds inside its MXU.
  spilled = 8 * MIB + (16 if generation == 7 else 64) * block * out
  x_and_y = block * wide * (features + 2 * out)
  return operands * (2 * features + 4 * out) + x_and_y + out * (features + 2 * scales) + spilled


@functools.partial(jax.jit, static_argnames=("rotation", "interpret"))
def forward(
  x_MK: Float[Array, "M K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None = None,
  rotation: int = 0,
  interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "M O"]:
  """y = tensor_scale * (rotated x @ W), in x's dtype.

  Args:
    layer: index into the stack, where there is one; clamped. Only that layer is read.
    rotation: of x first, as by `codec.rotate`, at no cost: a power of two up to MAX_ROTATION.
    interpret: `pltpu.InterpretParams()` runs it on a CPU.
  """
  return _over_a_stack(
    functools.partial(_forward_call, target.current_target(), rotation, interpret),
    x_MK, codes, scale, tensor_scale, layer,
  )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("rotation", "interpret"))
def backward(
  dy_MO: Float[Array, "M O"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None = None,
  rotation: int = 0,
  interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "M K"]:
  """dx = tensor_scale * (dy @ W^T), rotated back, in dy's dtype; arguments as in `forward`."""
  return _over_a_stack(
    functools.partial(_backward_call, target.current_target(), rotation, interpret),
    dy_MO, codes, scale, tensor_scale, layer,
  )  # fmt: skip


def _over_a_stack(call, x, codes, scale, tensor_scale, layer):
  """call(x, codes, scale, tensor_scale, layer [1]), where `vmap` loops over a longer stack."""
  if layer is None:
    codes, scale, tensor_scale, layer = codes[None], scale[None], tensor_scale[None], 0
  layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, codes.shape[0] - 1)
  batched = jax.custom_batching.custom_vmap(call)

  @batched.def_vmap
  def rule(size, is_batched, x, codes, scale, tensor_scale, layer):
    stack = [codes, scale, tensor_scale]
    x_batched, *stack_batched, layer_batched = is_batched
    if not any(stack_batched) and not layer_batched:
      y = _over_a_stack(call, x.reshape(-1, x.shape[-1]), *stack, layer[0])
      return y.reshape(size, -1, y.shape[-1]), True
    if any(stack_batched):
      full = lambda leaf, has: leaf if has else jnp.broadcast_to(leaf, (size, *leaf.shape))
      stack = [full(leaf, has) for leaf, has in zip(stack, stack_batched)]
      first = jnp.arange(size)[:, None] * stack[0].shape[1]
      layer = first + jnp.broadcast_to(layer, first.shape)
      stack = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in stack]

    def one(i):
      take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False)
      return _over_a_stack(call, take(x) if x_batched else x, *stack, take(layer)[0])

    return jax.lax.map(one, jnp.arange(size)), True

  return batched(x, codes, scale, tensor_scale, layer.reshape(1))


# --- calls


def _forward_call(device, rotation, interpret, x_MK, codes, scale, tensor_scale, layer):
  sizes = block_sizes(x_MK.shape[0], x_MK.dtype, codes.shape, codec.format_of(scale), device)
  rows, parts = x_MK.shape[0], _parts(x_MK.dtype)
  plan, scale = _plan(device, codes, scale, sizes.tile, rotation)
  few = parts * rows <= FEW
  operands = parts * (SLAB * rows if few else sizes.rows)
  at_scales = (lambda m, o, l: (l[0], 0, o)) if plan.by_k else (lambda m, o, l: (l[0], o, 0))
  return pl.pallas_call(
    functools.partial(
      _forward_few if few else _forward_many, plan=plan, every_step=device.device_kind == TWO_CORES
    ),
    out_shape=jax.ShapeDtypeStruct((rows, plan.out), x_MK.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(pl.cdiv(rows, sizes.rows), pl.cdiv(plan.out, sizes.out)),
      in_specs=[
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec(
          (sizes.rows, plan.groups * PAIR), lambda m, o, l: (m, 0), pipeline_mode=pl.Buffered(1)
        ),
        pl.BlockSpec((None, sizes.out, plan.groups * LANES), lambda m, o, l: (l[0], o, 0)),
        _scale_block(plan, _up(plan.scales, LANES), sizes.out, at_scales),
      ],
      out_specs=pl.BlockSpec((sizes.rows, sizes.out), lambda m, o, l: (m, o)),
      scratch_shapes=[
        pltpu.VMEM((operands, plan.groups * PAIR), jnp.bfloat16),
        pltpu.VMEM((operands, sizes.out), jnp.float32),
      ],
    ),
    compiler_params=_parameters(sizes.vmem_bytes, device, ("parallel", "parallel")),
    interpret=interpret,
    name="fp4_forward",
  )(layer, tensor_scale, x_MK, *_in_hbm(codes, scale))


def _backward_call(device, rotation, interpret, dy_MO, codes, scale, tensor_scale, layer):
  rows, out = dy_MO.shape
  parts = _parts(dy_MO.dtype)
  block = _up(pl.cdiv(rows, pl.cdiv(rows, MAX_ROWS // parts)), 16)
  out_block = next(n for n in (128, 256, 512) if n >= min(out, 512))
  plan, scale = _plan(device, codes, scale, min(out_block, 256), rotation)
  lanes = LANES * min(plan.per, plan.groups)
  sums, wide = parts * block, dy_MO.dtype.itemsize
  vmem = 8 * sums * lanes + 2 * block * wide * (out_block + 2 * lanes) + 3 * out_block * lanes
  at_scales = (lambda m, h, o, l: (l[0], h, o)) if plan.by_k else (lambda m, h, o, l: (l[0], o, h))
  return pl.pallas_call(
    functools.partial(_backward, plan=plan),
    out_shape=jax.ShapeDtypeStruct((rows, plan.features), dy_MO.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(pl.cdiv(rows, block), pl.cdiv(plan.groups, plan.per), pl.cdiv(out, out_block)),
      in_specs=[
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((block, out_block), lambda m, h, o, l: (m, o)),
        pl.BlockSpec((None, out_block, lanes), lambda m, h, o, l: (l[0], o, h)),
        _scale_block(plan, LANES, out_block, at_scales),
      ],
      out_specs=pl.BlockSpec((block, 2 * lanes), lambda m, h, o, l: (m, h)),
      scratch_shapes=[pltpu.VMEM((sums, 2 * lanes), jnp.float32)],
    ),
    compiler_params=_parameters(vmem + 16 * MIB, device, ("parallel", "parallel", "arbitrary")),
    interpret=interpret,
    name="fp4_backward",
  )(layer, tensor_scale, dy_MO, *_in_hbm(codes, scale))


# --- arguments


def _device(device):
  """Generation and VMEM; those of a v6e for an interpreter."""
  return DEVICES.get(device.device_kind, DEVICES["TPU v6 lite"])


def _parts(dtype):
  return 1 if dtype == jnp.bfloat16 else 3


def _up(size, multiple):
  return pl.cdiv(size, multiple) * multiple


def _plan(device, codes, scale, tile, rotation):
  """The plan, and the scales in the order in which a TPU keeps them: the one that pads less."""
  out, k = scale.shape[1:]
  by_k = _up(out, LANES) * _up(k, 8) < _up(out, 8) * _up(k, LANES)
  block = codec.BLOCK[codec.format_of(scale)]
  per = LANES * block // PAIR
  features = 2 * codes.shape[-1]
  plan = decode.Plan(_device(device)[0], by_k, per, tile, out, features, k, rotation)
  return plan, jnp.swapaxes(scale, 1, 2) if by_k else scale


def _scale_block(plan, scales, out, index):
  return pl.BlockSpec((None, scales, out) if plan.by_k else (None, out, scales), index)


def _parameters(vmem_bytes, device, semantics):
  if device.device_kind != TWO_CORES:
    semantics = ("arbitrary",) * len(semantics)
  return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_bytes)


def _in_hbm(*stacks):
  # XLA takes a kernel to read all of its operands: at each layer it would bring a whole stack that
  # fits into VMEM.
  return [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]


# --- kernels


def _forward_many(layer, tensor_scale, x, codes, scale, y, ordered, sums, *, plan, every_step):
  """y [M, O] += the columns of a chunk of K, whose scales fill 128 lanes, times the weights."""
  rows = x.shape[0]

  def order(group, columns):
    for n, term in enumerate(decode.split(columns)):
      ordered[pl.ds(n * rows, rows), decode.lanes_of(group, PAIR)] = term

  decode.order_columns(x, plan, order, every_step)
  sums[...] = jnp.zeros_like(sums)

  def chunk(index, count, valid):
    for first in range(0, codes.shape[0], plan.tile):
      words = decode.words_of(decode.scales_of(scale, index, first, plan, valid), plan)
      total = None
      for n in range(count):
        group = index * plan.per + n
        total = decode.add_product(total, ordered, codes, group, first, plan, words, n)
      sums[:, pl.ds(first, plan.tile)] += total

  decode.for_chunks(plan, chunk)
  y[...] = (decode.join(sums[...], rows) * tensor_scale[layer[0]]).astype(y.dtype)


def _forward_few(layer, tensor_scale, x, codes, scale, y, ordered, sums, *, plan, every_step):
  """The same with a row of `ordered` and `sums` for each row of x and each of 16 scales."""
  rows = ordered.shape[0] // SLAB
  real = rows // _parts(x.dtype)
  per_slab = plan.per * SLAB // LANES  # groups of 128 bytes

  def order(group, columns):
    lane = jax.lax.broadcasted_iota(jnp.int32, (SLAB, PAIR), 1) & (LANES - 1)
    scale_of = (lane >> decode.shift(plan)) + (LANES // plan.per) * (group & (per_slab - 1))
    mine = scale_of == jax.lax.broadcasted_iota(jnp.int32, (SLAB, PAIR), 0)
    # In float32, of which one row is easier to take.
    terms = [term.astype(jnp.float32) for term in decode.split(columns)]
    for row in range(rows):
      values = terms[row // real][row % real : row % real + 1]
      values = jnp.where(mine, values, 0.0).astype(jnp.bfloat16)
      ordered[pl.ds(SLAB * row, SLAB), decode.lanes_of(group, PAIR)] = values

  decode.order_columns(x, plan, order, every_step)
  sums[...] = jnp.zeros_like(sums)

  def chunk(index, count, valid):
    for first in range(0, codes.shape[0], plan.tile):
      scales = decode.scales_of(scale, index, first, plan, valid)
      scales = scales if plan.by_k else scales.T
      totals = [jnp.zeros((SLAB, plan.tile), jnp.float32)] * rows
      for slab in range(0, count, per_slab):
        product, here = None, scales[SLAB * (slab // per_slab) :][:SLAB]
        for n in range(slab, min(slab + per_slab, count)):
          group = index * plan.per + n
          product = decode.add_product(product, ordered, codes, group, first, plan)
        for row in range(rows):
          totals[row] += product[SLAB * row :][:SLAB] * here
      for row in range(rows):
        sums[pl.ds(SLAB * row, SLAB), pl.ds(first, plan.tile)] += totals[row]

  decode.for_chunks(plan, chunk)
  for row in range(real):
    terms = [
      jnp.sum(sums[pl.ds(SLAB * r, SLAB), :], 0, keepdims=True) for r in range(row, rows, real)
    ]
    y[row : row + 1, :] = (decode.add(terms) * tensor_scale[layer[0]]).astype(y.dtype)


def _backward(layer, tensor_scale, dy, codes, scale, dx, sums, *, plan):
  """dx [M, 256 per group] += a block of O of dy, times the weights."""
  rows, width = dy.shape
  step, steps = pl.program_id(2), pl.num_programs(2)
  left = plan.out - step * width if plan.out % width else None  # of O, in this block

  @pl.when(step == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)

  def chunk(count, valid):
    for first in range(0, width, plan.tile):
      grads = dy[:, pl.ds(first, plan.tile)]
      if left is not None:
        grads = decode.first_of(grads, left - first, 1)
      grads = jnp.concatenate(decode.split(grads), 0)
      words = decode.words_of(decode.scales_of(scale, 0, first, plan, valid, left), plan)
      for n in range(count):
        for offset, w in decode.weights(codes, n, first, plan, words, n):
          at = decode.lanes_of(n, PAIR, offset, w.shape[1])
          sums[:, at] += decode.dot(grads, w, decode.NN)

  whole, tail = divmod(plan.scales, LANES)
  if whole:
    pl.when(pl.program_id(1) < whole)(lambda: chunk(plan.per, LANES))
  if tail:
    groups = plan.groups - whole * plan.per
    pl.when(pl.program_id(1) == whole)(lambda: chunk(groups, tail))

  @pl.when(step == steps - 1)
  def _():
    order = decode.order_matrix(plan)
    for n in range(sums.shape[1] // PAIR):
      at = pl.ds(n * PAIR, PAIR)
      total = decode.join(sums[:, at], rows) * tensor_scale[layer[0]]
      terms = decode.split(total.astype(dx.dtype))
      total = decode.add([decode.dot(term, order, decode.NT) for term in terms])
      dx[:, at] = (total * decode.norm(plan)).astype(dx.dtype)
