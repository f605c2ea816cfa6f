"""Remedies and rankings: what is tried, in which order, how often, and what comes of it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from jaxlab.parallel import advise, plan, targets
from jaxlab.parallel import mesh as meshes

CPU = targets.parse("cpu")
MEMORY = 100
ONE = meshes.MeshConfig()


@dataclasses.dataclass(frozen=True)
class Planner:
  """Plans by a table: {names of the changes: (peak bytes, seconds of a step) or None}."""

  table: dict
  asked: list = dataclasses.field(default_factory=list)

  def __call__(self, variant: advise.Variant) -> plan.Plan | None:
    key = tuple(variant.changes.items())
    self.asked.append(key)
    found = self.table[key]
    return None if found is None else a_plan(*found)


def a_plan(peak: int, seconds: float = 1.0) -> plan.Plan:
  device = dataclasses.replace(CPU.device, memory_bytes=MEMORY)
  program = plan.ProgramPlan(
    name="step", runs=1.0, compiled=True, argument_bytes=peak, output_bytes=0, alias_bytes=0,
    temp_bytes=0, code_bytes=0, resident_bytes=0, peak_bytes=peak, formula_bytes=None, flops={},
    traffic_bytes=0.0, collective_bytes={}, compute_seconds=seconds, memory_seconds=0.0,
    network_seconds=0.0, implementations={}, buffers=(), trace_seconds=0.0, compile_seconds=0.0,
    cached=False,
  )  # fmt: skip
  return plan.Plan(dataclasses.replace(CPU, device=device), {}, [program])


def variant(**changes) -> advise.Variant:
  return advise.Variant(changes, lambda mesh: plan.Recipe((), ()), ONE)


def names(found) -> list[tuple]:
  return [tuple(f.variant.changes.items()) for f in found]


REMAT, BITS = (("remat", True),), (("bits", 4),)
MICRO_8, MICRO_4 = (("micro", 8),), (("micro", 4),)


def test_remedies_are_the_first_that_fit_one_of_each_kind():
  table = {REMAT: (120, 1.0), MICRO_8: (95, 1.0), MICRO_4: (60, 1.0), BITS: (92, 1.0)}
  planner = Planner(table)
  tried = [
    variant(remat=True),
    variant(micro=8),
    variant(micro=4),
    variant(micro=2),
    variant(bits=4),
  ]
  found = advise.remedies(tried, planner, budget=9)
  assert names(found) == [MICRO_4, BITS]
  assert all(f.plan.fits for f in found)
  # A smaller micro-batch than one that fits is the same remedy: it is not compiled.
  assert planner.asked == [REMAT, MICRO_8, MICRO_4, BITS]


def test_a_part_of_a_remedy_that_is_enough_leaves_the_rest_out():
  both = (("remat", True), ("micro", 4))
  planner = Planner({REMAT: (90, 1.0), both: (50, 1.0), MICRO_4: (200, 1.0)})
  tried = [variant(remat=True), variant(remat=True, micro=4), variant(micro=4)]
  assert names(advise.remedies(tried, planner, budget=9)) == [REMAT]
  assert both not in planner.asked
  alone = Planner({REMAT: (200, 1.0), both: (50, 1.0), MICRO_4: (90, 1.0)})
  assert names(advise.remedies(tried, alone, budget=9)) == [both, MICRO_4]


def test_three_remedies_are_enough():
  tried = [variant(**{name: 1}) for name in "abcde"]
  planner = Planner({((name, 1),): (10, 1.0) for name in "abcde"})
  assert names(advise.remedies(iter(tried), planner, budget=9)) == [((n, 1),) for n in "abc"]
  assert len(planner.asked) == advise.REMEDIES == 3


def test_the_budget_counts_what_was_compiled():
  tried = [variant(**{name: 1}) for name in "abcde"]
  table = {((name, 1),): (500, 1.0) for name in "acde"} | {(("b", 1),): None}  # b: hopeless
  planner = Planner(table)
  assert advise.remedies(tried, planner, budget=3) == []
  assert planner.asked == [((name, 1),) for name in "abcd"]
  assert advise.remedies(tried, planner, budget=0) == []


def test_a_search_ranks_what_fits_by_time():
  table = {
    (("mesh", 1),): (50, 3.0), (("mesh", 2),): (93, 1.0), (("mesh", 3),): None,
    (("mesh", 4),): (92, 2.0), (("mesh", 5),): (10, 0.1),
  }  # fmt: skip
  planner, seen = Planner(table), []
  tried = [variant(mesh=n) for n in range(1, 6)]
  count = lambda done, total: seen.append((done, total))
  found = advise.search(tried, planner, budget=3, on_done=count)
  assert names(found) == [(("mesh", 4),), (("mesh", 1),)]  # 2 does not fit, 5 is beyond the budget
  assert seen == [(1, 3), (2, 3), (3, 3)]
  all_of_them = advise.search(tried, Planner(table), budget=50)
  assert [f.plan.step_seconds for f in all_of_them] == [0.1, 2.0, 3.0]
  assert advise.search([], planner, budget=3) == []


def test_a_time_without_traffic_does_not_win():
  known, unknown = (("mesh", 1),), (("mesh", 2),)

  def make(one):
    made = a_plan(50, seconds=9.0)
    if tuple(one.changes.items()) == known:
      return made
    [program] = made.programs
    blind = {"traffic_bytes": None, "collective_bytes": None, "compute_seconds": 1.0}
    return dataclasses.replace(made, programs=[dataclasses.replace(program, **blind)])

  found = advise.search([variant(mesh=2), variant(mesh=1)], make, budget=9)
  assert names(found) == [known, unknown]
  assert found[1].plan.unknown_traffic == ["step"]


# --- meshes


@pytest.mark.parametrize("devices, heads", [(1, 3), (8, 8), (12, 28), (16, 40), (256, 64), (6, 7)])
def test_mesh_shapes_are_all_that_divide(devices, heads):
  found = [(m.data, m.fsdp, m.tensor) for m in advise.mesh_shapes(devices, heads)]
  every = {
    (data, fsdp, tensor)
    for data in range(1, devices + 1) for fsdp in range(1, devices // data + 1)
    for tensor in range(1, advise.MOST_TENSOR + 1)
    if data * fsdp * tensor == devices and heads % tensor == 0
  }  # fmt: skip
  assert len(found) == len(set(found)) and set(found) == every
  assert all(m.sequence == 1 for m in advise.mesh_shapes(devices, heads))
  for sizes in found:
    assert math.prod(meshes.MeshConfig(*sizes).shape(devices)) == devices


def test_the_first_meshes_communicate_the_least():
  found = list(advise.mesh_shapes(8, 8))
  assert found[0] == meshes.MeshConfig(data=8)  # gradients only
  assert found[1] == meshes.MeshConfig(data=4, fsdp=2)
  assert [m.tensor for m in found] == sorted(m.tensor for m in found)
  assert found[-1].tensor == 8


# --- without compiling


def test_what_is_hopeless_by_its_formulas():
  limit = advise.HOPELESS * plan.FITS * 1000
  assert limit == pytest.approx(1150)
  recipe = lambda **formulas: plan.Recipe((), (), formulas)
  assert not advise.hopeless(recipe(a=10, b=1150), 1000)
  assert advise.hopeless(recipe(a=10, b=1151), 1000)
  assert not advise.hopeless(recipe(), 1000)  # without formulas nothing is known


def test_what_stays_on_a_device_must_fit_it():
  """A 32B model copied to every chip needs no compiler to be ruled out."""
  array = lambda: jax.ShapeDtypeStruct((100,), jnp.float32)
  x = array()
  assert not advise.hopeless(plan.Recipe((), {"a": x, "same": x}), 450)
  assert advise.hopeless(plan.Recipe((), {"a": x, "other": array()}), 450)


def test_changes_read_as_bindings():
  assert advise.describe({"RLConfig.remat": True, "quantize.format": "nvfp4"}) == (
    "RLConfig.remat = True, quantize.format = 'nvfp4'"
  )
  assert advise.describe({}) == "as configured"


def test_variants_are_planned_as_they_are():
  """A real program under two sizes: the smaller one is the remedy."""

  def build(rows):
    x = plan.place(
      jax.ShapeDtypeStruct((rows, 1024), jnp.float32), jax.sharding.PartitionSpec(), mesh
    )
    return plan.Recipe([plan.Program("f", jax.jit(jnp.sin), (x,))], x)

  mesh = meshes.make_mesh(ONE, jax.devices()[:1])
  device = dataclasses.replace(CPU.device, memory_bytes=40_000)
  target = dataclasses.replace(CPU, device=device)
  make = lambda v: plan.make(v.build(mesh), target, mesh, compiles=True)
  tried = [
    advise.Variant({"rows": rows}, lambda mesh, rows=rows: build(rows), ONE) for rows in (8, 4, 2)
  ]
  [found] = advise.remedies(tried, make, budget=5)
  assert found.variant.changes == {"rows": 4} and found.plan.peak_bytes >= 2 * 4 * 4096
