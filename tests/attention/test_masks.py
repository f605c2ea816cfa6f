"""Masks against their sentence, pair by pair."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.attention import masks

Q = np.array([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])  # the second row has two places of padding
K = np.array([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
SEGMENT = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])


def by_hand(rule) -> np.ndarray:
  keep = np.zeros((2, 5, 5), bool)
  for b, t, s in np.ndindex(2, 5, 5):
    q, k = Q[b, t], K[b, s]
    keep[b, t, s] = q >= 0 and k >= 0 and rule(b, t, s, q, k)
  return keep


CASES = {
  "causal": (masks.Where(), lambda b, t, s, q, k: k <= q),
  "both ways": (masks.Where(causal=False), lambda b, t, s, q, k: True),
  "causal window": (masks.Where(window=2), lambda b, t, s, q, k: k <= q and q - k < 2),
  "window": (masks.Where(causal=False, window=2), lambda b, t, s, q, k: abs(q - k) < 2),
  "segments": (
    masks.Where(segment_q_BT=jnp.asarray(SEGMENT), segment_k_BS=jnp.asarray(SEGMENT)),
    lambda b, t, s, q, k: k <= q and SEGMENT[b, t] == SEGMENT[b, s],
  ),
  "lengths": (
    masks.Where(causal=False, lengths_B=jnp.array([3, 1])),
    lambda b, t, s, q, k: k < (3, 1)[b],
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_pair(case):
  where, rule = CASES[case]
  found = where.dense(jnp.asarray(Q), jnp.asarray(K))
  np.testing.assert_array_equal(found, by_hand(rule))
  assert found.any() and not found.all()


@pytest.mark.parametrize("case", ["causal", "segments", "until"])
def test_some_of_the_queries_are_those_rows_of_the_mask(case):
  until = masks.Where(until_BS=jnp.array([[5, 3, 5, 4, 5], [5, 5, 3, 5, 5]]))
  where = until if case == "until" else CASES[case][0]
  q, k, slots = jnp.asarray(Q), jnp.asarray(K), jnp.array([1, 4, 2])
  found = where.dense(q[:, slots], k, slots)
  np.testing.assert_array_equal(found, where.dense(q, k)[:, slots])
  # Queries past the end that only fill a chunk see nothing.
  filled = where.dense(jnp.full((2, 1), -1), k, jnp.array([5]))
  assert not filled.any()


def test_one_row_of_keys_serves_all_rows():
  slots = jnp.arange(5)[None]
  found = masks.Where().dense(jnp.asarray(Q), slots)
  both = masks.Where().dense(jnp.asarray(Q), jnp.broadcast_to(slots, (2, 5)))
  np.testing.assert_array_equal(found, both)
