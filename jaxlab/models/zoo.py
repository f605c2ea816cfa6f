"""config.json -> module: the one place that knows which architectures exist.

Configs as written by transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) are
read alike. What a checkpoint asks for and we do not have is refused by field and value, never
ignored.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlab.models import bert, causal_lm, modernbert
from jaxlab.nn import rotary

FAMILIES = ("llama", "qwen2", "qwen3")
ENCODER, DECODER = "modernbert", "modernbert-decoder"
MODERNBERT = (ENCODER, DECODER)
BERT = "bert"
LAYER_TYPES = ("full_attention", "sliding_attention")

Model = causal_lm.CausalLM | modernbert.ModernBert | bert.Bert


def from_config(config: dict[str, Any], param_dtype: jax.typing.DTypeLike = jnp.float32) -> Model:
  """Builds the module that a Hugging Face `config.json` describes.

  Raises: ValueError naming the field and its value for anything unsupported.
  """
  family = config.get("model_type")
  if family in MODERNBERT:
    return modernbert.ModernBert(modernbert_config(config), param_dtype)
  if family == BERT:
    return bert.Bert(bert_config(config), param_dtype)
  if family not in FAMILIES:
    raise _unsupported("model_type", family, f"one of {', '.join((*FAMILIES, *MODERNBERT, BERT))}")
  return causal_lm.CausalLM(causal_lm_config(config), param_dtype)


def param_shapes(module: Model) -> Any:
  """Shapes of a model's dense, stacked parameters; makes none."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  return jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]


def causal_lm_config(config: dict[str, Any]) -> causal_lm.CausalLMConfig:
  """The architecture fields of a Llama, Qwen2 or Qwen3 `config.json`.

  Raises: ValueError as `from_config`, and for families that `from_config` alone has.
  """
  family = config.get("model_type")
  if family in (*MODERNBERT, BERT):
    raise ValueError(
      f"config.json: for this use model_type must be one of {', '.join(FAMILIES)}; got {family!r}. "
      "Budgets, rounding by groups and RL do not know it yet; jaxlab.load does, and "
      "launch.quantize with PTQConfig.method = @rtn() or @mr_gptq()."
    )
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


def modernbert_config(
  config: dict[str, Any], *, decoder_window: str = "hf"
) -> modernbert.ModernBertConfig:
  """The architecture fields of a ModernBERT or Ettin `config.json`.

  Args:
    decoder_window: keys of a local layer of a decoder, of `local_attention` 128: "hf" for 64 as in
      transformers, "train" for 65 as in the training code of Ettin, where the edge is inclusive.
  """
  if decoder_window not in ("hf", "train"):
    raise ValueError(
      f"modernbert_config: decoder_window must be hf or train; got {decoder_window!r}."
    )
  family = config.get("model_type")
  if family not in MODERNBERT:
    raise _unsupported("model_type", family, f"one of {', '.join(MODERNBERT)} here")
  for field in ("hidden_activation", "classifier_activation"):
    _refuse(config, field, ("gelu",), default="gelu")
  for field in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
    _refuse(config, field, (False,), default=False)
  _refuse(config, "decoder_bias", (True,), default=True)
  local_layers = tuple(kind == "sliding_attention" for kind in _layer_types(config))
  global_rope, local_rope = _modernbert_ropes(config, any(local_layers))
  half = config.get("sliding_window")  # written by the decoder; the other way to say the same
  half = _required(config, "local_attention") // 2 if half is None else half
  causal = family == DECODER
  return modernbert.ModernBertConfig(
    vocab_size=_required(config, "vocab_size"),
    width=_required(config, "hidden_size"),
    num_heads=_required(config, "num_attention_heads"),
    mlp_width=_required(config, "intermediate_size"),
    local_layers=local_layers,
    window=half if causal and decoder_window == "hf" else half + 1,
    global_rope=global_rope,
    local_rope=local_rope,
    causal=causal,
    norm_eps=config.get("norm_eps", 1e-5),
    max_positions=_required(config, "max_position_embeddings"),
    tie_embeddings=config.get("tie_word_embeddings", True),
  )


def bert_config(config: dict[str, Any]) -> bert.BertConfig:
  """The architecture fields of a BERT `config.json`, of the bare encoder."""
  _refuse(config, "hidden_act", ("gelu",), default="gelu")
  _refuse(config, "position_embedding_type", ("absolute",), default="absolute")
  for field in ("is_decoder", "add_cross_attention"):
    _refuse(config, field, (False,), default=False)
  _refuse(config, "architectures", (["BertModel"],), default=["BertModel"])
  return bert.BertConfig(
    vocab_size=_required(config, "vocab_size"),
    width=_required(config, "hidden_size"),
    num_layers=_required(config, "num_hidden_layers"),
    num_heads=_required(config, "num_attention_heads"),
    mlp_width=_required(config, "intermediate_size"),
    token_types=config.get("type_vocab_size", 2),
    norm_eps=config.get("layer_norm_eps", 1e-12),
    max_positions=config.get("max_position_embeddings", 512),
  )


def _layer_types(config: dict[str, Any]) -> list[str]:
  """`layer_types` (transformers 5) or `global_attn_every_n_layers` (4), one a layer."""
  depth = _required(config, "num_hidden_layers")
  types = config.get("layer_types")
  if types is None:
    every = _required(config, "global_attn_every_n_layers")
    types = [LAYER_TYPES[bool(i % every)] for i in range(depth)]
  if unknown := set(types) - set(LAYER_TYPES):
    raise _unsupported("layer_types", sorted(unknown), " and ".join(LAYER_TYPES))
  if len(types) != depth:
    raise _unsupported("layer_types", types, f"one a layer, {depth} of them")
  return types


def _modernbert_ropes(
  config: dict[str, Any], any_local: bool
) -> tuple[rotary.RopeConfig, rotary.RopeConfig]:
  """(of global, of local layers). Nothing is assumed: phases of one model differ in theta."""
  if by_type := config.get("rope_parameters"):
    of_global = _required(by_type, "full_attention")
    of_local = _required(by_type, "sliding_attention") if any_local else of_global
  else:
    scaling = config.get("rope_scaling") or {}
    of_global = scaling | {"rope_theta": _required(config, "global_rope_theta")}
    theta = config.get("local_rope_theta", of_global["rope_theta"])
    of_local = scaling | {"rope_theta": of_global["rope_theta"] if theta is None else theta}
    if any_local and "local_rope_theta" not in config:  # null is another matter: as global layers
      _required(config, "local_rope_theta")
  for rope in (of_global, of_local):
    _required(rope, "rope_theta")
  return rope_config({"rope_parameters": of_global}), rope_config({"rope_parameters": of_local})


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
