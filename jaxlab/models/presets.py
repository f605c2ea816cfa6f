"""Public architectures as numbers, for plans, memory budgets and tests without weights at hand.

A preset is a `config.json` as transformers would write it; `zoo.from_config` makes the module.
Sources: config.json of `Qwen/Qwen2.5-*-Instruct`, arXiv 2412.15115 Table 1; arXiv 2507.11412
Table 1 and the YAMLs of JHU-CLSP/ettin-encoder-vs-decoder, last phase. Their first phase, of 1024
tokens, had theta 10k in all layers; sizes do not depend on it.
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


def ettin_encoder_17m() -> Config:
  return _ettin("17m", decoder=False)


def ettin_encoder_32m() -> Config:
  return _ettin("32m", decoder=False)


def ettin_encoder_68m() -> Config:
  return _ettin("68m", decoder=False)


def ettin_encoder_150m() -> Config:
  return _ettin("150m", decoder=False)


def ettin_encoder_400m() -> Config:
  return _ettin("400m", decoder=False)


def ettin_encoder_1b() -> Config:
  return _ettin("1b", decoder=False)


def ettin_decoder_17m() -> Config:
  return _ettin("17m", decoder=True)


def ettin_decoder_32m() -> Config:
  return _ettin("32m", decoder=True)


def ettin_decoder_68m() -> Config:
  return _ettin("68m", decoder=True)


def ettin_decoder_150m() -> Config:
  return _ettin("150m", decoder=True)


def ettin_decoder_400m() -> Config:
  return _ettin("400m", decoder=True)


def ettin_decoder_1b() -> Config:
  return _ettin("1b", decoder=True)


# The folder that a recipe expects -> what is in it. `hf download NAME --local-dir NAME` makes it.
BY_NAME: dict[str, Callable[[], Config]] = {
  "Qwen/Qwen2.5-0.5B-Instruct": qwen2p5_0p5b,
  "Qwen/Qwen2.5-1.5B-Instruct": qwen2p5_1p5b,
  "Qwen/Qwen2.5-3B-Instruct": qwen2p5_3b,
  "Qwen/Qwen2.5-7B-Instruct": qwen2p5_7b,
  "Qwen/Qwen2.5-14B-Instruct": qwen2p5_14b,
  "Qwen/Qwen2.5-32B-Instruct": qwen2p5_32b,
  "jhu-clsp/ettin-encoder-17m": ettin_encoder_17m,
  "jhu-clsp/ettin-encoder-32m": ettin_encoder_32m,
  "jhu-clsp/ettin-encoder-68m": ettin_encoder_68m,
  "jhu-clsp/ettin-encoder-150m": ettin_encoder_150m,
  "jhu-clsp/ettin-encoder-400m": ettin_encoder_400m,
  "jhu-clsp/ettin-encoder-1b": ettin_encoder_1b,
  "jhu-clsp/ettin-decoder-17m": ettin_decoder_17m,
  "jhu-clsp/ettin-decoder-32m": ettin_decoder_32m,
  "jhu-clsp/ettin-decoder-68m": ettin_decoder_68m,
  "jhu-clsp/ettin-decoder-150m": ettin_decoder_150m,
  "jhu-clsp/ettin-decoder-400m": ettin_decoder_400m,
  "jhu-clsp/ettin-decoder-1b": ettin_decoder_1b,
}

# name: layers, width, heads, MLP width
ETTIN_SIZES = {
  "17m": (7, 256, 4, 384),
  "32m": (10, 384, 6, 576),
  "68m": (19, 512, 8, 768),
  "150m": (22, 768, 12, 1152),
  "400m": (28, 1024, 16, 2624),
  "1b": (28, 1792, 28, 3840),
}
DECODERS_OF_LOCAL_10K = ("17m", "32m", "68m", "400m")  # theta; all encoders have 160k


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


def _ettin(size: str, *, decoder: bool) -> Config:
  layers, width, heads, mlp = ETTIN_SIZES[size]
  local_theta = 10_000.0 if decoder and size in DECODERS_OF_LOCAL_10K else 160_000.0
  return {
    "architectures": ["ModernBertDecoderForCausalLM" if decoder else "ModernBertForMaskedLM"],
    "model_type": "modernbert-decoder" if decoder else "modernbert",
    "hidden_size": width,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "intermediate_size": mlp,
    "vocab_size": 50_368,
    "max_position_embeddings": 7999,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": local_theta,
    "norm_eps": 1e-5,
    "hidden_activation": "gelu",
    "tie_word_embeddings": True,
    "pad_token_id": 50_283,
    "bos_token_id": 50_281,
    "eos_token_id": 50_282,
    "cls_token_id": 50_281,
    "sep_token_id": 50_282,
  }
