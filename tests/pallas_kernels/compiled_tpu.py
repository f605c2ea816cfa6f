"""Compiles for a TPU that is not there and reads what its compiler says. Only where JAXLAB_AOT=tpu.

Run as a program it compiles one product, `DEVICE ROWS OUT FEATURES FORMAT`, and nothing else: the
compiler writes down its schedule if the environment says so when it is loaded (`schedule`).
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlab.parallel import hlo, targets
from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, mosaic_tpu

FULL = os.environ.get("AOT") == "full"
needs_compiler = pytest.mark.skipif(
  os.environ.get("JAXLAB_AOT") != "tpu", reason="needs JAXLAB_AOT=tpu, and its compiler"
)
SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Program:
  temporaries: int  # bytes
  text: str

  @property
  def analysis(self) -> hlo.Analysis:
    return hlo.analyse(self.text)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Of a kernel whose loops run once: instruction words, and what they hold of each unit."""

  bundles: int
  used: dict[str, int]
  slots: dict[str, int]  # of a word

  def __str__(self) -> str:
    used = (f"{unit} {n} ({self.slots[unit]})" for unit, n in self.used.items() if n)
    return f"{self.bundles} bundles; slots used, and slots of a bundle: {', '.join(used)}"


def packed(format: str, out: int, features: int, layers: int = 4) -> tuple:
  block = codec.BLOCK[format]
  scale = jnp.float8_e4m3fn if format == "nvfp4" else jnp.uint8
  return (
    jax.ShapeDtypeStruct((layers, out, features // 2), jnp.uint8),
    jax.ShapeDtypeStruct((layers, out, features // block), scale),
    jax.ShapeDtypeStruct((layers,), jnp.float32),
  )


def compile_for(name: str, function: Callable[..., Any], *arguments: Any) -> Program:
  """The Program that a TPU's compiler makes of function(*arguments); name: "v5e", ..."""
  chosen = targets.parse(SLICES[name])
  here = NamedSharding(Mesh(np.array(targets.devices(chosen)[:1]), ("x",)), P())
  arguments = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments
  )
  with target.use_target(name):
    compiled = jax.jit(lambda *a: function(*a)).lower(*arguments).compile()
  return Program(compiled.memory_analysis().temp_size_in_bytes, compiled.as_text())


def schedule(name: str, rows: int, out: int, features: int, format: str) -> Schedule:
  """What the compiler packed into the instruction words of `forward`."""
  words = map(str, (name, rows, out, features, format))
  with tempfile.TemporaryDirectory() as folder:
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    subprocess.run(
      [sys.executable, "-m", "tests.pallas_kernels.compiled_tpu", *words],
      check=True, cwd=ROOT, env=os.environ | {"LIBTPU_INIT_ARGS": flags}, capture_output=True,
    )  # fmt: skip
    pattern = "*fp4_forward*final_hlo-static-per-bundle-utilization.txt"
    (path,) = pathlib.Path(folder).glob(pattern)
    _, units, slots, _, *lines = path.read_text(encoding="utf-8").splitlines()
  units = [unit.strip() for unit in units.split(",")]
  counts = [[int(n) for n in line.split()] for line in lines if re.match(r"\d", line)]
  used = dict(zip(units, map(sum, zip(*counts, strict=True)), strict=True))
  return Schedule(len(counts), used, dict(zip(units, map(int, slots.split()), strict=True)))


def _main(name, rows, out, features, format):
  x = jax.ShapeDtypeStruct((int(rows), int(features)), jnp.bfloat16)
  w = packed(format, int(out), int(features))
  compile_for(name, mosaic_tpu.forward, x, *w, jax.ShapeDtypeStruct((), jnp.int32))


if __name__ == "__main__":
  _main(*sys.argv[1:])
