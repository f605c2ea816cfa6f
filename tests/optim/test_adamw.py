"""AdamW against its equations in float64, and stacked layers against unstacked ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.optim import adamw

PATHS = ("layers/q/kernel/a", "layers/q/kernel/b", "layers/q/bias", "layers/attn_norm", "norm")


def trees(steps, shape=(3, 4)):
  """Parameters and the gradients of some steps, standard normal."""
  keys = jax.random.split(jax.random.key(0), (steps + 1, len(PATHS)))
  return [{p: jax.random.normal(k, shape) for p, k in zip(PATHS, row)} for row in keys]


def run(optimizer, params, grads):
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  for g in grads:
    updates, state = update(g, state, params)
    params = optax.apply_updates(params, updates)
  return params


def by_hand(params, grads, lr, b1, b2, eps, decay, clip):
  theta = {p: np.float64(x) for p, x in params.items()}
  m = {p: np.zeros_like(x) for p, x in theta.items()}
  v = {p: np.zeros_like(x) for p, x in theta.items()}
  for t, step in enumerate(grads, 1):
    norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in step.values()))
    for p in theta:
      g = np.float64(step[p]) * min(1.0, clip / norm)
      m[p] = b1 * m[p] + (1 - b1) * g
      v[p] = b2 * v[p] + (1 - b2) * g**2
      change = m[p] / (1 - b1**t) / (np.sqrt(v[p] / (1 - b2**t)) + eps)
      decays = p.endswith(("/a", "/b"))
      theta[p] -= lr * (change + decay * theta[p] * decays)
  return theta


def test_against_the_equations():
  params, *grads = trees(5)
  optimizer = adamw.adamw(1e-2, weight_decay=0.3, clip_norm=0.2)
  want = by_hand(params, grads, 1e-2, 0.9, 0.99, 1e-8, 0.3, 0.2)
  got = run(optimizer, params, grads)
  for path in PATHS:
    np.testing.assert_allclose(got[path], want[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_decay_is_by_path():
  decays = {
    p: adamw.decays_by_default(p) for p in (*PATHS, "embed", "layers/q_norm", "head/kernel")
  }
  assert [p for p, d in decays.items() if not d] == [
    "layers/q/bias", "layers/attn_norm", "norm", "layers/q_norm",
  ]  # fmt: skip
  params = {"embed": jnp.ones(3)}
  optimizer = adamw.adamw(1.0, weight_decay=0.5, decays=lambda path: path != "embed")
  np.testing.assert_array_equal(run(optimizer, params, [{"embed": jnp.zeros(3)}])["embed"], 1.0)


def test_stacked_layers_get_the_update_of_unstacked_ones():
  params, *grads = trees(3)
  optimizer = adamw.adamw(1e-2, clip_norm=0.2)

  def unstack(tree):
    rest = {p: x for p, x in tree.items() if not p.startswith("layers/")}
    return rest | {
      p.replace("layers/", f"layers/{i}/"): row
      for p, x in tree.items() if p.startswith("layers/") for i, row in enumerate(x)
    }  # fmt: skip

  want = unstack(run(optimizer, params, grads))
  got = run(optimizer, unstack(params), [unstack(g) for g in grads])
  for path in want:  # the norm adds in another order
    np.testing.assert_allclose(got[path], want[path], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  "settings, text",
  [
    ({"b2": 1.0}, "b2=1.0"),
    ({"eps": 0.0}, "eps=0.0"),
    ({"clip_norm": 0.0}, "clip_norm must be > 0"),
  ],
)
def test_errors_name_the_values(settings, text):
  with pytest.raises(ValueError, match=text):
    adamw.adamw(1e-3, **settings)
