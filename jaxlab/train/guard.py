"""A bad step never reaches the parameters: a guard around any optimiser. Dims: none.

Why not `optax.apply_if_finite`: past its limit it applies the NaN. Why at all: Adam never recovers
from one infinite gradient, and clipping does not help (inf / inf).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# The gradient norm of a model that starts from noise rises tenfold within a few updates, once it
# has found the task; the 6 sigmas of a trained one would take that for a fault.
SIGMAS_FROM_NOISE = 1e3


class GuardState(NamedTuple):
  """The inner optimiser's state and what the guard remembers; all scalars but `norms`."""

  inner: Any
  norms: Any  # float32 [window], the norms of the last good steps, a ring
  good_steps: Any  # int32
  bad_steps: Any  # int32, over the whole run
  bad_in_a_row: Any  # int32, 0 after a good step


def guarded(
  inner: optax.GradientTransformation,
  *,
  window: int = 32,  # [ours: the recent past]
  sigmas: float = 6.0,  # [ours: what chance does not reach in a run]
) -> optax.GradientTransformationExtraArgs:
  """Skips an update whose loss or gradient is not finite, or whose norm is far above its past.

  With mean and std of the last `window` good gradient norms, a step is good if its loss and norm
  are finite and norm <= mean + max(sigmas * std, mean); the last rule starts when half the window
  is filled. A bad step changes neither parameters nor inner state (its schedule does not advance).
  A good one has the inner optimiser's update, operation for operation and bit for bit. (Compiled
  into one program with its surroundings, XLA may fuse a product and a sum, or add up a norm, in
  another way than it would without the guard: a last-bit rounding, the same at every rerun.)

  Args:
    inner: any optimiser.
    window: how many good norms are remembered.
    sigmas: standard deviations above the mean that still pass. The mean itself is always allowed
      on top, so that a run of nearly constant norms does not make every step a spike.
  Returns: a transformation whose `update` takes the scalar `loss` as an extra argument.
  Raises: ValueError if window < 2 or sigmas <= 0.
  """
  if window < 2 or sigmas <= 0:
    raise ValueError(f"guarded: must have window >= 2 and sigmas > 0; got {window=}, {sigmas=}.")
  inner = optax.with_extra_args_support(inner)

  def init(params):
    counts = [jnp.int32(0) for _ in range(3)]  # three buffers: a train step donates them
    return GuardState(inner.init(params), jnp.zeros(window, jnp.float32), *counts)

  def update(updates, state, params=None, *, loss, **extra):
    norm = optax.tree.norm(updates).astype(jnp.float32)
    good = is_good(norm, loss, state, sigmas)
    new_updates, new_inner = inner.update(updates, state.inner, params, loss=loss, **extra)

    def keep(new, old):
      return jax.tree.map(lambda x, y: jnp.where(good, x, y), new, old)

    return keep(new_updates, jax.tree.map(jnp.zeros_like, new_updates)), GuardState(
      inner=keep(new_inner, state.inner),
      norms=keep(state.norms.at[state.good_steps % window].set(norm), state.norms),
      good_steps=state.good_steps + good,
      bad_steps=state.bad_steps + ~good,
      bad_in_a_row=jnp.where(good, 0, state.bad_in_a_row + 1),
    )

  return optax.GradientTransformationExtraArgs(init, update)


def is_good(norm: jax.Array, loss: jax.Array, state: GuardState, sigmas: float = 6.0) -> jax.Array:
  """Whether a step with this gradient norm and loss is applied; a bool scalar.

  Args:
    norm: global gradient norm, float32 scalar.
    loss: scalar.
    state: the guard's state before the step.
    sigmas: as in `guarded`.
  """
  window = state.norms.shape[0]
  seen = jnp.minimum(state.good_steps, window)
  filled = jnp.arange(window) < seen
  count = jnp.maximum(seen, 1)
  mean = jnp.sum(jnp.where(filled, state.norms, 0)) / count
  std = jnp.sqrt(jnp.sum(jnp.where(filled, (state.norms - mean) ** 2, 0)) / count)
  usual = norm <= mean + jnp.maximum(sigmas * std, mean)
  return jnp.isfinite(norm) & jnp.isfinite(loss) & ((seen < window // 2) | usual)


def counters(opt_state: Any) -> dict[str, jax.Array]:
  """{"bad_steps", "bad_in_a_row"} of the guard in an optimiser state; {} if there is none."""
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, GuardState))
  for node in nodes:
    if isinstance(node, GuardState):
      return {"bad_steps": node.bad_steps, "bad_in_a_row": node.bad_in_a_row}
  return {}
