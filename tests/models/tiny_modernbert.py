"""Tiny ModernBERT encoders and decoders: configs, weights under Hugging Face names, folders."""

import json
import math
import pathlib

import numpy as np

from jaxlab.io import safetensors

BASE = {
  "vocab_size": 16,
  "hidden_size": 8,
  "intermediate_size": 6,
  "num_hidden_layers": 4,
  "num_attention_heads": 2,
  "max_position_embeddings": 64,
  "local_attention": 4,
  "norm_eps": 1e-5,
  "hidden_activation": "gelu",
  "pad_token_id": 0,
  "bos_token_id": 1,
  "cls_token_id": 1,
  "eos_token_id": 2,
  "sep_token_id": 2,
}
# As transformers 4 and 5 spell layer types and thetas.
V4 = {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 1e4}
V5 = {
  "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
  "rope_parameters": {
    "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
  },
}
WIDE = {
  "vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 7,
  "num_attention_heads": 6, "local_attention": 10, "max_position_embeddings": 256,
}  # fmt: skip


def config(kind: str, **changes) -> dict:
  """`kind`: "encoder" or "decoder". Without changes, the model of specs/ettin.md 6.1."""
  own = {
    "encoder": {"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert"},
    "decoder": {
      "architectures": ["ModernBertDecoderForCausalLM"],
      "model_type": "modernbert-decoder",
    },
  }
  return own[kind] | BASE | V4 | changes


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
  """{Hugging Face name: shape}, sorted by name; the tied output matrix is not stored."""
  d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
  encoder = config["model_type"] == "modernbert"
  qkv = {"Wqkv": (3 * d, d)} if encoder else dict.fromkeys(("q_proj", "k_proj", "v_proj"), (d, d))
  head = "head" if encoder else "lm_head"
  made = {
    "model.embeddings.tok_embeddings.weight": (v, d),
    "model.embeddings.norm.weight": (d,),
    "model.final_norm.weight": (d,),
    f"{head}.dense.weight": (d, d),
    f"{head}.norm.weight": (d,),
    "decoder.bias": (v,),
  }
  for i in range(config["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    made |= {f"{layer}attn_norm.weight": (d,)} if i else {}
    made |= {f"{layer}attn.{name}.weight": shape for name, shape in qkv.items()}
    made |= {
      f"{layer}attn.Wo.weight": (d, d),
      f"{layer}mlp_norm.weight": (d,),
      f"{layer}mlp.Wi.weight": (2 * f, d),
      f"{layer}mlp.Wo.weight": (d, f),
    }
  if not config.get("tie_word_embeddings", True):
    made["decoder.weight"] = (v, d)
  return dict(sorted(made.items()))


def golden_weights(config: dict) -> dict[str, np.ndarray]:
  """Of specs/ettin.md 6.1: sin(0.7 (j + 1) + 0.37 n) of parameter j in the order of their names."""
  made = {}
  for j, (name, shape) in enumerate(shapes(config).items()):
    n = np.arange(1, math.prod(shape) + 1).reshape(shape)
    x = np.sin(0.7 * (j + 1) + 0.37 * n)
    gain, bias = "norm" in name, name.endswith("bias")
    made[name] = (1 + 0.1 * x if gain else 0.1 * x if bias else 0.5 * x).astype(np.float32)
  return made


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
  random, made = np.random.RandomState(seed), {}
  for name, shape in shapes(config).items():
    made[name] = (random.standard_normal(shape) * 0.2 + ("norm" in name)).astype(np.float32)
  return made


def tokens(batch: int, length: int, vocab: int = 97, seed: int = 0) -> np.ndarray:
  return np.random.RandomState(seed).randint(3, vocab, (batch, length)).astype(np.int32)


def write_folder(folder: pathlib.Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
  """A model folder without tokenizer."""
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True) + "\n"
  (folder / "config.json").write_text(text)
  safetensors.write_sharded(folder, tensors)
