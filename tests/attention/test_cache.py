"""Slot = position: what is written where, and what is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.attention import cache as kv

L, B, K, S, H = 2, 3, 2, 6, 4
pytestmark = pytest.mark.usefixtures("strict_dtypes")


def new(t, seed=0):
  return jnp.asarray(np.random.RandomState(seed).standard_normal((B, t, K, H)), jnp.float32)


def empty(stacked):
  return kv.init_cache(
    num_layers=L, batch=B, num_kv_heads=K, num_slots=S, head_dim=H, dtype=jnp.float32,
    stacked=stacked,
  )  # fmt: skip


def layer_of(cache, i):
  return cache.layer(i if isinstance(cache.k, list) else jnp.int32(i))


def append(cache, i, k, v):
  return cache.with_layer(i, layer_of(cache, i).append(k, v))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
  "write,t,slots",
  [
    (2, 2, [[2, 3]] * B),  # all rows at one slot: one contiguous update
    ([0, 2, 4], 2, [[0, 1], [2, 3], [4, 5]]),  # a slot of its own for each row
    ([5, S, S + 3], 1, [[5], [], []]),  # S and beyond is dropped, never clamped
    ([4, 5, 0], 3, [[4, 5], [5], [0, 1, 2]]),  # what runs over the end is dropped
    ([-2, -1, 0], 3, [[None, None, 0], [None, 0, 1], [0, 1, 2]]),  # left padding is dropped
  ],
)
def test_tokens_go_to_their_slots_and_nothing_else_changes(stacked, write, t, slots):
  k, v = new(t), new(t, seed=1)
  cache = append(empty(stacked).at(jnp.asarray(write, jnp.int32)), 1, k, v)
  expected = np.zeros((B, K, S, H), np.float32)
  for b, row in enumerate(slots):
    for i, slot in enumerate(row):
      if slot is not None:
        expected[b, :, slot] = np.asarray(k)[b, i]
  found_k, found_v = layer_of(cache, 1).read()
  np.testing.assert_array_equal(found_k, expected)
  np.testing.assert_array_equal(found_v != 0, found_k != 0)
  np.testing.assert_array_equal(layer_of(cache, 0).read()[0], 0)  # the other layer


def test_scalar_and_row_writes_agree():
  k, v = new(2), new(2, seed=1)
  scalar = append(empty(True).at(jnp.int32(3)), 0, k, v)
  rows = append(empty(True).at(jnp.full(B, 3)), 0, k, v)
  np.testing.assert_array_equal(scalar.k, rows.k)
  np.testing.assert_array_equal(scalar.v, rows.v)


def test_values_are_stored_in_the_dtype_of_the_cache():
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), empty(True)).at(jnp.int32(0))
  k, _ = layer_of(append(half, 0, new(1), new(1)), 0).read()
  assert k.dtype == jnp.bfloat16


@pytest.mark.usefixtures("full_compilation")
def test_only_the_new_tokens_of_one_layer_are_written():
  """The step's program updates the donated stack in place: no copy of the cache per layer."""
  step = jax.jit(lambda c, k, v, i: c.with_layer(i, c.layer(i).append(k, v)), donate_argnums=0)
  args = (empty(True).at(jnp.int32(0)), new(1), new(1), jnp.int32(1))
  compiled = step.lower(*args).compile()
  one_cache = L * B * K * S * H * 4
  assert compiled.memory_analysis().temp_size_in_bytes < one_cache
