"""The frozen base of a run: checked against memory before it is loaded, quantised where it is read.

On an accelerator the 16-bit checkpoint never reaches the device: it is read and rounded in host
memory, and only packed arrays are put there. That is what lets a 32B model start on 80 GB.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jaxlab import lm as lm_lib
from jaxlab.models import causal_lm
from jaxlab.quant import report
from jaxlab.rl import config as rl_config
from jaxlab.train import budget
from pallas_kernels import target

PyTree = Any


def load(path: str, quantize: Callable[[PyTree], PyTree], config: rl_config.RLConfig) -> lm_lib.LM:
  """The model of a run, in host memory, after its memory budget was logged.

  Raises: ValueError if the run cannot fit into memory, or for a model that is not there.
  """
  check_memory(path, quantize, config)
  # The dtype is chosen for the device that will compute, not for the host that holds the arrays.
  with target.use_target(target.current_target()), _host():
    return lm_lib.load(path)


def quantized(lm: lm_lib.LM, quantize: Callable[[PyTree], PyTree]) -> lm_lib.LM:
  """The model with quantised kernels, rounded in host memory and put on the device."""
  with _host():
    params = quantize(lm.params)
  if target.current_target().platform != "cpu":
    params = jax.device_put(params, jax.local_devices()[0])
  return dataclasses.replace(lm, params=params)


def _host():
  return jax.default_device(jax.local_devices(backend="cpu")[0])


def check_memory(
  path: str, quantize: Callable[[PyTree], PyTree], config: rl_config.RLConfig
) -> None:
  """Logs what the run will take at its peak. Raises: ValueError with the numbers if too much."""
  architecture, _ = budget.describe_checkpoint(path)
  format = format_of(architecture, quantize)
  parts = budget.memory_budget(architecture, format, work(config, format))
  logging.info("%s", budget.require_fits(parts))


def format_of(architecture: causal_lm.CausalLMConfig, quantize: Callable[[PyTree], PyTree]) -> str:
  """What `quantize` makes of a model's kernels, one of `budget.FORMATS`; allocates nothing."""
  module = causal_lm.CausalLM(architecture)
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  shapes = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
  format = report.format_of(jax.eval_shape(quantize, shapes))
  return format if format in budget.BITS else "bf16"


def work(config: rl_config.RLConfig, format: str) -> budget.Work:
  """The sizes of a run that cost memory."""
  c = config
  answers = c.groups * c.samples
  rows = -(-answers // c.sequences_per_row)
  on_cpu = target.current_target().platform == "cpu"
  # A packed row holds every answer and its prompt once, at the least.
  per_row = c.max_prompt_tokens + c.sequences_per_row * c.sampling.max_new_tokens
  return budget.Work(
    dtype_bytes=budget.default_dtype_bytes(),
    lora_rank=c.lora.rank,
    rollout_sequences=c.prompts * c.samples,
    rollout_tokens=c.max_prompt_tokens + c.sampling.max_new_tokens,
    train_sequences=min(rows, c.micro_rows or rows),
    train_tokens=per_row,
    chunk_tokens=c.loss.chunk_tokens,
    unpacked_copy=on_cpu and format != "bf16",
  )
