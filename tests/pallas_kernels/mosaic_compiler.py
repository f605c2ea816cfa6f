"""Compiles the Mosaic-GPU kernels for GPUs that are not there, in a process for each kind of GPU.

The plugin remembers the architecture of the first Mosaic-GPU kernel that a process compiles and
gives it to ptxas for all others, which refuses them (jax 0.10.2).
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlab.parallel import hlo, targets
from pallas_kernels.fp4_gemm import blackwell, codec, mosaic_gpu
from pallas_kernels.fp4_gemm import mosaic_gpu_decode as decode

LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Compiled:
  """said: by ptxas. temporaries: bytes. written: (shape, bytes) of new 8- and 4-bit buffers."""

  said: str
  ptx: str
  temporaries: int
  written: list[tuple[str, float]]

  @property
  def resources(self) -> str:
    lines = [line.split("info    :")[-1].strip() for line in self.said.splitlines()]
    return "; ".join(line for line in lines if "spill" in line or "Used" in line)


Compiler = Callable[..., Compiled]


@contextlib.contextmanager
def worker(device: str) -> Iterator[Compiler]:
  """A function that calls one of this module's functions for `device` in a process of its own."""
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
    yield lambda function, *args: pool.submit(function, device, *args).result()


def matmul(device: str, rows: int, shape: tuple[int, int], format: str) -> Compiled:
  """One product with a layer of a stack: sm_90's of bfloat16 rows, or sm_100's of FP4 rows."""
  array = _arrays(device)
  if device.startswith("b200"):
    run = lambda *args: blackwell.forward_rows(*args, jnp.bfloat16)
    x = _rows(array, rows, shape[1], format)
  else:
    run, x = mosaic_gpu.forward, array(jnp.bfloat16, rows, shape[1])
  return _compile(run, x, *_weights(array, shape, format), array(jnp.int32))


def loop(device: str, rows: int, wide: int, narrow: int, format: str) -> Compiled:
  """Products up and down in a scan over the layers, as a decoder runs them at every token."""
  array = _arrays(device)
  up, down = (_weights(array, shape, format) for shape in ((wide, narrow), (narrow, wide)))

  def product(x, w, i):
    if device.startswith("b200"):
      return blackwell.forward_rows(codec.quantize_rows(x, format), *w, i, x.dtype)
    return mosaic_gpu.forward(x, *w, i)

  def run(x, up, down):
    layer = lambda x, i: (product(jax.nn.silu(product(x, up, i)), down, i), None)
    return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0]

  return _compile(run, array(jnp.bfloat16, rows, narrow), up, down)


def decoding(device: str, format: str) -> Compiled:
  """A kernel that only decodes: codes [64, 128], scale [64, 16] to pieces of A [4, 64, 64].

  Its shared memory is the codes, then the scales 8192 bytes on; parameter 0 is the result.
  """
  array, count = _arrays(device), decode.GROUP // codec.BLOCK[format]
  dtype = _SCALES[format]

  def body(codes_ref, scale_ref, a_ref, codes, scale, copied):
    plgpu.copy_gmem_to_smem(codes_ref, codes, copied)
    plgpu.copy_gmem_to_smem(scale_ref, scale, copied)
    plgpu.barrier_wait(copied)
    factors = decode.factors_in_registers(scale.at[:, pl.ds(0, count)], format)
    for half in range(2):
      for i, piece in enumerate(decode.decode_in_registers(codes, factors, half, format)):
        a_ref[2 * half + i] = piece

  scratch = [
    plgpu.SMEM((decode.ROWS, decode.BYTES), jnp.uint8, transforms=decode.CODES_TRANSFORMS),
    plgpu.SMEM((decode.ROWS, decode.SCALE_BYTES), dtype),
    plgpu.Barrier(num_arrivals=2),
  ]
  out = jax.ShapeDtypeStruct((decode.PIECES, decode.ROWS, decode.PIECE), jnp.bfloat16)
  return _compile(
    plgpu.kernel(body, out_type=out, scratch_types=scratch),
    array(jnp.uint8, decode.ROWS, decode.BYTES),
    array(dtype, decode.ROWS, decode.SCALE_BYTES),
  )


_SCALES = {"nvfp4": jnp.float8_e4m3fn, "mxfp4": jnp.uint8}


def _arrays(device: str) -> Callable[..., Any]:
  here = NamedSharding(Mesh(np.array(targets.devices(targets.parse(device))[:1]), ("x",)), P())
  return lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=here)


def _weights(array, shape, format):
  features, width = shape
  return (
    array(jnp.uint8, LAYERS, features, width // 2),
    array(_SCALES[format], LAYERS, features, width // codec.BLOCK[format]),
    array(jnp.float32, LAYERS),
  )


def _rows(array, rows, width, format):
  scale = array(_SCALES[format], rows, width // codec.BLOCK[format])
  return codec.Rows(array(jnp.uint8, rows, width // 2), scale, array(jnp.float32, rows))


def _compile(function, *args) -> Compiled:
  with tempfile.TemporaryDirectory() as folder:
    os.environ.update(MOSAIC_GPU_DUMP_TO=folder, MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1")
    compiled = jax.jit(function).lower(*args).compile()
    read = lambda kind: "".join(f.read_text() for f in sorted(pathlib.Path(folder).glob(kind)))
    said, ptx = read("*.ptxas"), read("*.ptx")
  written = [
    (r.instruction.shape, r.instruction.bytes)
    for r in hlo.analyse(compiled.as_text()).results
    if not r.in_place and r.instruction.shape.startswith(("u8", "f8", "f4"))
  ]
  return Compiled(said, ptx, compiled.memory_analysis().temp_size_in_bytes, written)
