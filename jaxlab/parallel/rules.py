"""Where parameters and batches live on the mesh: a rule by name, a spec for every part of a leaf.

A rule maps a kernel to (axis of its inputs, axis of its outputs). Column-parallel kernels split
their outputs over `tensor` and row-parallel ones their inputs, so that attention and MLP need one
sum each; the other axis is split over `fsdp`. What each component of a packed or adapted kernel
gets is `jaxlab.nn.weights.partition_specs`. Layers (the stack axis) are never split.
Source: arXiv 1909.08053 §3 (tensor), 1910.02054 (fsdp). Dims: V D K.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.nn import weights
from jaxlab.parallel import mesh as meshes

PyTree = Any
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh  # specs need sizes only
COLUMN = ("fsdp", "tensor")
ROW = ("tensor", "fsdp")
RULES = {
  "q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW,
  "gate": COLUMN, "up": COLUMN, "down": ROW,
  "embed": ROW,  # [V, D]
  "head": COLUMN,
}  # fmt: skip
ROWS = ("data", "fsdp")  # the axes that hold different rows of a batch


def batch_spec() -> PartitionSpec:
  """Of every array of a batch: rows (the leading axis) over `data` and `fsdp`."""
  return PartitionSpec(ROWS)


def param_specs(params: PyTree, mesh: Mesh, *, num_kv_heads: int | None = None) -> PyTree:
  """The PartitionSpec of every array of a causal LM, in the structure of `params`.

  Args:
    params: stacked or a list of layers, of any leaf type; shapes are enough.
    mesh: with the axes of `make_mesh`.
    num_kv_heads: K. `k` and `v` are split over `tensor` only if it divides K; without K they are
      whole. So is a vocabulary that it does not divide. The log says so.
  Raises: ValueError for a path without a rule, and for a shard that would split a block, a
    rotation, or an axis that does not divide.
  """
  return weights.map_leaves(
    lambda path, leaf: leaf_specs(path, leaf, mesh, num_kv_heads=num_kv_heads), params
  )


def leaf_specs(path: str, leaf: Any, mesh: Mesh, *, num_kv_heads: int | None = None) -> Any:
  """`param_specs` of the one kernel or array at `path`, such as 'layers/q/kernel'."""
  if missing := [axis for axis in meshes.AXES if axis not in mesh.shape]:
    raise ValueError(
      f"param_specs: the mesh must have the axes {meshes.AXES}; got {mesh.axis_names}, without "
      f"{missing}. Use make_mesh."
    )
  name, *rest = [part for part in path.split("/") if part != "layers" and not part.isdigit()]
  if name.endswith("norm"):
    return PartitionSpec()
  if name not in RULES or rest not in ([], ["kernel"], ["bias"]):
    raise ValueError(
      f"param_specs: every parameter needs a rule; got {path!r}, and rules for "
      f"{', '.join(RULES)} and norms. Add one to jaxlab/parallel/rules.py."
    )
  in_axis, out_axis = _axes(name, leaf, mesh, num_kv_heads)
  if rest == ["bias"]:
    return PartitionSpec(*[None] * (leaf.ndim - 1), out_axis) if out_axis else PartitionSpec()
  return weights.partition_specs(leaf, in_axis, out_axis, mesh, path)


def shard_params(
  params: PyTree, mesh: jax.sharding.Mesh, *, num_kv_heads: int | None = None
) -> PyTree:
  """The same parameters, placed by `param_specs`. With several processes each passes all of them,
  and keeps its own shards."""
  return weights.map_leaves(
    lambda path, leaf: shard_leaf(path, leaf, mesh, num_kv_heads=num_kv_heads), params
  )


def shard_leaf(
  path: str, leaf: Any, mesh: jax.sharding.Mesh, *, num_kv_heads: int | None = None
) -> Any:
  """`shard_params` of one kernel or array, also of NumPy arrays."""
  specs = leaf_specs(path, leaf, mesh, num_kv_heads=num_kv_heads)
  return jax.tree.map(lambda x, spec: _place(x, NamedSharding(mesh, spec)), leaf, specs)


def shard_batch(batch: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Arrays [B, ...] of this process as global arrays, rows over `data` and `fsdp`.

  With n processes each passes its own B / n rows, in the order of the processes.

  Raises: ValueError if the axes do not divide the rows.
  """
  sharding = NamedSharding(mesh, batch_spec())
  shards = mesh.shape["data"] * mesh.shape["fsdp"]

  def place(x):
    rows = x.shape[0] * jax.process_count()
    if rows % shards:
      raise ValueError(
        f"shard_batch: rows must be a multiple of data * fsdp = {shards}; got {rows} rows. "
        "Change the batch, or move devices to the tensor axis."
      )
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))

  return jax.tree.map(place, batch)


def replicate(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Copies the arrays that are not on the mesh yet to all of its devices.

  For the counters of a training state that was made of sharded arrays: left on one device they cost
  a second compilation.
  """

  def put(x):
    there = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
    return x if there else _place(x, NamedSharding(mesh, PartitionSpec()))

  return jax.tree.map(put, tree)


@dataclasses.dataclass(frozen=True)
class Placement:
  """What a model asks for while it runs, so that `fsdp` splits memory and not the arithmetic.

  Left alone, XLA multiplies with the split kernels where they are: rows move to the weights, and
  every device holds all rows. A layer that gathers its kernels first keeps its own rows; packed
  kernels travel packed (one layer at a time, and again in a rematerialised backward pass).
  """

  mesh: jax.sharding.Mesh
  num_kv_heads: int | None = None

  def rows(self, x: Any) -> Any:
    """An activation [B, ...] with its rows over `data` and `fsdp`."""
    return self._constrain(x, batch_spec())

  def layer(self, params: PyTree) -> PyTree:
    """A layer's parameters with every kernel whole over `fsdp` (`tensor` stays as it is)."""
    return weights.map_leaves(lambda path, leaf: self.gather(path, leaf), params)

  def gather(self, path: str, leaf: Any) -> Any:
    """The same for one kernel; `At` a layer of a stack becomes that layer's kernel."""
    if self.mesh.shape["fsdp"] == 1:
      return leaf
    leaf = _taken(leaf)
    specs = leaf_specs(path, leaf, self.mesh, num_kv_heads=self.num_kv_heads)
    # The first constraint holds for the gradient on its way back: summed straight into shards.
    return jax.tree.map(
      lambda x, spec: self._constrain(self._constrain(x, spec), _without_fsdp(spec)), leaf, specs
    )

  def _constrain(self, x, spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def _taken(leaf: Any) -> Any:
  if isinstance(leaf, weights.LoRA):
    return dataclasses.replace(leaf, base=_taken(leaf.base))
  if isinstance(leaf, weights.At):
    return jax.tree.map(lambda x: weights.take(x, leaf.index), leaf.leaf)
  return leaf


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
  return PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
  if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
    return jax.device_put(x, sharding)
  # device_put would first compare the whole array between the processes.
  host = np.asarray(x)
  return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _axes(name, leaf, mesh, num_kv_heads):
  """The rule, with `tensor` taken out where it would cut a KV head or an odd vocabulary."""
  in_axis, out_axis = RULES[name]
  tensor = mesh.shape["tensor"]
  if name in ("k", "v") and (num_kv_heads is None or num_kv_heads % tensor):
    if tensor > 1:
      _say_whole("k and v", f"{num_kv_heads or 'an unknown number of'} KV heads", tensor)
    return in_axis, None
  vocab = leaf.shape[0 if name == "embed" else -1]
  if name in ("embed", "head") and vocab % tensor:
    _say_whole(name, f"{vocab} tokens", tensor)
    return tuple(None if axis == "tensor" else axis for axis in (in_axis, out_axis))
  return in_axis, out_axis


@functools.cache  # so that it is said once
def _say_whole(what: str, have: str, tensor: int) -> None:
  logging.info("param_specs: %s whole on every device of tensor=%d (%s).", what, tensor, have)
