"""Sampled answers packed for training: one row holds many sequences, each common prefix once.

The sequences of a row, sorted, form a tree; its tokens lie in depth-first order. A token sees its
ancestors, which is one interval test per pair (`Where.until`), and the head runs only on tokens
that predict a token of an answer. Eight answers to one prompt cost one prompt; a template that all
prompts begin with costs one template. The loss is that of the unpacked sequences: same terms, same
gradient. Dims: R rows, S slots, Q sequences a row, T answer tokens, K predicted slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxlab.attention import dense, masks
from jaxlab.models import causal_lm
from jaxlab.nn import pytree
from jaxlab.objectives import policy_gradient

SLOT_MULTIPLE = 128  # S is padded to a multiple, so that few shapes are compiled


class Sample(NamedTuple):
  """One sampled answer as the trainer sees it."""

  prompt: Sequence[int]
  answer: Sequence[int]  # the stop token included
  logp: np.ndarray  # float32 [len(answer)], as sampled
  advantage: float
  train: bool  # False: every token masked (truncated), but the sequence counts in denominators


@pytree.pytree()
class PackedBatch:
  """Rows of packed sequences; every leaf has the leading axis R, so micro-batches split rows."""

  tokens_RS: Int[Array, "R S"]
  positions_RS: Int[Array, "R S"]  # -1 = padding
  until_RS: Int[Array, "R S"]  # end of the token's subtree
  source_RK: Int[Array, "R K"]  # slot whose hidden state predicts ...
  target_RK: Int[Array, "R K"]  # ... the token of this slot
  pair_RQT: Int[Array, "R Q T"]  # index into K for token t of sequence q
  mask_RQT: Bool[Array, "R Q T"]
  advantage_RQ: Float[Array, "R Q"]
  valid_RQ: Bool[Array, "R Q"]  # False: only fills the row
  logp_rollout_RQT: Float[Array, "R Q T"]
  logp_old_RQT: Float[Array, "R Q T"] | None = None
  logp_ref_RQT: Float[Array, "R Q T"] | None = None


def pack(
  sequences: Sequence[Sample], *, per_row: int, max_answer: int, row_multiple: int = 1,
  most: int | None = None,
) -> PackedBatch:  # fmt: skip
  """Packs sequences into rows of `per_row`, in the order given.

  Args:
    per_row: Q; 1 keeps every sequence apart.
    max_answer: T, the longest answer allowed.
    row_multiple: rows are filled up to a multiple (micro-batches, devices).
    most: sequences of the largest batch to come, if batches differ in size: rows are then filled up
      to a power of two, at most to the rows of that batch, so that few programs are compiled.
  """
  rows = [sequences[i : i + per_row] for i in range(0, len(sequences), per_row)]
  trees = [_tree([[*s.prompt, *s.answer] for s in row]) for row in rows]
  first_answers = [[len(s.prompt) for s in row] for row in rows]
  pairs = [_pairs(t, firsts) for t, firsts in zip(trees, first_answers, strict=True)]
  num_rows = len(rows)
  if most is not None:
    num_rows = min(_next_power(num_rows, least=1), max(num_rows, -(-most // per_row)))
  num_rows = _round_up(num_rows, row_multiple)
  num_slots = _round_up(max(len(t.tokens) for t in trees), SLOT_MULTIPLE)
  num_pairs = _next_power(max(len(p) for p in pairs))
  out = _empty(num_rows, num_slots, num_pairs, per_row, max_answer)
  for r, (row, tree, slots) in enumerate(zip(rows, trees, pairs, strict=True)):
    n = len(tree.tokens)
    out["tokens_RS"][r, :n], out["positions_RS"][r, :n] = tree.tokens, tree.positions
    out["until_RS"][r, :n] = tree.until
    out["source_RK"][r, : len(slots)] = [tree.parent[s] for s in slots]
    out["target_RK"][r, : len(slots)] = slots
    where = {slot: k for k, slot in enumerate(slots)}
    for q, s in enumerate(row):
      t = len(s.answer)
      out["pair_RQT"][r, q, :t] = [where[slot] for slot in tree.slots[q][len(s.prompt) :]]
      out["mask_RQT"][r, q, :t] = s.train
      out["logp_rollout_RQT"][r, q, :t] = s.logp
      out["advantage_RQ"][r, q], out["valid_RQ"][r, q] = s.advantage, True
  return PackedBatch(**{name: jnp.asarray(x) for name, x in out.items()})


def largest(
  sequences: int, *, per_row: int, max_prompt: int, max_answer: int, row_multiple: int = 1
) -> PackedBatch:
  """A batch of padding, as large as `pack` makes of so many sequences: nothing is shared."""
  rows = _round_up(-(-sequences // per_row), row_multiple)
  slots = _round_up(per_row * (max_prompt + max_answer), SLOT_MULTIPLE)
  pairs = _next_power(per_row * max_answer)
  arrays = _empty(rows, slots, pairs, per_row, max_answer)
  return PackedBatch(**{name: jnp.asarray(x) for name, x in arrays.items()})


class _Tree(NamedTuple):
  tokens: list[int]
  positions: list[int]
  until: list[int]
  parent: list[int]
  slots: list[list[int]]  # of each sequence's tokens


def _tree(sequences: list[list[int]]) -> _Tree:
  """Depth-first layout of the prefix tree; neighbours in sorted order share the most."""
  tree = _Tree([], [], [], [], [[] for _ in sequences])
  previous, path = [], []
  for i in sorted(range(len(sequences)), key=lambda i: sequences[i]):
    tokens = sequences[i]
    shared = _common(previous, tokens)
    start = len(tree.tokens)
    for slot in path[shared:]:
      tree.until[slot] = start
    path = path[:shared] + list(range(start, start + len(tokens) - shared))
    tree.tokens.extend(tokens[shared:])
    tree.positions.extend(range(shared, len(tokens)))
    tree.until.extend([0] * (len(tokens) - shared))
    tree.parent.extend([path[d - 1] if d else -1 for d in range(shared, len(tokens))])
    tree.slots[i].extend(path)
    previous = tokens
  for slot in path:
    tree.until[slot] = len(tree.tokens)
  return tree


def _pairs(tree: _Tree, first_answers: list[int]) -> list[int]:
  """Slots that hold a token of some answer."""
  return sorted({slot for path, n in zip(tree.slots, first_answers) for slot in path[n:]})


def _common(a: list[int], b: list[int]) -> int:
  n = min(len(a), len(b))
  return next((i for i in range(n) if a[i] != b[i]), n)


def _empty(rows: int, slots: int, pairs: int, per_row: int, length: int) -> dict[str, np.ndarray]:
  ints = lambda *shape, fill=0: np.full(shape, fill, np.int32)
  return {
    "tokens_RS": ints(rows, slots),
    "positions_RS": ints(rows, slots, fill=-1),
    "until_RS": ints(rows, slots),
    "source_RK": ints(rows, pairs),
    "target_RK": ints(rows, pairs),
    "pair_RQT": ints(rows, per_row, length),
    "mask_RQT": np.zeros((rows, per_row, length), bool),
    "advantage_RQ": np.zeros((rows, per_row), np.float32),
    "valid_RQ": np.zeros((rows, per_row), bool),
    "logp_rollout_RQT": np.zeros((rows, per_row, length), np.float32),
  }


def _round_up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple


def _next_power(n: int, least: int = 16) -> int:
  return max(least, 1 << (n - 1).bit_length())


def score(
  module: causal_lm.CausalLM,
  params,
  batch: PackedBatch,
  config: policy_gradient.PolicyGradientConfig,
) -> tuple[Float32[Array, "R Q T"], Float32[Array, "R Q T"]]:
  """(log-probability, entropy) of every answer token under `params`, without noise."""
  variables = {"params": params}
  attend = dense.DenseAttention(masks.Where(until_BS=batch.until_RS))
  hidden_RSD, _ = module.apply(
    variables, batch.tokens_RS, batch.positions_RS, attend, method="hidden"
  )
  hidden_RKD = jnp.take_along_axis(hidden_RSD, batch.source_RK[..., None], axis=1)
  if module.placement is not None:
    hidden_RKD = module.placement.rows(hidden_RKD)
  logp_RK, entropy_RK = policy_gradient.chunked_logprobs(
    lambda rows: module.apply(variables, rows, method="head"),
    hidden_RKD,
    jnp.take_along_axis(batch.tokens_RS, batch.target_RK, axis=1),
    temperature=config.temperature,
    chunk_tokens=config.chunk_tokens,
  )
  rows, per_row, length = batch.pair_RQT.shape
  index = batch.pair_RQT.reshape(rows, -1)
  spread = lambda x_RK: jnp.take_along_axis(x_RK, index, axis=1).reshape(rows, per_row, length)
  return spread(logp_RK), spread(entropy_RK)


def map_rows(fn, batch: PackedBatch, rows: int | None):
  """`fn(batch)` computed for `rows` rows at a time; None for all at once.

  Strided like the micro-batches of a train step: each part has rows of every shard.
  """
  total = batch.tokens_RS.shape[0]
  if rows is None or rows >= total:
    return fn(batch)
  split = lambda x: jnp.swapaxes(x.reshape(rows, total // rows, *x.shape[1:]), 0, 1)
  join = lambda x: jnp.swapaxes(x, 0, 1).reshape(total, *x.shape[2:])
  return jax.tree.map(join, jax.lax.map(fn, jax.tree.map(split, batch)))


def make_objective(module: causal_lm.CausalLM, config: policy_gradient.PolicyGradientConfig):
  """The policy-gradient objective `(params, PackedBatch, key) -> (Weighted, metrics)`."""

  def objective(params, batch: PackedBatch, key):
    del key  # nothing random: the noise belongs to the rollout
    logp_RQT, entropy_RQT = score(module, params, batch, config)
    flat = lambda x: None if x is None else x.reshape(-1, *x.shape[2:])
    data = policy_gradient.PolicyBatch(
      mask_BT=flat(batch.mask_RQT),
      advantage_B=flat(batch.advantage_RQ),
      logp_old_BT=flat(batch.logp_old_RQT),
      logp_rollout_BT=flat(batch.logp_rollout_RQT),
      logp_ref_BT=flat(batch.logp_ref_RQT),
      valid_B=flat(batch.valid_RQ),
    )
    return policy_gradient.policy_gradient_loss(flat(logp_RQT), flat(entropy_RQT), data, config)

  return objective
