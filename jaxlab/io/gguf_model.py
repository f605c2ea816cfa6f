"""A GGUF file as a model: its metadata as a `config.json`, its tensors as stacked parameters.

Files of llama.cpp's "llama" architecture hold the rows of q and k in interleaved rotary order
(pairs 2i, 2i+1); transformers and we pair i with i + H/2, so those rows are put back. Its "qwen2"
and "qwen3" files are in our order already.
Source: llama.cpp convert_hf_to_gguf.py (`LlamaModel.permute`), gguf-py/gguf/constants.py.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxlab.io import assemble, assemble_packed, fp4_layouts, gguf, gguf_fp4, names
from jaxlab.models import zoo
from jaxlab.nn import rotary

ARCHITECTURES = {  # general.architecture -> class in transformers
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of frequencies: what GGUF keeps of llama3 scaling
LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1, and of 3.2 and 3.3's small ones; the rest they share
PLAIN_DTYPES = {"F16": "float16", "BF16": "bfloat16"}  # all else is exported as float32, exactly


def config(file: gguf.GGUFFile) -> dict[str, Any]:
  """The Hugging Face config of the model, as transformers 4 spells it (5 reads that too).

  Raises: ValueError naming the key and its value for a model that we do not have.
  """
  meta = file.metadata
  arch = meta.get("general.architecture")
  if arch not in ARCHITECTURES:
    raise _unsupported(file, "general.architecture", arch, f"one of {', '.join(ARCHITECTURES)}")
  if meta.get(f"{arch}.expert_count"):
    raise _unsupported(file, f"{arch}.expert_count", meta[f"{arch}.expert_count"], "0")
  heads = _whole(file, f"{arch}.attention.head_count")
  width = _whole(file, f"{arch}.embedding_length")
  head_dim = meta.get(f"{arch}.attention.key_length", width // heads)
  for key in ("attention.value_length", "rope.dimension_count"):
    if meta.get(f"{arch}.{key}", head_dim) != head_dim:
      raise _unsupported(file, f"{arch}.{key}", meta[f"{arch}.{key}"], f"the head width {head_dim}")
  made = {
    "architectures": [ARCHITECTURES[arch]],
    "model_type": arch,
    "vocab_size": file.tensors[names.GGUF["embed"]].shape[0]
    if names.GGUF["embed"] in file.tensors
    else _whole(file, f"{arch}.vocab_size"),
    "hidden_size": width,
    "intermediate_size": _whole(file, f"{arch}.feed_forward_length"),
    "num_hidden_layers": _whole(file, f"{arch}.block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", heads),
    "head_dim": head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": _whole(file, f"{arch}.context_length"),
    "rms_norm_eps": _rounded(meta.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
    "rope_theta": _rounded(meta.get(f"{arch}.rope.freq_base", 10_000.0)),
    "rope_scaling": None,
    "tie_word_embeddings": names.GGUF["head/kernel"] not in file.tensors,
    "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
    "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    "torch_dtype": PLAIN_DTYPES.get(_embedding_type(file), "float32"),
  }
  if arch != "qwen2":
    made["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
  if arch == "llama":
    made["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
  made["rope_scaling"] = _rope_scaling(file, arch, made)
  return made


def load_params(
  file: gguf.GGUFFile, module: Any, dtype: jax.typing.DTypeLike, *, place: assemble.Place
) -> Any:
  """Stacked parameters of `module`: FP4 blocks of kernels stay packed, the rest becomes `dtype`.

  Raises: ValueError for a missing, unexpected or misshapen tensor.
  """
  shapes = assemble.parameter_shapes(module)
  c = module.config
  expected = names.expand(shapes, names.GGUF, c.num_layers)
  check_names(file, expected, tied=c.tie_embeddings)
  interleaved = file.metadata.get("general.architecture") in names.GGUF_INTERLEAVED
  heads = {"q": c.num_heads, "k": c.num_kv_heads} if interleaved else {}

  def in_order(name: str, rows: np.ndarray) -> np.ndarray:
    path, _ = expected[name]
    linear = path.split("/")[1] if names.is_stacked(path) else None
    return split_half(rows, heads[linear]) if linear in heads else rows

  def read_packed(name: str) -> fp4_layouts.Packed:
    packed = gguf_fp4.read(file, name)
    codes, scale = in_order(name, packed.codes), in_order(name, packed.scale)
    return packed._replace(codes=codes, scale=scale)

  return assemble_packed.load(
    shapes,
    names.GGUF,
    _kinds(file, shapes, c.num_layers),
    read=lambda name: in_order(name, file.dequantize(name)),
    read_packed=read_packed,
    dtype=dtype,
    place=place,
    source=str(file.path),
  )


def check_names(file: gguf.GGUFFile, expected: Mapping[str, Any], *, tied: bool) -> None:
  """As `assemble.check_names`; scales of NVFP4 weights may be there."""
  scales = gguf_fp4.scale_names(file, expected)
  if unused := sorted(name for name in scales if name.endswith(gguf_fp4.ACT_SCALE)):
    logging.warning(
      "%s: %d activation scales are not used, such as %s", file.path, len(unused), unused[0]
    )
  found = {name: None for name in file.tensors if name not in scales}
  assemble.check_names(expected, found, str(file.path), tied=tied)


def _kinds(file: gguf.GGUFFile, shapes: assemble.Shapes, num_layers: int) -> dict[str, list]:
  """{path: kind of each layer} of the kernels that are in FP4 in some layer."""
  kinds = {}
  for path in filter(names.is_transposed, shapes):
    layers = range(num_layers) if names.is_stacked(path) else (None,)
    found = [gguf_fp4.kind(file, names.tensor_name(names.GGUF, path, i)) for i in layers]
    if any(found):
      kinds[path] = found
  return kinds


def split_half(rows: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows (or biases) of q or k from interleaved rotary pairs to split-half pairs."""
  pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
  return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


def stored_dtypes(file: gguf.GGUFFile) -> dict[str, str]:
  """{Hugging Face name: dtype to export}: as stored where plain, float32 for block formats."""
  back = {template: path for path, template in names.GGUF.items()}
  dtypes = {}
  for name, tensor in file.tensors.items():
    parts = name.split(".")
    layer = parts[1] if parts[0] == "blk" else None
    path = back.get(name.replace(f".{layer}.", ".{}.") if layer else name)
    if path is not None:
      dtypes[names.HUGGING_FACE[path].format(layer)] = PLAIN_DTYPES.get(tensor.type, "float32")
  return dtypes


def _rope_scaling(file: gguf.GGUFFile, arch: str, made: dict[str, Any]) -> dict[str, Any] | None:
  kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
  if kind not in ("none", "linear"):
    raise _unsupported(file, f"{arch}.rope.scaling.type", kind, "none or linear")
  if ROPE_FACTORS in file.tensors:
    return _llama3_scaling(file, made)
  if kind == "linear":
    return {"rope_type": "linear", "factor": file.metadata[f"{arch}.rope.scaling.factor"]}
  return None


def _llama3_scaling(file: gguf.GGUFFile, made: dict[str, Any]) -> dict[str, Any]:
  """The released scaling whose frequencies are the stored ones: GGUF keeps only their divisors."""
  divisors_h = file.dequantize(ROPE_FACTORS)
  theta, head_dim = made["rope_theta"], made["head_dim"]
  plain_h = rotary.inverse_frequencies(rotary.RopeConfig(theta), head_dim)
  for factor in LLAMA3_FACTORS:
    scaling = {
      "rope_type": "llama3",
      "factor": factor,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    }
    ours_h = rotary.inverse_frequencies(
      zoo.rope_config({"rope_theta": theta, "rope_scaling": scaling}), head_dim
    )
    if divisors_h.shape == plain_h.shape and np.allclose(plain_h / divisors_h, ours_h, rtol=1e-4):
      return scaling
  raise _unsupported(
    file, ROPE_FACTORS, divisors_h.tolist()[:3], f"Llama 3 scaling by {LLAMA3_FACTORS}"
  )


def _embedding_type(file: gguf.GGUFFile) -> str:
  tensor = file.tensors.get(names.GGUF["embed"])
  return tensor.type if tensor else "F32"


def _rounded(value: float) -> float:
  """A float32 of the metadata as the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
  return float(str(np.float32(value)))


def _whole(file: gguf.GGUFFile, key: str) -> int:
  value = file.metadata.get(key)
  if not isinstance(value, int):  # some models have one a layer
    raise _unsupported(file, key, value, "one whole number")
  return value


def _unsupported(file: gguf.GGUFFile, key: str, value: Any, supported: str) -> ValueError:
  return ValueError(
    f"load: {file.path}: {key} = {value!r} is not supported; jaxlab has {supported}."
  )
