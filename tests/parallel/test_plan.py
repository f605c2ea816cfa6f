"""Plans of small programs: arithmetic by closed forms, memory as the compiler has it."""

import dataclasses
import functools
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlab.parallel import flops as counting
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import plan, plan_report, targets
from jaxlab.quant import fp4
from jaxlab.rl import programs
from pallas_kernels import target as kernels
from pallas_kernels.fp4_gemm import cpu, fp4_matmul
from tests.rl import tiny as tiny_rl

CPU = targets.parse("cpu")
M, K, N = 8, 32, 16


@functools.cache
def one_device() -> jax.sharding.Mesh:
  return meshes.make_mesh(meshes.MeshConfig(), jax.devices()[:1])


WHOLE = P()


def shape(*sizes, dtype=jnp.float32, mesh=None, spec=WHOLE) -> jax.ShapeDtypeStruct:
  sharding = NamedSharding(mesh or one_device(), spec)
  return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def flops(function, *args, **trips) -> dict[str, float]:
  return counting.count(jax.jit(function).trace(*args).jaxpr.jaxpr, **trips)


# --- arithmetic


def test_a_product_takes_two_operations_a_weight():
  x, w = shape(M, K), shape(K, N)
  assert flops(jnp.matmul, x, w) == {"float32": 2 * M * K * N}
  halves = [shape(*a.shape, dtype=jnp.bfloat16) for a in (x, w)]
  assert flops(jnp.matmul, *halves) == {"bfloat16": 2 * M * K * N}
  heads = flops(
    lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k), shape(3, 5, 2, 4), shape(3, 7, 2, 4)
  )
  assert heads == {"float32": 2 * 3 * 2 * 5 * 7 * 4}


def test_a_gradient_takes_three_times_the_product():
  loss = lambda x, w: jnp.sum(x @ w)
  both = flops(jax.grad(lambda x, w: loss(x, w) ** 2, (0, 1)), shape(M, K), shape(K, N))
  assert both == {"float32": 3 * 2 * M * K * N}
  # Of the weights alone: without the gradient of the input.
  assert flops(jax.grad(loss, 1), shape(M, K), shape(K, N))["float32"] <= 2 * 2 * M * K * N


def test_loops_count_by_their_length_and_of_branches_the_larger_counts():
  square = shape(K, K)
  one = 2 * M * K * K

  def layers(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  assert flops(layers, shape(M, K), shape(5, K, K)) == {"float32": 5 * one}
  nested = lambda x, w: jax.lax.fori_loop(0, 3, lambda i, x: layers(x, w), x)
  assert flops(nested, shape(M, K), shape(5, K, K)) == {"float32": 15 * one}
  recomputed = jax.grad(lambda x, w: jnp.sum(jax.checkpoint(layers)(x, w)))
  assert flops(recomputed, shape(M, K), shape(5, K, K))["float32"] == (1 + 1 + 1) * 5 * one
  branches = [lambda x, w: x, lambda x, w: x @ w @ w, lambda x, w: x @ w]
  choose = lambda i, x, w: jax.lax.switch(i, branches, x, w)
  assert flops(choose, shape(dtype=jnp.int32), shape(M, K), square) == {"float32": 2 * one}
  until = lambda x, w: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)
  assert flops(until, shape(M, K), square) == {"float32": one}  # of unknown length: once
  assert flops(until, shape(M, K), square, trips=7.0) == {"float32": 7 * one}


def test_a_convolution_takes_a_product_for_each_place():
  image, kernel = shape(2, 10, 12, 3), shape(5, 5, 3, 7)
  convolve = functools.partial(
    jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )  # fmt: skip
  assert flops(convolve, image, kernel) == {"float32": 2 * (2 * 10 * 12 * 7) * (5 * 5 * 3)}


def test_implementations_are_named_by_their_scope():
  def step(x):
    with jax.named_scope("fp4_matmul:xla"):
      x = jnp.sin(x)
    return jax.lax.scan(
      lambda x, _: (jax.named_call(jnp.cos, name="attend:dense")(x), None), x, length=2
    )[0]

  traced = jax.jit(step).trace(shape(4))
  assert plan.implementations(traced.jaxpr.jaxpr) == {"fp4_matmul": "xla", "attend": "dense"}


# --- bytes


def test_bytes_of_a_device_are_those_of_its_shards():
  mesh = jax.sharding.AbstractMesh((2, 2, 2, 1), meshes.AXES)
  tree = {
    "whole": shape(8, 4, mesh=mesh),
    "split": shape(8, 4, mesh=mesh, spec=P(("data", "fsdp"), "tensor")),
    "half": shape(8, dtype=jnp.bfloat16, mesh=mesh, spec=P("fsdp")),
    "key": jax.eval_shape(lambda: jax.random.key(0)), "array": np.zeros((3, 5), np.int8),
  }  # fmt: skip
  assert plan.device_bytes(tree) == 4 * (32 + 32 // 8) + 2 * 8 // 2 + 8 + 15
  placed = plan.place({"a": jax.ShapeDtypeStruct((8,), jnp.float32)}, P("fsdp"), mesh)
  assert plan.device_bytes(placed) == 16
  each = plan.place(
    {"a": jax.ShapeDtypeStruct((8,), jnp.float32)}, {"a": P(("data", "tensor"))}, mesh
  )
  assert plan.device_bytes(each) == 8


@functools.partial(jax.jit, donate_argnums=0)
def update(state, frozen, batch):
  """As a train step: the state is donated, the rest stays."""
  loss = lambda w: jnp.mean(jnp.square(jnp.tanh(batch @ frozen) @ w))
  grads = jax.grad(loss)(state["w"])
  momentum = 0.9 * state["m"] + grads
  return {"w": state["w"] - momentum, "m": momentum}, jnp.sum(grads)


def arguments(mesh: jax.sharding.Mesh):
  """State, frozen weights and rows of `update`, spread over `mesh`."""
  w = shape(64, 32, mesh=mesh, spec=P("fsdp"))
  momentum = shape(64, 32, mesh=mesh, spec=P("fsdp"))
  frozen = shape(48, 64, mesh=mesh, spec=P(None, "tensor"))
  return {"w": w, "m": momentum}, frozen, shape(16, 48, mesh=mesh, spec=P(("data", "fsdp")))


@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 2, 1)], ids=str)
def test_the_plan_of_this_machine_is_what_the_running_program_has(sizes):
  config = meshes.MeshConfig(*sizes)
  target = targets.parse(f"cpux{np.prod(sizes)}")
  mesh = meshes.make_mesh(config, targets.devices(target))
  args = arguments(mesh)
  made = plan.make(
    plan.Recipe([plan.Program("update", update, args)], args[:2]), target, mesh, compiles=True
  )
  arrays = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape), x.sharding), args)
  memory = update.lower(*arrays).compile().memory_analysis()
  [found] = made.programs
  assert (found.argument_bytes, found.output_bytes, found.alias_bytes, found.temp_bytes) == (
    memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes,
    memory.temp_size_in_bytes,
  )  # fmt: skip
  data, fsdp, tensor, _ = sizes
  state = 2 * 4 * 64 * 32 // fsdp
  assert found.alias_bytes == state
  assert found.argument_bytes == state + 4 * 48 * 64 // tensor + 4 * 16 * 48 // (data * fsdp)
  assert found.resident_bytes == 0  # all that stays is an argument
  own = found.argument_bytes + found.output_bytes - found.alias_bytes + found.temp_bytes
  assert made.peak_bytes == found.peak_bytes == own + found.code_bytes
  products = 2 * 16 * 48 * 64 + 2 * 2 * 16 * 64 * 32  # the last one forwards, and its gradient
  assert found.flops == {"float32": products / np.prod(sizes)}
  assert bool(found.collective_bytes) == (np.prod(sizes) > 1)
  assert found.traffic_bytes > found.argument_bytes
  assert found.seconds == max(
    products / np.prod(sizes) / target.device.flops["f32"],
    found.traffic_bytes / target.device.hbm,
    sum(found.collective_bytes.values()) / target.device.network,
  )
  text = json.dumps(plan_report.as_dict(made))
  assert json.loads(text)["programs"][0]["bound"] == found.bound
  run = update(*arrays)  # the very program ran
  assert all(
    x.sharding == y.sharding for x, y in zip(jax.tree.leaves(run[0]), jax.tree.leaves(args[0]))
  )


def test_what_stays_is_counted_once():
  """Beside a program is what it does not take; an equal array that is another one counts."""
  a, b, again = shape(32), shape(64), shape(32)
  double = jax.jit(lambda x: 2 * x)
  programs = [
    plan.Program("takes_a", double, (a,)),
    plan.Program("takes_b", double, (b,), runs=3.0),
  ]
  made = plan.make(
    plan.Recipe(programs, {"a": a, "same": a, "b": [b], "c": again}),
    CPU,
    one_device(),
    compiles=True,
  )
  takes_a, takes_b = made.programs
  assert (takes_a.argument_bytes, takes_a.resident_bytes) == (4 * 32, 4 * 64 + 4 * 32)
  assert (takes_b.argument_bytes, takes_b.resident_bytes) == (4 * 64, 4 * 32 + 4 * 32)
  assert (
    takes_a.peak_bytes
    == takes_a.resident_bytes + 2 * 4 * 32 + takes_a.temp_bytes + takes_a.code_bytes
  )
  assert made.peak_bytes == max(takes_a.peak_bytes, takes_b.peak_bytes)
  assert made.step_seconds == takes_a.seconds + 3 * takes_b.seconds


# --- what fits


def a_plan(peak: int, memory: int, refused: str | None = None) -> plan.Plan:
  x = shape(4)
  recipe = plan.Recipe([plan.Program("f", jax.jit(jnp.sin), (x,))], x)
  made = plan.make(recipe, CPU, one_device(), compiles=False)
  program = dataclasses.replace(made.programs[0], peak_bytes=peak, refused=refused)
  device = dataclasses.replace(CPU.device, memory_bytes=memory)
  return dataclasses.replace(
    made, target=dataclasses.replace(CPU, device=device), programs=[program]
  )


def test_it_fits_up_to_92_percent_of_the_device():
  assert plan.FITS == 0.92
  assert a_plan(92, 100).fits
  assert not a_plan(93, 100).fits
  assert a_plan(73_600_000_000, 80_000_000_000).fits
  assert not a_plan(73_600_000_001, 80_000_000_000).fits
  assert not a_plan(10, 100, refused="too much").fits


def test_it_stops_after_what_does_not_fit():
  programs = [plan.Program(name, jax.jit(jnp.sin), (shape(4),)) for name in "ab"]
  device = dataclasses.replace(CPU.device, memory_bytes=10)
  small = dataclasses.replace(CPU, device=device)
  make = functools.partial(
    plan.make, plan.Recipe(programs, ()), small, one_device(), compiles=False
  )
  assert [p.name for p in make().programs] == ["a", "b"]
  assert [p.name for p in make(stops=True).programs] == ["a"]


USED = int(21.92 * 2**30)


@pytest.mark.parametrize(
  "message, used",
  [
    ("Ran out of memory in memory space hbm. Used (21.92G) exceeds available HBM (15.75G).", USED),
    ("Ran out of memory in memory space hbm. Used 21.92G of 15.75G hbm. Exceeded by 6G", USED),
    ("XLA:TPU compile permanent error. Used 903.10M of 512.00M hbm.", int(903.10 * 2**20)),
  ],
)  # fmt: skip
def test_a_tpu_compiler_that_refuses_says_how_much_it_wanted(message, used, monkeypatch, tmp_path):
  def refuse(self, **options):
    raise jax.errors.JaxRuntimeError(
      f"RESOURCE_EXHAUSTED: {message}\n  Program hbm requirement ..."
    )

  x, other = shape(4), shape(8)
  recipe = plan.Recipe([plan.Program("f", jax.jit(jnp.sin), (x,))], (x, other))
  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  for cached in (False, True):  # what was refused is remembered, too
    made = plan.make(recipe, CPU, one_device(), compiles=True, cache=tmp_path)
    [found] = made.programs
    assert found.cached == cached
    assert found.peak_bytes == used + 4 * 8
    assert not made.fits and re.search(r"exceeds|of .* hbm", found.refused)
    assert found.traffic_bytes is None and found.memory_seconds == 0
    assert "does not fit" in plan_report.summary(made)
    assert "unknown" in plan_report.markdown(made, [], [], "")


def test_another_error_of_the_compiler_is_an_error(monkeypatch):
  def fail(self, **options):
    raise jax.errors.JaxRuntimeError("INTERNAL: the compiler is at fault")

  monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
  recipe = plan.Recipe([plan.Program("f", jax.jit(jnp.sin), (shape(4),))], ())
  with pytest.raises(jax.errors.JaxRuntimeError, match="at fault"):
    plan.make(recipe, CPU, one_device(), compiles=True)


def test_a_program_that_cannot_be_read_back_still_has_its_memory(monkeypatch):
  def fail(self):
    raise jax.errors.JaxRuntimeError("INTERNAL: async-update\nmore")

  monkeypatch.setattr(jax.stages.Compiled, "as_text", fail)
  recipe = plan.Recipe([plan.Program("f", jax.jit(jnp.sin), (shape(4),))], ())
  [found] = plan.make(recipe, CPU, one_device(), compiles=True).programs
  assert (found.argument_bytes, found.output_bytes) == (16, 16)
  assert found.traffic_bytes is None and found.collective_bytes is None


# --- the cache


def test_a_program_is_compiled_once(tmp_path, monkeypatch):
  compiles = []
  lowered_compile = jax.stages.Lowered.compile
  monkeypatch.setattr(
    jax.stages.Lowered, "compile", lambda self: compiles.append(1) or lowered_compile(self)
  )
  make = lambda *programs, target=CPU: (
    plan.make(
      plan.Recipe(programs, ()), target, one_device(), compiles=True, cache=tmp_path / "cache"
    ).programs
  )
  [first] = make(plan.Program("f", jax.jit(jnp.sin), (shape(4),)))
  [again] = make(plan.Program("f", jax.jit(jnp.sin), (shape(4),), runs=2.0))
  assert (first.cached, again.cached, len(compiles)) == (False, True, 1)
  own = {"cached": False, "runs": 1.0, "trace_seconds": 0.0, "compile_seconds": 0.0}
  assert dataclasses.replace(again, **own) == dataclasses.replace(first, **own)
  [larger] = make(plan.Program("f", jax.jit(jnp.sin), (shape(5),)))
  [other] = make(plan.Program("f", jax.jit(jnp.cos), (shape(4),)))
  [elsewhere] = make(
    plan.Program("f", jax.jit(jnp.sin), (shape(4),)), target=targets.parse("cpux1")
  )
  [longer] = make(plan.Program("f", jax.jit(jnp.sin), (shape(4),), trips=9.0))  # read otherwise
  monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=true")
  [faster] = make(plan.Program("f", jax.jit(jnp.sin), (shape(4),)))
  assert not any(p.cached for p in (larger, other, elsewhere, longer, faster))
  assert len(list((tmp_path / "cache").iterdir())) == len(compiles) == 6


@pytest.mark.parametrize(
  "rows, platform", [(1, "h100"), (64, "h100"), (1, "v6e"), (64, "v5e"), (5, "cpu")]
)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_a_kernel_counts_as_the_product_it_stands_for(rows, platform, fmt):
  """Both directions, of one layer of a stack, whatever the kernel's own arrays look like."""
  w = fp4.quantize(jnp.ones((2, 256, 128)), fmt)
  x = jnp.ones((rows, 256), jnp.bfloat16)

  def loss(x, i):
    y = fp4_matmul(x, w.codes, w.scale, w.multiplier, layer=i)
    return jnp.sum(y.astype(jnp.float32) ** 2)

  if platform == "cpu" and cpu.why_no_library():
    pytest.skip("no native library")
  with kernels.use_target(platform):
    found = flops(jax.grad(loss), x, jnp.int32(1))
  assert found == {"bfloat16": 2 * 2 * rows * 256 * 128}


# --- without a compiler


@pytest.mark.parametrize("text, sizes", [("h100x8", (2, 2, 2, 1)), ("v5e:1x1", (1, 1, 1, 1))])
def test_without_a_compiler_an_rl_recipe_is_lowered_and_counted(text, sizes):
  """On a mesh of devices that are not there: arguments by their shards, the rest by formula."""
  target = targets.parse(text)
  mesh = jax.sharding.AbstractMesh(sizes, meshes.AXES)
  spread = None if mesh.size == 1 else meshes.MeshConfig(*sizes)
  config = tiny_rl.config(mesh=spread, micro_rows=8, aqn=None)
  with kernels.use_target(kernels.Target(target.device.platform, target.device.kind)):
    recipe = programs.recipe(tiny_rl.CONFIG, config, fp4.quantize_params, mesh)
    made = plan.make(recipe, target, mesh, compiles=False)
  assert [p.name for p in made.programs] == ["rollout_prefill", "rollout_decode", "train_step"]
  for found, program in zip(made.programs, recipe.programs):
    shapes = [
      x for x in jax.tree.leaves((program.args, dict(program.kwargs))) if hasattr(x, "sharding")
    ]
    chosen = {"cuda": "triton", "tpu": "mosaic_tpu"}[target.device.platform]
    assert not found.compiled and found.implementations == {"fp4_matmul": chosen}
    assert found.argument_bytes == plan.device_bytes(shapes)
    everything = plan.device_bytes(
      list({id(x): x for x in [*shapes, *jax.tree.leaves(recipe.resident)]}.values())
    )
    # The formula is of all that is on the device; shapes that need more have the last word.
    assert found.peak_bytes == max(found.formula_bytes, everything)
    assert found.flops["bfloat16"] > 0 and found.traffic_bytes is None
  assert made.fits and "by formula: no compiler here" in plan_report.summary(made)
  assert dict(made.mesh) == dict(zip(meshes.AXES, sizes))
