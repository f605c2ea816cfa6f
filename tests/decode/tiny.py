"""A folder with a language model, tokenizer and chat template, that says random bytes at once."""

import pathlib

from tests.io import tokenizers_small
from tests.models import tiny as tiny_models

CONFIG = tiny_models.config(
  "qwen2", vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
  num_attention_heads=4, tie_word_embeddings=True, max_position_embeddings=128, bos_token_id=1,
  eos_token_id=2,
)  # fmt: skip


def write_model(folder: pathlib.Path, *, with_tokenizer: bool = True) -> pathlib.Path:
  """Weights of another seed are another model; <s> and </s> are put around a text."""
  tiny_models.write_folder(folder, CONFIG)
  if with_tokenizer:
    tokenizers_small.write_folder(folder, tokenizer_config=tokenizers_small.CONFIG)
  return folder
