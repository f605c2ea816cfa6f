"""A small model of bytes, for training runs that need nothing but this package. Dims: none."""

import json
import os
import pathlib

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxlab.io import files
from jaxlab.io import tokenizer as tokenizer_lib

EOS = "<eos>"
VOCABULARY = 264  # 256 bytes and the end token, and rows to divide over devices


def byte_model(
  folder: str | os.PathLike[str],
  width: int = 128,  # [ours: 0.9M parameters with the next two]
  layers: int = 4,  # [ours]
  mlp_width: int = 384,  # [ours]
  heads: int = 4,  # [ours]
  positions: int = 1024,  # [ours]
) -> str:
  """Writes config.json and a tokenizer, one token a byte, for `TrainConfig.init = 'random'`.

  The architecture is Qwen3's. Several processes may write the same folder. Returns: the folder.
  """
  folder = pathlib.Path(folder)
  byte_tokenizer().save(folder)
  config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": width,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": heads,
    "head_dim": width // heads,
    "intermediate_size": mlp_width,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": positions,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": len(pre_tokenizers.ByteLevel.alphabet()),
  }
  text = json.dumps(config, indent=2) + "\n"
  files.write_atomically(folder / "config.json", lambda f: f.write(text.encode()))
  return str(folder)


def byte_tokenizer() -> tokenizer_lib.Tokenizer:
  """One token a byte, then the end token."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.add_special_tokens([EOS])
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  eos = len(alphabet)
  return tokenizer_lib.Tokenizer(backend, {"eos_token": EOS}, (eos,), eos, None, {})
