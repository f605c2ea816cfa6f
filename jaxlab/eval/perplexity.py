"""Perplexity of a text by non-overlapping windows: exp of the mean negative log-likelihood a token.

A document is cut into windows of W tokens; each window is read on its own and predicts all of its
tokens but the first (the convention of the quantisation literature; the last, shorter window counts
too). Figures of other window lengths or tokenizers are other figures. Dims: B windows, T tokens.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from jaxlab import errors
from jaxlab.decode import text
from jaxlab.eval import statistics
from jaxlab.nn import weights
from jaxlab.objectives import policy_gradient
from pallas_kernels import target

PyTree = Any
CHUNK_TOKENS = 1024  # rows that meet the head at once: 1024 x V float32 logits


@dataclasses.dataclass(frozen=True)
class PerplexityConfig:
  """How a text is read."""

  window: int = 1024  # tokens a window [ours: 2048 is usual for large models]
  batch_size: int = 4  # windows in one forward pass [ours: fits a laptop]
  dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of dense weights; as `load`
  field: str = "text"  # of the rows of a .jsonl file [ours]
  max_tokens: int | None = None  # read no more of the text than this

  def __post_init__(self):
    for name in ("window", "max_tokens"):
      value = getattr(self, name)
      if value is not None and value < 2:
        raise ValueError(f"PerplexityConfig.{name}: must be at least 2; got {value}.")
    if self.batch_size < 1:
      raise ValueError(f"PerplexityConfig.batch_size: must be at least 1; got {self.batch_size}.")


@dataclasses.dataclass(frozen=True)
class Perplexity:
  """Mean negative log-likelihood (nats) of the predicted tokens, with its interval."""

  nll: statistics.Estimate  # clusters: documents, or the windows of a single one
  documents: int
  windows: int

  @property
  def value(self) -> float:
    return math.exp(self.nll.value)

  def as_dict(self) -> dict[str, Any]:
    """Figures of result.json: perplexity and nll_per_token with intervals (n: tokens)."""
    nll = self.nll.as_dict()
    bounds = ("value", "ci_low", "ci_high")
    ppl = {k: None if nll[k] is None else math.exp(nll[k]) for k in bounds}
    return {
      "perplexity": ppl | {"n": nll["n"]},
      "nll_per_token": nll,
      "documents": self.documents,
      "windows": self.windows,
    }


def perplexity(
  lm: Any,
  documents: Sequence[str],
  config: PerplexityConfig = PerplexityConfig(),
  *,
  on_batch: Callable[[int, int], None] | None = None,
) -> Perplexity:
  """Perplexity of texts under a model.

  Args:
    lm: a `jaxlab.LM`, packed or dense, with or without adapters; computes in its own dtype.
    documents: texts; a window never reaches over the end of one.
    on_batch: called with (windows done, windows in all).
  Raises: ValueError for a model without tokenizer, a window longer than the context, or texts
    without two tokens.
  """
  if config.window > lm.module.config.max_positions:
    raise ValueError(
      f"PerplexityConfig.window: must fit the context of {lm.module.config.max_positions} tokens; "
      f"got {config.window}."
    )
  tokenizer = text.require_tokenizer(lm)
  ids = text.encode_prompts(tokenizer, documents)
  return perplexity_of_ids(lm.module, lm.params, ids, config, on_batch=on_batch)


def perplexity_of_ids(
  module: Any,
  params: PyTree,
  documents: Sequence[Sequence[int]],
  config: PerplexityConfig = PerplexityConfig(),
  *,
  on_batch: Callable[[int, int], None] | None = None,
) -> Perplexity:
  """As `perplexity`, for documents as token ids; one program whatever their lengths."""
  tokens_WT, length_W, document_W = windows(documents, config.window, config.max_tokens)
  if target.current_target().platform == "cpu":  # each batch would unpack every layer again
    params = weights.densify(params, params["embed"].dtype)
  parts = []
  total, size = len(tokens_WT), config.batch_size
  for start in range(0, total, size):
    batch = slice(start, start + size)
    pad = size - len(tokens_WT[batch])
    tokens_BT = np.pad(tokens_WT[batch], ((0, pad), (0, 0)))
    nll_BT, counts_BT = window_nll(module, params, tokens_BT, np.pad(length_W[batch], (0, pad)))
    parts.append(np.asarray(nll_BT)[np.asarray(counts_BT)])
    if on_batch:
      on_batch(min(start + size, total), total)
  many = len(set(document_W.tolist())) > 1
  clusters = document_W if many else np.arange(total)
  per_token = np.repeat(clusters, length_W - 1).tolist()
  nll = statistics.clustered_mean(np.concatenate(parts), per_token)
  return Perplexity(nll, documents=len(set(document_W.tolist())), windows=total)


@functools.partial(jax.jit, static_argnames=("module",))
def window_nll(
  module: Any, params: PyTree, tokens_BT: Int[Array, "B T"], length_B: Int[Array, "B"]
) -> tuple[Float32[Array, "B T-1"], Bool[Array, "B T-1"]]:
  """(-log p of tokens 1.., whether each counts). [B, T, V] logits never exist."""
  variables = {"params": params}
  hidden_BTD, _ = module.apply(variables, tokens_BT, method="hidden")
  logp_BT, _ = policy_gradient.chunked_logprobs(
    lambda rows: module.apply(variables, rows, method="head"),
    hidden_BTD[:, :-1],
    tokens_BT[:, 1:],
    chunk_tokens=CHUNK_TOKENS,
  )
  counts_BT = jnp.arange(1, tokens_BT.shape[1])[None] < length_B[:, None]
  return -logp_BT, counts_BT


def windows(
  documents: Sequence[Sequence[int]], window: int, max_tokens: int | None = None
) -> tuple[Int[np.ndarray, "W T"], Int[np.ndarray, "W"], Int[np.ndarray, "W"]]:
  """Right-padded windows, their lengths, and the document of each; none has one token only.

  Raises: ValueError if nothing is left.
  """
  rows, lengths, sources = [], [], []
  left = math.inf if max_tokens is None else max_tokens
  for source, ids in enumerate(documents):
    ids = np.asarray(ids[: int(min(left, len(ids)))], np.int32)
    left -= len(ids)
    for start in range(0, len(ids) - 1, window):
      row = ids[start : start + window]
      rows.append(np.pad(row, (0, window - len(row))))
      lengths.append(len(row))
      sources.append(source)
  if not rows:
    raise ValueError(
      f"perplexity: needs a text of at least two tokens; got {len(documents)} documents without. "
      "Check the file and its field."
    )
  return np.stack(rows), np.array(lengths), np.array(sources)


def read_documents(path: str, field: str = "text") -> list[str]:
  """The texts of a file: each row's `field` of a .jsonl file, else the whole file as one.

  Raises: ValueError for a missing file, no rows, or a row without the field (with its number);
    CorruptFile for a row that is no JSON object or a file that is not UTF-8.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(f"read_documents: the file must exist; got {path}. Check the path.")
  if file.suffix == ".jsonl":
    documents = list(_jsonl_texts(file, field))
  else:
    documents = [_utf8(file, "file", file.read_bytes())]
  if not any(document.strip() for document in documents):
    raise ValueError(f"read_documents: the file must hold text; got none in {path}.")
  return documents


def _jsonl_texts(path: pathlib.Path, field: str) -> Iterator[str]:
  with path.open("rb") as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        row = json.loads(_utf8(path, f"row {number}", line))
      except json.JSONDecodeError as error:
        raise errors.CorruptFile(
          path, f"row {number}", f"a row must be JSON, got {error}", "Fix that row."
        ) from error
      if not isinstance(row, dict) or not isinstance(row.get(field), str):
        there = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
          f"read_documents: {path}, row {number}: field {field!r} must be a text; got {there}. "
          "Set PerplexityConfig.field."
        )
      yield row[field]


def _utf8(path: pathlib.Path, where: str, raw: bytes) -> str:
  try:
    return raw.decode("utf-8")
  except UnicodeDecodeError as error:
    raise errors.CorruptFile(
      path, where, f"text must be UTF-8, got {error}", "Convert it to UTF-8."
    ) from error
