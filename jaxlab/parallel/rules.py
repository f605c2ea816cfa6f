"""Where parameters and batches live on the mesh: a rule by name, a spec for every part of a leaf.

A rule maps a kernel to (axis of its inputs, axis of its outputs). Column-parallel kernels split
their outputs over `tensor` and row-parallel ones their inputs, so that attention and MLP need one
sum each; the other axis is split over `fsdp`. What each component of a packed or adapted kernel
gets is `jaxlab.nn.weight_specs.partition_specs`. Layers (the stack axis) are never split.
Activations have rows over `data` and `fsdp`, positions over `sequence`, heads over `tensor`.
Source: arXiv 1909.08053 §3 (tensor), 1910.02054 (fsdp). Dims: V D K; B T S N H L of a cache.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.nn import weight_specs, weights
from jaxlab.parallel import mesh as meshes
from pallas_kernels.fp4_gemm import split

PyTree = Any
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh  # specs need sizes only
COLUMN = ("fsdp", "tensor")
ROW = ("tensor", "fsdp")
RULES = {
  "q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW,
  "gate": COLUMN, "up": COLUMN, "down": ROW,
  "embed": ROW,  # [V, D]
  "head": COLUMN,
  "head_dense": ("fsdp", None),  # its outputs are normalised: whole
}  # fmt: skip
ROWS = ("data", "fsdp")  # the axes that hold different rows of a batch


def batch_spec() -> PartitionSpec:
  """Of every array of a batch: rows (the leading axis) over `data` and `fsdp`."""
  return PartitionSpec(ROWS)


def row_shards(mesh: Mesh) -> int:
  """How many parts the rows of a batch are split into."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def activation_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Of an array [B, ...]: rows over `data` and `fsdp`; of one [B, T, D], T over `sequence` too.

  An axis that does not divide stays whole: a decoded token (T = 1), the one row of a prefix.
  """
  if not shape:
    return PartitionSpec()
  positions = _divides("sequence", shape[1], mesh) if len(shape) > 2 else None
  return _spelt(_row_axes(shape[0], mesh), positions)


def cache_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Of the keys or values [*L, B, K, S, H] of a cache: rows over `data` and `fsdp`, K over
  `tensor`; an axis that does not divide stays whole."""
  *stack, rows, kv_heads, _, _ = shape
  return _spelt(*[None] * len(stack), _row_axes(rows, mesh), _divides("tensor", kv_heads, mesh))


def _row_axes(rows: int, mesh: Mesh) -> tuple[str, ...] | str | None:
  """The axes that split the rows: both, or one of them, or none."""
  split = [axis for axis in ROWS if mesh.shape[axis] > 1]
  if len(split) == len(ROWS) and rows % row_shards(mesh) == 0:
    return ROWS
  return next((axis for axis in split if rows % mesh.shape[axis] == 0), None)


def _divides(axis: str, size: int, mesh: Mesh) -> str | None:
  shards = mesh.shape[axis]
  return axis if shards > 1 and size % shards == 0 else None


def _spelt(*axes) -> PartitionSpec:
  """As jit spells it, without None at the end: another spelling is another compilation."""
  axes = list(axes)
  while axes and axes[-1] is None:
    axes.pop()
  return PartitionSpec(*axes)


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
  in_axis, out_axis = _split_axes(name, leaf, mesh, num_kv_heads)
  if rest == ["bias"]:
    return PartitionSpec(*[None] * (leaf.ndim - 1), out_axis) if out_axis else PartitionSpec()
  return weight_specs.partition_specs(leaf, in_axis, out_axis, mesh, path)


def _split_axes(name, leaf, mesh, num_kv_heads):
  """The rule without axes of one device, as jit does: another spelling is another compilation."""
  return tuple(
    None if axis is None or mesh.shape[axis] == 1 else axis
    for axis in _axes(name, leaf, mesh, num_kv_heads)
  )


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
  return jax.tree.map(lambda x, spec: place(x, NamedSharding(mesh, spec)), leaf, specs)


def shard_rows(batch: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Arrays [B, ...] that every process has in full, their rows over `data` and `fsdp`.

  Raises: ValueError if the axes do not divide the rows.
  """
  shards = row_shards(mesh)
  if uneven := [x.shape[0] for x in jax.tree.leaves(batch) if x.shape[0] % shards]:
    raise ValueError(
      f"shard_rows: rows must be a multiple of data * fsdp = {shards}; got {uneven[0]} rows. "
      "Change the batch, or move devices to the tensor axis."
    )
  return jax.tree.map(lambda x: place(x, NamedSharding(mesh, batch_spec())), batch)


def replicate(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Copies the arrays that are not on the mesh yet to all of its devices.

  For the counters of a training state that was made of sharded arrays: left on one device they cost
  a second compilation.
  """

  def put(x):
    there = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
    return x if there else place(x, NamedSharding(mesh, PartitionSpec()))

  return jax.tree.map(put, tree)


@dataclasses.dataclass(frozen=True)
class Placement:
  """What a model asks for while it runs, so that `fsdp` splits memory and not the arithmetic.

  Left alone, XLA multiplies with the split kernels where they are: rows move to the weights, and
  every device holds all rows. A layer that gathers its kernels first keeps its own rows; packed
  kernels travel packed (one layer at a time, and again in a rematerialised backward pass).
  """

  mesh: Mesh
  num_kv_heads: int | None = None

  def rows(self, x: Any) -> Any:
    """An activation [B, ...] placed by `activation_spec`."""
    return self._constrain(x, activation_spec(x.shape, self.mesh))

  def cache(self, x: Any) -> Any:
    """Keys or values of a cache placed by `cache_spec`."""
    return self._constrain(x, cache_spec(x.shape, self.mesh))

  def attend(self, attend: Callable[..., Any]) -> Callable[..., Any]:
    """An attention that sees its part of the queries and all keys and values of its rows."""
    if self.mesh.shape["sequence"] == 1:
      return attend

    def placed(q_BTNH, k_BTKH, v_BTKH, rope, layer_cache):
      q_BTNH, k_BTKH, v_BTKH = (
        self._constrain(q_BTNH, self._heads(q_BTNH.shape, whole=False)),
        self._constrain(k_BTKH, self._heads(k_BTKH.shape, whole=True)),
        self._constrain(v_BTKH, self._heads(v_BTKH.shape, whole=True)),
      )
      return attend(q_BTNH, k_BTKH, v_BTKH, rope, layer_cache)

    return placed

  def _heads(self, shape: tuple[int, ...], *, whole: bool) -> PartitionSpec:
    """Of q, k or v [B, T, heads, H]."""
    rows, length, heads, _ = shape
    positions = None if whole else _divides("sequence", length, self.mesh)
    return _spelt(_row_axes(rows, self.mesh), positions, _divides("tensor", heads, self.mesh))

  def layer(self, params: PyTree) -> PyTree:
    """A layer's parameters with every kernel whole over `fsdp` (`tensor` stays as it is); FP4
    kernels carry how they are split, for implementations that XLA cannot partition."""
    return weights.map_leaves(lambda path, leaf: self._split(path, self.gather(path, leaf)), params)

  def _split(self, path: str, leaf: Any) -> Any:
    if isinstance(leaf, weights.LoRA):
      return dataclasses.replace(leaf, base=self._split(path, leaf.base))
    kernel = leaf.leaf if isinstance(leaf, weights.At) else leaf
    if not isinstance(kernel, weights.FP4Array):
      return leaf
    axes = _split_axes(path.split("/")[0], kernel, self.mesh, self.num_kv_heads)
    in_axis, out_axis = (None if axis == "fsdp" else axis for axis in axes)
    return weights.Sharded(leaf, split.Split(self.mesh, in_axis, out_axis))

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


def place(x: Any, sharding: NamedSharding) -> jax.Array:
  """One array, on the host or any devices, as a global one; every process passes all of it."""
  if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
    return jax.device_put(x, sharding)
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = place(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
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
