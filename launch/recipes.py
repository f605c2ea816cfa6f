"""From a gin recipe to the programs that its verb compiles. Data files are never read.

Which verb it is for is seen from what it binds: RLConfig, TrainConfig, else a model that decodes
(generate, evaluate, quantize), which the flag --model names.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlab.decode import autoregressive
from jaxlab.decode import programs as decode
from jaxlab.models import zoo
from jaxlab.parallel import advise, plan, rules
from jaxlab.parallel import mesh as meshes
from jaxlab.rl import programs as rl
from jaxlab.rl import tiny
from jaxlab.train import budget, pretrain
from launch import common, model, registry

Mesh = rules.Mesh


class Choices(NamedTuple):
  """What may be planned of a recipe.

  recipe: as configured. mesh: the recipe's own, or None.
  smaller: variants on a mesh that need less memory. searched: variants over a number of devices.
  """

  verb: str
  recipe: Callable[[Mesh], plan.Recipe]
  mesh: meshes.MeshConfig | None
  smaller: Callable[[meshes.MeshConfig, Mesh], Iterator[advise.Variant]]
  searched: Callable[[int], Iterator[advise.Variant]]


def choices(run: common.Run) -> Choices:
  """Reads the recipe of the command line.

  Raises: ValueError for a model that is not known, or settings that do not fit each other.
  """
  if registry.mentions("RLConfig"):
    return _rl(run)
  if registry.mentions("TrainConfig"):
    return _train(run)
  return _decoding(run)


# --- reinforcement learning


def _rl(run: common.Run) -> Choices:
  config = registry.get("RLConfig")()
  quantize = registry.get("quantize")
  found = _rl_model(config, run)
  evaluates = registry.mentions("RLData", "test")

  def recipe(config, quantize, mesh):
    resolved = dataclasses.replace(config, mesh=_sizes(mesh))
    return rl.recipe(found, resolved, quantize, mesh, evaluates=evaluates)

  def smaller(sizes, mesh):
    if sizes.data > 1:
      split = advise.all_fsdp(sizes)
      yield advise.Variant(_mesh_change(split), functools.partial(recipe, config, quantize), split)
    for change, config_, quantize_ in rl.smaller(config, quantize, mesh):
      yield advise.Variant(change, functools.partial(recipe, config_, quantize_), sizes)

  def searched(devices):
    heads = zoo.causal_lm_config(found).num_heads
    for sizes in advise.mesh_shapes(devices, heads):
      packed = rl.packed_rows(config, sizes.data * sizes.fsdp)
      for rows in _micro_rows(packed, sizes, config.micro_rows):
        changed = dataclasses.replace(config, micro_rows=rows)
        yield advise.Variant(
          _mesh_change(sizes) | {"RLConfig.micro_rows": rows},
          functools.partial(recipe, changed, quantize), sizes,
        )  # fmt: skip

  return Choices("rl", functools.partial(recipe, config, quantize), config.mesh, smaller, searched)


def _rl_model(config: Any, run: common.Run) -> Mapping[str, Any]:
  """The model's config.json; of one that the run would pre-train first, without doing so."""
  if getattr(config.model, "func", config.model) is tiny.addition_model:
    return tiny.CONFIG
  return pretrain.read_model_config(config.model_path(run.workdir))


# --- training


def _train(run: common.Run) -> Choices:
  config = registry.get("TrainConfig")()
  found = pretrain.read_model_config(config.model_path(run.workdir))

  def recipe(config, mesh):
    function, args = pretrain.abstract_step(found, config, mesh)
    formula = None if config.lora else pretrain.formula_bytes(found, config, mesh)
    formulas = {"train_step": formula} if formula else {}
    return plan.Recipe([plan.Program("train_step", function, args)], args[:2], formulas)

  def smaller(sizes, mesh):
    if not config.remat:
      yield _variant({"TrainConfig.remat": True}, sizes)
    rows = config.micro_rows or config.rows
    fewer = advise.halves(rows, rules.row_shards(mesh))
    for micro in fewer:
      yield _variant({"TrainConfig.micro_rows": micro}, sizes)
    if sizes.data > 1:
      split = advise.all_fsdp(sizes)
      yield _variant({}, split)
      yield _variant({"TrainConfig.micro_rows": [rows, *fewer][-1]}, split)

  def searched(devices):
    heads = zoo.from_config(found, jnp.float32).config.num_heads
    for sizes in advise.mesh_shapes(devices, heads):
      for rows in _micro_rows(config.rows, sizes, config.micro_rows):
        yield _variant({"TrainConfig.micro_rows": rows}, sizes)

  def _variant(change: Mapping[str, Any], sizes: meshes.MeshConfig) -> advise.Variant:
    fields = {name.removeprefix("TrainConfig."): value for name, value in change.items()}
    changed = dataclasses.replace(config, **fields)
    return advise.Variant(
      {**change, **_mesh_change(sizes)}, functools.partial(recipe, changed), sizes
    )

  return Choices("train", functools.partial(recipe, config), config.mesh, smaller, searched)


# --- a model that decodes


def _decoding(run: common.Run) -> Choices:
  found = pretrain.read_model_config(model.required(run.flags.model))
  sampled = registry.get("SamplingConfig")()
  quantize = registry.get("quantize") if registry.mentions("quantize") else lambda params: params
  rows = registry.setting("AccuracyConfig", "batch_size")

  def recipe(rows, mesh):
    dtype = jnp.float32 if budget.default_dtype_bytes() == 4 else jnp.bfloat16
    kv_heads = zoo.causal_lm_config(found).num_kv_heads
    placement = None if mesh.size == 1 else rules.Placement(mesh, kv_heads)
    plain = zoo.from_config(found, dtype)
    shapes = jax.eval_shape(quantize, zoo.param_shapes(plain))
    params = plan.place_params(shapes, mesh, kv_heads)
    sampler = autoregressive.Sampler(plain.clone(placement=placement), sampled, stop_ids=(0,))
    programs = decode.programs(
      "generate", sampler, params, mesh,
      prompts=rows, samples=1, prompt_tokens=run.flags.prompt_tokens,
    )  # fmt: skip
    parts = budget.memory_budget(zoo.causal_lm_config(found), work=budget.Work(
      dtype_bytes=jnp.dtype(dtype).itemsize,
      rollout_sequences=-(-rows // rules.row_shards(mesh)),
      rollout_tokens=run.flags.prompt_tokens + sampled.max_new_tokens,
      head_shards=mesh.shape["tensor"],
    ))  # fmt: skip
    peak = plan.device_bytes(params) + parts["peak"] - parts["weights"]
    return plan.Recipe(programs, params, {program.name: peak for program in programs})

  def smaller(sizes, mesh):
    for fewer in advise.halves(rows, rules.row_shards(mesh)):
      yield advise.Variant(
        {"AccuracyConfig.batch_size": fewer}, functools.partial(recipe, fewer), sizes
      )

  def searched(devices):
    for sizes in advise.mesh_shapes(devices, zoo.causal_lm_config(found).num_heads):
      if rows % (sizes.data * sizes.fsdp) == 0:
        yield advise.Variant(_mesh_change(sizes), functools.partial(recipe, rows), sizes)

  return Choices("generate", functools.partial(recipe, rows), None, smaller, searched)


# --- sizes


def _sizes(mesh: Mesh) -> meshes.MeshConfig | None:
  return None if mesh.size == 1 else meshes.MeshConfig(**mesh.shape)


def _mesh_change(sizes: meshes.MeshConfig) -> dict[str, int]:
  return {
    f"MeshConfig.{axis}": size for axis, size in dataclasses.asdict(sizes).items() if size > 1
  }


def _micro_rows(rows: int, sizes: meshes.MeshConfig, configured: int | None) -> Iterator[int]:
  """Twice, once and half of what is configured, in whole rows of every device."""
  shards = sizes.data * sizes.fsdp
  for micro in ((configured or rows) * 2, configured or rows, (configured or rows) // 2):
    if micro and micro % shards == 0 and rows % micro == 0:
      yield micro
