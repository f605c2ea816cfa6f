"""The GPTQ solver against float64 NumPy that eliminates one input at a time, and its identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.quant import gptq

I, O, K = 48, 20, 3  # inputs, outputs, groups of inputs that share a unit
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Oracle 6 of the specification of arXiv 2509.23202.
X6 = np.array(
  [
    [1, 0.5, 0, 0.2],
    [0.5, 1, 0.3, 0],
    [0, 0.3, 1, 0.4],
    [0.2, 0, 0.4, 1],
    [1, 1, 0, 0],
    [0, 0, 1, 1],
  ]
)
W6 = np.array([[1.3, -0.7, 2.6, 0.4], [-3.4, 0.2, 1.1, 5.2]])
RTN6 = [[1.5, -0.5, 3, 0.5], [-3, 0, 1, 6]]


def rounded(x, unit):
  """To the nearest value of the grid, ties to the even code."""
  a = np.abs(np.asarray(x, np.float64) / unit)
  codes = sum(
    compare(a, t)
    for compare, t in zip(
      [np.greater, np.greater_equal] * 3 + [np.greater], [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    )
  )
  return np.sign(x) * E2M1[codes.astype(int)] * unit


def problem(seed, inputs=I, outputs=O, samples=200):
  """(w_IO, unit_kO, H) with correlated inputs of different sizes."""
  random = np.random.default_rng(seed)
  mix = np.eye(inputs) + 0.3 * random.standard_normal((inputs, inputs))
  x = random.standard_normal((samples, inputs)) @ mix * random.uniform(0.3, 3, inputs)
  w = random.standard_normal((inputs, outputs))
  unit = np.abs(w).reshape(K, -1, outputs).max(1) / 6
  return w.astype(np.float32), unit.astype(np.float32), (2 * x.T @ x / samples).astype(np.float32)


def eliminate(w_IO, unit_kO, hessian, damp, order):
  """Optimal brain surgery as published: after each input, H loses its row and column."""
  h = np.asarray(hessian, np.float64).copy()
  w = np.asarray(w_IO, np.float64).copy()
  group = np.arange(len(w)) // (len(w) // len(unit_kO))
  left = list(np.argsort(-np.diag(h), kind="stable") if order == "activation" else range(len(w)))
  h += damp * np.diag(h).mean() * np.eye(len(w))
  while left:
    inverse = np.linalg.inv(h[np.ix_(left, left)])
    i, rest = left[0], left[1:]
    q = rounded(w[i], unit_kO[group[i]].astype(np.float64))
    w[rest] -= inverse[1:, :1] / inverse[0, 0] * (w[i] - q)[None]
    w[i], left = q, rest
  return w


def solve(w, unit, hessian, damp=0.01, order="activation", block=128):
  factor = gptq.factorise(jnp.asarray(hessian), damp, order)
  return np.asarray(gptq.solve(jnp.asarray(w), jnp.asarray(unit), factor, block=block))


def nearest(w, unit):
  return rounded(w, np.repeat(unit, len(w) // len(unit), axis=0).astype(np.float64))


def loss(w, new, hessian):
  change = np.asarray(w, np.float64) - new
  return np.trace(change.T @ np.asarray(hessian, np.float64) @ change)


# --- worked by hand


@pytest.mark.parametrize(
  ("order", "perm", "expected", "objective"),
  [
    ("default", [0, 1, 2, 3], [[1.5, -1, 3, 0], [-3, 0, 1, 6]], 0.517833),
    ("activation", [1, 0, 2, 3], [[1, -0.5, 2, 1], [-3, 0, 1, 6]], 0.562333),
  ],
)
def test_worked_example(order, perm, expected, objective):
  hessian = np.float32(2 * X6.T @ X6 / 6)
  factor = gptq.factorise(jnp.asarray(hessian), 0.01, order)
  np.testing.assert_array_equal(factor.perm_I, perm)
  found = np.asarray(gptq.solve(jnp.float32(W6.T), jnp.ones((1, 2)), factor)).T
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_allclose(loss(W6.T, found.T, hessian), objective, atol=1e-6)
  if order == "default":
    np.testing.assert_allclose(factor.inverse_II[0, 0], 3.022675, rtol=1e-6)
    np.testing.assert_allclose(factor.inverse_II[3, 3], 1.161770, rtol=1e-6)
  nearest_OI = nearest(W6.T, np.ones((1, 2))).T
  np.testing.assert_array_equal(nearest_OI, RTN6)
  np.testing.assert_allclose(loss(W6.T, nearest_OI.T, hessian), 0.834167, atol=1e-6)


# --- against elimination in float64, and identities (oracle 5)


@pytest.mark.parametrize("order", gptq.ORDERS)
@pytest.mark.parametrize("block", [1, 7, 128])
def test_blocks_of_any_size_are_elimination_one_by_one(order, block):
  w, unit, hessian = problem(0)
  expected = eliminate(w, unit, hessian, 0.01, order)
  assert (expected != nearest(w, unit)).mean() > 0.1
  np.testing.assert_allclose(solve(w, unit, hessian, order=order, block=block), expected, rtol=1e-6)


def test_a_diagonal_hessian_is_rounding_to_nearest():
  w, unit, hessian = problem(1)
  found = solve(w, unit, np.diag(np.diag(hessian)))
  np.testing.assert_allclose(found, nearest(w, unit), rtol=1e-6)


def test_what_is_on_the_grid_stays():
  w, unit, hessian = problem(2)
  grid = np.float32(nearest(w, unit))
  np.testing.assert_array_equal(solve(grid, unit, hessian), grid)


def test_infinite_damping_is_rounding_to_nearest():
  w, unit, hessian = problem(3)
  np.testing.assert_allclose(solve(w, unit, hessian, damp=1e6), nearest(w, unit), rtol=1e-6)


def test_equal_diagonals_keep_the_default_order():
  w, unit, hessian = problem(4)
  size = np.sqrt(np.diag(hessian))
  even = np.float32(hessian / size[:, None] / size[None])
  np.fill_diagonal(even, 1)
  a, b = (solve(w, unit, even, order=order) for order in gptq.ORDERS)
  np.testing.assert_array_equal(a, b)


def test_outputs_are_independent_of_each_other():
  w, unit, hessian = problem(5)
  order = np.random.default_rng(0).permutation(O)
  np.testing.assert_array_equal(
    solve(w[:, order], unit[:, order], hessian), solve(w, unit, hessian)[:, order]
  )


def test_the_objective_falls_in_the_mean():
  """Not for each problem: mean over 64, for each order."""
  ratios = {order: [] for order in gptq.ORDERS}
  for seed in range(64):
    w, unit, hessian = problem(seed)
    before = loss(w, nearest(w, unit), hessian)
    for order in gptq.ORDERS:
      ratios[order].append(loss(w, solve(w, unit, hessian, order=order), hessian) / before)
  means = {order: np.mean(found) for order, found in ratios.items()}
  assert means["default"] < 0.8 and means["activation"] < means["default"], means


def test_dead_inputs_are_found_where_the_order_puts_them():
  """A dead input is one that is never seen, not one whose weights are zero."""
  w, unit, hessian = problem(6)
  hessian[[5, 30]] = 0
  hessian[:, [5, 30]] = 0
  w[7] = 0  # alive
  found = solve(w, unit, hessian)
  assert not found[[5, 30]].any()
  alive = np.delete(np.arange(I), [5, 30])
  unit_of = np.repeat(unit, I // K, axis=0)[alive]  # each its own group: columns were taken out
  expected = eliminate(
    w[alive], unit_of, hessian[np.ix_(alive, alive)], 0.01 * 46 / 48, "activation"
  )
  assert np.mean(np.abs(found[alive] - expected) > 1e-5) < 0.05


def test_output_squares_are_the_diagonal_of_the_objective():
  w, unit, hessian = problem(7)
  change = np.float32(w - nearest(w, unit))
  found = gptq.squared_outputs(jnp.asarray(change), jnp.asarray(hessian))
  np.testing.assert_allclose(found, np.diag(change.T @ hessian @ change), rtol=1e-4)


# --- damping


def test_damping_is_raised_and_reported():
  """A Hessian with an eigenvalue of -0.05 means of its diagonal: 0.01 is too little, 0.1 enough."""
  hessian = np.eye(8) * 1.0
  hessian[0, 1] = hessian[1, 0] = 1.05
  factor = gptq.factorise(jnp.float32(hessian), 0.01)
  assert (factor.retries, factor.damp) == (1, pytest.approx(0.1))
  assert gptq.factorise(jnp.float32(hessian), 0.1).retries == 0


def test_what_stays_indefinite_is_refused():
  with pytest.raises(ValueError, match="factorise: .* got failures up to damp=10"):
    gptq.factorise(jnp.float32(np.diag([1.0, -30.0])), 0.01)
  with pytest.raises(ValueError, match="positive definite"):
    gptq.factorise(jnp.full((4, 4), jnp.nan), 0.01)
  with pytest.raises(ValueError, match="order must be one of default, activation; got 'x'"):
    gptq.factorise(jnp.eye(4), 0.01, "x")


# --- compile


def test_one_program_per_shape():
  w, unit, hessian = problem(8)
  solve(w, unit, hessian)
  programs = gptq._solve._cache_size(), gptq._factorise._cache_size()
  for seed, damp in ((9, 0.01), (10, 0.05)):
    solve(*problem(seed), damp=damp)
  assert (gptq._solve._cache_size(), gptq._factorise._cache_size()) == programs
  solve(w[:, :4], unit[:, :4], hessian)
  assert gptq._solve._cache_size() == programs[0] + 1


def test_outputs_split_over_eight_devices_are_those_of_one():
  w, unit, hessian = problem(11, outputs=64)
  mesh = jax.sharding.Mesh(jax.devices()[:8], ("rows",))
  split, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, "rows"), ()))
  factor = gptq.factorise(jax.device_put(jnp.asarray(hessian), whole), 0.01)
  found = gptq.solve(jax.device_put(w, split), jax.device_put(unit, split), factor)
  assert found.sharding.is_equivalent_to(split, 2)
  np.testing.assert_array_equal(found, solve(w, unit, hessian))
  program = gptq._solve.lower(
    jax.device_put(w, split), jax.device_put(unit, split), *factor[:3], block=I
  ).compile()
  for word in ("all-reduce", "all-gather", "collective-permute", "all-to-all"):
    assert word not in program.as_text()
