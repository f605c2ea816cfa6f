"""Sentence embeddings of an encoder, and how much of them a changed model keeps.

Dims: N texts, B rows, T tokens, D width.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int

from jaxlab.decode import text
from jaxlab.eval import perplexity

BUCKET = 32  # rows are filled up to a multiple of it: a program a length
MAX_TOKENS = 256  # [all-MiniLM-L6-v2: sentence_bert_config.json]


def embed_texts(
  lm: Any, texts: Sequence[str], *, batch_size: int = 32, max_tokens: int = MAX_TOKENS
) -> Float32[np.ndarray, "N D"]:
  """A vector of length 1 for each text; longer texts are cut, keeping the tokenizer's last token.

  Args:
    lm: a `jaxlab.LM` whose module has `sentence` (`jaxlab.models.bert`), packed or dense.
  Raises: ValueError for a model without sentence embeddings or tokenizer.
  """
  if not hasattr(lm.module, "sentence"):
    raise ValueError(
      f"embed_texts: the model must be a sentence encoder; got {type(lm.module).__name__}. Load a "
      "BERT such as all-MiniLM-L6-v2."
    )
  tokenizer = text.require_tokenizer(lm)
  rows = [tokenizer.encode(t, add_special_tokens=True) for t in texts]
  rows = [ids if len(ids) <= max_tokens else [*ids[: max_tokens - 1], ids[-1]] for ids in rows]
  params = perplexity.evaluation_params(lm.params)
  order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # alike lengths: little padding
  found = np.zeros((len(rows), lm.module.config.width), np.float32)
  for start in range(0, len(order), batch_size):
    chosen = order[start : start + batch_size]
    length = -(-max(len(rows[i]) for i in chosen) // BUCKET) * BUCKET
    tokens_BT = np.zeros((batch_size, min(length, max_tokens)), np.int32)
    positions_BT = np.full_like(tokens_BT, -1)
    for row, i in enumerate(chosen):
      tokens_BT[row, : len(rows[i])] = rows[i]
      positions_BT[row, : len(rows[i])] = np.arange(len(rows[i]))
    found[chosen] = np.asarray(_sentences(lm.module, params, tokens_BT, positions_BT))[
      : len(chosen)
    ]
  return found


@functools.partial(jax.jit, static_argnames=("module",))
def _sentences(
  module: Any, params: Any, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"]
) -> Float32[Array, "B D"]:
  return module.apply({"params": params}, tokens_BT, positions_BT, method="sentence")


def similarities(
  a: Float32[np.ndarray, "N D"], b: Float32[np.ndarray, "N D"]
) -> Float32[np.ndarray, "N"]:
  """Cosine of each text's two embeddings, of length 1: 1 where the models agree."""
  return np.sum(a * b, axis=-1)


def retrieved(
  queries: Float32[np.ndarray, "N D"], passages: Float32[np.ndarray, "N D"]
) -> dict[str, float]:
  """{number: 1.0 where the query's own passage is the nearest of all, else 0.0}."""
  nearest = np.argmax(queries @ passages.T, axis=-1)
  return {str(i): float(found == i) for i, found in enumerate(nearest)}
