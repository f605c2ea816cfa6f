"""Checkpoint names as data: our parameter paths and what Hugging Face and llama.cpp call them.

A template with `{}` names one tensor a layer; ours is then stacked below `layers/`. Kernels
(`.../kernel`) are stored as [out, in] in both formats and kept as [in, out] here; everything else
has the same layout in all three.
"""

import re
from collections.abc import Iterable, Mapping

_LAYER = "model.layers.{}."

# Llama, SmolLM2, Qwen2.5 and Qwen3 as transformers names them; a model has the paths of its config.
HUGGING_FACE = {
  "embed": "model.embed_tokens.weight",
  "norm": "model.norm.weight",
  "head/kernel": "lm_head.weight",
  "layers/attn_norm": _LAYER + "input_layernorm.weight",
  "layers/q/kernel": _LAYER + "self_attn.q_proj.weight",
  "layers/q/bias": _LAYER + "self_attn.q_proj.bias",
  "layers/k/kernel": _LAYER + "self_attn.k_proj.weight",
  "layers/k/bias": _LAYER + "self_attn.k_proj.bias",
  "layers/v/kernel": _LAYER + "self_attn.v_proj.weight",
  "layers/v/bias": _LAYER + "self_attn.v_proj.bias",
  "layers/o/kernel": _LAYER + "self_attn.o_proj.weight",
  "layers/o/bias": _LAYER + "self_attn.o_proj.bias",
  "layers/q_norm": _LAYER + "self_attn.q_norm.weight",
  "layers/k_norm": _LAYER + "self_attn.k_norm.weight",
  "layers/mlp_norm": _LAYER + "post_attention_layernorm.weight",
  "layers/gate/kernel": _LAYER + "mlp.gate_proj.weight",
  "layers/gate/bias": _LAYER + "mlp.gate_proj.bias",
  "layers/up/kernel": _LAYER + "mlp.up_proj.weight",
  "layers/up/bias": _LAYER + "mlp.up_proj.bias",
  "layers/down/kernel": _LAYER + "mlp.down_proj.weight",
  "layers/down/bias": _LAYER + "mlp.down_proj.bias",
}

# llama.cpp's `gguf-py/gguf/constants.py`, architectures llama, qwen2 and qwen3.
GGUF = {
  "embed": "token_embd.weight",
  "norm": "output_norm.weight",
  "head/kernel": "output.weight",
  "layers/attn_norm": "blk.{}.attn_norm.weight",
  "layers/q/kernel": "blk.{}.attn_q.weight",
  "layers/q/bias": "blk.{}.attn_q.bias",
  "layers/k/kernel": "blk.{}.attn_k.weight",
  "layers/k/bias": "blk.{}.attn_k.bias",
  "layers/v/kernel": "blk.{}.attn_v.weight",
  "layers/v/bias": "blk.{}.attn_v.bias",
  "layers/o/kernel": "blk.{}.attn_output.weight",
  "layers/o/bias": "blk.{}.attn_output.bias",
  "layers/q_norm": "blk.{}.attn_q_norm.weight",
  "layers/k_norm": "blk.{}.attn_k_norm.weight",
  "layers/mlp_norm": "blk.{}.ffn_norm.weight",
  "layers/gate/kernel": "blk.{}.ffn_gate.weight",
  "layers/gate/bias": "blk.{}.ffn_gate.bias",
  "layers/up/kernel": "blk.{}.ffn_up.weight",
  "layers/up/bias": "blk.{}.ffn_up.bias",
  "layers/down/kernel": "blk.{}.ffn_down.weight",
  "layers/down/bias": "blk.{}.ffn_down.bias",
}

# Buffers that old versions of transformers saved and every reader recomputes.
IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)|rope_freqs\.weight")

# The architectures whose GGUF files hold q and k rows in interleaved rotary order.
GGUF_INTERLEAVED = ("llama",)

_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")


def is_linear(name: str) -> bool:
  """True for the Hugging Face name of a layer's kernel."""
  return _LINEAR.fullmatch(name) is not None


def module_name(linear: str) -> str:
  """'self_attn.q_proj' for 'q': the name inside a layer, as adapters and quantisers use it."""
  return HUGGING_FACE[f"layers/{linear}/kernel"].removeprefix(_LAYER).removesuffix(".weight")


def is_stacked(path: str) -> bool:
  return path.startswith("layers/")


def is_transposed(path: str) -> bool:
  """True where the checkpoint's tensor is [out, in] and ours [in, out]."""
  return path.endswith("/kernel")


def expand(paths: Iterable[str], template: Mapping[str, str], num_layers: int) -> dict:
  """{checkpoint name: (path, layer or None)} for the given paths of a model."""
  names = {}
  for path in paths:
    if is_stacked(path):
      names |= {template[path].format(i): (path, i) for i in range(num_layers)}
    else:
      names[template[path]] = (path, None)
  return names
