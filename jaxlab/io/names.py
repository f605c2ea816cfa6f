"""Checkpoint names as data: our parameter paths and what Hugging Face and llama.cpp call them.

A template with `{}` names one tensor a layer; ours is then stacked below `layers/`. One that ends
in `#i/n` names part i of n equal parts of a tensor's rows (a fused kernel). Kernels (`.../kernel`)
are stored as [out, in] in both formats and kept as [in, out] here; everything else has the same
layout in all three.
"""

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

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

# Ettin's decoders, and what ModernBERT and Ettin's encoders name otherwise. The first layer's gain
# is the one behind the embedding, see `jaxlab.models.modernbert`.
MODERNBERT_DECODER = {
  "embed": "model.embeddings.tok_embeddings.weight",
  "norm": "model.final_norm.weight",
  "head_dense/kernel": "lm_head.dense.weight",
  "head_norm": "lm_head.norm.weight",
  "head/kernel": "decoder.weight",
  "head/bias": "decoder.bias",
  "layers/attn_norm": _LAYER + "attn_norm.weight",
  "layers/q/kernel": _LAYER + "attn.q_proj.weight",
  "layers/k/kernel": _LAYER + "attn.k_proj.weight",
  "layers/v/kernel": _LAYER + "attn.v_proj.weight",
  "layers/o/kernel": _LAYER + "attn.Wo.weight",
  "layers/mlp_norm": _LAYER + "mlp_norm.weight",
  "layers/gate/kernel": _LAYER + "mlp.Wi.weight#0/2",
  "layers/up/kernel": _LAYER + "mlp.Wi.weight#1/2",
  "layers/down/kernel": _LAYER + "mlp.Wo.weight",
}
MODERNBERT = MODERNBERT_DECODER | {
  "head_dense/kernel": "head.dense.weight",
  "head_norm": "head.norm.weight",
  "layers/q/kernel": _LAYER + "attn.Wqkv.weight#0/3",
  "layers/k/kernel": _LAYER + "attn.Wqkv.weight#1/3",
  "layers/v/kernel": _LAYER + "attn.Wqkv.weight#2/3",
}

# The bare encoder, as sentence-transformers' models have it (`architectures` BertModel).
_BERT_LAYER = "encoder.layer.{}."
BERT = {
  "embed": "embeddings.word_embeddings.weight",
  "position_embed": "embeddings.position_embeddings.weight",
  "type_embed": "embeddings.token_type_embeddings.weight",
  "embed_norm/gain": "embeddings.LayerNorm.weight",
  "embed_norm/bias": "embeddings.LayerNorm.bias",
  "pooler/kernel": "pooler.dense.weight",
  "pooler/bias": "pooler.dense.bias",
  "layers/q/kernel": _BERT_LAYER + "attention.self.query.weight",
  "layers/q/bias": _BERT_LAYER + "attention.self.query.bias",
  "layers/k/kernel": _BERT_LAYER + "attention.self.key.weight",
  "layers/k/bias": _BERT_LAYER + "attention.self.key.bias",
  "layers/v/kernel": _BERT_LAYER + "attention.self.value.weight",
  "layers/v/bias": _BERT_LAYER + "attention.self.value.bias",
  "layers/o/kernel": _BERT_LAYER + "attention.output.dense.weight",
  "layers/o/bias": _BERT_LAYER + "attention.output.dense.bias",
  "layers/attn_norm/gain": _BERT_LAYER + "attention.output.LayerNorm.weight",
  "layers/attn_norm/bias": _BERT_LAYER + "attention.output.LayerNorm.bias",
  "layers/up/kernel": _BERT_LAYER + "intermediate.dense.weight",
  "layers/up/bias": _BERT_LAYER + "intermediate.dense.bias",
  "layers/down/kernel": _BERT_LAYER + "output.dense.weight",
  "layers/down/bias": _BERT_LAYER + "output.dense.bias",
  "layers/mlp_norm/gain": _BERT_LAYER + "output.LayerNorm.weight",
  "layers/mlp_norm/bias": _BERT_LAYER + "output.LayerNorm.bias",
}
_ELSEWHERE = {"model.layers.0.attn_norm.weight": "model.embeddings.norm.weight"}

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

# Copies of a tied embedding under the name of the output matrix.
TIED = {template["head/kernel"] for template in (HUGGING_FACE, MODERNBERT, GGUF)}

# Buffers that old versions of transformers saved and every reader recomputes.
IGNORED = re.compile(
  r".*\.(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)|rope_freqs\.weight"
  r"|embeddings\.position_ids"
)

# The architectures whose GGUF files hold q and k rows in interleaved rotary order.
GGUF_INTERLEAVED = ("llama",)

_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")


def huggingface(model_type: str | None) -> Mapping[str, str]:
  """The template of a `config.json`'s `model_type`."""
  own = {"modernbert": MODERNBERT, "modernbert-decoder": MODERNBERT_DECODER, "bert": BERT}
  return own.get(model_type, HUGGING_FACE)


def tensor_name(template: Mapping[str, str], path: str, layer: int | None = None) -> str:
  """The checkpoint's name of a parameter, for a part of a fused tensor with `#i/n` behind it."""
  name = template[path].format(layer)
  return _ELSEWHERE.get(name, name)


def split_part(name: str) -> tuple[str, int, int]:
  """(tensor, i, n): the tensor's own name, and which of its n equal parts is meant."""
  tensor, _, part = name.partition("#")
  index, _, count = part.partition("/")
  return (tensor, int(index), int(count)) if part else (tensor, 0, 1)


def parts_of(read: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
  """A reader of whole tensors as one that also knows the names of parts."""

  def read_part(name: str) -> np.ndarray:
    tensor, index, count = split_part(name)
    value = read(tensor)
    if len(value) % count:
      return value  # no such parts; the check of the shape says so by name
    rows = len(value) // count
    return value[index * rows : (index + 1) * rows]

  return read_part


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
  """{checkpoint name: (path, layer or None)} for the given paths of a model.

  A fused tensor stands there once, for one of its parts.
  """
  names = {}
  for path in paths:
    for layer in range(num_layers) if is_stacked(path) else (None,):
      names[split_part(tensor_name(template, path, layer))[0]] = (path, layer)
  return names
