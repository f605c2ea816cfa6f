"""Compiles a recipe's programs for devices that are not there, and says what they need and take.

A `Recipe` lists the jitted programs of a run with abstract arguments that know where they live;
nothing is allocated. Of each program the compiler tells the memory, its HLO the traffic, and the
traced program the arithmetic. Per device:

  peak   = arguments + outputs - aliased + temporaries + code + what else stays there meanwhile
  time  >= max(flops / rate of their dtype, bytes / memory bandwidth, sent bytes / network)

`fits` means that the largest peak is at most FITS of the device's memory. Dims: none.
Source: the roofline model, doi:10.1145/1498765.1498785.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend
from absl import logging

from jaxlab.parallel import flops, hlo, rules, targets
from pallas_kernels import target as running

PyTree = Any
FITS = 0.92  # of a device's memory: the rest is the allocator's, the runtime's and other programs'
BUFFERS = 8  # of the largest are listed
VERSION = 3  # of the cached figures: raised when they would come out otherwise


@dataclasses.dataclass(frozen=True)
class Program:
  """One jitted function as a run calls it.

  args: shapes with shardings (of `Recipe.resident` where they are the same arrays).
  runs: times in a step of the recipe.
  trips: of its loop whose end the data decide (a sampler's), at most.
  """

  name: str
  function: Any
  args: tuple
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  runs: float = 1.0
  trips: float = 1.0


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What a run compiles.

  programs: in the order of a step.
  resident: what stays on the devices all the time; a program that does not take a part of it as an
    argument still has it in its memory.
  formulas: {program: bytes on a device} by the library's formulas, where it has some.
  """

  programs: Sequence[Program]
  resident: PyTree
  formulas: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Buffer:
  """A large array that a program writes, by the name of the operation that makes it."""

  source: str
  shape: str
  bytes: int
  times: float  # in one run of the program


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
  """What one program needs and takes, on one device. Bytes, seconds; times are of one run.

  compiled: False where no compiler was at hand: then temporaries come from the recipe's formula.
  peak_bytes: includes what stays on the device beside the program (`resident_bytes`).
  collective_bytes: {kind: bytes sent}; None where the compiler's text could not be read.
  traffic_bytes: read and written in device memory; likewise.
  """

  name: str
  runs: float
  compiled: bool
  argument_bytes: int
  output_bytes: int
  alias_bytes: int
  temp_bytes: int
  code_bytes: int
  resident_bytes: int
  peak_bytes: int
  formula_bytes: int | None
  flops: Mapping[str, float]
  traffic_bytes: float | None
  collective_bytes: Mapping[str, float] | None
  compute_seconds: float
  memory_seconds: float
  network_seconds: float
  implementations: Mapping[str, str]
  buffers: Sequence[Buffer]
  trace_seconds: float
  compile_seconds: float
  cached: bool
  refused: str | None = None  # what the compiler said, where it found too little memory

  @property
  def seconds(self) -> float:
    """The roofline time: a run is not quicker, but for what a cache on the chip keeps."""
    return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

  @property
  def bound(self) -> str:
    """What the roofline time is made of."""
    times = {
      "compute": self.compute_seconds, "hbm": self.memory_seconds, "network": self.network_seconds,
    }  # fmt: skip
    return max(times, key=times.__getitem__)


@dataclasses.dataclass(frozen=True)
class Plan:
  """All programs of a recipe on one target."""

  target: targets.Target
  mesh: Mapping[str, int]
  programs: Sequence[ProgramPlan]

  @property
  def device_bytes(self) -> int:
    return self.target.device.memory_bytes

  @property
  def peak_bytes(self) -> int:
    return max(program.peak_bytes for program in self.programs)

  @property
  def fits(self) -> bool:
    enough = self.peak_bytes <= FITS * self.device_bytes
    return enough and not any(program.refused for program in self.programs)

  @property
  def step_seconds(self) -> float:
    """The roofline time of a step of the recipe."""
    return sum(program.seconds * program.runs for program in self.programs)

  @property
  def unknown_traffic(self) -> list[str]:
    """Programs of a step whose time is that of their arithmetic alone."""
    return [p.name for p in self.programs if p.runs and p.traffic_bytes is None]


def make(
  recipe: Recipe,
  target: targets.Target,
  mesh: rules.Mesh,
  *,
  compiles: bool,
  cache: pathlib.Path | None = None,
  stops: bool = False,
) -> Plan:
  """Traces, lowers and (where a compiler is there) compiles every program of a recipe.

  Args:
    recipe: built under `use_target(target)`, with shardings on `mesh`.
    compiles: whether this process has the target's compiler.
    cache: folder of figures by content: a program that was compiled before is not compiled again.
    stops: leave out what comes after a program that does not fit.
  """
  logging.info("%s: %d programs for %s.", target.text, len(recipe.programs), target.device.kind)
  with running.use_target(running.Target(target.device.platform, target.device.kind)):
    programs = []
    for program in recipe.programs:
      programs.append(_plan(program, recipe, target, compiles, cache))
      if stops and not Plan(target, {}, programs).fits:
        break
  return Plan(target, dict(mesh.shape), programs)


def resident_bytes(recipe: Recipe) -> int:
  """Bytes that stay on a device all the time; an array that stands there twice counts once."""
  return device_bytes(list({id(x): x for x in jax.tree.leaves(recipe.resident)}.values()))


def device_bytes(tree: PyTree) -> int:
  """Bytes that one device holds of arrays or of shapes with shardings."""

  def local(x):
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      return math.prod(shape) * 8
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(local, jax.tree.leaves(tree)))


def place(tree: PyTree, specs: PyTree, mesh: rules.Mesh) -> PyTree:
  """Shapes with shardings: `specs` has the structure of `tree`, or is one spec for all."""
  if isinstance(specs, jax.sharding.PartitionSpec):
    sharding = jax.sharding.NamedSharding(mesh, specs)
    return jax.tree.map(lambda x: x.update(sharding=sharding), tree)
  return jax.tree.map(
    lambda x, spec: x.update(sharding=jax.sharding.NamedSharding(mesh, spec)), tree, specs
  )


def place_params(params: PyTree, mesh: rules.Mesh, num_kv_heads: int) -> PyTree:
  """Shapes of parameters with the shardings of `rules.param_specs`."""
  return place(params, rules.param_specs(params, mesh, num_kv_heads=num_kv_heads), mesh)


def implementations(jaxpr: jax.extend.core.Jaxpr) -> dict[str, str]:
  """{op: implementation} of the ops that choose one: their scope is called "op:implementation"."""
  found = {}
  for eqn in jaxpr.eqns:
    found |= dict(re.findall(r"(\w+):(\w+)", str(eqn.source_info.name_stack)))
    for sub in jax.extend.core.jaxprs_in_params(eqn.params):
      found |= implementations(sub)
  return found


def _plan(
  program: Program, recipe: Recipe, target: targets.Target, compiles: bool, cache
) -> ProgramPlan:
  start = time.monotonic()
  traced = program.function.trace(*program.args, **program.kwargs)
  if compiles:
    lowered = traced.lower()
  else:
    lowered = traced.lower(lowering_platforms=(target.device.platform,))
  middle = time.monotonic()
  figures, cached = _figures(program, lowered, target, compiles, cache)
  mine = {id(x) for x in jax.tree.leaves((program.args, dict(program.kwargs)))}
  resident = {id(x): x for x in jax.tree.leaves(recipe.resident)}
  beside = device_bytes([x for key, x in resident.items() if key not in mine])
  formula = recipe.formulas.get(program.name)
  if not compiles:
    figures |= _uncompiled(program, formula, beside)
  own = sum(
    figures[part] for part in ("argument_bytes", "output_bytes", "temp_bytes", "code_bytes")
  )
  peak = max(own - figures["alias_bytes"], figures.pop("used_bytes", 0)) + beside
  work = {
    dtype: n / target.count for dtype, n in flops.count(traced.jaxpr.jaxpr, program.trips).items()
  }
  device, sent = target.device, figures["collective_bytes"]
  return ProgramPlan(
    name=program.name,
    runs=program.runs,
    compiled=compiles,
    resident_bytes=beside,
    peak_bytes=peak,
    formula_bytes=formula,
    flops=work,
    compute_seconds=sum((n / device.flops[_unit(dtype, device)] for dtype, n in work.items()), 0.0),
    memory_seconds=(figures["traffic_bytes"] or 0.0) / device.hbm,
    network_seconds=sum((sent or {}).values(), 0.0) / device.network if device.network else 0.0,
    implementations=implementations(traced.jaxpr.jaxpr),
    trace_seconds=middle - start,
    compile_seconds=time.monotonic() - middle,
    cached=cached,
    **figures,
  )


def _unit(dtype: str, device: targets.Device) -> str:
  """The unit of a device that multiplies such operands."""
  kinds = {"float32": "f32", "float64": "f32", "float8": "f8", "float4": "f4"}
  wanted = next((unit for name, unit in kinds.items() if dtype.startswith(name)), "bf16")
  return wanted if wanted in device.flops else "bf16"


def _figures(program, lowered, target, compiles, cache) -> tuple[dict[str, Any], bool]:
  """(what the compiler says of a program, whether it was asked before)."""
  if not compiles:
    return {"traffic_bytes": None, "collective_bytes": None, "buffers": ()}, False
  path = None
  if cache is not None:
    about = f"{VERSION} {target.text} {_versions()} {_options()}{program.trips:g} "
    about += lowered.as_text()
    path = cache / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
    if path.exists():
      found = json.loads(path.read_text())
      return found | {"buffers": [Buffer(**b) for b in found["buffers"]]}, True
  logging.info("compiling %s ...", program.name)
  found = _compile(lowered, program.trips)
  if path is not None:
    cache.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(
      json.dumps(found | {"buffers": [dataclasses.asdict(b) for b in found["buffers"]]})
    )
    part.replace(path)
  return found, False


def _compile(lowered: jax.stages.Lowered, trips: float) -> dict[str, Any]:
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    # The TPU compiler refuses what its memory cannot hold, and says how much it wanted.
    used = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", str(error))
    used = used or re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", str(error))
    if used is None:
      raise
    none = dict.fromkeys(
      ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes"), 0
    )
    return none | {
      "used_bytes": int(float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1)),
      "refused": used[0], "traffic_bytes": None, "collective_bytes": None, "buffers": (),
    }  # fmt: skip
  memory = compiled.memory_analysis()
  return {
    "argument_bytes": memory.argument_size_in_bytes,
    "output_bytes": memory.output_size_in_bytes,
    "alias_bytes": memory.alias_size_in_bytes,
    "temp_bytes": memory.temp_size_in_bytes,
    "code_bytes": memory.generated_code_size_in_bytes,
    **_text_figures(compiled, trips),
  }


def _text_figures(compiled: jax.stages.Compiled, trips: float) -> dict[str, Any]:
  try:
    text = compiled.as_text()
  except jax.errors.JaxRuntimeError as error:
    # libtpu writes asynchronous updates that jaxlib 0.10 cannot read back.
    logging.warning("The compiled program cannot be read: %s", str(error).splitlines()[0][:150])
    return {"traffic_bytes": None, "collective_bytes": None, "buffers": ()}
  found = hlo.analyse(text, trips)
  return {
    "traffic_bytes": found.bytes,
    "collective_bytes": found.collectives,
    "buffers": _largest(found.results),
  }


def _largest(results: Sequence[hlo.Result]) -> list[Buffer]:
  """The largest new buffers, one of each origin and shape."""
  kept = {}
  for result in results:
    made = result.instruction
    if not result.in_place:
      kept.setdefault((made.source, made.shape), Buffer(
        made.source, made.shape, round(made.bytes), result.times
      ))  # fmt: skip
    if len(kept) == BUFFERS:
      break
  return list(kept.values())


def _uncompiled(program: Program, formula: int | None, beside: int) -> dict[str, int]:
  """Memory without a compiler: arguments by their shapes, all else by the recipe's formula.

  A formula is of the whole device: what stays `beside` the program is in it.
  """
  leaves = jax.tree.leaves((program.args, dict(program.kwargs)))
  arguments = device_bytes([x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)])
  return {
    "argument_bytes": arguments,
    "output_bytes": 0,
    "alias_bytes": 0,
    "temp_bytes": max((formula or 0) - arguments - beside, 0),
    "code_bytes": 0,
  }


def _options() -> str:
  """Of the compilers, as the environment sets them."""
  names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
  return "".join(f"{name}={os.environ[name]} " for name in names if os.environ.get(name))


@functools.cache
def _versions() -> str:
  """Of the packages that decide what is compiled."""
  names = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
  return " ".join(
    f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name in names
  )
