"""One update: gradients of an objective, summed over micro-batches, divided once, applied.

Dims: B batch rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlab.nn import weights
from jaxlab.objectives import weighted
from jaxlab.train import guard
from jaxlab.train import state as train_state

PyTree = Any
Objective = Callable[
  [PyTree, PyTree, jax.Array], tuple[weighted.Weighted, dict[str, weighted.Weighted]]
]
RESERVED = ("loss", "grad_norm", "bad_steps", "bad_in_a_row")  # metrics that every step has


def make_train_step(
  objective: Objective,
  optimizer: optax.GradientTransformation,
  *,
  micro_batch: int | None = None,  # [ours: one pass over the whole batch]
) -> Callable[..., Any]:
  """The jitted function `(state, frozen, batch, key) -> (state, metrics)`.

  The total and the weight of the objective are summed over micro-batches and divided once, so any
  `micro_batch` gives the same update to rounding (an objective that draws random numbers gets the
  key `fold_in(fold_in(key, state.step), i)` in micro-batch i; only there does the split show).

  Arguments of the result: `state` is donated; `frozen` is the other half of `weights.partition`, an
  argument so that its arrays are no constants of the program; `batch` is a pytree of arrays
  [B, ...]; `key` is the run's key, the same at every step. `metrics` are scalars on the device:
  "loss", "grad_norm" (before the optimiser clips it), the objective's, the guard's counters.

  Args:
    objective: `(params, batch, key) -> (Weighted(total, weight), {name: Weighted})`.
    optimizer: takes gradients of the mean loss; `fit` wants it guarded.
    micro_batch: rows that one forward and backward pass holds in memory; None for all.
  Returns: the jitted step. It raises ValueError, while tracing, if B is no multiple of
    `micro_batch` or the objective uses a reserved name.
  """
  if micro_batch is not None and micro_batch < 1:
    raise ValueError(f"make_train_step: micro_batch must be at least 1; got {micro_batch}.")
  optimizer = optax.with_extra_args_support(optimizer)

  def total_of(trainable, frozen, rows, key):
    loss, metrics = objective(weights.merge(trainable, frozen), rows, key)
    return loss.total.astype(jnp.float32), {"loss": loss, **metrics}

  gradient = jax.grad(total_of, has_aux=True)

  def step(state, frozen, batch, key):
    key = jax.random.fold_in(key, state.step)
    grads, sums = _accumulate(gradient, state.trainable, frozen, batch, key, micro_batch)
    _check_names(sums)
    # An empty batch (weight 0) has total 0 and gradient 0, and stays that.
    weight = jnp.where(sums["loss"].weight > 0, sums["loss"].weight, 1.0)
    grads = jax.tree.map(lambda g: g / weight, grads)
    metrics = {name: value.mean() for name, value in sums.items()}
    metrics["grad_norm"] = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(
      grads, state.opt_state, state.trainable, loss=metrics["loss"]
    )
    trainable = optax.apply_updates(state.trainable, updates)
    metrics |= guard.counters(opt_state)
    return train_state.TrainState(state.step + 1, trainable, opt_state), metrics

  return jax.jit(step, donate_argnums=0)


def _accumulate(gradient, trainable, frozen, batch, key, micro_batch):
  """(sum of gradients, sums of {name: Weighted}) over the micro-batches of a batch."""
  micro_batches = _split(batch, micro_batch)
  count = jax.tree.leaves(micro_batches)[0].shape[0]

  def one(i, rows):
    return gradient(trainable, frozen, rows, jax.random.fold_in(key, i))

  first = jax.tree.map(lambda x: x[0], micro_batches)
  if count == 1:
    return one(0, first)

  def add(sums, xs):
    return jax.tree.map(jnp.add, sums, one(*xs)), None

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0, first))
  sums, _ = jax.lax.scan(add, zeros, (jnp.arange(count), micro_batches))
  return sums


def _split(batch, micro_batch):
  """Leaves [B, ...] as [B / m, m, ...]; micro-batch i takes every (B / m)-th row from i on.

  Strided, so that a batch sharded over its rows gives each micro-batch rows of every shard.
  """
  sizes = {x.shape[0] for x in jax.tree.leaves(batch)}
  if len(sizes) != 1:
    raise ValueError(f"train step: all arrays of a batch must have the same rows; got {sizes}.")
  rows = sizes.pop()
  micro_batch = micro_batch or rows
  if rows == 0 or rows % micro_batch:
    raise ValueError(
      f"train step: the batch must be a multiple of micro_batch; got {rows} rows and "
      f"{micro_batch=}. Choose a divisor of {rows}, or another batch."
    )
  count = rows // micro_batch
  return jax.tree.map(
    lambda x: jnp.swapaxes(x.reshape(micro_batch, count, *x.shape[1:]), 0, 1), batch
  )


def _check_names(metrics):
  clash = sorted(metrics.keys() & set(RESERVED[1:]))
  if clash:
    raise ValueError(
      f"train step: an objective's metrics must not be called {RESERVED}; got {clash}. Rename them."
    )
