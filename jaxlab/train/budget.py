"""What a run will need in memory, before anything is allocated, and whether it is there.

  linears = bits / 8 * N_lin,  N_lin = L (2 D N H + 2 D K H + 3 D F)
  rest    = dtype bytes * (embedding + head + gains + biases)
  adapters = 16 * L R (2 (D + N H) + 2 (D + K H) + 3 (D + F))    float32 master, m, v, gradient
  cache   = 2 L K H * dtype bytes * sequences * tokens
  training: inputs of the blocks L B T D, one block's activations 2 B T (8 D + 6 F) and its unpacked
  weights, logits of one chunk 8 C V; rollout and training alternate, so the peak is the larger one.

Source: arXiv 2510.11696 Table 3, whose weight sizes these formulas meet within 2 %. Dims: as in the
legend; B sequences of T tokens in a training step, C tokens a chunk of the head.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from jaxlab.data import assets
from jaxlab.io import fp4_configs, huggingface, orbax
from jaxlab.models import causal_lm, zoo
from jaxlab.quant import report
from pallas_kernels import target

# Bits of a weight with its scales: blocks of 16 and 8-bit scales; 32 and 8; 64 and 8.
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.125}
FORMATS = (*BITS, "bf16")
LEAVE_FREE = 0.05  # of the memory there is: compiled programs, buffers of the loader [ours]


@dataclasses.dataclass(frozen=True)
class Work:
  """What a device does in a run, in the sizes that cost memory; 0 leaves a part out.

  dtype_bytes: of activations, cache and everything that is not packed.
  unpacked_copy: rollouts use a dense copy of the linears (a CPU; see `text.serving_params`).
  """

  dtype_bytes: int = 2
  lora_rank: int = 0
  rollout_sequences: int = 0  # decoded together
  rollout_tokens: int = 0  # prompt + answer of each, as padded
  train_sequences: int = 0  # B, of one micro-batch
  train_tokens: int = 0  # T, prompt + answer of each
  chunk_tokens: int = 4096  # C
  unpacked_copy: bool = False
  other_bytes: int = 0  # what else lasts
  kernel_shards: int = 1  # parts that kernels and adapters are split into (fsdp * tensor)
  head_shards: int = 1  # parts that heads, MLP width and vocabulary are split into (tensor)


def num_linear_weights(config: causal_lm.CausalLMConfig) -> int:
  """Weights of the linears of all layers, which quantisation shrinks."""
  c = config
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  return c.num_layers * (2 * c.width * heads + 2 * c.width * kv + 3 * c.width * c.mlp_width)


def weight_bytes(
  config: causal_lm.CausalLMConfig, format: str = "bf16", dtype_bytes: int = 2
) -> int:
  """Bytes of a model with linears in `format` ("bf16": dense, in `dtype_bytes` as all else)."""
  c = config
  if format not in FORMATS:
    raise ValueError(
      f"weight_bytes: unknown format; got {format!r}. Use one of {', '.join(FORMATS)}."
    )
  tables = c.vocab_size * c.width * (1 if c.tie_embeddings else 2)
  gains = (2 * c.num_layers + 1) * c.width + (2 * c.num_layers * c.head_dim if c.qk_norm else 0)
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  biases = (
    c.qkv_bias * (heads + 2 * kv) + c.o_bias * c.width + c.mlp_bias * (2 * c.mlp_width + c.width)
  )
  rest = tables + gains + c.num_layers * biases
  bits = BITS.get(format, 8 * dtype_bytes)
  return round(bits / 8 * num_linear_weights(c)) + dtype_bytes * rest


def memory_budget(
  config: causal_lm.CausalLMConfig, format: str = "bf16", work: Work | None = None
) -> dict[str, int]:
  """Bytes by part: weights, adapters, unpacked copy, cache, training, and their `peak`."""
  c, w = config, work or Work()
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  per_rank = 2 * (c.width + heads) + 2 * (c.width + kv) + 3 * (c.width + c.mlp_width)
  rows = w.train_sequences * w.train_tokens
  layer = num_linear_weights(c) // c.num_layers if rows else 0
  cache_bytes = 2 * c.num_layers * kv * w.dtype_bytes * w.rollout_sequences * w.rollout_tokens
  if c.num_kv_heads % w.head_shards == 0:  # else every device has all KV heads
    cache_bytes //= w.head_shards
  block_inputs, block = _blocks(c, rows, layer, w.dtype_bytes)
  logit_bytes = 8 * c.vocab_size // w.head_shards  # of a row
  parts = {
    "weights": weight_bytes(c, format, w.dtype_bytes) // w.kernel_shards,
    "adapters": 16 * c.num_layers * w.lora_rank * per_rank // w.kernel_shards,
    "unpacked_copy": w.unpacked_copy * w.dtype_bytes * num_linear_weights(c) // w.kernel_shards,
    "other": w.other_bytes,
    "cache": cache_bytes,
    "block_inputs": block_inputs,
    "block": block // w.head_shards,
    "logits": logit_bytes * (min(w.chunk_tokens, rows) if rows else w.rollout_sequences),
  }
  lasting = sum(parts[name] for name in ("weights", "adapters", "unpacked_copy", "other"))
  train = parts["block_inputs"] + parts["block"] + parts["logits"] if rows else 0
  rollout = parts["cache"] + logit_bytes * w.rollout_sequences
  return parts | {"peak": lasting + max(train, rollout)}


def full_training_bytes(
  config: Any, parameters: int, *, shards: int, head_shards: int, tokens: int, chunk_tokens: int,
  dtype_bytes: int,
) -> int:  # fmt: skip
  """Peak of a device that trains all parameters: float32 master, m, v and gradient of its shard,
  and the training terms above, with one layer's kernels and the token table gathered.

  Args:
    config: of a causal LM or ModernBERT.
    parameters: in all. shards: data copies have none of their own, so fsdp * tensor.
    tokens: of a micro-batch, and chunk_tokens those that meet the head at once, on the device.
  """
  c = config
  table = c.vocab_size * c.width
  layer = (parameters - table * (1 if c.tie_embeddings else 2)) // c.num_layers
  block_inputs, block = _blocks(c, tokens, layer, dtype_bytes)
  logits = (8 * min(chunk_tokens, tokens) * c.vocab_size + dtype_bytes * table) // head_shards
  return 16 * parameters // shards + block_inputs + block // head_shards + logits


def _blocks(config: Any, tokens: int, layer_weights: int, dtype_bytes: int) -> tuple[int, int]:
  """Bytes of training: (inputs of all blocks, activations of one and its kernels unpacked)."""
  c = config
  block = tokens * (8 * c.width + 6 * c.mlp_width) + layer_weights
  return dtype_bytes * c.num_layers * tokens * c.width, dtype_bytes * block


def check_model(path: str | os.PathLike[str], work: Work) -> None:
  """Logs what a model and its work will take; call it before the model is loaded.

  Raises: ValueError with the numbers if that cannot fit, or for a model that is not there.
  """
  logging.info("%s", require_fits(memory_budget(*describe_checkpoint(path), work)))


def describe_checkpoint(path: str | os.PathLike[str]) -> tuple[causal_lm.CausalLMConfig, str]:
  """Architecture and format of a model that is not loaded: (config, one of FORMATS).

  Where linears differ, the largest of their formats counts.
  Raises: ValueError for what is not there or not supported.
  """
  path = assets.model_path(path)
  if not path.exists():
    raise ValueError(
      f"load: {str(path)!r} does not exist. Give a model folder, a .gguf file, or 'demo'."
    )
  raw = huggingface.load_config(path)
  config = zoo.causal_lm_config(raw)
  if orbax.is_checkpoint(path / "params"):
    found = report.formats_of(orbax.params_shapes(path / "params"))
    return config, max((f if f in BITS else "bf16" for f in found), key=lambda f: BITS.get(f, 16))
  packed = fp4_configs.of_folder(path, raw) is not None
  return config, "nvfp4" if packed else "bf16"


def default_dtype_bytes() -> int:
  """Bytes of a dense number as `jaxlab.load` chooses by itself: float32 on a CPU, else 16 bits."""
  return 4 if target.current_target().platform == "cpu" else 2


def available_bytes() -> int | None:
  """Free bytes of this machine (within its container's limit), or of the first accelerator.

  None where that cannot be known.
  """
  if target.current_target().platform == "cpu":
    known = [n for n in (_meminfo(), *_cgroup_free()) if n is not None]
    return min(known) if known else _physical()
  stats = jax.local_devices()[0].memory_stats()
  return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


def require_fits(parts: Mapping[str, int], available: int | None = None) -> str:
  """One line of the budget, to be logged before anything is allocated.

  Args:
    parts: from `memory_budget`; devices share nothing here, so divide before if they do.
    available: None asks `available_bytes`.
  Raises: ValueError with the numbers if the peak is more than there is.
  """
  available = available_bytes() if available is None else available
  shown = ", ".join(f"{name.replace('_', ' ')} {_gb(n)}" for name, n in parts.items() if n)
  line = f"memory: {shown}; there is {'an unknown amount' if available is None else _gb(available)}"
  if available is not None and parts["peak"] > available * (1 - LEAVE_FREE):
    raise ValueError(
      f"not enough {line}. Choose fewer or shorter sequences, a 4-bit format, or a smaller model."
    )
  return line


def _gb(n: int) -> str:
  return f"{n / 1e9:.2f} GB" if n >= 1e7 else f"{n / 1e6:.2f} MB"


def _meminfo() -> int | None:
  file = pathlib.Path("/proc/meminfo")
  if not file.exists():
    return None
  rows = dict(line.split(":", 1) for line in file.read_text().splitlines())
  return int(rows["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in rows else None


def _cgroup_free(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> list[int]:
  """What the container's limit leaves, in version 2 and 1; reclaimable file pages count as free."""
  free = []
  for folder, limit, used, cache in (
    (root, "memory.max", "memory.current", "inactive_file"),
    (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
  ):
    if not (folder / limit).exists() or (most := (folder / limit).read_text().strip()) == "max":
      continue
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    busy = int((folder / used).read_text()) - int(stat.get(cache, 0))
    free.append(int(most) - busy)
  return free


def _physical() -> int | None:
  names = ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
  name = next((n for n in names if n in os.sysconf_names), None)
  return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if name else None
