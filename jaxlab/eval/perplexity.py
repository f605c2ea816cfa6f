"""Perplexity of a text by non-overlapping windows: exp of the mean negative log-likelihood a token.

Each window of T tokens is read on its own and predicts all of its tokens but the first. Two ways to
cut windows:
  documents   a window never reaches over the end of a document; the last, shorter one counts too
  joined      documents joined by blank lines, whole windows only: WikiText-2 with windows of 2048,
              as the quantisation literature reports it (IST-DASLab/FP-Quant, GPTQ)
Figures of other window lengths, ways or tokenizers are other figures. Two models are compared token
by token on the same windows (`nats_lost`). Dims: B windows, T tokens, W windows in all.
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
from jaxlab.io import tokenizer as tokenizers
from jaxlab.nn import weights
from jaxlab.objectives import policy_gradient
from pallas_kernels import target

PyTree = Any
CHUNK_TOKENS = 1024  # rows that meet the head at once: 1024 x V float32 logits
BLANK_LINE = "\n\n"  # between joined documents


@dataclasses.dataclass(frozen=True)
class PerplexityConfig:
  """How a text is read."""

  window: int = 1024  # tokens a window [ours: 2048 is usual for large models]
  batch_size: int = 4  # windows in one forward pass [ours: fits a laptop]
  dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of dense weights; as `load`
  protocol: Literal["documents", "joined"] = "documents"  # [ours: no text runs into another]
  field: str = "text"  # of the rows of a .jsonl file [ours]
  max_tokens: int | None = None  # read no more of the text than this
  # What intervals take as independent. Documents are, paragraphs of one (WikiText's rows) are not.
  unit: Literal["document", "window"] = "document"  # [ours]

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

  nll: statistics.Estimate  # clusters: see `Windows.clusters`
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


@dataclasses.dataclass(frozen=True)
class Windows:
  """A text as a model reads it: right-padded rows, their lengths, and each token's document."""

  tokens_WT: Int[np.ndarray, "W T"]
  length_W: Int[np.ndarray, "W"]
  document_WT: Int[np.ndarray, "W T"]
  unit: str = "document"

  def clusters(self) -> Int[np.ndarray, "tokens"]:
    """For each predicted token what it hangs together with: its document; or its window, as `unit`
    says, and for a text that is a single document."""
    source_WT = self.document_WT
    if self.unit == "window" or self.documents() < 2:
      source_WT = np.broadcast_to(np.arange(len(source_WT))[:, None], source_WT.shape)
    return source_WT[:, 1:][self._predicted()]

  def documents(self) -> int:
    """How many documents have a predicted token: the clusters, where there are several."""
    return len(set(self.document_WT[:, 1:][self._predicted()].tolist()))

  def _predicted(self) -> Bool[np.ndarray, "W _"]:
    """True for the tokens that count, of those after each window's first."""
    return np.arange(1, self.tokens_WT.shape[1])[None] < self.length_W[:, None]


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
    documents: texts.
    on_batch: called with (windows done, windows in all).
  Raises: ValueError for a model without tokenizer, a window longer than the context, or texts
    without two tokens (or one whole window, where they are joined).
  """
  found = read_windows(lm, documents, config)
  return _summary(found, token_nll(lm.module, lm.params, found, config, on_batch=on_batch))


def perplexity_of_ids(
  module: Any,
  params: PyTree,
  documents: Sequence[Sequence[int]],
  config: PerplexityConfig = PerplexityConfig(),
  *,
  on_batch: Callable[[int, int], None] | None = None,
) -> Perplexity:
  """As `perplexity`, for documents as token ids, each cut on its own."""
  found = windows(documents, config.window, config.max_tokens)
  found = dataclasses.replace(found, unit=config.unit)
  return _summary(found, token_nll(module, params, found, config, on_batch=on_batch))


def read_windows(lm: Any, documents: Sequence[str], config: PerplexityConfig) -> Windows:
  """The windows of texts as `config` asks; see `perplexity` for what it raises."""
  if config.window > lm.module.config.max_positions:
    raise ValueError(
      f"PerplexityConfig.window: must fit the context of {lm.module.config.max_positions} tokens; "
      f"got {config.window}."
    )
  tokenizer = text.require_tokenizer(lm)
  if config.protocol == "joined":
    found = joined_windows(tokenizer, documents, config.window, config.max_tokens)
  else:
    ids = text.encode_prompts(tokenizer, documents)
    found = windows(ids, config.window, config.max_tokens)
  return dataclasses.replace(found, unit=config.unit)


def token_nll(
  module: Any,
  params: PyTree,
  windows: Windows,
  config: PerplexityConfig = PerplexityConfig(),
  *,
  on_batch: Callable[[int, int], None] | None = None,
) -> Float32[np.ndarray, "tokens"]:
  """-log p (nats) of every predicted token in order; one program whatever the windows' lengths."""
  params = evaluation_params(params)
  parts = []
  total, size = len(windows.tokens_WT), config.batch_size
  for start in range(0, total, size):
    batch = slice(start, start + size)
    pad = size - len(windows.tokens_WT[batch])
    tokens_BT = np.pad(windows.tokens_WT[batch], ((0, pad), (0, 0)))
    length_B = np.pad(windows.length_W[batch], (0, pad))
    nll_BT, counts_BT = window_nll(module, params, tokens_BT, length_B)
    parts.append(np.asarray(nll_BT)[np.asarray(counts_BT)])
    if on_batch:
      on_batch(min(start + size, total), total)
  return np.concatenate(parts)


def nats_lost(
  nll: Float32[np.ndarray, "tokens"],
  reference: Float32[np.ndarray, "tokens"],
  windows: Windows,
) -> statistics.Estimate:
  """Mean of -log p minus the reference model's, nats a token, on the same tokens (`token_nll`).

  Positive where the model is worse. The pairing takes out how hard each token is, so the interval
  is far narrower than those of the two perplexities.
  """
  lost = np.asarray(nll, np.float64) - np.asarray(reference, np.float64)
  return statistics.clustered_mean(lost, windows.clusters().tolist())


def _summary(windows: Windows, nll: Float32[np.ndarray, "tokens"]) -> Perplexity:
  mean = statistics.clustered_mean(nll, windows.clusters().tolist())
  return Perplexity(mean, documents=windows.documents(), windows=len(windows.length_W))


def evaluation_params(params: PyTree) -> PyTree:
  """Parameters as many long forward passes want them: on a CPU packed kernels are unpacked once.

  Kernels with FP4 activations (W4A4) stay: their products are not those of the unpacked kernel.
  """
  if target.current_target().platform != "cpu":
    return params
  dtype = next(w.dtype for w in weights.leaf_paths(params).values() if not weights.is_leaf(w))

  def unpack(w):
    match w:
      case weights.FP4Array(activations="none") | weights.NF4Array():
        return weights.dense(w, dtype)
      case _:
        return w

  return jax.tree.map(unpack, params, is_leaf=weights.is_packed)


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
) -> Windows:
  """Windows of token ids, each of one document; none has one token only.

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
  tokens_WT = np.stack(rows)
  document_WT = np.broadcast_to(np.array(sources)[:, None], tokens_WT.shape)
  return Windows(tokens_WT, np.array(lengths), document_WT)


def joined_windows(
  tokenizer: tokenizers.Tokenizer,
  documents: Sequence[str],
  window: int,
  max_tokens: int | None = None,
) -> Windows:
  """Whole windows of the documents joined by blank lines, encoded as one text.

  Raises: ValueError for a text that does not fill one window.
  """
  joined = BLANK_LINE.join(documents)
  (ids,) = text.encode_prompts(tokenizer, [joined])
  plain = tokenizer.backend.encode(joined, add_special_tokens=False)
  starts = np.cumsum([0] + [len(d) + len(BLANK_LINE) for d in documents[:-1]])
  at = np.array([start for start, _ in plain.offsets], np.int64)
  document = np.searchsorted(starts, at, side="right") - 1
  document = np.pad(document, (len(ids) - len(document), 0))  # bos tokens go before the first
  count = min(len(ids), max_tokens or len(ids)) // window
  if not count:
    raise ValueError(
      f"perplexity: joined documents must fill one window of {window} tokens; got "
      f"{min(len(ids), max_tokens or len(ids))}. Give more text, or shorter windows."
    )
  cut = lambda x: np.asarray(x[: count * window]).reshape(count, window)
  return Windows(cut(ids).astype(np.int32), np.full(count, window), cut(document))


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
