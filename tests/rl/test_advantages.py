"""Advantages against oracle O6 of the QeRL specification, then as properties."""

import hypothesis as hp
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxlab.rl import advantages

R = np.array([[2.2, 0.2, 0.0, 2.2]])
NAN = float("nan")
groups = st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), min_size=1, max_size=3)


def advantage(rows, **settings):
  return advantages.group_advantage(np.array(rows, np.float64), **settings)


@pytest.mark.parametrize(
  "settings, expected",
  [
    ({}, [0.863997, -0.781712, -0.946283, 0.863997]),
    ({"eps": 1e-6}, [0.864068, -0.781775, -0.946360, 0.864068]),
    ({"scale": "none"}, [1.05, -0.95, -1.15, 1.05]),
    ({"scale": "rloo"}, [1.4, -1.266667, -1.533333, 1.4]),
    ({"scale": "batch"}, [0.863997, -0.781712, -0.946283, 0.863997]),  # one group is the batch
  ],
)
def test_oracle(settings, expected):
  np.testing.assert_allclose(advantage(R, **settings), [expected], atol=1e-6)


def test_pair():
  np.testing.assert_allclose(advantage([[1.0, 0.0]]), [[0.707007, -0.707007]], atol=1e-6)


def test_batch_scale_centres_by_group_and_divides_by_the_spread_of_all():
  rows = [[1.0, 0.0], [5.0, 4.0]]
  std = np.std([1, 0, 5, 4], ddof=1)
  expected = np.array([[0.5, -0.5], [0.5, -0.5]]) / (std + 1e-4)
  np.testing.assert_allclose(advantage(rows, scale="batch"), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", advantages.SCALES)
def test_equal_rewards_give_exactly_zero(scale):
  rows = [[0.1, 0.1, 0.1], [1.0, 0.0, 1.0]]  # the mean of three .1 is not .1 in binary
  result = advantage(rows, scale=scale)
  assert (result[0] == 0).all()
  assert (result[1] != 0).all()
  assert advantages.has_variance(np.array(rows)).tolist() == [False, True]


@pytest.mark.parametrize("scale", advantages.SCALES)
def test_unmeasured_rewards_are_left_out(scale):
  rows = [[1.0, NAN, 0.0, NAN], [NAN] * 4, [NAN, 2.0, NAN, NAN]]
  result = advantage(rows, scale=scale)
  assert np.isfinite(result).all()
  assert (result[1:] == 0).all()
  assert (result[0, [1, 3]] == 0).all()
  if scale != "batch":
    np.testing.assert_allclose(result[0, [0, 2]], advantage([[1.0, 0.0]], scale=scale)[0])


@hp.given(rows=groups, shift=st.sampled_from([-2.0, 0.5, 8.0]), seed=st.integers(0, 9))
@hp.settings(max_examples=60, deadline=None, derandomize=True)
def test_shift_invariant_and_permutation_equivariant(rows, shift, seed):
  rows = np.round(rows, 3)
  order = np.random.default_rng(seed).permutation(4)
  for scale in advantages.SCALES:
    base = advantage(rows, scale=scale)
    np.testing.assert_allclose(advantage(rows[:, order], scale=scale), base[:, order], atol=1e-6)
    if not (advantages.has_variance(rows + shift) == advantages.has_variance(rows)).all():
      continue
    np.testing.assert_allclose(advantage(rows + shift, scale=scale), base, atol=1e-5)


@pytest.mark.parametrize("scale", advantages.SCALES)
def test_a_group_of_one_is_refused_with_its_number(scale):
  with pytest.raises(ValueError, match="at least 2 samples.*got 1 for each of 3 prompts"):
    advantage([[1.0], [0.0], [1.0]], scale=scale)


def test_other_errors():
  with pytest.raises(ValueError, match="group, batch, none, rloo; got 'std'"):
    advantage(R, scale="std")
  with pytest.raises(ValueError, match="got inf for prompt 0, sample 1"):
    advantage([[0.0, np.inf]])
