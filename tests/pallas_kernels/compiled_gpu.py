"""Compiles for a GPU that is not there and reads what its compilers say of every kernel.

XLA writes the PTX and the launches of a program into a folder; ptxas, which comes with jax[cuda13],
assembles the PTX once more and says registers and spills. Only where JAXLAB_AOT=cuda.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlab.parallel import hlo, targets
from pallas_kernels import target

FULL = os.environ.get("AOT") == "full"
needs_compiler = pytest.mark.skipif(
  os.environ.get("JAXLAB_AOT") != "cuda", reason="needs JAXLAB_AOT=cuda, and its compiler"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One kernel of a program: per thread, and per block of threads."""

  name: str
  registers: int
  spills: int  # bytes stored
  shared: int  # bytes
  grid: str
  threads: int
  ptx: str

  def __str__(self) -> str:
    return (
      f"{self.name}: grid {self.grid}, {self.threads} threads, {self.registers} registers, "
      f"{self.spills} bytes spilled, {self.shared} bytes shared"
    )


@dataclasses.dataclass(frozen=True)
class Program:
  temporaries: int  # bytes
  text: str
  kernels: dict[str, Kernel]

  @property
  def analysis(self) -> hlo.Analysis:
    return hlo.analyse(self.text)


def compile_for(name: str, function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct):
  """The Program that a GPU's compiler makes of function(*arguments); name: "h100", "b200", ..."""
  chosen = targets.parse(f"{name}x1")
  here = NamedSharding(Mesh(np.array(targets.devices(chosen)[:1]), ("x",)), P())
  arguments = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments
  )
  with (
    tempfile.TemporaryDirectory() as folder,
    target.use_target(target.Target("cuda", chosen.device.kind)),
  ):
    lowered = jax.jit(lambda *a: function(*a)).lower(*arguments)
    compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
    kernels = _kernels(pathlib.Path(folder))
  return Program(compiled.memory_analysis().temp_size_in_bytes, compiled.as_text(), kernels)


def _kernels(folder: pathlib.Path) -> dict[str, Kernel]:
  (launches,) = folder.glob("*thunk_sequence.txt")
  assembled = {}
  for path in folder.glob("*.ptx"):
    assembled |= _assemble(path)
  found = {}
  launch = re.compile(r"(\w+) grid: \[(.*?)\] threads: \[(\d+).*?shared_memory: (\d+)")
  for name, grid, threads, shared in launch.findall(launches.read_text()):
    registers, spills, ptx = assembled[name]
    found[name] = Kernel(name, registers, spills, int(shared), grid, int(threads), ptx)
  return found


def _assemble(path: pathlib.Path) -> dict[str, tuple[int, int, str]]:
  """{kernel: (registers, bytes spilled, PTX of its file)}."""
  ptx = path.read_text()
  if ".entry" not in ptx:
    return {}
  architecture = re.search(r"\.target (\w+)", ptx)[1]
  root = pathlib.Path(importlib.util.find_spec("nvidia").submodule_search_locations[0])
  (ptxas,) = root.glob("*/bin/ptxas")
  command = [ptxas, "-v", "--gpu-name", architecture, path, "-o", path.with_suffix(".cubin")]
  said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  blocks = said.split("Compiling entry function")[1:]
  number = lambda pattern, block: int(re.search(pattern, block)[1])
  return {
    re.search(r"'(\w+)'", block)[1]: (
      number(r"Used (\d+) registers", block),
      number(r"(\d+) bytes spill stores", block),
      ptx,
    )
    for block in blocks
  }
