"""What the compilers of absent GPUs make of the Triton kernels. `make aot` runs it.

By default one shape for each kind of tile, at the widths of Qwen2.5 7B and 32B; AOT=full takes the
whole grid. Prints registers, spills and shared memory.
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, producer_triton, triton
from tests.pallas_kernels import compiled_gpu

pytestmark = [pytest.mark.aot, compiled_gpu.needs_compiler]
LAYERS = 4
UP_7B, DOWN_7B, UP_32B, DOWN_32B = (18944, 3584), (3584, 18944), (27648, 5120), (5120, 27648)
CASES = [
  ("forward", "nvfp4", 1, UP_7B),
  ("forward", "nvfp4", 8, DOWN_7B),
  ("forward", "nvfp4", 64, UP_32B),
  ("forward", "nvfp4", 2048, DOWN_32B),
  ("forward", "mxfp4", 8, UP_32B),
  ("forward", "mxfp4", 2048, UP_7B),
  ("backward", "nvfp4", 8, UP_7B),
  ("backward", "nvfp4", 2048, UP_32B),
  ("backward", "mxfp4", 2048, DOWN_7B),
]
DEVICES = ("h100", "b200")
if compiled_gpu.FULL:
  CASES = list(
    itertools.product(
      ("forward", "backward"), ("nvfp4", "mxfp4"), (1, 8, 32, 64, 128, 2048),
      (UP_7B, DOWN_7B, UP_32B, DOWN_32B),
    )
  )  # fmt: skip
  DEVICES = ("h100", "h200", "b200")
spec = jax.ShapeDtypeStruct


def packed(format, out, features, layers=LAYERS):
  block = codec.BLOCK[format]
  scale = jnp.float8_e4m3fn if format == "nvfp4" else jnp.uint8
  return (
    spec((layers, out, features // 2), jnp.uint8),
    spec((layers, out, features // block), scale),
    spec((layers,), jnp.float32),
  )


def layer_bytes(w) -> int:
  return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in w)


def kernel_of(program) -> compiled_gpu.Kernel:
  (found,) = (kernel for name, kernel in program.kernels.items() if name.startswith("fp4_"))
  return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction, format, rows, shape", CASES)
def test_compiles(direction, format, rows, shape, device, capsys):
  out, features = shape
  w = packed(format, out, features)
  transposed = direction == "backward"
  width, columns = (out, features) if transposed else (features, out)
  x = spec((rows, width), jnp.bfloat16)
  program = compiled_gpu.compile_for(device, getattr(triton, direction), x, *w, spec((), jnp.int32))
  kernel = kernel_of(program)
  gpu = target.gpu(target.TARGETS[device])
  sizes = triton.default_block_sizes(rows, w[0].shape, format, transposed, gpu)
  with capsys.disabled():
    print(f"\n{device} {direction} {format} {rows} x {features} -> {out}: {sizes}\n  {kernel}")
  assert kernel.spills == 0
  # Scales are bytes, but copied by words while others are decoded: no load of less in the loop.
  assert not re.findall(r"ld\.global\S*\.b(?:8|16)\b", kernel.ptx)
  sums = 4 * sizes.parts * rows * columns if sizes.parts > 1 else 0
  planes = 2 * rows * width if sizes.planes else 0
  assert program.temporaries <= sums + planes + 2**16  # no weights among them


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out, features", [(100, 48), (64, 32), (2056, 576)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_odd_shapes_compile(direction, out, features, device):
  rows = {48: 5, 32: 1, 576: 131}[features]
  w = packed("nvfp4" if features == 48 else "mxfp4", out, features, 1)
  x = spec((rows, features if direction == "forward" else out), jnp.bfloat16)
  program = compiled_gpu.compile_for(device, getattr(triton, direction), x, *w, spec((), jnp.int32))
  assert kernel_of(program).spills == 0


def test_float32_compiles_to_the_same_kernel():
  x = spec((4, 3584), jnp.float32)
  w = packed("nvfp4", 18944, 3584)
  program = compiled_gpu.compile_for("h100", triton.forward, x, *w, spec((), jnp.int32))
  assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in kernel_of(program).ptx


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 64])
def test_a_loop_over_layers_reads_each_weight_once(rows, device):
  """As a decoder reads its weights at every token: nothing packed is copied, all is read once."""
  layers, up, down = 8, packed("nvfp4", 18944, 3584, 8), packed("nvfp4", 3584, 18944, 8)

  def loop(x, up, down):
    def layer(x, i):
      with jax.named_scope("fp4_matmul:triton"):
        h = triton.forward(x, *up, i)
      with jax.named_scope("fp4_matmul:triton"):
        return triton.forward(jax.nn.silu(h), *down, i), None

    return jax.lax.scan(layer, x, jnp.arange(layers))[0]

  program = compiled_gpu.compile_for(device, loop, spec((rows, 3584), jnp.bfloat16), up, down)
  analysis = program.analysis
  weights = layers * (layer_bytes(up) + layer_bytes(down))
  assert weights <= analysis.bytes < (1.02 if rows == 1 else 2) * weights
  large = [r.instruction.shape for r in analysis.results if r.instruction.bytes > 2**12]
  assert not [shape for shape in large if shape.startswith(("u8", "u32", "s8", "s32", "f8"))]
  assert program.temporaries < layer_bytes(up)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
  "format, rows, dtype", [("nvfp4", 1, jnp.bfloat16), ("mxfp4", 2048, jnp.float32)]
)
def test_the_producer_compiles(format, rows, dtype, device, capsys):
  """One pass for mxfp4, two for nvfp4; the rotated rows are never written."""
  produce = lambda x: producer_triton.forward(x, format, 128, None)
  program = compiled_gpu.compile_for(device, produce, spec((rows, 18944), dtype))
  kernels = [kernel for name, kernel in program.kernels.items() if name.startswith("fp4_")]
  with capsys.disabled():
    print(f"\n{device} {format} rows {rows} x 18944\n  " + "\n  ".join(map(str, kernels)))
  assert {kernel.name for kernel in kernels} == {
    "nvfp4": {"fp4_amax", "fp4_quantize"}, "mxfp4": {"fp4_quantize"}
  }[format]  # fmt: skip
  assert not any(kernel.spills > 64 for kernel in kernels)
  assert program.temporaries < rows * 64 + 2**15
