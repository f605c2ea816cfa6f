"""config.json -> module: the one place that knows which architectures exist.

Configs as written by transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) are
read
alike. What a checkpoint asks for and we do not have is refused by field and value, never ignored.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlab.models import causal_lm
from jaxlab.nn import rotary

FAMILIES = ("llama", "qwen2", "qwen3")


def from_config(
  config: dict[str, Any], param_dtype: jax.typing.DTypeLike = jnp.float32
) -> causal_lm.CausalLM:
  """Builds the module that a Hugging Face `config.json` describes.

  Raises: ValueError naming the field and its value for anything unsupported.
  """
  return causal_lm.CausalLM(causal_lm_config(config), param_dtype)


def causal_lm_config(config: dict[str, Any]) -> causal_lm.CausalLMConfig:
  """The architecture fields of a Llama, Qwen2 or Qwen3 `config.json`."""
  family = config.get("model_type")
  if family not in FAMILIES:
    raise _unsupported("model_type", family, f"one of {', '.join(FAMILIES)}")
  _refuse(config, "hidden_act", ("silu", "swish"), default="silu")
  _refuse(config, "partial_rotary_factor", (1, 1.0), default=1.0)
  if family != "llama":
    _refuse(config, "use_sliding_window", (False,), default=False)
  if layer_types := set(config.get("layer_types") or ()) - {"full_attention"}:
    raise _unsupported("layer_types", sorted(layer_types), "full_attention")
  heads = _required(config, "num_attention_heads")
  width = _required(config, "hidden_size")
  attention_bias = bool(config.get("attention_bias", False))
  return causal_lm.CausalLMConfig(
    vocab_size=_required(config, "vocab_size"),
    width=width,
    num_layers=_required(config, "num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=config.get("num_key_value_heads") or heads,
    head_dim=config.get("head_dim") or (128 if family == "qwen3" else width // heads),
    mlp_width=_required(config, "intermediate_size"),
    norm_eps=config.get("rms_norm_eps", 1e-6),
    rope=rope_config(config),
    max_positions=config.get("max_position_embeddings", 2048),
    tie_embeddings=config.get("tie_word_embeddings", False),
    qkv_bias=family == "qwen2" or attention_bias,
    o_bias=family != "qwen2" and attention_bias,
    mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
    qk_norm=family == "qwen3",
  )


def rope_config(config: dict[str, Any]) -> rotary.RopeConfig:
  """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4)."""
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
  kind = rope.get("rope_type", rope.get("type", "default"))
  _refuse(rope, "partial_rotary_factor", (1, 1.0), default=1.0)
  match kind:
    case "default":
      return rotary.RopeConfig(theta=theta)
    case "linear":
      return rotary.RopeConfig(theta=theta, kind="linear", factor=_required(rope, "factor"))
    case "llama3":
      return rotary.RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_required(rope, "factor"),
        low_freq_factor=_required(rope, "low_freq_factor"),
        high_freq_factor=_required(rope, "high_freq_factor"),
        original_max_positions=_required(rope, "original_max_position_embeddings"),
      )
    case _:
      raise _unsupported("rope_type", kind, "default, linear or llama3")


def _required(config: dict[str, Any], field: str) -> Any:
  if config.get(field) is None:
    raise ValueError(
      f"config.json: field {field!r} is missing. Fetch the model's own config again."
    )
  return config[field]


def _refuse(config: dict[str, Any], field: str, supported: tuple, default: Any) -> None:
  value = config.get(field, default)
  if value not in supported:
    raise _unsupported(field, value, " or ".join(map(str, supported)))


def _unsupported(field: str, value: Any, supported: str) -> ValueError:
  return ValueError(f"config.json: {field} = {value!r} is not supported; jaxlab has {supported}.")
