"""Random checkpoints of real shapes, written shard by shard, and the memory of quantising them.

Run: python -m tests.io.random_folder FOLDER [7b|small] [nvfp4|mxfp4]
Writes FOLDER/in (unless it is there) and FOLDER/out, and prints sizes, seconds and peak memory.
"""

import json
import pathlib
import resource
import sys
import time

import ml_dtypes
import numpy as np

from jaxlab.io import assemble, names, safetensors
from jaxlab.models import zoo

SHAPES = {  # Qwen2.5-7B's, and one that has all its parts
  "7b": {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
  },
  "small": {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
  },
}  # fmt: skip


def config(shape: str) -> dict:
  return {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    **SHAPES[shape],
  }


def write(folder: pathlib.Path, shape: str, max_shard_bytes: int = 1 << 30) -> None:
  """A folder of bfloat16 normal numbers. Tensors are slices of one pool of them: making billions of
  numbers would take longer than all the rest."""
  own = config(shape)
  module = zoo.from_config(own)
  shapes = assemble.parameter_shapes(module)
  where = names.expand(shapes, names.HUGGING_FACE, module.config.num_layers)
  rng = np.random.default_rng(0)
  pool = (0.02 * rng.standard_normal(1 << 24, np.float32)).astype(ml_dtypes.bfloat16)

  def make(size: tuple[int, ...], start: int) -> np.ndarray:
    return np.resize(np.roll(pool, start), size)

  def pairs():
    for name, (path, layer) in where.items():
      size = shapes[path] if layer is None else shapes[path][1:]
      size = size[::-1] if names.is_transposed(path) else size
      start = int(rng.integers(pool.size))
      yield name, safetensors.TensorSpec(size, pool.dtype, lambda s=size, i=start: make(s, i))

  safetensors.write_sharded(folder, pairs(), max_shard_bytes=max_shard_bytes)
  (folder / "config.json").write_text(json.dumps(own))


def peak_bytes() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quantizer(format: str):
  """What `stream.quantize_folder` takes."""
  from jaxlab.quant import fp4

  if format == "nvfp4":
    return lambda w, amax: fp4.quantize(w, "nvfp4", tensor_amax=amax)
  return lambda w, amax: fp4.quantize(w, format)


def main(folder: str, shape: str = "small", format: str = "nvfp4", shard_bytes: str = "0") -> None:
  import jax.numpy as jnp

  from jaxlab.io import stream

  root, c = pathlib.Path(folder), SHAPES[shape]
  if not (root / "in" / "config.json").exists():
    write(root / "in", shape)
    print(json.dumps({"peak_bytes_writing": peak_bytes()}))
    return  # another process quantises, whose peak is its own
  # Compiled first: the compiler's memory is no matter of the folder's size.
  d, f, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"]
  kv = kv * d // c["num_attention_heads"]
  for size in {(d, d), (d, kv), (d, f), (f, d)}:
    quantizer(format)(jnp.ones(size, jnp.bfloat16), jnp.float32(1))
  start, before = time.monotonic(), peak_bytes()
  sizes = stream.quantize_folder(
    root / "in",
    root / "out",
    quantizer(format),
    on_block=lambda done, total: print(done, total, peak_bytes(), file=sys.stderr, flush=True),
    max_shard_bytes=int(shard_bytes) or stream.MAX_SHARD_BYTES,
  )
  block_elements = 2 * d * (d + kv) + 3 * d * f
  report = sizes._asdict() | {
    "peak_bytes_before": before,
    "peak_bytes": peak_bytes(),
    "block_bytes_f32": 4 * block_elements,
    "seconds": round(time.monotonic() - start, 1),
  }
  print(json.dumps(report))


if __name__ == "__main__":
  main(*sys.argv[1:])
