"""Traffic, collectives and buffers of hand-written HLO, in the three compilers' manners.

Every expected figure is added up by hand beside it: reads + writes in bytes, loops by their trips.
"""
# ruff: noqa: E501 (HLO has one instruction a line)

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlab.parallel import hlo

pytestmark = pytest.mark.usefixtures("full_compilation")

# A GPU's: a loop over four layers that slices the weights, multiplies, and writes a cache in place.
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8, replica_count=1

%fused_slice (param_0: bf16[4,256,128], param_1: s32[]) -> bf16[1,256,128] {
  %param_0 = bf16[4,256,128]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1), metadata={scheduling_name="param_1"}
  %zero = s32[] constant(0)
  %dynamic-slice.1 = bf16[1,256,128]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,256,128}
  ROOT %copy.1 = bf16[1,256,128]{2,1,0} copy(%dynamic-slice.1)
}

%gemm_computation (parameter_0: bf16[32,256], parameter_1: bf16[256,128]) -> f32[32,128] {
  %parameter_0 = bf16[32,256]{1,0} parameter(0)
  %parameter_1 = bf16[256,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[32,128]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_update (param_0: bf16[4,32,128], param_1: f32[32,128], param_2: s32[]) -> bf16[4,32,128] {
  %param_0 = bf16[4,32,128]{2,1,0} parameter(0)
  %param_1 = f32[32,128]{1,0} parameter(1)
  %convert.1 = bf16[32,128]{1,0} convert(%param_1)
  %bitcast.1 = bf16[1,32,128]{2,1,0} bitcast(%convert.1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %dynamic-update-slice.1 = bf16[4,32,128]{2,1,0} dynamic-update-slice(%param_0, %bitcast.1, %param_2, %zero, %zero)
  ROOT %bitcast.2 = bf16[4,32,128]{2,1,0} bitcast(%dynamic-update-slice.1)
}

%body (param: (s32[], bf16[4,256,128], bf16[4,32,128], bf16[32,256])) -> (s32[], bf16[4,256,128], bf16[4,32,128], bf16[32,256]) {
  %param = (s32[], bf16[4,256,128]{2,1,0}, bf16[4,32,128]{2,1,0}, bf16[32,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%param), index=0
  %w = bf16[4,256,128]{2,1,0} get-tuple-element(%param), index=1
  %cache = bf16[4,32,128]{2,1,0} get-tuple-element(%param), index=2
  %x = bf16[32,256]{1,0} get-tuple-element(%param), index=3
  %slice_fusion = bf16[1,256,128]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/layers/dynamic_slice"}
  %bitcast.3 = bf16[256,128]{1,0} bitcast(%slice_fusion)
  %gemm_fusion = f32[32,128]{1,0} fusion(%x, %bitcast.3), kind=kCustom, calls=%gemm_computation, metadata={op_name="jit(step)/layers/dot"}, backend_config={"kind":"__triton_gemm"}
  %update_fusion = bf16[4,32,128]{2,1,0} fusion(%cache, %gemm_fusion, %i), kind=kLoop, calls=%fused_update
  ROOT %tuple = (s32[], bf16[4,256,128]{2,1,0}, bf16[4,32,128]{2,1,0}, bf16[32,256]{1,0}) tuple(%i, %w, %update_fusion, %x)
}

%condition (param.1: (s32[], bf16[4,256,128], bf16[4,32,128], bf16[32,256])) -> pred[] {
  %param.1 = (s32[], bf16[4,256,128]{2,1,0}, bf16[4,32,128]{2,1,0}, bf16[32,256]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%param.1), index=0
  %four = s32[] constant(4)
  ROOT %lt = pred[] compare(%j, %four), direction=LT
}

ENTRY %main (w.1: bf16[4,256,128], cache.1: bf16[4,32,128], x.1: bf16[32,256]) -> bf16[4,32,128] {
  %w.1 = bf16[4,256,128]{2,1,0} parameter(0)
  %cache.1 = bf16[4,32,128]{2,1,0} parameter(1)
  %x.1 = bf16[32,256]{1,0} parameter(2)
  %start = s32[] constant(0)
  %tuple.1 = (s32[], bf16[4,256,128]{2,1,0}, bf16[4,32,128]{2,1,0}, bf16[32,256]{1,0}) tuple(%start, %w.1, %cache.1, %x.1)
  %while.1 = (s32[], bf16[4,256,128]{2,1,0}, bf16[4,32,128]{2,1,0}, bf16[32,256]{1,0}) while(%tuple.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %gte = bf16[4,32,128]{2,1,0} get-tuple-element(%while.1), index=2
}
"""
LAYER, X, Y, ROW = 256 * 128 * 2, 32 * 256 * 2, 32 * 128 * 4, 32 * 128 * 2
GPU_BYTES = 4 * (
  2 * LAYER  # the slice: one layer is read, not four, and written
  + X + LAYER + Y  # the product
  + Y + ROW + 4  # the update: the product is read, a row of the cache written; and the index
) + 4 * 4  # fmt: skip # the index of the slice


def test_a_loop_on_a_gpu():
  found = hlo.analyse(GPU)
  assert found.bytes == GPU_BYTES
  assert found.collectives == {}
  written = [(r.instruction.shape, r.times, r.in_place) for r in found.results]
  assert written == [
    ("bf16[1,256,128]", 4, False),
    ("bf16[4,32,128]", 4, True),  # as large as the cache, of which only a row is written
    ("f32[32,128]", 4, False),
  ]
  assert found.results[2].instruction.source == "jit(step)/layers/dot"
  assert found.results[1].instruction.source == "update_fusion"  # without metadata: its name


def test_a_copy_of_the_cache_is_a_new_buffer():
  """A fusion whose root changes what the update made writes all of it."""
  rewritten = GPU.replace(
    "ROOT %bitcast.2 = bf16[4,32,128]{2,1,0} bitcast(", "ROOT %c = bf16[4,32,128]{1,2,0} copy("
  )
  found = hlo.analyse(rewritten)
  assert not any(r.in_place for r in found.results)
  assert found.bytes - GPU_BYTES == 4 * (4 * ROW - ROW)


def test_a_loop_without_a_number_counts_once():
  text = re.sub(r', backend_config=\{"known_trip_count.*', "", GPU)
  assert hlo.analyse(text).bytes == GPU_BYTES  # as a TPU has it: the condition says four
  until = text.replace(
    "ROOT %lt = pred[] compare(%j, %four), direction=LT", "ROOT %lt = pred[] x(%j)"
  )
  assert hlo.analyse(until).bytes == GPU_BYTES / 4
  unknown = text.replace("%four = s32[] constant(4)", "%four = s32[] copy(%j)")
  assert hlo.analyse(unknown).bytes == GPU_BYTES / 4
  assert hlo.analyse(unknown, trips=4.0).bytes == GPU_BYTES  # as the caller knows
  assert hlo.analyse(GPU, trips=9.0).bytes == GPU_BYTES  # the compiler knows better
  fused = text.replace(
    "ROOT %lt = pred[] compare(%j, %four), direction=LT",
    "ROOT %lt = pred[] fusion(%j, %four), kind=kLoop, calls=%fused_lt",
  ).replace("%condition (", """%fused_lt (p.0: s32[], p.1: s32[]) -> pred[] {
  %p.0 = s32[] parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %lt.1 = pred[] compare(%p.0, %p.1), direction=LT
}

%condition (""")  # fmt: skip
  assert hlo.analyse(fused).bytes == GPU_BYTES


# A TPU's: tiles and memory on the chip, S(1), in its layouts; slices are fetched there while
# something else runs; a product reads its layer by a fusion inside of its own.
TPU = """HloModule jit_decode, is_scheduled=true, num_partitions=4

%inner_slice (param_0: bf16[4,256,128], param_1: s32[]) -> bf16[256,128] {
  %param_0 = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %dynamic-slice.1 = bf16[1,256,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,256,128}
  ROOT %bitcast.1 = bf16[256,128]{1,0:T(8,128)(2,1)} bitcast(%dynamic-slice.1)
}

%on_chip (param_0.2: s32[]) -> bf16[32,128] {
  %param_0.2 = s32[]{:T(128)S(6)} parameter(0)
  ROOT %broadcast.1 = bf16[32,128]{1,0:T(8,128)(2,1)S(1)} broadcast(%param_0.2), dimensions={}
}

%product (param_0.1: bf16[32,256], param_1.1: bf16[4,256,128], param_2.1: s32[], param_3.1: bf16[4,32,128]) -> (bf16[4,32,128], bf16[32,128]) {
  %param_0.1 = bf16[32,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.1 = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %param_2.1 = s32[]{:T(128)S(6)} parameter(2)
  %param_3.1 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} parameter(3)
  %zero.1 = s32[]{:T(128)} constant(0)
  %fusion.1 = bf16[256,128]{1,0:T(8,128)(2,1)} fusion(%param_1.1, %param_2.1), kind=kLoop, calls=%inner_slice
  %convolution.1 = bf16[32,128]{1,0:T(8,128)(2,1)} convolution(%param_0.1, %fusion.1), dim_labels=bf_io->bf
  %bitcast.2 = bf16[1,32,128]{2,1,0:T(8,128)(2,1)} bitcast(%convolution.1)
  %dynamic-update-slice.1 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%param_3.1, %bitcast.2, %param_2.1, %zero.1, %zero.1)
  ROOT %tuple.1 = (bf16[4,32,128]{2,1,0:T(8,128)(2,1)}, bf16[32,128]{1,0:T(8,128)(2,1)}) tuple(%dynamic-update-slice.1, %convolution.1)
}

ENTRY %main (w: bf16[4,256,128], cache: bf16[4,32,128], x: bf16[32,256], i: s32[]) -> (bf16[4,32,128], bf16[32,128], bf16[64,256]) {
  %w = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %cache = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %x = bf16[32,256]{1,0:T(8,128)(2,1)} parameter(2)
  %i = s32[]{:T(128)S(6)} parameter(3)
  %copy-start = (bf16[32,256]{1,0:T(8,128)(2,1)S(1)}, bf16[32,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %slice-start = ((bf16[4,256,128]{2,1,0:T(8,128)(2,1)}), bf16[1,256,128]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:1], [0:256], [0:128]}
  %copy-done = bf16[32,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %slice-done = bf16[1,256,128]{2,1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start)
  %all-gather = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} all-gather(%copy-done), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1'}, dimensions={0}
  %fusion.2 = (bf16[4,32,128]{2,1,0:T(8,128)(2,1)}, bf16[32,128]{1,0:T(8,128)(2,1)}) fusion(%copy-done, %w, %i, %cache), kind=kOutput, calls=%product
  %fusion.3 = bf16[32,128]{1,0:T(8,128)(2,1)S(1)} fusion(%i), kind=kLoop, calls=%on_chip
  %gte.0 = bf16[4,32,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%fusion.2), index=0
  %gte.1 = bf16[32,128]{1,0:T(8,128)(2,1)} get-tuple-element(%fusion.2), index=1
  %copy.1 = bf16[64,256]{1,0:T(8,128)(2,1)} copy(%all-gather)
  ROOT %tuple.2 = (bf16[4,32,128]{2,1,0:T(8,128)(2,1)}, bf16[32,128]{1,0:T(8,128)(2,1)}, bf16[64,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)S(6)}, s32[]{:T(128)S(6)}, /*index=5*/s32[]{:T(128)S(6)}) tuple(%gte.0, %gte.1, %copy.1, %i, %i, /*index=5*/%i)
}
"""


def test_memory_on_the_chip_is_not_traffic_but_what_comes_from_elsewhere_is():
  found = hlo.analyse(TPU)
  assert found.bytes == (
    X  # x is fetched
    + LAYER  # and a layer, of the four that the slice starts from
    + LAYER + ROW + ROW  # the product: a layer again; it writes a row of the cache, and y
    + 2 * X  # the gathered rows are stored
  )  # fmt: skip
  assert found.collectives == {"all-gather": X}  # a device sends its half, from its chip
  written = [(r.instruction.shape, r.instruction.bytes, r.in_place) for r in found.results]
  # Of the product's two results one overwrites; nothing that only starts is a buffer.
  assert written == [
    ("bf16[4,32,128]", 4 * ROW, True), ("bf16[64,256]", 2 * X, False), ("bf16[32,128]", ROW, False),
  ]  # fmt: skip


# A CPU's: calls, a conditional, an update outside of a fusion, a gather and a scatter.
CPU = """HloModule jit_f, is_scheduled=true

%small (p: (f32[64])) -> (f32[64]) {
  %p = (f32[64]{0}) parameter(0)
  %p0 = f32[64]{0} get-tuple-element(%p), index=0
  %negate.1 = f32[64]{0} negate(%p0)
  ROOT %tuple.1 = (f32[64]{0}) tuple(%negate.1)
}

%large (q: (f32[64])) -> (f32[64]) {
  %q = (f32[64]{0}) parameter(0)
  %q0 = f32[64]{0} get-tuple-element(%q), index=0
  %exponential.1 = f32[64]{0} exponential(%q0), metadata={op_name="jit(f)/exp"}
  %call.1 = f32[64]{0} call(%exponential.1), to_apply=%called
  ROOT %tuple.2 = (f32[64]{0}) tuple(%call.1)
}

%called (c: f32[64]) -> f32[64] {
  %c = f32[64]{0} parameter(0)
  ROOT %log.1 = f32[64]{0} log(%c)
}

ENTRY %main (x: f32[64], table: f32[1000,64], i: s32[8], j: s32[]) -> f32[1000,64] {
  %x = f32[64]{0} parameter(0), metadata={op_name="x"}
  %table = f32[1000,64]{1,0} parameter(1)
  %i = s32[8]{0} parameter(2)
  %j = s32[] parameter(3)
  %names = f32[2]{0} constant({1.5, -2})
  %tuple.3 = (f32[64]{0}) tuple(%x)
  %conditional.1 = (f32[64]{0}) conditional(%j, %tuple.3, %tuple.3), branch_computations={%small, %large}
  %gte.1 = f32[64]{0} get-tuple-element(%conditional.1), index=0
  %bitcast.1 = f32[1,64]{1,0} bitcast(%gte.1)
  %update.1 = f32[1000,64]{1,0} dynamic-update-slice(%table, %bitcast.1, %j, %j)
  %gather.1 = f32[8,64]{1,0} gather(%update.1, %i), offset_dims={1}, collapsed_slice_dims={0}
  ROOT %scatter.1 = f32[1000,64]{1,0} scatter(%update.1, %i, %gather.1), to_apply=%called
}
"""


def test_branches_calls_gathers_and_updates_on_a_cpu():
  found = hlo.analyse(CPU)
  row = 64 * 4
  assert found.bytes == (
    2 * row + 2 * row  # the larger branch: exp, and the log that it calls
    + 2 * row  # a row of the table is overwritten
    + 2 * 8 * row  # eight are gathered
    + 2 * 8 * row  # and scattered
  )  # fmt: skip
  in_place = [r.instruction.opcode for r in found.results if r.in_place]
  assert sorted(in_place) == ["dynamic-update-slice", "scatter"]
  assert {r.instruction.opcode for r in found.results if not r.in_place} == {
    "exponential", "log", "gather"
  }  # fmt: skip
  either = CPU.replace(
    "branch_computations={%small, %large}", "true_computation=%large, false_computation=%small"
  )
  assert hlo.analyse(either).bytes == found.bytes


# --- collectives


MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (p: f32[16,8]) -> f32[16,8] {{
  %p = f32[16,8]{{1,0{}}} parameter(0)
  {}
}}
"""
P_BYTES = 16 * 8 * 4


@pytest.mark.parametrize(
  "line, kind, sent",
  [
    ("ROOT %r = f32[16,8]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%a", "all-reduce", 2 * 3 / 4),
    ("ROOT %r = f32[16,8]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}", "all-reduce", 2 * 1 / 2),
    ("ROOT %r = f32[128,8]{1,0} all-gather(%p), replica_groups={}, dimensions={0}", "all-gather", 7),
    ("ROOT %r = f32[64,8]{1,0} all-gather(%p), replica_groups=[2,4]<=[2,2,2]T(1,0,2), dimensions={0}", "all-gather", 3),
    ("ROOT %r = f32[4,8]{1,0} reduce-scatter(%p), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}", "reduce-scatter", 3 / 4),
    ("ROOT %r = f32[2,8]{1,0} reduce-scatter(%p), replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", "reduce-scatter", 7 / 8),
    ("ROOT %r = f32[16,8]{1,0} all-to-all(%p), replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([2,4]T(1,0)) {'c'}", "all-to-all", 3 / 4),
    ("ROOT %r = f32[16,8]{1,0} all-to-all(%p), replica_groups=mesh['a'=8] {'a':(2)4}", "all-to-all", 3 / 4),
    ("ROOT %r = f32[16,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", "collective-permute", 1),
  ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["", ":T(8,128)S(1)"])
def test_what_a_device_sends(line, kind, sent, where):
  found = hlo.analyse(MODULE.format(where, line))
  assert found.collectives == {kind: sent * P_BYTES}


# As libtpu writes them: a reduce-scatter is a fusion; a gather begins in one, goes on beside the work
# of others, which hand its arrays on, and ends in a last one.
FUSED = """HloModule jit_f, is_scheduled=true, num_partitions=8

%all-reduce-scatter.1 (input: f32[16,8]) -> f32[2,8] {
  %input = f32[16,8]{1,0} parameter(0)
  %all-reduce.1 = f32[16,8]{1,0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %id = s32[] partition-id()
  ROOT %dynamic-slice.1 = f32[2,8]{1,0} dynamic-slice(%all-reduce.1, %id, %id), dynamic_slice_sizes={2,8}
}

%begin (p.0: f32[2,8]) -> (f32[2,8], f32[16,8], u32[]) {
  %p.0 = f32[2,8]{1,0:T(8)S(1)} parameter(0)
  %gather.0 = f32[16,8]{1,0} all-gather(%p.0), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %start = (f32[2,8]{1,0:T(8)S(1)}, f32[16,8]{1,0:T(8)S(1)}, u32[]{:S(2)}) custom-call(%gather.0), custom_call_target="AsyncCollectiveStart"
}

%go_on (p.1: f32[2,8], q.1: f32[16,8], x.1: f32[4,4]) -> (f32[4,4], f32[2,8], f32[16,8], f32[16,8]) {
  %p.1 = f32[2,8]{1,0:T(8)S(1)} parameter(0)
  %q.1 = f32[16,8]{1,0} parameter(1)
  %x.1 = f32[4,4]{1,0} parameter(2)
  %gather.1 = f32[16,8]{1,0} all-gather(%p.1), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"0"}}
  %product = f32[4,4]{1,0} convolution(%x.1, %x.1), dim_labels=bf_io->bf
  ROOT %tuple.1 = (f32[4,4]{1,0}, f32[2,8]{1,0:T(8)S(1)}, f32[16,8]{1,0}, f32[16,8]{1,0}) tuple(%product, %p.1, %q.1, %gather.1)
}

%finish (p.2: f32[2,8], q.2: f32[16,8]) -> f32[16,8] {
  %p.2 = f32[2,8]{1,0:T(8)S(1)} parameter(0)
  %q.2 = f32[16,8]{1,0:T(8)S(1)} parameter(1)
  %gather.2 = f32[16,8]{1,0} all-gather(%p.2), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %done = f32[16,8]{1,0:T(8)S(1)} custom-call(%p.2, %q.2, %gather.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (g: f32[16,8], w: f32[2,8], x: f32[4,4]) -> f32[2,8] {
  %g = f32[16,8]{1,0:T(8)S(1)} parameter(0)
  %w = f32[2,8]{1,0:T(8)S(1)} parameter(1)
  %x = f32[4,4]{1,0} parameter(2)
  %f.0 = (f32[2,8]{1,0:T(8)S(1)}, f32[16,8]{1,0:T(8)S(1)}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%begin
  %a.0 = f32[2,8]{1,0:T(8)S(1)} get-tuple-element(%f.0), index=0
  %b.0 = f32[16,8]{1,0} get-tuple-element(%f.0), index=1
  %f.1 = (f32[4,4]{1,0}, f32[2,8]{1,0:T(8)S(1)}, f32[16,8]{1,0}, f32[16,8]{1,0}) fusion(%a.0, %b.0, %x), kind=kCustom, calls=%go_on
  %a.1 = f32[2,8]{1,0:T(8)S(1)} get-tuple-element(%f.1), index=1
  %b.1 = f32[16,8]{1,0:T(8)S(1)} get-tuple-element(%f.1), index=2
  %f.2 = f32[16,8]{1,0:T(8)S(1)} fusion(%a.1, %b.1), kind=kCustom, calls=%finish
  ROOT %f.3 = f32[2,8]{1,0:T(8)S(1)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_collective_in_fusions_counts_once_and_as_what_it_is():
  found = hlo.analyse(FUSED)
  assert found.collectives == {"all-gather": 7 * P_BYTES / 8, "reduce-scatter": 7 / 8 * P_BYTES}
  assert found.bytes == 2 * 4 * 4 * 4  # of the product: what is handed on is not touched


@pytest.mark.parametrize(
  "start, done, kind, sent, result",
  [
    ("(f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start", "f32[64,8]{1,0}", "all-gather", 3, 4),
    ("f32[16,8]{1,0} all-reduce-start", "f32[16,8]{1,0}", "all-reduce", 1.5, 1),
    ("((f32[16,8]{1,0}), f32[4,8]{1,0}) reduce-scatter-start", "f32[4,8]{1,0}", "reduce-scatter", 0.75, 0.25),
    ("(f32[16,8]{1,0}, f32[16,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start", "f32[16,8]{1,0}", "collective-permute", 1, 1),
  ],
)  # fmt: skip
def test_a_collective_that_starts_and_is_done_counts_once(start, done, kind, sent, result):
  lines = f"""%s = {start}(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={{0}}
  ROOT %d = {done} {kind}-done(%s), metadata={{op_name="jit(f)/dot"}}"""
  found = hlo.analyse(MODULE.format("", lines))
  assert found.collectives == {kind: sent * P_BYTES}
  assert found.bytes == P_BYTES + result * P_BYTES  # the operand is read, the result written
  [buffer] = found.results
  assert (buffer.instruction.bytes, buffer.instruction.source) == (result * P_BYTES, "jit(f)/dot")


def test_a_collective_in_a_computation_of_its_own():
  """Wrapped by async-start, or hidden in a fusion."""
  wrapped = MODULE.format(
    "",
    "%s = ((f32[16,8]{1,0}), f32[16,8]{1,0}, u32[]) async-start(%p), calls=%wrapped\n"
    "  %u = ((f32[16,8]{1,0}), f32[16,8]{1,0}, u32[]) async-update(%s)\n"
    "  ROOT %d = f32[16,8]{1,0} async-done(%u)",
  ) + """
%wrapped (w: f32[16,8]) -> f32[16,8] {
  %w = f32[16,8]{1,0} parameter(0)
  ROOT %r = f32[16,8]{1,0} all-to-all(%w), replica_groups=[2,4]<=[8]
}
"""  # fmt: skip
  found = hlo.analyse(wrapped)
  assert found.collectives == {"all-to-all": 0.75 * P_BYTES}
  assert found.bytes == 2 * P_BYTES
  start = wrapped.index("  %s = ")
  fusion = "  ROOT %f = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%wrapped\n"
  hidden = hlo.analyse(wrapped[:start] + fusion + wrapped[wrapped.index("}\n\n%wrapped") :])
  assert hidden.collectives == found.collectives
  assert hidden.bytes == 2 * P_BYTES


def test_a_collective_of_the_last_round_of_a_loop():
  """Its start is not to be seen: the result counts alone."""
  done = "ROOT %d = f32[64,8]{1,0} all-gather-done(%p)"
  assert hlo.analyse(MODULE.format("", done)).bytes == 4 * P_BYTES


# --- programs of this machine's compiler


def compiled(function, *args) -> hlo.Analysis:
  return hlo.analyse(jax.jit(function).lower(*args).compile().as_text())


def test_a_scan_costs_in_proportion_to_its_length():
  def layers(w_LDD, x_BD):
    return jax.lax.scan(lambda x_BD, w_DD: (jnp.tanh(x_BD @ w_DD), None), x_BD, w_LDD)[0]

  width, rows = 128, 8
  x_BD = jax.ShapeDtypeStruct((rows, width), jnp.float32)
  five, ten, fifteen = (
    compiled(layers, jax.ShapeDtypeStruct((n, width, width), jnp.float32), x_BD).bytes
    for n in (5, 10, 15)
  )
  assert fifteen - ten == ten - five
  kernel = width * width * 4
  # The kernel is read; a compiler may copy it out of the stack first (a write and a read more).
  assert kernel < (ten - five) / 5 < 3.5 * kernel


@functools.cache
def mesh_of_eight() -> jax.sharding.Mesh:
  return jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))


def test_a_product_over_a_split_axis_sends_its_result():
  """Each of eight devices has a part of the sum: 2 * 7/8 of the result go out of it."""
  on = lambda *spec: NamedSharding(mesh_of_eight(), P(*spec))
  x = jax.ShapeDtypeStruct((16, 512), jnp.float32, sharding=on(None, "x"))
  w = jax.ShapeDtypeStruct((512, 32), jnp.float32, sharding=on("x"))
  program = jax.jit(jnp.matmul, out_shardings=on()).lower(x, w).compile()
  found = hlo.analyse(program.as_text())
  assert found.collectives == {"all-reduce": 2 * 7 / 8 * 16 * 32 * 4}


def test_rows_over_devices_send_nothing_and_gathered_weights_all_but_their_own():
  on = lambda *spec: NamedSharding(mesh_of_eight(), P(*spec))
  x = jax.ShapeDtypeStruct((16, 512), jnp.float32, sharding=on("x"))
  whole = jax.ShapeDtypeStruct((512, 32), jnp.float32, sharding=on())
  assert compiled(jnp.matmul, x, whole).collectives == {}

  def gathered(x, w):
    return x @ jax.lax.with_sharding_constraint(w, on())

  part = jax.ShapeDtypeStruct((512, 32), jnp.float32, sharding=on("x"))
  assert compiled(gathered, x, part).collectives == {"all-gather": 7 / 8 * 512 * 32 * 4}
