"""x @ W for a packed W on H100 and H200 (sm_90): decoded in registers, multiplied by wgmma (W4A16).

Y^T = W X^T: wgmma takes its operand A from registers, so the decoded weights never see shared
memory; X stays there, as operand B. One warpgroup copies by TMA, the others decode and multiply
([64, 256] weights a step and warpgroup, `mosaic_gpu_decode`), coupled by two rings of slots: packed
weights with their block scales, and x. The whole stack [L, O, H] is an operand and the layer an
index into it: nothing is sliced or repacked before the kernel.

The grid is one CTA a multiprocessor, each with a list of tiles [64 * warpgroups, rows]. With few
rows there are too few tiles to keep all multiprocessors busy, so they are cut along K: every CTA
takes the same number of steps, and a tile's parts are added afterwards, in float32 and in a fixed
order. Which is better is estimated from bytes and rounds (`default_block_sizes`), not measured.

Needs x in bfloat16. The sums are float32, over exact operands.

Never run on a GPU yet. Checked instead: rings, barriers, cutting and sums in interpret mode, with a
race detector; the decoding by executing its PTX on numpy; registers, spills and shared memory by
compiling for an H100.
Dims: M rows of x, O out, K in, H = K / 2, k = K / block, S parts of a tile.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec
from pallas_kernels.fp4_gemm import mosaic_gpu_decode as decode
from pallas_kernels.fp4_gemm import mosaic_gpu_schedule as schedules

SHARED_BYTES = 227 * 1024  # of a CTA on sm_90
MULTIPROCESSORS = 132  # of an H100 SXM and an H200; where `target` knows no GPU
MAX_ROWS = 256  # of x a tile: wgmma's N
REGISTERS = 512  # times 128 threads, of a multiprocessor
COPY_REGISTERS = 24  # a thread of the copying warpgroup
OUT_BYTES = 16 * 1024  # of the slots from which the result is stored
OTHER_BYTES = 4 * 1024  # barriers and alignment
MAX_STAGES = 6  # [ours: 100 to 200 KiB under way cover the latency of the memory; not measured]
GROUP, ROWS = decode.GROUP, decode.ROWS
# K must be a multiple: TMA moves at least 16 bytes of a row's scales.
WIDTH_MULTIPLE = {"nvfp4": 256, "mxfp4": 512}


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """How the work is cut.

  rows: of x a tile, a multiple of 8, at most 256.
  warpgroups: that multiply; each has 64 rows of W.
  columns: of a slot of x; 64, 128 or 256.
  stages, x_stages: slots of packed weights, [64 * warpgroups, 256], and of x, [rows, columns].
  ctas: on the grid, one a multiprocessor.
  split: whether tiles are cut along K, each CTA taking the same number of steps.
  """

  rows: int
  warpgroups: int
  columns: int
  stages: int
  x_stages: int
  ctas: int
  split: bool

  @property
  def pool(self) -> int:
    """Registers that a CTA starts with: 128 times as many, the same for each of its threads."""
    warpgroups = self.warpgroups + 1
    return REGISTERS // warpgroups // 8 * 8 * warpgroups

  @property
  def registers(self) -> int:
    """Of a thread that multiplies. More than the pool holds, and the kernel would wait for ever."""
    return min(240, (self.pool - COPY_REGISTERS) // self.warpgroups // 8 * 8)

  @property
  def overlaps(self) -> bool:
    """Whether a thread has registers for sums, two halves of operand A (64) and its other needs."""
    return self.rows // 2 + 64 + 26 <= self.registers  # 26: what ptxas still accepts


def shared_bytes(blocks: BlockSizes) -> int:
  """Of shared memory that a CTA takes at most."""
  packed = ROWS * blocks.warpgroups * (decode.BYTES + decode.SCALE_BYTES)
  x = blocks.rows * blocks.columns * 2
  return blocks.stages * packed + blocks.x_stages * x + OUT_BYTES + OTHER_BYTES


def default_block_sizes(
  rows: int, codes_shape: tuple[int, ...], multiprocessors: int
) -> BlockSizes:
  """Sizes for x [rows, K] and codes [..., O, K / 2]."""
  features, width = codes_shape[-2], 2 * codes_shape[-1]
  row_tiles = pl.cdiv(rows, MAX_ROWS)
  tile_rows = pl.cdiv(pl.cdiv(rows, row_tiles), 8) * 8
  steps = width // GROUP
  # Few rows: the more warps the better they hide each other's waiting. Many: registers for sums.
  warpgroups = 4 if tile_rows <= 64 else 2
  while features % (ROWS * warpgroups) or (
    warpgroups > 1 and features // (ROWS * warpgroups) * steps * row_tiles < multiprocessors
  ):
    warpgroups //= 2
  columns = GROUP if tile_rows <= 32 else 2 * decode.PIECE if tile_rows <= 64 else decode.PIECE
  tiles = row_tiles * features // (ROWS * warpgroups)
  split = row_tiles == 1 and schedules.split_pays(tiles, rows, width, multiprocessors)
  ctas = min(multiprocessors, tiles * steps if split else tiles)
  parts = GROUP // columns
  sizes = functools.partial(BlockSizes, tile_rows, warpgroups, columns, ctas=ctas, split=split)
  # The deepest rings that fit; with many rows not both whole steps, but two of packed weights.
  rings = [(n, n * parts) for n in range(MAX_STAGES, 1, -1)]
  rings += [(2, n) for n in range(2 * parts - 1, parts, -1)]
  return next(b for ring in rings if shared_bytes(b := sizes(*ring)) <= SHARED_BYTES)


def why_not(
  rows: int, x_dtype: Any, codes_shape: tuple[int, ...], format: str, device: target.Target
) -> str | None:
  """None if the kernel can run, else a sentence."""
  gpu = target.gpu(device)
  if gpu is None or gpu.capability != (9, 0):
    return f"it is made for H100 and H200 (sm_90); this is {device.device_kind}"
  if x_dtype != jnp.bfloat16:
    return f"x must be bfloat16, wgmma's operand; got {jnp.dtype(x_dtype).name}"
  if rows < 1:
    return f"x must have a row; got {rows}"
  features, width = codes_shape[-2], 2 * codes_shape[-1]
  if features % ROWS:
    return f"out must be a multiple of {ROWS}, the rows of wgmma; got {features}"
  if width % WIDTH_MULTIPLE[format]:
    return (
      f"in must be a multiple of {WIDTH_MULTIPLE[format]} for {format}, of whose scales TMA moves "
      f"16 bytes a row; got {width}"
    )
  return None


@dataclasses.dataclass(frozen=True)
class _Plan:
  """A call's sizes."""

  blocks: BlockSizes
  format: str
  schedule: schedules.Schedule
  interpret: Any


def _body(plan, layer_ref, tensor_scale_ref, x_ref, codes_ref, scale_ref, y_ref, **scratch):
  warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
  share, blocks, layer = plan.schedule.share(cta), plan.blocks, layer_ref[0]
  rings = (
    schedules.Ring(blocks.stages, scratch["full"], scratch["empty"]),
    schedules.Ring(blocks.x_stages, scratch["x_full"], scratch["x_empty"]),
  )

  @pl.when(warpgroup == blocks.warpgroups)
  def _():
    plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
    _copy(plan, share, layer, rings, x_ref, codes_ref, scale_ref, scratch)

  @pl.when(warpgroup < blocks.warpgroups)
  def _():
    plgpu.set_max_registers(blocks.registers, action="increase")
    factor = None if blocks.split else tensor_scale_ref[layer]
    _multiply(plan, share, rings, warpgroup, cta, factor, y_ref, scratch)


def _copy(plan, share, layer, rings, x_ref, codes_ref, scale_ref, scratch):
  """The copying warpgroup."""
  blocks, (ring, x_ring) = plan.blocks, rings
  scale_step = WIDTH_MULTIPLE[plan.format] // GROUP  # steps that 16 bytes of scales last

  def step(turn, _):
    tile, k = share.at(turn)
    row_tile, feature_tile = plan.schedule.coordinates(tile)
    slot = ring.fill(turn)
    for w in range(blocks.warpgroups):
      rows = pl.ds((feature_tile * blocks.warpgroups + w) * ROWS, ROWS)
      columns = pl.ds(k * decode.BYTES, decode.BYTES)
      scales = pl.ds(lax.div(k, scale_step) * decode.SCALE_BYTES, decode.SCALE_BYTES)
      for source, slots, part in (
        (codes_ref, scratch["codes_smem"], columns),
        (scale_ref, scratch["scale_smem"], scales),
      ):
        plgpu.copy_gmem_to_smem(source.at[layer, rows, part], slots.at[slot, w], ring.full.at[slot])
    parts = GROUP // blocks.columns
    for part in range(parts):
      slot = x_ring.fill(turn * parts + part)
      rows = pl.ds(row_tile * blocks.rows, blocks.rows)
      columns = pl.ds(k * GROUP + part * blocks.columns, blocks.columns)
      plgpu.copy_gmem_to_smem(
        x_ref.at[rows, columns], scratch["x_smem"].at[slot], x_ring.full.at[slot]
      )

  lax.fori_loop(0, share.steps, step, None)
  ring.drain(share.steps)
  x_ring.drain(share.steps * (GROUP // blocks.columns))


def _multiply(plan, share, rings, warpgroup, cta, factor, y_ref, scratch):
  """A multiplying warpgroup: its tiles one after the other, of each the steps that are its own."""

  def tile_part(i, _):
    def accumulate(sums_ref):
      step = lambda turn, _: _step(plan, share, rings, warpgroup, turn, sums_ref, scratch)
      lax.fori_loop(*share.turns(i), step, None)
      return sums_ref[...]

    sums = pl.run_scoped(accumulate, plgpu.ACC((ROWS, plan.blocks.rows), jnp.float32))
    row_tile, feature_tile = plan.schedule.coordinates(share.tile(i))
    first = (feature_tile * plan.blocks.warpgroups + warpgroup) * ROWS
    out = y_ref.at[plan.schedule.part(cta, share.tile(i)), :, pl.ds(first, ROWS)]
    if factor is not None:
      sums = sums * factor
    _store(plan, sums.astype(y_ref.dtype), out, row_tile, scratch["y_smem"], warpgroup)

  lax.fori_loop(0, share.tiles, tile_part, None)
  _finish(rings[1], share.steps, GROUP // plan.blocks.columns, 0)
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _step(plan, share, rings, warpgroup, turn, sums_ref, scratch):
  """sums += (64 rows of W) (x^T), over the GROUP columns of one step.

  In two halves. Where registers suffice, the products of one run while the next is decoded, also
  into the next step; a slot of x is given back when they are done.
  """
  ring, x_ring = rings
  slot = ring.take(turn)
  operand = _operand(plan, share.at(turn)[1], scratch, slot, warpgroup)
  parts, per_slot = GROUP // plan.blocks.columns, plan.blocks.columns // decode.PIECE
  for half in range(2):
    if not plan.blocks.overlaps:
      _finish(x_ring, turn, parts, half)
    pieces = operand(half)
    if half == 1:
      plgpu.barrier_arrive(ring.empty.at[slot])
    if plan.blocks.overlaps:
      _finish(x_ring, turn, parts, half)
    for i, piece in enumerate(pieces, 2 * half):
      part, column = divmod(i, per_slot)
      if column == 0:
        x_slot = x_ring.take(turn * parts + part)
      columns = slice(column * decode.PIECE, (column + 1) * decode.PIECE)
      _wgmma(plan, sums_ref, piece, scratch["x_smem"].at[x_slot, :, columns], scratch, warpgroup)


def _finish(x_ring, turn, parts, half):
  """Waits for the products of the half before this one, and gives back the slots it ended with."""
  plgpu.wgmma_wait(0)

  def arrive(behind):
    plgpu.barrier_arrive(x_ring.empty.at[lax.rem(turn * parts - behind, x_ring.slots)])

  if half == 0:

    @pl.when(turn > 0)
    def _():
      for behind in range(max(parts // 2, 1), 0, -1):
        arrive(behind)
  else:
    for part in range(parts // 2):
      arrive(-part)


def _operand(plan, k, scratch, slot, warpgroup):
  """A function that decodes half a step's weights: two pieces of operand A."""
  columns = GROUP // codec.BLOCK[plan.format]  # of the 16 scales that are there
  codes, scale = scratch["codes_smem"].at[slot, warpgroup], scratch["scale_smem"]
  if not plan.interpret:
    begin = lax.rem(k * columns, decode.SCALE_BYTES)
    factors = decode.factors_in_registers(
      scale.at[slot, warpgroup, :, pl.ds(begin, columns)], plan.format
    )
    return lambda half: decode.decode_in_registers(codes, factors, half, plan.format)
  scale = scale[slot, warpgroup]
  if columns < decode.SCALE_BYTES:
    scale = jnp.where(lax.rem(k, 2) == 0, scale[:, :columns], scale[:, columns:])
  pieces = decode.decode_by_jax(codes[...], scale, plan.format)
  return lambda half: pieces[2 * half : 2 * half + 2]


def _wgmma(plan, sums_ref, a, x_smem, scratch, warpgroup):
  """sums += a x^T."""
  if not plan.interpret:
    plgpu.wgmma(sums_ref, a, plgpu.transpose_ref(x_smem, (1, 0)))
    return
  # The interpreter takes wgmma's operands from shared memory only, and as they lie there.
  a_smem, xt_smem = scratch["a_smem"].at[warpgroup], scratch["xt_smem"].at[warpgroup]
  a_smem[...] = a
  xt_smem[...] = x_smem[...].T
  plgpu.wgmma(sums_ref, a_smem, xt_smem)


def _store(plan, y, out, row_tile, y_smem, warpgroup):
  """A tile's result y [64, rows] into the transposed array, some rows of x at a time."""
  piece = y_smem.shape[1]
  for start in range(0, plan.blocks.rows, piece):
    rows = min(piece, plan.blocks.rows - start)
    slot = y_smem.at[warpgroup, :rows]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    part = y[:, start : start + rows]
    if plan.interpret:
      slot[...] = part.T
    else:
      transposed = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
      plgpu.transpose_ref(slot, (1, 0))[...] = transposed
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(row_tile * plan.blocks.rows + start, rows)])


def _scratch(plan: _Plan, x_dtype, scale_dtype, y_dtype) -> dict[str, Any]:
  blocks, itemsize = plan.blocks, jnp.dtype(y_dtype).itemsize
  n = blocks.warpgroups
  swizzled = lambda columns: (
    plgpu.TilingTransform((8, columns)),
    plgpu.SwizzleTransform(128),
  )
  y_rows = min(blocks.rows, OUT_BYTES // (n * ROWS * itemsize))
  shapes = {
    "codes_smem": plgpu.SMEM(
      (blocks.stages, n, ROWS, decode.BYTES), jnp.uint8, transforms=decode.CODES_TRANSFORMS
    ),
    "scale_smem": plgpu.SMEM((blocks.stages, n, ROWS, decode.SCALE_BYTES), scale_dtype),
    "x_smem": plgpu.SMEM(
      (blocks.x_stages, blocks.rows, blocks.columns), x_dtype, transforms=swizzled(64)
    ),
    "y_smem": plgpu.SMEM((n, y_rows, ROWS), y_dtype, transforms=swizzled(128 // itemsize)),
    "full": plgpu.Barrier(num_arrivals=2 * n, num_barriers=blocks.stages),
    "empty": plgpu.Barrier(num_arrivals=n, num_barriers=blocks.stages),
    "x_full": plgpu.Barrier(num_arrivals=1, num_barriers=blocks.x_stages),
    "x_empty": plgpu.Barrier(num_arrivals=n, num_barriers=blocks.x_stages),
  }
  if plan.interpret:
    shapes["a_smem"] = plgpu.SMEM((n, ROWS, decode.PIECE), x_dtype)
    shapes["xt_smem"] = plgpu.SMEM((n, decode.PIECE, blocks.rows), x_dtype)
  return shapes


def forward(
  x_MK: BFloat16[Array, "M K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None = None,
  *,
  blocks: BlockSizes | None = None,
  interpret: Any = False,
) -> BFloat16[Array, "M O"]:
  """x @ W^T with float32 sums; see `why_not` for what it takes.

  Args:
    layer: index into a stack of one axis, clamped; None for one matrix.
    interpret: parameters of the Mosaic-GPU interpreter, for a CPU.
  """
  if layer is None:
    codes, scale, tensor_scale, layer = codes[None], scale[None], tensor_scale[None], jnp.int32(0)
  layers, features, _ = codes.shape
  layer = jnp.clip(layer, 0, layers - 1)
  tensor_scale = tensor_scale * 2.0 ** -decode.POWER[codec.format_of(scale)]
  rows, width = x_MK.shape
  gpu = target.gpu(target.current_target())
  multiprocessors = gpu.multiprocessors if gpu else MULTIPROCESSORS
  blocks = blocks or default_block_sizes(rows, codes.shape, multiprocessors)
  schedule = schedules.Schedule(
    pl.cdiv(rows, blocks.rows), features // (ROWS * blocks.warpgroups), width // GROUP,
    blocks.ctas, blocks.split,
  )  # fmt: skip
  plan = _Plan(blocks, codec.format_of(scale), schedule, interpret)
  x_MK = jnp.pad(decode.permute(x_MK), ((0, schedule.row_tiles * blocks.rows - rows), (0, 0)))
  y_dtype = jnp.float32 if blocks.split else x_MK.dtype
  y_SMO = plgpu.kernel(
    functools.partial(_body, plan),
    out_type=jax.ShapeDtypeStruct((schedule.parts, x_MK.shape[0], features), y_dtype),
    scratch_types=_scratch(plan, x_MK.dtype, scale.dtype, y_dtype),
    grid=(blocks.ctas,),
    grid_names=("cta",),
    num_threads=blocks.warpgroups + 1,
    thread_name="warpgroup",
    interpret=interpret,
    kernel_name="fp4_gemm_sm90",
  )(layer[None], tensor_scale, x_MK, codes, scale)
  if not blocks.split:
    return y_SMO[0, :rows]
  return (schedule.add_parts(y_SMO[:, :rows]) * tensor_scale[layer]).astype(x_MK.dtype)
