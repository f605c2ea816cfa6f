"""What training changes, as one pytree. Dims: none (trainable arrays of any rank)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["step", "trainable", "opt_state"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that one update reads and writes; what it only reads (`frozen`) is kept apart.

  Invariants: `trainable` holds float32 masters under the paths of `weights.partition`; `opt_state`
  is what the optimiser makes of them, the guard's counters included; the randomness of an update is
  `fold_in(key, step)`, so a state and a key say all about what comes next.
  """

  # Plain annotations: a pytree node is also built around shapes, specs and booleans.
  step: Any  # int32 scalar, the updates done so far, skipped ones included
  trainable: Any  # {path: float32 array}
  opt_state: Any

  @classmethod
  def create(
    cls, trainable: dict[str, jax.Array], optimizer: optax.GradientTransformation
  ) -> "TrainState":
    """The state before the first update.

    The arrays are copied: a train step donates its state, and must not delete the buffers of the
    model that these came from.

    Args:
      trainable: {path: array of any float dtype}, from `weights.partition`.
      optimizer: usually `guard.guarded(...)`.
    Raises: ValueError for an array that is not of a float dtype.
    """
    for path, x in trainable.items():
      if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
          f"TrainState.create: trainable arrays must be floats; got {x.dtype} at {path!r}. "
          "Train an adapter over a packed kernel, not its codes."
        )
    masters = {path: jnp.array(x, jnp.float32, copy=True) for path, x in trainable.items()}
    # Some optimisers keep the parameters themselves, or one zero in several places.
    opt_state = jax.tree.map(lambda x: jnp.array(x, copy=True), optimizer.init(masters))
    return cls(jnp.int32(0), masters, opt_state)


def abstract(
  trainable: dict[str, jax.ShapeDtypeStruct],
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
) -> TrainState:
  """The shapes of `TrainState.create`; allocates nothing.

  On a mesh they have shardings: what the optimiser keeps for a parameter lies beside it, the rest
  is whole on every device.
  """
  made = jax.eval_shape(functools.partial(TrainState.create, optimizer=optimizer), trainable)
  if mesh is None:
    return made
  whole = NamedSharding(mesh, PartitionSpec())

  def put(path, x):
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    like = next((trainable[name] for name in names if name in trainable), None)
    beside = like is not None and like.shape == x.shape
    return x.update(sharding=like.sharding if beside else whole)

  return jax.tree_util.tree_map_with_path(put, made)
