"""The programs of an RL run with abstract arguments, and what to change where they do not fit.

They are the run's own functions (`loop.prepare` builds the same objects) on shapes as large as the
configuration allows: prompts of the full length, answers that never stop, nothing shared.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlab import lora
from jaxlab.decode import autoregressive, sampling
from jaxlab.decode import programs as decode
from jaxlab.models import zoo
from jaxlab.nn import weights
from jaxlab.parallel import advise, plan, rules
from jaxlab.quant import fp4
from jaxlab.rl import base, batch, experiment, rollout
from jaxlab.rl import config as rl_config
from jaxlab.train import budget, guard, state, step
from pallas_kernels import target

PyTree = Any
Quantize = Callable[[PyTree], PyTree]


def recipe(
  model: Mapping[str, Any],
  config: rl_config.RLConfig,
  quantize: Quantize,
  mesh: rules.Mesh,
  *,
  evaluates: bool = False,
) -> plan.Recipe:
  """What `launch.rl` compiles: rollout (prefill, decode), scoring where it is needed, update.

  Args:
    model: the model's config.json.
    quantize: of parameters, as in the run.
    mesh: the devices to plan for; one device has a mesh of size 1.
    evaluates: whether held-out items are answered before and after.
  Raises: ValueError for a model that we do not have, or a mesh that does not divide its sizes.
  """
  architecture = zoo.causal_lm_config(dict(model))
  base.check_mesh(config, architecture, mesh.size)
  dtype = jnp.float32 if budget.default_dtype_bytes() == 4 else jnp.bfloat16
  placement = None if mesh.size == 1 else rules.Placement(mesh, architecture.num_kv_heads)
  module = zoo.from_config(dict(model), dtype).clone(placement=placement)
  run = _Run(config, module, mesh)
  params = run.params(quantize)
  trainable, frozen = weights.partition(params, lora.is_trainable(config.lora))
  optimizer = guard.guarded(config.optimizer.build(config.updates))
  current = state.abstract(trainable, optimizer, mesh)
  served = run.serving(current, frozen)
  # The adapters as attached stay, as the reference of a KL term; so does a copy for serving.
  resident = (current, frozen, trainable, served)
  packed = run.batch()
  objective = batch.make_objective(module.clone(remat=config.remat), config.loss)
  train_step = step.make_train_step(objective, optimizer, micro_batch=config.micro_rows)
  updates = config.iterations * config.minibatches
  programs = [
    *run.rollout("rollout", config.sampling, config.prompts, config.samples, served),
    plan.Program("train_step", train_step, (current, frozen, packed, run.key), runs=float(updates)),
  ]
  scored = config.minibatches * (updates > 1) + config.minibatches * bool(config.loss.kl_coef)
  if scored:
    args = (module, config.loss, current.trainable, frozen, packed)
    kwargs = {"micro_rows": config.micro_rows}
    programs.append(plan.Program("score", rollout.score_step, args, kwargs, float(scored)))
  if evaluates:
    greedy = dataclasses.replace(config.sampling, temperature=0.0)
    rows = experiment.evaluation_rows(experiment.EVAL_ROWS, placement)
    programs += run.rollout("evaluation", greedy, rows, 1, served, in_step=False)
  formulas = _formulas(architecture, config, base.format_of(params), mesh.size)
  return plan.Recipe(programs, resident, formulas)


def smaller(
  config: rl_config.RLConfig, quantize: Quantize, mesh: rules.Mesh
) -> Iterator[tuple[dict[str, Any], rl_config.RLConfig, Quantize]]:
  """({gin name: value}, config, quantize) of runs that need less memory.

  One change at a time, the cheapest first; then all of them, which ends with 4-bit weights.
  """
  shards = rules.row_shards(mesh)
  micro_rows = advise.halves(config.micro_rows or packed_rows(config, shards), shards)
  prompts = [p for p in advise.halves(config.prompts, 1) if p * config.samples % shards == 0]
  chunk = {"PolicyGradientConfig.chunk_tokens": 1024}
  remat, four_bit = {"RLConfig.remat": True}, {"quantize.format": "nvfp4"}
  micro = [{"RLConfig.micro_rows": rows} for rows in micro_rows]
  fewer = [_fewer(config, n, shards) for n in prompts]
  least = (micro[-1] if micro else {}) | chunk | remat
  for change in (remat, chunk, *micro, *fewer, four_bit, least, *({**f, **least} for f in fewer),
                 {**(fewer[-1] if fewer else {}), **least, **four_bit}):  # fmt: skip
    packs = "quantize.format" in change
    if packs and _packed(quantize):
      continue
    if (made := _changed(config, change)) != config or packs:
      yield change, made, fp4.quantize_params if packs else quantize


def _packed(quantize: Quantize) -> bool:
  """Whether kernels have 4 bits already."""
  kernel = jax.ShapeDtypeStruct((1, 128, 128), jnp.float32)
  shapes = {"layers": {name: {"kernel": kernel} for name in lora.TARGETS}}
  found = jax.eval_shape(quantize, shapes)
  return any(map(weights.is_packed, jax.tree.leaves(found, is_leaf=weights.is_packed)))


def packed_rows(config: rl_config.RLConfig, shards: int = 1) -> int:
  """Rows of the largest batch of an update, as packed for so many parts."""
  rows = -(-config.update_answers // config.sequences_per_row)
  return -(-rows // shards) * shards


def _fewer(config: rl_config.RLConfig, prompts: int, shards: int) -> dict[str, int]:
  """Fewer prompts; micro-batches no larger than their answers, or they would be filled up."""
  rows = packed_rows(dataclasses.replace(config, prompts=prompts), shards)
  micro = {"RLConfig.micro_rows": rows} if (config.micro_rows or 0) > rows else {}
  return {"RLConfig.prompts": prompts} | micro


def _changed(config: rl_config.RLConfig, change: Mapping[str, Any]) -> rl_config.RLConfig:
  own = {n.removeprefix("RLConfig."): v for n, v in change.items() if n.startswith("RLConfig.")}
  if (chunk := change.get("PolicyGradientConfig.chunk_tokens")) is not None:
    own["loss"] = dataclasses.replace(
      config.loss, chunk_tokens=min(chunk, config.loss.chunk_tokens)
    )
  return dataclasses.replace(config, **own)


@dataclasses.dataclass(frozen=True)
class _Run:
  """A run's sizes, and where its arrays live."""

  config: rl_config.RLConfig
  module: Any
  mesh: rules.Mesh

  @functools.cached_property
  def key(self) -> jax.ShapeDtypeStruct:
    shape = jax.eval_shape(lambda: jax.random.key(0))
    return plan.place(shape, jax.sharding.PartitionSpec(), self.mesh)

  def params(self, quantize: Quantize) -> PyTree:
    """Quantised base and adapters."""

    make = lambda params, key: lora.attach(quantize(params), self.config.lora, key)
    dense = zoo.param_shapes(self.module.clone(placement=None))
    shapes = jax.eval_shape(make, dense, self.key)
    return plan.place_params(shapes, self.mesh, self.module.config.num_kv_heads)

  def batch(self) -> batch.PackedBatch:
    """The largest batch of an update."""
    c = self.config

    def make():
      packed = batch.largest(
        c.update_answers, per_row=c.sequences_per_row,
        max_prompt=c.max_prompt_tokens, max_answer=c.sampling.max_new_tokens,
        row_multiple=math.lcm(c.micro_rows or 1, rules.row_shards(self.mesh)),
      )  # fmt: skip
      logp = packed.logp_rollout_RQT
      several = c.iterations * c.minibatches > 1
      return dataclasses.replace(
        packed,
        logp_old_RQT=logp if several else None,
        logp_ref_RQT=logp if c.loss.kl_coef else None,
      )

    return plan.place(jax.eval_shape(make), rules.batch_spec(), self.mesh)

  def rollout(
    self, name: str, sampled: sampling.SamplingConfig, prompts: int, samples: int, params: PyTree,
    *, in_step: bool = True,
  ) -> list[plan.Program]:  # fmt: skip
    """Prefill and decode of `prompts` groups; an evaluation has no noise and is in no step."""
    noise = self.config.aqn if in_step else None
    return decode.programs(
      name, autoregressive.Sampler(self.module, sampled, stop_ids=(0,)), params, self.mesh,
      prompts=prompts, samples=samples, prompt_tokens=self.config.max_prompt_tokens,
      sigma=None if noise is None else noise.sigma_start,
      relative=noise is not None and noise.relative, runs=float(in_step),
    )  # fmt: skip

  def serving(self, current: state.TrainState, frozen: PyTree) -> PyTree:
    """The parameters as the sampler has them; on an accelerator they are the trainer's own."""
    placement = self.module.placement
    if target.current_target().platform != "cpu":
      return weights.merge(current.trainable, frozen)
    serve = lambda trainable, frozen: rollout.Serving(frozen, placement).params(trainable)
    shapes = jax.eval_shape(serve, current.trainable, frozen)
    return plan.place_params(shapes, self.mesh, self.module.config.num_kv_heads)


def _formulas(
  architecture, config: rl_config.RLConfig, format: str, devices: int
) -> dict[str, int]:
  """Bytes at the peak of every program by `budget.memory_budget`."""
  work = base.work(config, format, devices)
  alone = lambda **sizes: budget.memory_budget(
    architecture, format, dataclasses.replace(work, **sizes)
  )["peak"]
  rollout_bytes, update = alone(train_sequences=0), alone(rollout_sequences=0)
  # An evaluation has other rows than a rollout, over as many devices.
  parts = -(-config.prompts * config.samples // work.rollout_sequences)
  answered = alone(train_sequences=0, rollout_sequences=-(-experiment.EVAL_ROWS // parts))
  return {
    "rollout_prefill": rollout_bytes, "rollout_decode": rollout_bytes,
    "evaluation_prefill": answered, "evaluation_decode": answered,
    "train_step": update, "score": update,
  }  # fmt: skip
