"""A base model for RL in a minute on two CPU cores: a tiny Qwen2.5 that adds, and is mostly wrong.

It is pre-trained here on sums whose labels are ten too large 97 % of the time, so that the right
answer is a rare sample of a model that knows both. Source: the small QeRL experiment [ours].
"""

import os
import pathlib

import jax
import jax.numpy as jnp
from absl import logging

from jaxlab import lm as lm_lib
from jaxlab.data import addition
from jaxlab.io import huggingface, orbax
from jaxlab.models import zoo
from jaxlab.nn import stack, weights
from jaxlab.objectives import clm
from jaxlab.optim import config as optim
from jaxlab.train import fit, guard, state, step

CONFIG = {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "hidden_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "intermediate_size": 176,
  "vocab_size": len(addition.VOCABULARY),
  "max_position_embeddings": 32,
  "rope_theta": 10_000.0,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "bos_token_id": addition.VOCABULARY.index("<bos>"),
  "eos_token_id": addition.EOS_ID,
}


def addition_model(
  folder: str | os.PathLike[str],
  steps: int = 1500,  # [ours: the small experiment]
  batch: int = 192,  # [ours: the small experiment]
  lr: float = 3e-3,  # [ours: the small experiment]
  wrong_share: float = 0.97,  # [ours: the small experiment]
  seed: int = 0,
) -> str:
  """Pre-trains the model into `folder`, or finds it there; returns the path for `jaxlab.load`.

  AdamW on a cosine, without weight decay. An interrupted call goes on where it was.

  Args:
    folder: gets a checkpoint of ours with a tokenizer, and `training/`, what `fit` writes.
    wrong_share: probability that a training answer is ten too large.
    seed: of the initial weights and of the data.
  """
  folder = pathlib.Path(folder)
  if orbax.is_checkpoint(folder / lm_lib.PARAMS):
    return str(folder)
  logging.info("pre-training a base model for %d steps into %s", steps, folder)
  module = zoo.from_config(CONFIG, jnp.float32)
  init_key, run_key = jax.random.split(jax.random.key(seed))
  # A list of layers trains nearly twice as fast as a stack on a CPU.
  params = stack.unstack(module.init(init_key, jnp.zeros((1, 1), jnp.int32))["params"])
  trainable, frozen = weights.partition(params, lambda path: True)
  schedule = optim.OptimizerConfig(lr=lr, weight_decay=0.0, clip_norm=1.0)
  optimizer = guard.guarded(schedule.build(steps), sigmas=guard.SIGMAS_FROM_NOISE)

  def rounds(step_index: int, train_state: state.TrainState) -> fit.Round:
    del train_state
    texts = addition.pretraining_texts(step_index, batch, wrong_share=wrong_share, seed=seed)
    return fit.Round([clm.TokenBatch(*map(jnp.asarray, texts))])

  final = fit.fit(
    step.make_train_step(clm.make_objective(module), optimizer),
    state.TrainState.create(trainable, optimizer), frozen, rounds,
    steps=steps, key=run_key, workdir=folder / "training", save_every_steps=max(1, steps // 3),
    keep=1, fingerprint={"batch": batch, "lr": lr, "wrong_share": wrong_share, "steps": steps},
  )  # fmt: skip
  source = huggingface.Source(folder, dtypes={})
  trained = stack.restack(weights.merge(final.trainable, frozen))
  tokenizer = addition.make_tokenizer()
  lm_lib.save(lm_lib.LM(module, trained, CONFIG, tokenizer, str(folder), source), folder)
  return str(folder)
