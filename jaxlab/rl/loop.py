"""The RL loop, assembled: quantised base + adapters + rollouts -> `train.fit`. Source: QeRL Alg. 1.

`Trainer` holds what a run is made of; `run` trains (and resumes); `accuracy` scores the held-out
items without noise. The base never changes and is never copied for the trainer.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jaxlab import lm as lm_lib
from jaxlab import lora
from jaxlab.decode import autoregressive, sampling, text
from jaxlab.eval import records
from jaxlab.nn import weights
from jaxlab.parallel import rules
from jaxlab.rl import base, batch, rollout
from jaxlab.rl import config as rl_config
from jaxlab.train import fit, guard, signals, state, step

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Trainer:
  """A run before its first step; build it with `prepare`."""

  lm: lm_lib.LM  # params: base with adapters attached
  data: rl_config.RLData
  config: rl_config.RLConfig
  key: jax.Array
  state: state.TrainState
  frozen: PyTree
  source: rollout.RolloutSource
  train_step: Callable[..., Any]
  optimizer: optax.GradientTransformation

  def run(
    self,
    workdir: str | os.PathLike[str],
    *,
    config_text: str = "",
    on_round: Callable[[int, state.TrainState, dict[str, Any]], Mapping[str, Any] | None]
    | None = None,
    stop: signals.Interrupt | None = None,
  ) -> PyTree:
    """Trains to the configured number of steps; returns the parameters with trained adapters."""
    fingerprint = {
      "items": records.content_id("items", [item.id for item in self.data.train]),
      "base_bytes": int(sum(x.nbytes for x in jax.tree.leaves(self.frozen))),
    }
    final = fit.fit(
      self.train_step,
      self.state,
      self.frozen,
      self.source,
      steps=self.config.steps,
      key=self.key,
      workdir=workdir,
      save_every_steps=self.config.save_every,
      fingerprint=fingerprint,
      config_text=config_text,
      on_round=on_round,
      stop=stop,
    )
    return weights.merge(final.trainable, self.frozen)

  def place(self, work: tuple[state.TrainState, batch.PackedBatch, jax.Array]) -> Any:
    """(state, batch, key) of an update, read from files, where the run has such arrays."""
    placement = self.lm.module.placement
    if placement is None:
      return work
    train_state, packed, key = work
    like = lambda x, there: rules.place(x, there.sharding)
    train_state = jax.tree.map(like, train_state, self.state)
    return train_state, rules.shard_rows(packed, placement.mesh), like(key, self.key)


def prepare(
  lm: lm_lib.LM, data: rl_config.RLData, config: rl_config.RLConfig, seed: int
) -> Trainer:
  """Attaches adapters, splits what trains from what does not, and compiles nothing yet.

  Args:
    lm: a model whose kernels may be packed; adapters must not be there yet. It is put on the mesh
      of the config, unless it is there.
  Raises: ValueError for a model without tokenizer, or settings that do not fit each other, the
    model or the mesh.
  """
  _check(lm, config)
  base.check_mesh(config, lm.module.config)
  lm = base.on_mesh(lm, config.mesh)
  key = jax.random.key(seed)
  params = lora.attach(lm.params, config.lora, jax.random.fold_in(key, 0))
  if (placement := lm.module.placement) is not None:
    kv_heads = lm.module.config.num_kv_heads
    params = rules.shard_params(params, placement.mesh, num_kv_heads=kv_heads)
    key = rules.replicate(key, placement.mesh)
  trainable, frozen = weights.partition(params, lora.is_trainable(config.lora))
  module = lm.module.clone(remat=config.remat)
  optimizer = guard.guarded(config.optimizer.build(config.updates))
  objective = batch.make_objective(module, config.loss)
  run_key = jax.random.fold_in(key, 1)
  prompts = rollout.tokenize(
    data.train, lm.tokenizer, max_tokens=config.max_prompt_tokens, system_prompt=data.system_prompt
  )
  _check_lengths(prompts, lm, config)
  source = rollout.RolloutSource(
    sampler=make_sampler(lm, config.sampling),
    tokenizer=lm.tokenizer,
    prompts=prompts,
    data=data,
    config=config,
    frozen=frozen,
    reference=trainable,
    serving=rollout.Serving(frozen, placement),
    key=run_key,
  )
  train_state = state.TrainState.create(trainable, optimizer)
  if placement is not None:
    train_state = rules.replicate(train_state, placement.mesh)  # what is not sharded: the counters
  return Trainer(
    lm=dataclasses.replace(lm, params=params),
    data=data,
    config=config,
    key=run_key,
    state=train_state,
    frozen=frozen,
    source=source,
    train_step=step.make_train_step(objective, optimizer, micro_batch=config.micro_rows),
    optimizer=optimizer,
  )


def make_sampler(lm: lm_lib.LM, config: sampling.SamplingConfig) -> autoregressive.Sampler:
  """`text.make_sampler`, in few programs: without one for every size that a batch shrinks to."""
  return dataclasses.replace(text.make_sampler(lm, config), compact=False)


def _check(lm: lm_lib.LM, config: rl_config.RLConfig) -> None:
  if lm.tokenizer is None:
    raise ValueError(f"rl: {lm.path} has no tokenizer.json. Put the model's tokenizer beside it.")
  if config.sampling.stop_strings:
    raise ValueError(
      "rl: rollouts end at the tokenizer's end ids only: every token needs a log-probability; "
      f"got SamplingConfig.stop_strings={config.sampling.stop_strings}. Leave it empty."
    )
  if config.sampling.repetition_penalty != 1.0:
    raise ValueError(
      "rl: the trainer computes unpenalised log-probabilities, so a penalty biases every ratio; "
      f"got SamplingConfig.repetition_penalty={config.sampling.repetition_penalty}. Use 1.0."
    )
  if config.loss.temperature != config.sampling.temperature:
    raise ValueError(
      "rl: the trainer's temperature must be the rollout's; got "
      f"{config.loss.temperature} and {config.sampling.temperature}. Set both alike."
    )


def _check_lengths(prompts: rollout.Prompts, lm: lm_lib.LM, config: rl_config.RLConfig) -> None:
  """Now, and not in the rollout that asks the longest question."""
  longest, context = max(map(len, prompts.ids)), lm.module.config.max_positions
  if longest + config.sampling.max_new_tokens > context:
    raise ValueError(
      f"rl: prompts and answers must fit into the context of {context}; got a prompt of {longest} "
      f"tokens and {config.sampling.max_new_tokens} new ones. Lower RLConfig.max_prompt_tokens or "
      "SamplingConfig.max_new_tokens."
    )
