"""The frozen base of a run: checked against memory before it is loaded, quantised where it is read.

On an accelerator the 16-bit checkpoint never reaches the device: it is read and rounded in host
memory, and only packed arrays are put there. That is what lets a 32B model start on 80 GB. On a
mesh each device gets its shards only.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from jaxlab import lm as lm_lib
from jaxlab.models import causal_lm, zoo
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from jaxlab.quant import report
from jaxlab.rl import batch
from jaxlab.rl import config as rl_config
from jaxlab.train import budget
from pallas_kernels import target

PyTree = Any


def load(path: str, quantize: Callable[[PyTree], PyTree], config: rl_config.RLConfig) -> lm_lib.LM:
  """The model of a run, in host memory, after its memory budget was logged.

  Raises: ValueError if the run cannot fit into memory or be split as its mesh says, or for a model
    that is not there.
  """
  check_mesh(config, budget.describe_checkpoint(path)[0])
  check_memory(path, quantize, config)
  # The dtype is chosen for the device that will compute, not for the host that holds the arrays.
  with target.use_target(target.current_target()), _host():
    return lm_lib.load(path)


def quantized(
  lm: lm_lib.LM, quantize: Callable[[PyTree], PyTree], mesh: meshes.MeshConfig | None = None
) -> lm_lib.LM:
  """The model with quantised kernels, rounded in host memory and put on the device, or the mesh."""
  with _host():
    params = quantize(lm.params)
  if mesh is None and target.current_target().platform != "cpu":
    params = jax.device_put(params, jax.local_devices()[0])
  return on_mesh(dataclasses.replace(lm, params=params), mesh)


def on_mesh(lm: lm_lib.LM, mesh: meshes.MeshConfig | None) -> lm_lib.LM:
  """The model with its parameters placed by the library's rules, and a module that keeps them so.

  A model that is there already comes back as it is; without a mesh, too.
  Raises: ValueError for a mesh that does not fit the devices, or would split a block or a rotation.
  """
  if mesh is None:
    return lm
  kv_heads = lm.module.config.num_kv_heads
  placement = rules.Placement(meshes.make_mesh(mesh), kv_heads)
  params = rules.shard_params(lm.params, placement.mesh, num_kv_heads=kv_heads)
  return dataclasses.replace(lm, params=params, module=lm.module.clone(placement=placement))


def check_mesh(
  config: rl_config.RLConfig, architecture: causal_lm.CausalLMConfig, devices: int | None = None
) -> None:
  """Raises: ValueError if the run's sizes are no multiples of what its mesh splits them into.

  devices: None for those that are there.
  """
  if config.mesh is None:
    return
  devices = jax.device_count() if devices is None else devices
  mesh, rows = config.mesh, config.prompts * config.samples
  data, fsdp, tensor, sequence = mesh.shape(devices)
  split = [
    ("RLConfig.prompts * samples", rows, "data * fsdp", data * fsdp),
    ("RLConfig.micro_rows", config.micro_rows or 0, "data * fsdp", data * fsdp),
    ("the model's attention heads", architecture.num_heads, "tensor", tensor),
    ("slots of a packed row", batch.SLOT_MULTIPLE, "sequence", sequence),
  ]
  for what, size, axes, shards in split:
    if size % shards:
      raise ValueError(
        f"RLConfig.mesh: {what} must be a multiple of {axes}; got {size} over {shards} in {mesh} "
        f"on {devices} devices. Change one of them."
      )


def _host():
  return jax.default_device(jax.local_devices(backend="cpu")[0])


def check_memory(
  path: str, quantize: Callable[[PyTree], PyTree], config: rl_config.RLConfig
) -> None:
  """Logs what the run will take at its peak. Raises: ValueError with the numbers if too much."""
  architecture, _ = budget.describe_checkpoint(path)
  shapes = zoo.param_shapes(causal_lm.CausalLM(architecture))
  format = format_of(jax.eval_shape(quantize, shapes))
  parts = budget.memory_budget(architecture, format, work(config, format))
  logging.info("%s", budget.require_fits(parts))


def format_of(params: PyTree) -> str:
  """The format of a model's kernels, arrays or shapes, as one of `budget.FORMATS`."""
  format = report.format_of(params)
  return format if format in budget.BITS else "bf16"


def work(config: rl_config.RLConfig, format: str, devices: int | None = None) -> budget.Work:
  """The sizes of a run that cost memory, on one device of its mesh (of `devices`, as above)."""
  c = config
  answers = c.groups * c.samples
  rows = -(-answers // c.sequences_per_row)
  on_cpu = target.current_target().platform == "cpu"
  data, fsdp, tensor, sequence = (1, 1, 1, 1)
  if c.mesh is not None and not on_cpu:  # CPU devices share one memory
    data, fsdp, tensor, sequence = c.mesh.shape(devices or jax.device_count())
  train_rows = min(rows, c.micro_rows or rows)
  # A packed row holds every answer and its prompt once, at the least.
  per_row = c.max_prompt_tokens + c.sequences_per_row * c.sampling.max_new_tokens
  return budget.Work(
    dtype_bytes=budget.default_dtype_bytes(),
    lora_rank=c.lora.rank,
    rollout_sequences=-(-c.prompts * c.samples // (data * fsdp)),
    rollout_tokens=c.max_prompt_tokens + c.sampling.max_new_tokens,
    train_sequences=-(-train_rows // (data * fsdp)),
    train_tokens=-(-per_row // sequence),
    chunk_tokens=c.loss.chunk_tokens,
    unpacked_copy=on_cpu and format != "bf16",
    kernel_shards=fsdp * tensor,
    head_shards=tensor,
  )
