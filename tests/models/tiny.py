"""Tiny random models of every family: configs, weights under Hugging Face names, folders.

Weights come from NumPy's frozen `RandomState`, so goldens need to store outputs only.
"""

import json
import pathlib

import ml_dtypes
import numpy as np

from jaxlab.io import safetensors

VOCAB, WIDTH, MLP, LAYERS = 97, 48, 80, 3
BASE = {
  "vocab_size": VOCAB,
  "hidden_size": WIDTH,
  "intermediate_size": MLP,
  "num_hidden_layers": LAYERS,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
  "rms_norm_eps": 1e-5,
  "hidden_act": "silu",
  "tie_word_embeddings": False,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def config(family: str = "llama", **changes) -> dict:
  """A config.json with one or more switches turned."""
  own = {"head_dim": 16} if family == "qwen3" else {}
  architectures = [ARCHITECTURES[family] + "ForCausalLM"]
  return {"architectures": architectures, "model_type": family, **BASE, **own, **changes}


# One switch each. "v4" spells RoPE as transformers 4 does, "v5" as transformers 5.
CASES = {
  "llama": config(),
  "llama_all_heads_alike": config(num_key_value_heads=6),
  "llama_one_kv_head": config(num_key_value_heads=1),
  "llama_tied": config(tie_word_embeddings=True),
  "llama_biases": config(attention_bias=True, mlp_bias=True),
  "llama_head_dim": config(head_dim=20),
  "llama_theta_v4": config(rope_theta=5e5),
  "llama_theta_v5": config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
  "llama3_v4": config(rope_theta=5e5, rope_scaling=LLAMA3),
  "llama3_v5": config(rope_parameters={**LLAMA3, "rope_theta": 5e5}),
  "llama_linear_v4": config(rope_scaling={"type": "linear", "factor": 4.0}),
  "llama_linear_v5": config(
    rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
  ),
  "qwen2": config("qwen2"),
  "qwen2_tied": config("qwen2", tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1e6),
  "qwen3": config("qwen3"),
  "qwen3_tied_biases": config("qwen3", tie_word_embeddings=True, attention_bias=True),
}
GOLDENS = ("llama", "llama_biases", "llama3_v4", "qwen2_tied", "qwen3")


def weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
  """{Hugging Face name: float32 array}; every shape written out from the config."""
  d, f = config["hidden_size"], config["intermediate_size"]
  h = config.get("head_dim") or d // config["num_attention_heads"]
  q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
  family = config["model_type"]
  biased = family == "qwen2" or config.get("attention_bias", False)
  shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
  if not config["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (config["vocab_size"], d)
  linears = {
    "self_attn.q_proj": (q, d, biased),
    "self_attn.k_proj": (kv, d, biased),
    "self_attn.v_proj": (kv, d, biased),
    "self_attn.o_proj": (d, q, biased and family != "qwen2"),
    "mlp.gate_proj": (f, d, config.get("mlp_bias", False)),
    "mlp.up_proj": (f, d, config.get("mlp_bias", False)),
    "mlp.down_proj": (d, f, config.get("mlp_bias", False)),
  }
  for i in range(config["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    for norm in ("input_layernorm", "post_attention_layernorm"):
      shapes[f"{layer}{norm}.weight"] = (d,)
    for norm in ("q_norm", "k_norm") if family == "qwen3" else ():
      shapes[f"{layer}self_attn.{norm}.weight"] = (h,)
    for name, (out, into, bias) in linears.items():
      shapes[f"{layer}{name}.weight"] = (out, into)
      if bias:
        shapes[f"{layer}{name}.bias"] = (out,)
  random = np.random.RandomState(seed)
  made = {}
  for name in sorted(shapes):
    value = random.standard_normal(shapes[name]) * (0.4 if len(shapes[name]) == 1 else 0.2)
    made[name] = (value + ("norm" in name)).astype(np.float32)  # gains around 1
  return made


def tokens(batch: int = 2, length: int = 37, seed: int = 0) -> np.ndarray:
  return np.random.RandomState(seed).randint(0, VOCAB, (batch, length)).astype(np.int32)


def write_folder(
  folder: pathlib.Path, config: dict, *, seed: int = 0, dtype=np.float32, max_shard_bytes=10**9
) -> dict[str, np.ndarray]:
  """A model folder without tokenizer, by our own writer; returns its tensors as stored."""
  made = {name: x.astype(dtype) for name, x in weights(config, seed).items()}
  folder.mkdir(parents=True, exist_ok=True)
  stored = str(np.dtype(dtype))
  text = json.dumps({**config, "dtype": stored}, indent=2, sort_keys=True) + "\n"
  (folder / "config.json").write_text(text)
  safetensors.write_sharded(folder, made, max_shard_bytes=max_shard_bytes)
  return made


BF16 = ml_dtypes.bfloat16


def torch_model(config: dict, seed: int = 0):
  """The same model in transformers, float32, weights from `weights`."""
  import torch
  import transformers

  family = ARCHITECTURES[config["model_type"]]
  fields = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
  own = getattr(transformers, family + "Config")(**fields)
  model = getattr(transformers, family + "ForCausalLM")(own).eval()
  state = {name: torch.tensor(x) for name, x in weights(config, seed).items()}
  missing, unexpected = model.load_state_dict(state, strict=False)
  assert not unexpected and set(missing) <= {"lm_head.weight"}
  if config["tie_word_embeddings"]:
    model.tie_weights()
  return model


def torch_logits(model, tokens: np.ndarray) -> np.ndarray:
  import torch

  with torch.no_grad():
    return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
