"""How the parts of a kernel are split over a mesh. Dims: I in, O out, R rank."""

import math
from typing import Any

import jax

from jaxlab.nn import weights
from pallas_kernels.fp4_gemm import codec

# The last axes of a part that depend on the kernel's inputs or outputs; other parts, the scalars of
# a matrix, are copied.
PART_AXES = {
  "codes": ("out", "in"),
  "scale": ("out", "in"),
  "a": ("in", None),
  "b": (None, "out"),
  "down": ("in", None),
  "up": (None, "out"),
  "base": ("in", "out"),  # a dense kernel below an adapter
}


def partition_specs(
  leaf: Any,
  in_axis: str | None,
  out_axis: str | None,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  path: str = "kernel",
) -> Any:
  """The PartitionSpec of every part of a kernel whose inputs and outputs are split over mesh axes.

  Codes and scales follow both axes, A and `down` the inputs, B and `up` the outputs; ranks, stack
  axes and the scalars of a matrix are never split.

  Args:
    leaf: any kernel, of arrays or of shapes.
    in_axis, out_axis: names of axes of `mesh`, None for whole.
    path: for the error.
  Returns: the structure of `leaf` with a PartitionSpec in place of every array.
  Raises: ValueError if a shard would not hold whole blocks and rotations, or an axis not divide.
  """
  _check_shards(leaf, in_axis, out_axis, mesh, path)
  names = {"in": in_axis, "out": out_axis, None: None}

  def spec(key_path, x):
    axes = PART_AXES.get(key_path[-1].name, ()) if key_path else ("in", "out")
    found = [None] * (x.ndim - len(axes)) + [names[axis] for axis in axes]
    while found and found[-1] is None:  # as jit spells it: another spelling is another compilation
      found.pop()
    return jax.sharding.PartitionSpec(*found)

  return jax.tree_util.tree_map_with_path(spec, leaf)


def _check_shards(leaf, in_axis, out_axis, mesh, path):
  *_, features_in, features_out = leaf.shape
  for side, size, axis in (("in", features_in, in_axis), ("out", features_out, out_axis)):
    unit, reason = _unit(leaf) if side == "in" else (1, "")
    shards = 1 if axis is None else mesh.shape[axis]
    if size % (unit * shards):
      raise ValueError(
        f"partition_specs: {path}: every shard must hold whole {reason or 'features'}; got "
        f"{side} = {size} over {axis} = {shards}, {size / shards:g} a shard. "
        f"Choose a smaller {axis}."
      )


def _unit(leaf) -> tuple[int, str]:
  """Inputs that must stay together, and why."""
  match leaf:
    case weights.LoRA():
      return _unit(leaf.base)
    case weights.FP4Array(rotation=0):
      return codec.BLOCK[leaf.format], f"{leaf.format} blocks of {codec.BLOCK[leaf.format]}"
    case weights.FP4Array():
      block = codec.BLOCK[leaf.format]
      why = f"{leaf.format} blocks of {block} and rotations of {leaf.rotation}"
      return math.lcm(block, leaf.rotation), why
    case weights.NF4Array():
      return codec.NF4_BLOCK, f"nf4 blocks of {codec.NF4_BLOCK}"
    case _:
      return 1, ""
