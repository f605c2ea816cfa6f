"""Traffic of a kernel over a stack of packed weights: a layer is read, not the stack."""
# ruff: noqa: E501 (HLO has one instruction a line)

import pytest

from jaxlab.parallel import hlo

# As XLA writes a scan over three layers whose body calls a kernel with the whole stack.
LOOP = """HloModule jit_step, is_scheduled=true, num_partitions=1, replica_count=1

%body (param: (s32[], u8[3,64,128], f8e4m3fn[3,64,16], f32[3], bf16[8,2,32], bf16[2,64])) -> (s32[], u8[3,64,128], f8e4m3fn[3,64,16], f32[3], bf16[8,2,32], bf16[2,64]) {
  %param = (s32[], u8[3,64,128]{2,1,0}, f8e4m3fn[3,64,16]{2,1,0}, f32[3]{0}, bf16[8,2,32]{2,1,0}, bf16[2,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%param), index=0
  %codes = u8[3,64,128]{2,1,0} get-tuple-element(%param), index=1
  %scale = f8e4m3fn[3,64,16]{2,1,0} get-tuple-element(%param), index=2
  %tensor = f32[3]{0} get-tuple-element(%param), index=3
  %x = bf16[8,2,32]{2,1,0} get-tuple-element(%param), index=4
  %words = u32[3,64,32]{2,1,0} bitcast(%codes)
  %bytes = u8[3,64,16]{2,1,0} bitcast(%scale)
  %layer = s32[1]{0} bitcast(%i)
  %custom-call.1 = bf16[2,64]{1,0} custom-call(%layer, %x, %words, %bytes, %tensor), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/while/body/SCOPE/pallas_call"}
  ROOT %tuple = (s32[], u8[3,64,128]{2,1,0}, f8e4m3fn[3,64,16]{2,1,0}, f32[3]{0}, bf16[8,2,32]{2,1,0}, bf16[2,64]{1,0}) tuple(%i, %codes, %scale, %tensor, %x, %custom-call.1)
}

%condition (param.1: (s32[], u8[3,64,128], f8e4m3fn[3,64,16], f32[3], bf16[8,2,32], bf16[2,64])) -> pred[] {
  %param.1 = (s32[], u8[3,64,128]{2,1,0}, f8e4m3fn[3,64,16]{2,1,0}, f32[3]{0}, bf16[8,2,32]{2,1,0}, bf16[2,64]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%param.1), index=0
  %three = s32[] constant(3)
  ROOT %lt = pred[] compare(%j, %three), direction=LT
}

ENTRY %main (p: (s32[], u8[3,64,128], f8e4m3fn[3,64,16], f32[3], bf16[8,2,32], bf16[2,64])) -> (s32[], u8[3,64,128], f8e4m3fn[3,64,16], f32[3], bf16[8,2,32], bf16[2,64]) {
  %p = (s32[], u8[3,64,128]{2,1,0}, f8e4m3fn[3,64,16]{2,1,0}, f32[3]{0}, bf16[8,2,32]{2,1,0}, bf16[2,64]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], u8[3,64,128]{2,1,0}, f8e4m3fn[3,64,16]{2,1,0}, f32[3]{0}, bf16[8,2,32]{2,1,0}, bf16[2,64]{1,0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""
CODES, SCALES = 64 * 128, 64 * 16  # of a layer
REST = (
  4 + 8 * 2 * 32 * 2 + 3 * 4 + 2 * 64 * 2
)  # the index, x (whole, though of rank 3), tensor scales, y


@pytest.mark.parametrize("kernel", ["triton", "mosaic_gpu", "mosaic_tpu"])
def test_a_layer_counts_not_the_stack(kernel):
  found = hlo.analyse(LOOP.replace("SCOPE", f"fp4_matmul:{kernel}"))
  assert found.bytes == 3 * (CODES + SCALES + REST)
  assert [r.instruction.shape for r in found.results] == ["bf16[2,64]"]


def test_another_kernel_reads_what_it_gets():
  found = hlo.analyse(LOOP.replace("SCOPE", "something_else"))
  assert found.bytes == 3 * (3 * CODES + 3 * SCALES + REST)


def test_experts_under_vmap_are_all_read():
  """[experts, 1, O, width]: what lies before the stack is no layer."""
  text = LOOP.replace("SCOPE", "fp4_matmul:triton")
  text = text.replace("u32[3,64,32]{2,1,0}", "u32[3,1,64,32]{3,2,1,0}")
  text = text.replace("%bytes = u8[3,64,16]{2,1,0}", "%bytes = u8[3,1,64,16]{3,2,1,0}")
  assert hlo.analyse(text).bytes == 3 * (3 * CODES + 3 * SCALES + REST)


def test_one_matrix_is_all_read():
  text = LOOP.replace("SCOPE", "fp4_matmul:triton").replace(
    "u32[3,64,32]{2,1,0}", "u32[192,32]{1,0}"
  )
  assert hlo.analyse(text).bytes == 3 * (3 * CODES + SCALES + REST)
