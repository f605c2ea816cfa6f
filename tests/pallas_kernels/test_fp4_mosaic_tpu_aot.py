"""What the compilers of absent TPUs make of the Mosaic kernel. `make aot` runs it.

By default one shape for each kind of tile, at the widths of Qwen2.5 7B and 32B; AOT=full takes the
whole grid, and v5p. Prints tiles, VMEM, and the slots of instruction words that the kernels use.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, mosaic_tpu, producer_tpu
from tests.pallas_kernels import compiled_tpu
from tests.pallas_kernels.compiled_tpu import packed

pytestmark = [pytest.mark.aot, compiled_tpu.needs_compiler]
spec = jax.ShapeDtypeStruct
UP_7B, DOWN_7B, UP_32B, DOWN_32B = (18944, 3584), (3584, 18944), (27648, 5120), (5120, 27648)
CASES = [
  ("forward", "nvfp4", 1, UP_7B),
  ("forward", "mxfp4", 1, DOWN_32B),
  ("forward", "nvfp4", 8, DOWN_7B),
  ("forward", "nvfp4", 64, UP_32B),
  ("forward", "mxfp4", 64, DOWN_7B),
  ("forward", "nvfp4", 2048, DOWN_32B),
  ("backward", "nvfp4", 64, DOWN_7B),
  ("backward", "nvfp4", 2048, UP_7B),
  ("backward", "mxfp4", 512, UP_32B),
]
DEVICES = ("v5e", "v6e", "tpu7x")
if compiled_tpu.FULL:
  CASES = list(
    itertools.product(
      ("forward", "backward"), ("nvfp4", "mxfp4"), (1, 8, 64, 512, 2048),
      (UP_7B, DOWN_7B, UP_32B, DOWN_32B),
    )
  )  # fmt: skip
  DEVICES = (*DEVICES, "v5p")
# The vector unit does four operations on 1024 numbers in a cycle. What it may take for a weight, by
# the time in which its bytes and its scale arrive: clock (GHz), memory (GB/s) of a core.
SPEED = {"v5e": (1.5, 819), "v6e": (1.75, 1638), "tpu7x": (2.2, 3690)}


def layer_bytes(w) -> int:
  return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in w)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction, format, rows, shape", CASES)
def test_compiles(direction, format, rows, shape, device, capsys):
  out, features = shape
  w = packed(format, out, features)
  x = spec((rows, features if direction == "forward" else out), jnp.bfloat16)
  run = getattr(mosaic_tpu, direction)
  program = compiled_tpu.compile_for(device, run, x, *w, spec((), jnp.int32))
  sizes = mosaic_tpu.block_sizes(rows, x.dtype, w[0].shape, format, target.TARGETS[device])
  with capsys.disabled():
    tiles = f": {sizes}" if direction == "forward" else ""
    print(f"\n{device} {direction} {format} {rows} x {features} -> {out}{tiles}")
  assert program.temporaries < 2**16  # no weights among them, nor a copy of x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
  ("rows", "out", "features", "dtype"),
  [(1, 100, 32, jnp.bfloat16), (5, 3, 160, jnp.float32), (600, 640, 2016, jnp.bfloat16)],
)
def test_odd_shapes_compile(direction, rows, out, features, dtype, device):
  w = packed("mxfp4" if features == 32 else "nvfp4", out, features, 1)
  x = spec((rows, features if direction == "forward" else out), dtype)
  run = getattr(mosaic_tpu, direction)
  assert compiled_tpu.compile_for(device, run, x, *w, spec((), jnp.int32)).text


@pytest.mark.parametrize("device", (*DEVICES, *(() if compiled_tpu.FULL else ("v5p",))))
@pytest.mark.parametrize(
  ("rows", "up", "layers", "format"),
  [
    (1, UP_7B, 28, "nvfp4"),
    (64, UP_7B, 28, "mxfp4"),
    (8, UP_32B, 64, "nvfp4"),
    # A stack that would fit into VMEM, where XLA likes to bring all of it, at every layer.
    (8, (4096, 2048), 6, "nvfp4"),
  ],
)
def test_a_loop_over_layers_reads_each_weight_once(rows, up, layers, format, device):
  """As a decoder reads its weights at every token: nothing packed is copied or laid out anew."""
  wide, narrow = up
  up, down = packed(format, wide, narrow, layers), packed(format, narrow, wide, layers)

  def loop(x, up, down):
    def layer(x, i):
      with jax.named_scope("fp4_matmul:mosaic_tpu"):
        h = mosaic_tpu.forward(x, *up, i)
      with jax.named_scope("fp4_matmul:mosaic_tpu"):
        return mosaic_tpu.forward(jax.nn.silu(h), *down, i), None

    return jax.lax.scan(layer, x, jnp.arange(layers))[0]

  x = spec((rows, narrow), jnp.bfloat16)
  program = compiled_tpu.compile_for(device, loop, x, up, down)
  weights = layers * (layer_bytes(up) + layer_bytes(down))
  activations = 4 * layers * 2 * rows * (wide + narrow)  # where they do not stay in VMEM
  assert weights <= program.analysis.bytes <= 1.001 * weights + activations
  written = [r.instruction.shape for r in program.analysis.results if r.instruction.bytes > 2**12]
  assert not [shape for shape in written if shape.startswith(("u8", "s8", "u32", "s32", "f8"))]
  assert program.temporaries < 4 * 2 * rows * (wide + narrow) + 2**20


@pytest.mark.parametrize("device", DEVICES)
def test_codes_that_fill_no_whole_lanes_are_laid_out_anew(device):
  """A limit, which the README names: K / 2 = 288, of a register's 128 lanes."""
  x, w = spec((8, 576), jnp.bfloat16), packed("nvfp4", 1536, 576)
  program = compiled_tpu.compile_for(device, mosaic_tpu.forward, x, *w, spec((), jnp.int32))
  stack = w[0].shape[0] * layer_bytes(w)
  assert 0.9 * stack < program.temporaries < 1.5 * stack


@pytest.mark.parametrize("device", SPEED)
@pytest.mark.parametrize(
  ("rows", "format", "most"),
  # Operations on a weight, and bundles for 1024 weights, with what a step takes besides.
  [(1, "nvfp4", {"v5e": (3.7, 1.35), "v6e": (3.7, 1.45), "tpu7x": (2.2, 1.15)}),
   (8, "nvfp4", {"v5e": (5.4, 1.7), "v6e": (4.1, 1.6), "tpu7x": (2.6, 1.35)})],
)  # fmt: skip
def test_operations_on_a_weight(rows, format, most, device, capsys):
  """Decoding should take no longer than the bytes; where it does, how much longer is held here."""
  out, features = 6144, 2048  # one chunk of K: nothing loops inside a step
  done = compiled_tpu.schedule(device, rows, out, features, format)
  sizes = mosaic_tpu.block_sizes(
    rows, jnp.bfloat16, (out, features // 2), format, target.TARGETS[device]
  )
  weights = sizes.out * features / 1024
  clock, memory = SPEED[device]
  arrive = 1024 * (1 / 2 + 1 / codec.BLOCK[format]) * clock / memory
  dense = 1024 * 2 * clock / memory
  operations = done.used["VALU"] / weights  # codespell:ignore
  bundles = done.bundles / weights
  with capsys.disabled():
    print(
      f"\n{device} {format} {rows} rows: {operations:.2f} vector operations a weight, "
      f"{bundles:.2f} bundles for 1024 weights, whose bytes take {arrive:.2f} cycles, those of "
      f"bfloat16 {dense:.2f}: at most {dense / max(bundles, arrive):.2f} times as fast\n  {done}"
    )
  assert operations <= most[device][0]
  assert bundles <= most[device][1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
  ("format", "rows", "features", "dtype"),
  [("nvfp4", 1, 3584, jnp.bfloat16), ("mxfp4", 2048, 27648, jnp.float32)],
)
def test_the_producer_compiles(format, rows, features, dtype, device):
  """In one kernel, of which nothing is left but the rows."""
  produce = lambda x: producer_tpu.forward(x, format, 128, None)
  program = compiled_tpu.compile_for(device, produce, spec((rows, features), dtype))
  assert program.text.count("tpu_custom_call") == 1
  # The multipliers, a row each; and the scales, which XLA may lay out anew where k pads badly.
  scales = rows * features // codec.BLOCK[format]
  assert program.temporaries < 2**16 + 512 * rows + 2 * scales


@pytest.mark.parametrize("device", DEVICES)
def test_a_rotation_costs_nothing(device):
  """It is in the matrix that orders the columns: the program has the same buffers."""
  x, w = spec((64, 3584), jnp.bfloat16), packed("nvfp4", 18944, 3584)
  run = lambda *args: mosaic_tpu.forward(*args, rotation=128)
  program = compiled_tpu.compile_for(device, run, x, *w, spec((), jnp.int32))
  assert program.temporaries < 2**16
