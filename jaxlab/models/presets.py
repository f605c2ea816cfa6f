"""Public architectures as numbers, for plans, memory budgets and tests without weights at hand.

A preset is a `config.json` as transformers would write it; `zoo.from_config` makes the module.
Source: config.json of `Qwen/Qwen2.5-*-Instruct`; arXiv 2412.15115 Table 1.
"""

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]


def qwen2p5_0p5b() -> Config:
  return _qwen2p5(896, 24, heads=14, kv_heads=2, mlp=4864, vocab=151_936, tied=True)


def qwen2p5_1p5b() -> Config:
  return _qwen2p5(1536, 28, heads=12, kv_heads=2, mlp=8960, vocab=151_936, tied=True)


def qwen2p5_3b() -> Config:
  return _qwen2p5(2048, 36, heads=16, kv_heads=2, mlp=11_008, vocab=151_936, tied=True)


def qwen2p5_7b() -> Config:
  return _qwen2p5(3584, 28, heads=28, kv_heads=4, mlp=18_944, vocab=152_064, tied=False)


def qwen2p5_14b() -> Config:
  return _qwen2p5(5120, 48, heads=40, kv_heads=8, mlp=13_824, vocab=152_064, tied=False)


def qwen2p5_32b() -> Config:
  return _qwen2p5(5120, 64, heads=40, kv_heads=8, mlp=27_648, vocab=152_064, tied=False)


# The folder that a recipe expects -> what is in it. `hf download NAME --local-dir NAME` makes it.
BY_NAME: dict[str, Callable[[], Config]] = {
  "Qwen/Qwen2.5-0.5B-Instruct": qwen2p5_0p5b,
  "Qwen/Qwen2.5-1.5B-Instruct": qwen2p5_1p5b,
  "Qwen/Qwen2.5-3B-Instruct": qwen2p5_3b,
  "Qwen/Qwen2.5-7B-Instruct": qwen2p5_7b,
  "Qwen/Qwen2.5-14B-Instruct": qwen2p5_14b,
  "Qwen/Qwen2.5-32B-Instruct": qwen2p5_32b,
}


def _qwen2p5(
  width: int, layers: int, *, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool
) -> Config:
  return {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": width,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "intermediate_size": mlp,
    "vocab_size": vocab,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "tie_word_embeddings": tied,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
  }
