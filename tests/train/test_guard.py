"""The guard: bad steps never arrive, good ones pass untouched."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.optim import adamw
from jaxlab.train import guard

NAN, INF = np.nan, np.inf
STEPS = 60
INNER = adamw.adamw(1e-2, clip_norm=0.5)


def make(optimizer, compiled=True):
  """A step on a noisy quadratic, whose loss and gradient are multiplied by `factor`."""
  extra = optax.with_extra_args_support(optimizer)
  guarded = isinstance(optimizer.init({"w": jnp.zeros(1)}), guard.GuardState)

  def step(params, state, x, factor):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["w"] - x) ** 2))(params)
    grads = jax.tree.map(lambda g: g * factor, grads)
    loss = {"loss": loss * factor} if guarded else {}
    updates, state = extra.update(grads, state, params, **loss)
    return optax.apply_updates(params, updates), state

  return optimizer, jax.jit(step) if compiled else step


GUARDED = make(guard.guarded(INNER))
PLAIN = make(INNER)


def run(made, bad=(), steps=STEPS):
  optimizer, step = made
  params = {"w": jax.random.normal(jax.random.key(0), (16,))}
  state = optimizer.init(params)
  history = [params["w"]]
  for t in range(steps):
    x = jax.random.normal(jax.random.key(t + 1), (16,))
    params, state = step(params, state, x, jnp.float32(dict(bad).get(t, 1.0)))
    history.append(params["w"])
  return np.stack(history), state


@pytest.mark.parametrize("inner", [INNER, optax.sgd(1e-2, momentum=0.9)])
def test_a_healthy_run_is_bit_equal_with_and_without(inner):
  """Operation by operation: inside one program the fusion of multiply-adds is the compiler's."""
  guarded, state = run(make(guard.guarded(inner), compiled=False), steps=18)
  plain, plain_state = run(make(inner, compiled=False), steps=18)
  assert guarded.tobytes() == plain.tobytes()
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state.inner, plain_state))
  assert guard.counters(state) == {"bad_steps": 0, "bad_in_a_row": 0}


def test_a_compiled_healthy_run_differs_by_roundings_at_most():
  # 60 updates, each at most one rounding of 2^-24 of numbers below 4.
  np.testing.assert_allclose(run(GUARDED)[0], run(PLAIN)[0], rtol=0, atol=60 * 4 * 2**-24)


@pytest.mark.parametrize("factor", [NAN, INF, -INF, 1e4])
@pytest.mark.parametrize("at", [(40,), (40, 41, 42), tuple(range(40, 50)), (59,)])
def test_a_bad_step_changes_nothing(factor, at):
  history, state = run(GUARDED, dict.fromkeys(at, factor))
  for t in at:
    np.testing.assert_array_equal(history[t + 1], history[t])
  assert np.isfinite(history).all()
  assert guard.counters(state)["bad_steps"] == len(at)
  assert guard.counters(state)["bad_in_a_row"] == (1 if at == (59,) else 0)
  # What comes after is a run that never saw those steps: the inner state did not move either.
  assert state.inner[1][0].count == STEPS - len(at)


def test_a_nan_in_the_very_first_step():
  history, state = run(GUARDED, {0: NAN})
  np.testing.assert_array_equal(history[1], history[0])
  assert np.isfinite(history).all() and guard.counters(state)["bad_steps"] == 1


def test_without_a_guard_one_infinity_is_for_ever():
  history, _ = run(PLAIN, {40: INF})
  assert np.isfinite(history[40]).all() and np.isnan(history[-1]).any()


def spike_verdicts(norms, window=8, sigmas=6.0):
  """By hand, in float64: which of these gradient norms pass."""
  good, verdicts = [], []
  for norm in norms:
    past = np.float64(good[-window:])
    usual = len(past) < window // 2 or norm <= past.mean() + max(sigmas * past.std(), past.mean())
    verdicts.append(bool(usual))
    good += [norm] if usual else []
  return verdicts


def test_spikes_against_the_rule_by_hand():
  rng = np.random.default_rng(0)
  norms = rng.lognormal(0.0, 0.5, 300) * np.where(rng.random(300) < 0.1, 20, 1)
  optimizer = guard.guarded(optax.sgd(1.0), window=8)
  update = jax.jit(optimizer.update)
  state, got = optimizer.init({"w": jnp.zeros(1)}), []
  for norm in norms:
    updates, state = update({"w": jnp.float32([norm])}, state, loss=jnp.float32(0))
    got.append(bool(updates["w"][0] != 0))
  assert got == spike_verdicts(norms)
  assert not all(got)


def test_constant_gradients_are_no_spikes():
  """A std of zero must not make every later step a spike."""
  optimizer = guard.guarded(optax.sgd(1.0))
  update = jax.jit(optimizer.update)
  state = optimizer.init({"w": jnp.zeros(4)})
  for t in range(60):
    grads = {"w": jnp.full(4, 0.1 + 1e-4 * t)}
    _, state = update(grads, state, loss=jnp.float32(1))
  assert guard.counters(state)["bad_steps"] == 0


def test_counters_are_found_inside_a_chain_and_absent_without_a_guard():
  params = {"w": jnp.zeros(2)}
  chain = optax.chain(optax.clip(1.0), guard.guarded(optax.adam(1e-3)))
  assert set(guard.counters(chain.init(params))) == {"bad_steps", "bad_in_a_row"}
  assert guard.counters(INNER.init(params)) == {}


def test_errors_name_the_values():
  with pytest.raises(ValueError, match="window=1, sigmas=6.0"):
    guard.guarded(INNER, window=1)
