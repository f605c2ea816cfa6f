"""Filters against numpy in float64 and transformers; draws against the distribution they claim."""

import dataclasses

import hypothesis as hp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from jaxlab.decode import sampling

ROWS, VOCAB = 6, 40
LUCK = 1e-4  # a fixed seed either passes or does not: this is how odd a draw may look
FILTERS = {
  "temperature": {"temperature": 0.6},
  "top_k": {"top_k": 5},
  "top_k_all": {"top_k": 1000},
  "top_p": {"top_p": 0.7},
  "min_p": {"min_p": 0.2},
  "penalty": {"repetition_penalty": 1.7},
  "penalty_below_1": {"repetition_penalty": 0.8},
  "all": {
    "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2
  },
}  # fmt: skip


def logits(rows=ROWS, vocab=VOCAB, seed=0) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 2


def keys(rows=ROWS, seed=0):
  return jax.random.split(jax.random.key(seed), rows)


def seen(rows=ROWS, vocab=VOCAB) -> np.ndarray:
  return np.random.default_rng(1).random((rows, vocab)) < 0.3


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def reference(x, config: sampling.SamplingConfig, seen_NV):
  """(log-probabilities before, after the filters), one row and one token at a time."""
  x = x.astype(np.float64)
  r = config.repetition_penalty
  x = np.where(seen_NV, np.where(x > 0, x / r, x * r), x)
  full = log_softmax(x / (config.temperature or 1.0))
  kept = full.copy()
  for row in kept:
    if config.top_k:
      row[np.argsort(-row)[config.top_k :]] = -np.inf
    if config.top_p < 1:
      p = np.exp(log_softmax(row[None])[0])
      mass = 0.0
      for token in np.argsort(-p):
        if mass >= config.top_p:
          row[token] = -np.inf
        mass += p[token]
    if config.min_p:
      row[row < row.max() + np.log(config.min_p)] = -np.inf
  return full, log_softmax(kept)


# --- by hand


@pytest.mark.parametrize(
  "changes, kept",
  [
    ({"top_k": 2}, [0.5 / 0.75, 0.25 / 0.75, 0, 0]),
    ({"top_p": 0.7}, [0.5 / 0.75, 0.25 / 0.75, 0, 0]),
    ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
    ({"top_p": 0.4}, [1, 0, 0, 0]),  # the token that crosses the threshold stays
    ({"min_p": 0.4}, [0.5 / 0.75, 0.25 / 0.75, 0, 0]),
    ({"top_k": 3, "top_p": 0.7}, [0.5 / 0.75, 0.25 / 0.75, 0, 0]),  # of what top-k has left
  ],
)
def test_filters_on_four_tokens(changes, kept):
  logp_NV = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
  found = sampling.truncate(logp_NV, sampling.SamplingConfig(**changes))
  np.testing.assert_allclose(np.exp(found), [kept], atol=1e-6)


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones():
  config = sampling.SamplingConfig(repetition_penalty=2.0, temperature=0.0)
  x, mask = jnp.array([[3.0, 2.0, -1.0]]), jnp.array([[True, False, True]])
  drawn = sampling.draw(x, keys(1), config, mask)
  assert drawn.token_N.tolist() == [1]
  np.testing.assert_allclose(drawn.logp_N, log_softmax(np.array([[1.5, 2.0, -2.0]]))[:, 1], 1e-6)


# --- against float64


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_those_of_float64(name):
  config = sampling.SamplingConfig(**FILTERS[name])
  x, mask = logits(), seen() if config.repetition_penalty != 1 else np.zeros((ROWS, VOCAB), bool)
  full_NV, kept_NV = reference(x, config, mask)
  drawn = sampling.draw(jnp.asarray(x), keys(), config, jnp.asarray(mask))
  row, token = np.arange(ROWS), np.asarray(drawn.token_N)
  np.testing.assert_allclose(drawn.logp_N, full_NV[row, token], atol=1e-5)
  np.testing.assert_allclose(drawn.logp_kept_N, kept_NV[row, token], atol=1e-5)
  np.testing.assert_allclose(drawn.entropy_N, -(np.exp(full_NV) * full_NV).sum(-1), atol=1e-4)


def test_greedy_takes_the_largest_and_records_temperature_1():
  config = sampling.SamplingConfig(temperature=0.0)
  drawn = sampling.draw(jnp.asarray(logits()), keys(), config)
  assert (np.asarray(drawn.token_N) == logits().argmax(-1)).all()
  np.testing.assert_allclose(drawn.logp_N, log_softmax(logits()).max(-1), atol=1e-5)


# --- transformers


@pytest.mark.parity
@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_those_of_transformers(name):
  import torch
  from transformers.generation import logits_process as theirs

  c = sampling.SamplingConfig(**FILTERS[name])
  x, mask = logits(), seen()
  scores = torch.tensor(x)
  if c.repetition_penalty != 1.0:
    process = theirs.RepetitionPenaltyLogitsProcessor(c.repetition_penalty)
    for i in range(ROWS):
      ids = torch.tensor(np.flatnonzero(mask[i])[None])
      scores[i : i + 1] = process(ids, scores[i : i + 1])
  steps = [theirs.TemperatureLogitsWarper(c.temperature)]
  steps += [theirs.TopKLogitsWarper(c.top_k)] if c.top_k else []
  steps += [theirs.TopPLogitsWarper(c.top_p)] if c.top_p < 1 else []
  steps += [theirs.MinPLogitsWarper(c.min_p)] if c.min_p else []
  for step in steps:
    scores = step(None, scores)
  expected = torch.log_softmax(scores, -1).numpy()
  r = c.repetition_penalty
  ours = np.where(mask & (r != 1), np.where(x > 0, x / r, x * r), x)
  logp_NV = jax.nn.log_softmax(jnp.asarray(ours) / c.temperature, axis=-1)
  found = np.asarray(sampling.truncate(logp_NV, c))
  assert (np.isneginf(found) == np.isneginf(expected)).all()
  kept = np.isfinite(expected)
  np.testing.assert_allclose(found[kept], expected[kept], atol=1e-5)


# --- the draw itself


@hp.given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 7, 256, 257, 700]))
@hp.settings(max_examples=30)
def test_invert_is_the_first_token_beyond_u(seed, vocab):
  random = np.random.default_rng(seed)
  p_NV = random.dirichlet(np.full(vocab, 0.1), 8) * (random.random((8, vocab)) < 0.7)
  p_NV[:, -1] += 1e-3
  p_NV = (p_NV / p_NV.sum(-1, keepdims=True)).astype(np.float32)
  u_N = random.random(8).astype(np.float32)
  with np.errstate(divide="ignore"):
    token_N = np.asarray(sampling.invert(jnp.log(p_NV), jnp.asarray(u_N)))
  assert (p_NV[np.arange(8), token_N] > 0).all()
  cdf_NV = np.cumsum(p_NV.astype(np.float64), -1)
  cdf_NV /= cdf_NV[:, -1:]
  at = cdf_NV[np.arange(8), token_N]
  before = at - p_NV[np.arange(8), token_N]
  assert (u_N < at + 1e-5).all() and (u_N > before - 1e-5).all()


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_invert_at_the_ends_never_takes_a_token_without_probability(u):
  p_NV = np.zeros((1, 1000), np.float32)
  p_NV[0, [300, 301, 700]] = 0.25, 0.5, 0.25
  token = int(sampling.invert(jnp.log(p_NV), jnp.array([u], jnp.float32))[0])
  assert token == (300 if u == 0 else 700)


def chi_square(counts, expected) -> float:
  """p-value; cells of fewer than ten expected draws are put together."""
  small = expected < 10
  counts = np.append(counts[~small], counts[small].sum())
  expected = np.append(expected[~small], expected[small].sum())
  keep = expected > 0
  return stats.chisquare(counts[keep], expected[keep] * counts.sum() / expected.sum()).pvalue


def test_invert_draws_a_large_vocabulary_as_often_as_it_should():
  vocab, draws = 50_000, 200_000
  p_V = 1 / (np.random.default_rng(0).permutation(vocab) + 3.0)  # Zipf, in no order
  p_V /= p_V.sum()
  logp_1V = jnp.log(jnp.asarray(p_V, jnp.float32))[None]
  u = jax.random.uniform(jax.random.key(5), (20, draws // 20))
  one = jax.vmap(lambda u: sampling.invert(logp_1V, u[None])[0])
  tokens = np.asarray(jax.jit(lambda u: jax.lax.map(one, u))(u)).ravel()
  counts = np.bincount(tokens, minlength=vocab)
  assert chi_square(counts, p_V * draws) > LUCK
  blocks = lambda x: x[: vocab // 100 * 100].reshape(-1, 100).sum(-1)  # the tail, by position
  assert chi_square(blocks(counts), blocks(p_V * draws)) > LUCK


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_draw_follows_the_filtered_distribution(name):
  config, draws = sampling.SamplingConfig(**FILTERS[name]), 20_000
  x, none = logits(1), np.zeros((1, VOCAB), bool)
  _, kept_NV = reference(x, config, none)
  fold = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(draws))
  mask = jnp.zeros((draws, VOCAB), bool)
  drawn = sampling.draw(jnp.asarray(np.repeat(x, draws, 0)), fold, config, mask)
  counts = np.bincount(drawn.token_N, minlength=VOCAB)
  assert (counts[np.isneginf(kept_NV[0])] == 0).all()
  assert chi_square(counts, np.exp(kept_NV[0]) * draws) > LUCK


# --- settings


@pytest.mark.parametrize(
  "field, value",
  [
    ("max_new_tokens", 0), ("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1),
    ("min_p", 1.0), ("repetition_penalty", 0.0), ("stop_strings", ("",)),
  ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name(field, value):
  with pytest.raises(ValueError, match=f"SamplingConfig.{field}"):
    dataclasses.replace(sampling.SamplingConfig(), **{field: value})
