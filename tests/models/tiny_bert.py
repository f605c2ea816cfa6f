"""Tiny BERT encoders: config, weights under Hugging Face names, folder, transformers' own model.

Weights come from NumPy's frozen `RandomState`, so goldens need to store outputs only.
"""

import json
import pathlib

import numpy as np

from jaxlab.io import safetensors

CONFIG = {
  "architectures": ["BertModel"],
  "model_type": "bert",
  "vocab_size": 97,
  "hidden_size": 48,
  "intermediate_size": 80,
  "num_hidden_layers": 3,
  "num_attention_heads": 6,
  "max_position_embeddings": 40,
  "type_vocab_size": 2,
  "layer_norm_eps": 1e-12,
  "hidden_act": "gelu",
  "pad_token_id": 0,
}
# One switch each.
CASES = {
  "plain": CONFIG,
  "eps": CONFIG | {"layer_norm_eps": 1e-2},
  "one_head": CONFIG | {"num_attention_heads": 1},
  "three_types": CONFIG | {"type_vocab_size": 3},
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
  """{Hugging Face name: shape}, sorted by name."""
  d, f = config["hidden_size"], config["intermediate_size"]
  made = {
    "embeddings.word_embeddings.weight": (config["vocab_size"], d),
    "embeddings.position_embeddings.weight": (config["max_position_embeddings"], d),
    "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], d),
    "pooler.dense.weight": (d, d),
    "pooler.dense.bias": (d,),
  }
  linears = {
    "attention.self.query": (d, d), "attention.self.key": (d, d), "attention.self.value": (d, d),
    "attention.output.dense": (d, d), "intermediate.dense": (f, d), "output.dense": (d, f),
  }  # fmt: skip
  norms = ["embeddings.LayerNorm"]
  for i in range(config["num_hidden_layers"]):
    layer = f"encoder.layer.{i}."
    for name, shape in linears.items():
      made |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
  for name in norms:
    made |= {f"{name}.weight": (d,), f"{name}.bias": (d,)}
  return dict(sorted(made.items()))


def weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
  """Of size 0.2, gains around 1: every term matters."""
  random, made = np.random.RandomState(seed), {}
  for name, shape in shapes(config).items():
    gain = name.endswith("LayerNorm.weight")
    made[name] = (random.standard_normal(shape) * 0.2 + gain).astype(np.float32)
  return made


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(tokens [3, 19], types, mask): rows of 19, 19 and 11 tokens, the last with padding behind."""
  random = np.random.RandomState(seed)
  tokens = random.randint(1, 97, (3, 19)).astype(np.int32)
  types = np.zeros_like(tokens)
  types[1, 8:] = 1
  mask = np.ones_like(tokens)
  mask[2, 11:] = 0
  return tokens * mask, types, mask


def positions(mask: np.ndarray) -> np.ndarray:
  return np.where(mask == 1, np.arange(mask.shape[1])[None], -1).astype(np.int32)


def write_folder(folder: pathlib.Path, config: dict, tensors: dict | None = None) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True) + "\n"
  (folder / "config.json").write_text(text)
  safetensors.write_sharded(folder, weights(config) if tensors is None else tensors)


def torch_outputs(folder: pathlib.Path, tokens, types, mask) -> tuple[np.ndarray, np.ndarray]:
  """(hidden, pooled) of transformers' BertModel, float32, eager."""
  import torch
  import transformers

  torch.set_num_threads(1)
  model, info = transformers.BertModel.from_pretrained(
    folder, attn_implementation="eager", output_loading_info=True
  )
  assert not any(info[k] for k in ("unexpected_keys", "mismatched_keys", "missing_keys"))
  as_long = lambda x: torch.tensor(x, dtype=torch.long)
  with torch.no_grad():
    out = model.eval().float()(
      as_long(tokens), attention_mask=as_long(mask), token_type_ids=as_long(types)
    )
  return out.last_hidden_state.numpy(), out.pooler_output.numpy()
