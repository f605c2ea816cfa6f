"""x @ W with both in FP4 on Blackwell (sm_100): block-scaled tcgen05 products (W4A4).

UNVERIFIED: compiled for a B200, never run; no interpreter knows tcgen05. So it is not chosen by
rule; XLA's cuDNN product is (`cudnn`), which takes NVFP4 only.

A persistent grid of CTAs with two warpgroups. One warp of the first copies by TMA, another starts
the products; the second warpgroup takes results out of tensor memory, multiplies them with the
rows' multipliers and stores them, while the next tile is under way. Codes and scales go through one
ring of slots of 256 columns of K; scales are copied on into tensor memory before their product.
With many rows two CTAs share a product of 256 x 256: each holds half of x and of W (`collective`).
With few, tiles are cut along K over the CTAs (`mosaic_gpu_schedule`).

The tensor core wants scales in tiles of 128 rows by 4 blocks (`swizzle`). They are kept as in
checkpoints, so XLA swizzles the layer's scales of W at every call: read and written once more, an
eighth (NVFP4) or a sixteenth (MXFP4) of the codes' bytes each way. Give `swizzled` to save that.
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
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, scale_tiles
from pallas_kernels.fp4_gemm import mosaic_gpu_schedule as schedules

MULTIPROCESSORS = 148  # of a B200; where `target` knows no GPU
TILE = 128  # rows of x, and of W, of a CTA
GROUP = 256  # columns of a step: one line of the 128-byte swizzle
SLOTS = 4  # [ours: 4 x 36 KiB under way; not measured]
OUT_COLUMNS = 64  # of the slots from which the result is stored
TILE_ROWS, TILE_BLOCKS = scale_tiles.ROWS, scale_tiles.BLOCKS
swizzle = scale_tiles.swizzle
_COPY_WARP, _PRODUCT_WARP = 0, 1


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """collective: two CTAs share a product. ctas: on the grid, in pairs if so. split: along K."""

  collective: bool
  ctas: int
  split: bool


def default_block_sizes(
  rows: int, codes_shape: tuple[int, ...], multiprocessors: int
) -> BlockSizes:
  """Sizes for x [rows, K] and codes [..., O, K / 2]."""
  features, width = codes_shape[-2], 2 * codes_shape[-1]
  collective = rows > TILE and features % (2 * TILE) == 0
  tile = TILE * (1 + collective)
  row_tiles = pl.cdiv(rows, tile)
  tiles, units = row_tiles * features // tile, multiprocessors // (1 + collective)
  split = row_tiles == 1 and schedules.split_pays(tiles, rows, width, units)
  return BlockSizes(collective, min(units, tiles * width // GROUP if split else tiles), split)


def why_not(
  rows: int, x_dtype: Any, codes_shape: tuple[int, ...], format: str, device: target.Target
) -> str | None:
  """None if the kernel can run, else a sentence."""
  del x_dtype, format
  gpu = target.gpu(device)
  if gpu is None or gpu.capability != (10, 0):
    return f"it is made for B200 (sm_100); this is {device.device_kind}"
  if rows < 1:
    return f"x must have a row; got {rows}"
  features, width = codes_shape[-2], 2 * codes_shape[-1]
  if features % TILE:
    return f"out must be a multiple of {TILE}, a tile of scales; got {features}"
  if width % GROUP:
    return f"in must be a multiple of {GROUP}, a line of shared memory; got {width}"
  return None


@dataclasses.dataclass(frozen=True)
class _Plan:
  """A call's sizes."""

  blocks: BlockSizes
  rows: int  # of x a CTA copies and stores; the product's others are whatever was there
  scales: int  # of a row in a step
  schedule: schedules.Schedule

  @property
  def axis(self) -> str | None:
    return "pair" if self.blocks.collective else None

  @property
  def tile(self) -> int:
    """Rows, and columns, of the result that a product computes."""
    return TILE * (1 + self.blocks.collective)

  @property
  def results(self) -> int:
    """Tiles in tensor memory: of its 512 columns the slots' scales need 64 to 192."""
    return 1 if self.blocks.collective else 2


def _body(plan, layer_ref, x_ref, w_ref, xs_ref, ws_ref, factor_ref, y_ref, **scratch):
  share = plan.schedule.share(lax.axis_index("cta"))
  ring = schedules.Ring(SLOTS, scratch["full"], scratch["empty"])
  refs = (x_ref, w_ref, xs_ref, ws_ref)
  warpgroup = lax.axis_index("warpgroup")
  leads = lax.axis_index("pair") == 0 if plan.blocks.collective else True

  @pl.when(warpgroup == 0)
  def _():
    @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
    def _():
      warp = lax.axis_index("warp")

      @pl.when(warp == _COPY_WARP)
      def _():
        _copy(plan, share, layer_ref[0], ring, refs, scratch)

      @pl.when(jnp.logical_and(warp == _PRODUCT_WARP, leads))
      def _():
        _products(plan, share, ring, scratch)

  @pl.when(warpgroup == 1)
  def _():
    _store(plan, share, factor_ref, y_ref, scratch)


def _copy(plan, share, layer, ring, refs, scratch):
  """The copying warp."""
  x_ref, w_ref, xs_ref, ws_ref = refs
  scale_tiles = plan.tile // TILE_ROWS
  halves, both = (
    (plgpu.CopyPartition.PARTITIONED(0), plgpu.CopyPartition.REPLICATED)
    if plan.blocks.collective
    else (None, None)
  )

  def step(turn, _):
    tile, k = share.at(turn)
    row_tile, feature_tile = plan.schedule.coordinates(tile)
    slot = ring.fill(turn)
    columns = pl.ds(k * GROUP, GROUP)
    blocks = pl.ds(k * (plan.scales // TILE_BLOCKS), plan.scales // TILE_BLOCKS)
    rows = pl.ds(row_tile * plan.tile, plan.tile if plan.blocks.collective else plan.rows)
    features = pl.ds(feature_tile * plan.tile, plan.tile)
    x_scales, w_scales = (pl.ds(i * scale_tiles, scale_tiles) for i in (row_tile, feature_tile))
    at = lambda name: scratch[name].at[slot]
    for source, slot_ref, partition in (
      (x_ref.at[rows, columns], at("x_smem").at[: plan.rows], halves),
      (w_ref.at[layer, features, columns], at("w_smem"), halves),
      (xs_ref.at[x_scales, blocks], at("xs_smem"), halves),
      (ws_ref.at[w_scales, blocks], at("ws_smem"), both),
    ):
      plgpu.copy_gmem_to_smem(
        source,
        slot_ref,
        ring.full.at[slot],
        collective_axes=plan.axis,
        leader_tracked=partition,
      )

  lax.fori_loop(0, share.steps, step, None)


def _products(plan, share, ring, scratch):
  """The warp that starts the products, of the leading CTA."""

  def tile_part(i, _):
    result = lax.rem(i, plan.results)

    @pl.when(i >= plan.results)
    def _():
      plgpu.barrier_wait(scratch["stored"].at[result])

    begin, end = share.turns(i)
    sums = scratch["sums"].at[:, pl.ds(result * plan.tile, plan.tile)]

    def step(turn, _):
      slot = ring.take(turn)
      # A slot has its own scales in tensor memory: nothing orders their next copy behind a product
      # but the slot's turn. Tensor memory has no dynamic index for those of 256 rows.
      for i in range(SLOTS):
        product = functools.partial(_product, plan, ring, scratch, sums, i, turn > begin)
        pl.when(slot == i)(product)

    lax.fori_loop(begin, end, step, None)
    plgpu.tcgen05_commit_arrive(scratch["computed"].at[result], collective_axis=plan.axis)

  lax.fori_loop(0, share.tiles, tile_part, None)


def _product(plan, ring, scratch, sums, slot, accumulate):
  """Starts sums (+)= x w^T of a slot."""
  scales = [scratch[name][slot] for name in ("xs_tmem", "ws_tmem")]
  for name, in_tensor_memory in zip(("xs_smem", "ws_smem"), scales):
    plgpu.async_copy_scales_to_tmem(
      scratch[name].at[slot], in_tensor_memory, collective_axis=plan.axis
    )
  plgpu.tcgen05_mma(
    sums,
    scratch["x_smem"].at[slot],
    plgpu.transpose_ref(scratch["w_smem"].at[slot], (1, 0)),
    ring.empty.at[slot],
    a_scale=scales[0],
    b_scale=scales[1],
    accumulate=accumulate,
    collective_axis=plan.axis,
  )


def _store(plan, share, factor_ref, y_ref, scratch):
  """The warpgroup that stores results: a CTA's rows of each tile."""
  cta = lax.axis_index("cta")
  half = lax.axis_index("pair") if plan.blocks.collective else 0

  def tile_part(i, _):
    result, tile = lax.rem(i, plan.results), share.tile(i)
    row_tile, feature_tile = plan.schedule.coordinates(tile)
    first = row_tile * plan.tile + half * TILE
    factor = plgpu.load(
      factor_ref.at[pl.ds(first, TILE)],
      (),
      layout=plgpu.Layout.TCGEN05.reduce(1),
      optimized=False,
    )
    plgpu.barrier_wait(scratch["computed"].at[result])
    for piece in range(plan.tile // OUT_COLUMNS):
      inside, columns = piece * OUT_COLUMNS, functools.partial(pl.ds, size=OUT_COLUMNS)
      y = plgpu.async_load_tmem(scratch["sums"].at[:, columns(result * plan.tile + inside)])
      y = y * lax.broadcast_in_dim(factor, y.shape, [0])
      slot = scratch["y_smem"].at[piece % 2]
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      slot[...] = y.astype(y_ref.dtype)
      plgpu.commit_smem()
      out = y_ref.at[
        plan.schedule.part(cta, tile),
        pl.ds(first, plan.rows),
        columns(feature_tile * plan.tile + inside),
      ]
      plgpu.copy_smem_to_gmem(slot.at[: plan.rows], out)
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(scratch["stored"].at[result])

  lax.fori_loop(0, share.tiles, tile_part, None)
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scratch(plan: _Plan, scale_dtype, y_dtype) -> dict[str, Any]:
  collective = plan.blocks.collective
  swizzled = lambda columns: (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
  codes = plgpu.SMEM((SLOTS, TILE, GROUP), jnp.float4_e2m1fn, transforms=swizzled(GROUP))
  scales = lambda rows: plgpu.SMEM(
    (SLOTS, rows // TILE_ROWS, plan.scales // TILE_BLOCKS, 32, 16), scale_dtype
  )
  one = lambda rows: plgpu.TMEM(
    (rows, plan.scales), scale_dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT, collective=collective
  )
  stored = (
    functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",))
    if collective
    else plgpu.Barrier
  )
  ordered = functools.partial(plgpu.Barrier, num_arrivals=1, orders_tensor_core=True)
  out_columns = 128 // jnp.dtype(y_dtype).itemsize
  return {
    "x_smem": codes,
    "w_smem": codes,
    "xs_smem": scales(TILE),
    "ws_smem": scales(plan.tile),
    "y_smem": plgpu.SMEM((2, TILE, OUT_COLUMNS), y_dtype, transforms=swizzled(out_columns)),
    "sums": plgpu.TMEM((TILE, plan.results * plan.tile), jnp.float32, collective=collective),
    "xs_tmem": [one(TILE)] * SLOTS,
    "ws_tmem": [one(plan.tile)] * SLOTS,
    "full": plgpu.Barrier(num_arrivals=4, num_barriers=SLOTS),
    "empty": ordered(num_barriers=SLOTS),
    "computed": ordered(num_barriers=plan.results),
    "stored": stored(num_arrivals=1, num_barriers=plan.results, orders_tensor_core=True),
  }


def forward_rows(
  rows: codec.Rows,
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None,
  dtype: jax.typing.DTypeLike,
  *,
  swizzled: Shaped[Array, "*stack r b 32 16"] | None = None,
  blocks: BlockSizes | None = None,
) -> Float[Array, "M O"]:
  """x @ W^T for x rounded to FP4 (`codec.quantize_rows`), with float32 sums.

  Args:
    rows: codes [M, H], scale [M, k], multiplier [M], of W's format.
    layer: index into a stack of one axis, clamped; None for one matrix.
    dtype: of the result.
    swizzled: `swizzle(scale)`, where it is kept.
  """
  if layer is None:
    codes, scale, tensor_scale, layer = codes[None], scale[None], tensor_scale[None], jnp.int32(0)
    swizzled = None if swizzled is None else swizzled[None]
  layers, features, half = codes.shape
  layer = jnp.clip(layer, 0, layers - 1)
  block = codec.BLOCK[codec.format_of(scale)]
  count = rows.codes.shape[0]
  gpu = target.gpu(target.current_target())
  multiprocessors = gpu.multiprocessors if gpu else MULTIPROCESSORS
  blocks = blocks or default_block_sizes(count, codes.shape, multiprocessors)
  tile = TILE * (1 + blocks.collective)
  schedule = schedules.Schedule(
    pl.cdiv(count, tile), features // tile, 2 * half // GROUP, blocks.ctas, blocks.split
  )
  plan = _Plan(blocks, min(TILE, pl.cdiv(count, 8) * 8), GROUP // block, schedule)
  pad = lambda x, size: jnp.pad(x, [(0, size - count)] + [(0, 0)] * (x.ndim - 1))
  whole = schedule.row_tiles * tile
  kept = plan.rows if whole == TILE else whole
  x, factor = pad(rows.codes, kept), pad(rows.multiplier, whole)
  x_scale = swizzle(pad(rows.scale, whole))
  w_scale = swizzle(scale[layer]) if swizzled is None else swizzled[layer]
  y_dtype = jnp.float32 if blocks.split else dtype
  y_SMO = _call(plan, x.shape[0], features, y_dtype)(
    layer[None], _as_fp4(x), _as_fp4(codes), _as_scale(x_scale), _as_scale(w_scale),
    factor if blocks.split else factor * tensor_scale[layer],
  )  # fmt: skip
  if not blocks.split:
    return y_SMO[0, :count]
  return (schedule.add_parts(y_SMO[:, :count]) * tensor_scale[layer]).astype(dtype)


def _call(plan: _Plan, rows: int, features: int, y_dtype):
  """The kernel, over (layer, x, W, scales of x, scales of W, multipliers of the rows)."""
  collective = plan.blocks.collective
  scale_dtype = jnp.float8_e4m3fn if plan.scales == GROUP // 16 else jnp.float8_e8m0fnu
  return plgpu.kernel(
    functools.partial(_body, plan),
    out_type=jax.ShapeDtypeStruct((plan.schedule.parts, rows, features), y_dtype),
    scratch_types=_scratch(plan, scale_dtype, y_dtype),
    grid=(plan.blocks.ctas,),
    grid_names=("cta",),
    cluster=(2,) if collective else (),
    cluster_names=("pair",) if collective else (),
    num_threads=2,
    thread_name="warpgroup",
    kernel_name="fp4_gemm_sm100",
  )


def _as_fp4(codes):
  """[..., K] of the four-bit type: the same bytes, which XLA does not copy."""
  pairs = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn)
  return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _as_scale(scale):
  if scale.dtype == jnp.uint8:
    return lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
  return scale
