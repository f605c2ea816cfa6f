"""A regression with dropout that takes milliseconds: the model of the training tests.

Also the functions that child processes run, so that those import little. Dims: B D F.
"""

import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlab.nn import weights
from jaxlab.objectives import weighted
from jaxlab.train import fit, guard, signals, state, step

ROWS, DIM, HIDDEN = 12, 8, 16
OPTIMIZER = guard.guarded(optax.adamw(1e-2))
FINGERPRINT = {"data": "tiny", "rows": ROWS}


def init_params(seed: int = 0) -> dict[str, Any]:
  rng = np.random.default_rng(seed)
  up_DF, down_FD = rng.normal(size=(DIM, HIDDEN)) / 3, rng.normal(size=(HIDDEN, DIM)) / 4
  return {
    "up": {"kernel": jnp.asarray(up_DF, jnp.float32), "bias": jnp.zeros(HIDDEN)},
    "down": {"kernel": jnp.asarray(down_FD, jnp.float32)},
  }


def predict(params, x_BD):
  bias_1F = params["up"]["bias"][None]
  return jnp.tanh(x_BD @ params["up"]["kernel"] + bias_1F) @ params["down"]["kernel"]


def objective(params, batch, key):
  """Squared error over the rows that count, with dropout on the output."""
  out_BD = predict(params, batch["x"])
  keep_BD = jax.random.bernoulli(key, 0.9, out_BD.shape)
  return _error(out_BD * keep_BD, batch)


def without_dropout(params, batch, key):
  del key
  return _error(predict(params, batch["x"]), batch)


def _error(out_BD, batch):
  error_B = jnp.sum((out_BD - batch["x"]) ** 2, axis=-1) * batch["scale"]
  loss = weighted.Weighted(jnp.sum(error_B * batch["weight"]), jnp.sum(batch["weight"]))
  worst = weighted.Weighted(jnp.max(error_B), jnp.float32(1))
  return loss, {"worst": worst}


def batch_of(index: int, scale: float = 1.0) -> dict[str, np.ndarray]:
  """Batch `index` of the data set, a pure function of the index."""
  rng = np.random.default_rng((7, index))
  return {
    "x": rng.normal(size=(ROWS, DIM)).astype(np.float32),
    "weight": rng.integers(0, 3, ROWS).astype(np.float32),
    "scale": np.full(ROWS, scale, np.float32),
  }


def supervised(index: int, current: state.TrainState) -> fit.Round:
  """One batch a round, and the ids of its rows."""
  del current
  return fit.Round([batch_of(index)], rows=[index * ROWS + i for i in range(ROWS)])


def rl_like(index: int, current: state.TrainState) -> fit.Round:
  """Two updates on a "rollout" of the present policy; every third round has nothing to learn."""
  x_BD = jnp.asarray(batch_of(index)["x"])
  params = weights.merge(current.trainable, start()[1])
  batch = batch_of(index) | {"x": np.asarray(predict(params, x_BD)) + batch_of(index)["x"]}
  halves = [{k: v[half::2] for k, v in batch.items()} for half in (0, 1)]
  return fit.Round(halves if index % 3 else [], metrics={"reward": float(batch["x"].mean())})


def start(optimizer=OPTIMIZER, seed: int = 0) -> tuple[state.TrainState, Any]:
  """(fresh state, frozen): the output bias-free half trains, and so does the bias."""
  trainable, frozen = weights.partition(init_params(seed), lambda path: path != "up/kernel")
  return state.TrainState.create(trainable, optimizer), frozen


def make_step(optimizer=OPTIMIZER, **settings):
  return step.make_train_step(objective, optimizer, **settings)


def train(workdir: pathlib.Path, **settings) -> state.TrainState:
  """A run of `fit` with everything at its default."""
  current, frozen = start()
  defaults = {
    "train_step": make_step(), "rounds": supervised, "steps": 20, "key": jax.random.key(3),
    "save_every_steps": 3, "fingerprint": FINGERPRINT,
  }  # fmt: skip
  return fit.fit(state=current, frozen=frozen, workdir=workdir, **(defaults | settings))


def child(workdir: pathlib.Path, started, rounds=supervised, pause: float = 0.0, **settings):
  """A training process as a launcher makes one, with its exit code; `started` is set by its first
  step."""

  def slow(index, current):
    time.sleep(pause if index else 0)
    return rounds(index, current)

  def on_round(done, current, values):
    started.set()

  with signals.Interrupt() as stop:
    try:
      train(workdir, rounds=slow, on_round=on_round, stop=stop, **settings)
      started.set()  # also if nothing was left to do
    except signals.Interrupted as stopped:
      print(stopped, flush=True)
      raise SystemExit(stopped.exit_code) from None


def exact(value: Any) -> Any:
  """JSON values with every float as its bits."""
  if isinstance(value, float):
    return value.hex()
  if isinstance(value, dict):
    return {k: exact(v) for k, v in value.items()}
  return [exact(v) for v in value] if isinstance(value, list) else value


def same_bits(a: Any, b: Any) -> bool:
  """Whether two pytrees of arrays have the same structure and bits."""

  def data(x):
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x).tobytes()

  return jax.tree.all(jax.tree.map(lambda x, y: data(x) == data(y), a, b))
