"""Which changes make a run fit, and which mesh is the quickest: each answer was compiled."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import plan, rules

HOPELESS = 1.25  # times the limit by formula: not worth a compilation
REMEDIES = 3  # different ones that are looked for
MOST_TENSOR = 16  # devices over which heads and MLP width are split in a search


@dataclasses.dataclass(frozen=True)
class Variant:
  """A recipe with other settings.

  changes: {gin name: value} that make it.
  build: of a mesh, the recipe.
  mesh: its sizes.
  """

  changes: Mapping[str, Any]
  build: Callable[[rules.Mesh], plan.Recipe]
  mesh: meshes.MeshConfig


@dataclasses.dataclass(frozen=True)
class Found:
  """A variant and its plan."""

  variant: Variant
  plan: plan.Plan


def remedies(
  variants: Iterable[Variant],
  make: Callable[[Variant], plan.Plan | None],
  *,
  budget: int,
) -> list[Found]:
  """The first variants that fit, of different kinds, in the order given.

  Args:
    make: plans a variant; None where its formulas say that it is hopeless.
    budget: variants that are compiled at most.
  """
  found: list[Found] = []
  for variant in variants:
    kinds = [frozenset(f.variant.changes) for f in found]
    if any(kind <= set(variant.changes) for kind in kinds):
      continue  # part of it is enough
    if len(found) == REMEDIES or budget == 0:
      break
    if (made := make(variant)) is None:
      continue
    budget -= 1
    logging.info("%s: %s", describe(variant.changes), "fits" if made.fits else "does not fit")
    if made.fits:
      found.append(Found(variant, made))
  return found


def search(
  variants: Sequence[Variant],
  make: Callable[[Variant], plan.Plan | None],
  *,
  budget: int,
  on_done: Callable[[int, int], None] = lambda done, total: None,
) -> list[Found]:
  """The variants that fit, the quickest by roofline time first, among the first `budget`.

  Those whose traffic is unknown come last: their time leaves out memory and network.
  """
  found, compiled = [], 0
  for variant in variants:
    if compiled == budget:
      break
    if (made := make(variant)) is None:
      continue
    compiled += 1
    on_done(compiled, min(budget, len(variants)))
    found.append(Found(variant, made))
  rank = lambda f: (bool(f.plan.unknown_traffic), f.plan.step_seconds)
  return sorted((f for f in found if f.plan.fits), key=rank)


def mesh_shapes(devices: int, heads: int) -> Iterator[meshes.MeshConfig]:
  """Meshes of (data, fsdp, tensor) over all devices, the least communication first.

  `tensor` divides the heads. Long contexts also split the sequence: that is for the user to ask.
  """
  sizes = [n for n in range(1, devices + 1) if devices % n == 0]
  shapes = [
    (data, fsdp, devices // (data * fsdp))
    for data, fsdp in itertools.product(sizes, sizes)
    if devices % (data * fsdp) == 0
  ]
  for data, fsdp, tensor in sorted(shapes, key=lambda shape: (shape[2], shape[1])):
    if tensor <= MOST_TENSOR and heads % tensor == 0:
      yield meshes.MeshConfig(data, fsdp, tensor)


def halves(value: int, least: int) -> list[int]:
  """value / 2, value / 4, ... as long as `least` divides them."""
  found = []
  while value % (2 * least) == 0:
    value //= 2
    found.append(value)
  return found


def all_fsdp(sizes: meshes.MeshConfig) -> meshes.MeshConfig:
  """The mesh without copies of the parameters: those devices hold parts of them."""
  return dataclasses.replace(sizes, data=1, fsdp=sizes.data * sizes.fsdp)


def hopeless(recipe: plan.Recipe, device_bytes: int) -> bool:
  """Whether a recipe cannot fit, by its formulas or by what stays on a device all the time."""
  limit = plan.FITS * device_bytes
  peak = max(recipe.formulas.values(), default=0)
  return plan.resident_bytes(recipe) > limit or peak > HOPELESS * limit


def describe(changes: Mapping[str, Any]) -> str:
  """The changes as gin bindings."""
  return ", ".join(f"{name} = {value!r}" for name, value in changes.items()) or "as configured"
