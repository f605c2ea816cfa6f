"""Grouped-query attention against float64, its chunks, and the rows that see nothing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.attention import cache as kv
from jaxlab.attention import dense, masks
from jaxlab.nn import rotary

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def random(*shape, seed=0):
  return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), jnp.float32)


def reference(q_BTNH, k_BSKH, v_BSKH, keep_BTS) -> np.ndarray:
  """Head by head, float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BSKH, v_BSKH))
  group = q.shape[2] // k.shape[2]
  out = np.zeros_like(q)
  for b, t, n in np.ndindex(*q.shape[:3]):
    seen = np.flatnonzero(np.asarray(keep_BTS)[b, t])
    if not len(seen):
      continue
    score = k[b, seen, n // group] @ q[b, t, n] / math.sqrt(q.shape[-1])
    p = np.exp(score - score.max())
    out[b, t, n] = p @ v[b, seen, n // group] / p.sum()
  return out


@pytest.mark.parametrize("heads,kv_heads", [(6, 6), (6, 2), (6, 1), (1, 1)])
def test_groups(heads, kv_heads):
  q, k, v = (
    random(2, 5, heads, 8),
    random(2, 7, kv_heads, 8, seed=1),
    random(2, 7, kv_heads, 8, seed=2),
  )
  keep = jnp.asarray(np.random.RandomState(3).rand(2, 5, 7) < 0.5).at[0, 2].set(False)
  found = dense.attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), keep)
  np.testing.assert_allclose(found, reference(q, k, v, keep), atol=1e-5)
  np.testing.assert_array_equal(found[0, 2], 0)  # a query that sees nothing


def test_large_scores_do_not_overflow():
  q, k, v = 100 * random(1, 3, 2, 8), 100 * random(1, 3, 2, 8, seed=1), random(1, 3, 2, 8, seed=2)
  keep = jnp.ones((1, 3, 3), bool)
  found = dense.attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), keep)
  np.testing.assert_allclose(found, reference(q, k, v, keep), atol=1e-3)


def attend(q, k, v, positions, where=None, layer_cache=None):
  rope = rotary.rope_at(rotary.RopeConfig(), q.shape[-1], positions)
  layer = dense.DenseAttention(where or masks.Where())
  return layer(q, k, v, rope, layer_cache)


@pytest.mark.parametrize("chunk", [2, 3, 5])  # with and without a rest
def test_chunked_queries_are_the_unchunked(monkeypatch, chunk):
  q, k, v = random(1, 8, 2, 4), random(1, 8, 2, 4, seed=1), random(1, 8, 2, 4, seed=2)
  positions = jnp.arange(8)[None]
  segment, until = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]]), jnp.array([[8, 4, 8, 6, 8, 8, 8, 8]])
  where = masks.Where(segment_q_BT=segment, segment_k_BS=segment, until_BS=until)

  def loss(q, k, v):
    return jnp.sum(attend(q, k, v, positions, where)[0] ** 2)

  whole, whole_grads = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
  monkeypatch.setattr(dense, "QUERY_CHUNK", chunk)
  chunked, chunked_grads = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
  np.testing.assert_allclose(chunked, whole, rtol=1e-6)
  for a, b in zip(chunked_grads, whole_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
  "length, count", [(513, 3), (1024, 2), (2048, 4), (2304, 6), (8192, 16), (521, 2), (1100, 4)]
)
def test_chunks_are_full_where_a_few_more_make_them_so(length, count):
  """2304 = 256 + 2048, QeRL's rows: six of 384 and not five of 461; 521 is prime."""
  assert dense.num_chunks(length) == count
  assert -(-length // count) <= dense.QUERY_CHUNK


def test_gradient_is_finite_where_a_query_sees_nothing():
  q, k, v = random(1, 3, 1, 4), random(1, 3, 1, 4, seed=1), random(1, 3, 1, 4, seed=2)
  positions = jnp.array([[-1, 0, 1]])
  grads = jax.grad(lambda *x: jnp.sum(attend(*x, positions)[0] ** 2), (0, 1, 2))(q, k, v)
  assert all(np.isfinite(g).all() for g in grads)
  np.testing.assert_array_equal(grads[0][0, 0], 0)


@pytest.mark.parametrize("window", [None, 3])
def test_with_a_cache_it_is_the_same_attention(window):
  """Prefill of 5 at rows of different length, then a token; keys live at their positions."""
  where = masks.Where(window=window)
  q, k, v = random(2, 6, 4, 8), random(2, 6, 2, 8, seed=1), random(2, 6, 2, 8, seed=2)
  positions = jnp.broadcast_to(jnp.arange(6)[None], (2, 6))
  expected, _, _ = attend(q, k, v, positions, where)
  cache = kv.init_cache(
    num_layers=1, batch=2, num_kv_heads=2, num_slots=9, head_dim=8, dtype=jnp.float32, stacked=True
  ).layer(jnp.int32(0))
  lengths = np.array([5, 3])
  padded = np.where(np.arange(5)[None] < lengths[:, None], np.arange(5)[None], -1)
  part = lambda x, stop: x[:, :stop]
  found, cache, _ = attend(part(q, 5), part(k, 5), part(v, 5), jnp.asarray(padded), where, cache)
  np.testing.assert_allclose(found[0], expected[0, :5], atol=1e-5)
  np.testing.assert_allclose(found[1, :3], expected[1, :3], atol=1e-5)
  rows, at = np.arange(2), jnp.asarray(lengths)
  cache = kv.LayerCache(cache.k, cache.v, at, cache.layer)
  one = lambda x: x[rows, at][:, None]
  found, _, _ = attend(one(q), one(k), one(v), at[:, None], where, cache)
  np.testing.assert_allclose(found[:, 0], expected[rows, at], atol=1e-5)


def test_bfloat16_scores_are_summed_in_float32():
  q, k, v = (random(1, 64, 2, 16, seed=s).astype(jnp.bfloat16) for s in range(3))
  positions = jnp.arange(64)[None]
  found, _, _ = attend(q, k, v, positions)
  exact, _, _ = attend(*(x.astype(jnp.float32) for x in (q, k, v)), positions)
  assert found.dtype == jnp.bfloat16
  # bfloat16 keeps 8 bits: inputs after rotation, probabilities and the result are rounded.
  np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=4 * 2**-8)
