"""What `launch.bench` can measure; every suite returns flat rows for its table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import lm as lm_lib
from jaxlab import lora
from jaxlab.bench import baselines, pairs
from jaxlab.decode import autoregressive, sampling
from jaxlab.nn import stack, weights
from jaxlab.objectives import policy_gradient
from jaxlab.optim import config as optim
from jaxlab.rl import batch as packing
from jaxlab.train import guard, state, step

Row = dict[str, Any]


def decode_rows(
  model: str = "demo",
  batches: tuple[int, ...] = (1, 8, 32),
  prompt_tokens: int = 64,
  new_tokens: int = 128,
  repeats: int = pairs.PAIRS,
) -> list[Row]:
  """Greedy decoding in float32 beside transformers' `generate` on the same weights.

  `tokens_equal` is the share of positions where both wrote the same token.
  """
  lm = lm_lib.load(model, dtype=jnp.float32)
  baseline = baselines.torch_model(lm)
  params = stack.unstack(lm.params)
  config = sampling.SamplingConfig(max_new_tokens=new_tokens, temperature=0.0)
  sampler = autoregressive.Sampler(lm.module, config, stop_ids=(), compact=False)

  def row(batch: int) -> Row:
    prompts_BP = _random_prompts(lm, batch, prompt_tokens)
    ours = lambda: sampler(params, prompts_BP.tolist(), jax.random.key(0)).tokens_NT
    theirs = lambda: baselines.generate(baseline, prompts_BP, new_tokens)
    programs = _compiled_programs()
    same = float(np.mean(ours() == theirs()))
    programs = _compiled_programs() - programs
    timing = pairs.interleaved(ours, theirs, pairs=repeats)
    return {
      "what": "decode", "batch": batch, "tokens_per_s": batch * new_tokens / timing["seconds"],
      "baseline": "transformers generate, torch float32",
      "baseline_tokens_per_s": batch * new_tokens / timing["baseline_seconds"],
      "ratio_to_transformers": timing["ratio"], "ratio_low": timing["ratio_low"],
      "ratio_high": timing["ratio_high"], "tokens_equal": same,
      "peak_bytes": _decode_bytes(sampler, params, prompts_BP), "compilations": programs,
    }  # fmt: skip

  return [row(batch) for batch in batches]


def update_rows(
  model: str = "demo",
  prompts: int = 1,
  samples: int = 8,
  prompt_tokens: int = 112,
  answer_tokens: int = 16,
  rank: int = 16,
  repeats: int = pairs.PAIRS,
) -> list[Row]:
  """One GRPO update of LoRA adapters (float32 base) beside torch and peft on the same batch.

  Row "update" computes every sequence on its own, as the baseline does; "update_packed" is what the
  RL loop does: each prompt once, its answers packed behind it, against the same baseline.
  """
  lm = lm_lib.load(model, dtype=jnp.float32)
  samples_ = _random_answers(lm, prompts, samples, prompt_tokens, answer_tokens)
  apart = packing.pack(samples_, per_row=1, max_answer=answer_tokens)
  together = packing.pack(samples_, per_row=samples, max_answer=answer_tokens)
  settings = optim.OptimizerConfig(
    lr=1e-4, schedule="constant", warmup=0, weight_decay=0.0, clip_norm=1.0
  )
  torch_update = baselines.GRPOUpdate(
    baselines.torch_model(lm), apart, rank=rank, lr=settings.lr, clip_norm=settings.clip_norm
  )
  rows = []
  for what, data in (("update", apart), ("update_packed", together)):
    update, peak = _our_update(lm, data, rank, settings)
    timing = pairs.interleaved(update, torch_update.run, pairs=repeats)
    tokens = prompts * samples * (prompt_tokens + answer_tokens)
    rows.append({
      "what": what, "batch": prompts * samples, "tokens_per_s": tokens / timing["seconds"],
      "baseline": "torch + peft, float32",
      "baseline_tokens_per_s": tokens / timing["baseline_seconds"],
      "ratio_to_transformers": timing["ratio"], "ratio_low": timing["ratio_low"],
      "ratio_high": timing["ratio_high"], "peak_bytes": peak, "compilations": 1,
    })  # fmt: skip
  return rows


def _our_update(lm, data, rank, settings):
  """(a function that makes one update and waits for it, peak bytes of its program)."""
  config = lora.LoRAConfig(rank=rank, train_norms=False)
  params = lora.attach(lm.params, config, jax.random.key(0))
  trainable, frozen = weights.partition(params, lora.is_trainable(config))
  optimizer = guard.guarded(settings.build(1000))
  loss = policy_gradient.PolicyGradientConfig(correction="none")
  train_step = step.make_train_step(packing.make_objective(lm.module, loss), optimizer)
  box = [state.TrainState.create(trainable, optimizer)]
  key = jax.random.key(0)
  peak = _peak_bytes(train_step.lower(box[0], frozen, data, key).compile())

  def update():
    box[0], metrics = train_step(box[0], frozen, data, key)
    return metrics["loss"].item()

  return update, peak


def _random_prompts(lm: lm_lib.LM, batch: int, length: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.integers(100, lm.module.config.vocab_size, (batch, length)).astype(np.int32)


def _random_answers(lm, prompts, samples, prompt_tokens, answer_tokens) -> list[packing.Sample]:
  rng = np.random.default_rng(0)
  asked = _random_prompts(lm, prompts, prompt_tokens).tolist()
  draw = lambda: rng.integers(100, lm.module.config.vocab_size, answer_tokens).tolist()
  return [
    packing.Sample(prompt, draw(), np.zeros(answer_tokens, np.float32), rng.normal(), True)
    for prompt in asked
    for _ in range(samples)
  ]


def _compiled_programs() -> int:
  return autoregressive.prefill._cache_size() + autoregressive.decode._cache_size()


def _decode_bytes(sampler, params, prompts_BP) -> int:
  """Arguments, temporaries and outputs of the decode program, by the compiler."""
  batch, length = prompts_BP.shape
  bucket = autoregressive.prompt_bucket(length, sampler.module.config.max_positions)
  args = (np.zeros((batch, bucket), np.int32), np.full(batch, length, np.int32))
  rows, key = np.arange(batch, dtype=np.uint32), jax.random.key(0)
  state_shape = jax.eval_shape(
    lambda p, *a: autoregressive.prefill(sampler, p, *a, key, None, samples=1, prefix=0),
    params, *args, rows,
  )  # fmt: skip
  lowered = autoregressive.decode.lower(
    sampler, params, state_shape, key, None, steps=sampler.config.max_new_tokens, uniform=True
  )
  return _peak_bytes(lowered.compile())


def _peak_bytes(compiled) -> int:
  m = compiled.memory_analysis()
  return int(
    m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
  )


@dataclasses.dataclass(frozen=True)
class BenchConfig:
  """Which suites `launch.bench` runs, in order."""

  suites: tuple[Any, ...] = (decode_rows, update_rows)  # [ours: all there are]
