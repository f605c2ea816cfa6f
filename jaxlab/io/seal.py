"""What a checkpoint says about itself: digests of its arrays, its structure, a checksum of both.

Orbax notices neither a flipped bit in array data nor a changed static field (it takes the target's:
an NVFP4 kernel would come back labelled MXFP4), so we write both down and compare. Arrays in,
plain JSON values out; nothing here knows Orbax. Dims: none (any rank).
"""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.nn import weights

PyTree = Any

FOUR_BIT = (jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4), jnp.dtype(jnp.float4_e2m1fn))
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
OWN_PACKAGE = "jaxlab."  # classes named by a file are looked up in our own modules only


def _inspect(x):
  """(digest, all_finite) of one array, any dtype, typed keys included.

  The digest is one uint32: each word, offset by its position, goes through the murmur3 finaliser,
  and the results are added modulo 2^32. The finaliser is a bijection, so any single changed word
  changes the sum, and the sum is exact, hence the same under every sharding. (Word times odd weight
  has the first property too, but misses 128 zeroed words of an array of ones, a lost disk sector.)
  """
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  finite = jnp.bool_(True)
  if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype not in FOUR_BIT:
    finite = jnp.all(jnp.isfinite(x.astype(jnp.float32) if x.dtype.itemsize == 1 else x))
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  if x.dtype in FOUR_BIT:
    x = jax.lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
  word = WORDS[min(4, x.dtype.itemsize)]
  bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
  index = jnp.zeros(bits.shape, jnp.uint32)
  for axis, n in enumerate(bits.shape):
    index = index * jnp.uint32(n) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  return jnp.sum(_murmur3(bits + index * jnp.uint32(0x9E3779B9)), dtype=jnp.uint32), finite


def _murmur3(h):
  """The 32-bit finaliser of MurmurHash3, a bijection (Appleby, smhasher, public domain)."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


@functools.cache
def _inspector(replicated: jax.sharding.Sharding | None):
  return jax.jit(_inspect, out_shardings=replicated)


def inspect(arrays: dict[str, jax.Array]) -> tuple[dict[str, list], list[str]]:
  """Digest, dtype and shape of every array, and which of them hold a NaN or an infinity.

  Args:
    arrays: {path: array}, sharded in any way, over any number of processes.
  Returns: ({path: [digest, dtype, shape]}, paths of the arrays that are not finite).
  """
  found = {}
  for path, x in arrays.items():
    # A process can fetch only what it holds: over several, the two scalars are replicated.
    elsewhere = isinstance(x, jax.Array) and not x.is_fully_addressable
    mesh = x.sharding.mesh if elsewhere else None
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()) if mesh else None
    found[path] = _inspector(replicated)(x)
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
      # On CPUs, sums of several programs at once may wait for each other forever (jax 0.10.2).
      jax.block_until_ready(found[path])
  found = jax.device_get(found)  # one transfer for all of them
  table = {p: [int(found[p][0]), *array_type(x)] for p, x in arrays.items()}
  return table, [p for p in arrays if not found[p][1]]


def array_type(x) -> list:
  """[dtype, shape] of an array or a `ShapeDtypeStruct`, as JSON values."""
  return [str(x.dtype), list(x.shape)]


def dtype_of(name: str) -> Any:
  """The dtype that `array_type` wrote down, those of typed keys included."""
  if name in KEY_IMPLS:
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEY_IMPLS[name])).dtype
  return jnp.dtype(name)


def flatten(tree: PyTree) -> dict[str, Any]:
  """{path: leaf}.

  Raises: ValueError if a leaf is no array, or two leaves have the same path ("a/b" and "a", "b").
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  leaves = {weights.path_str(path): leaf for path, leaf in flat}
  if len(leaves) != len(flat):
    raise ValueError(
      f"checkpoint: paths must differ; got {len(flat)} leaves and {len(leaves)} paths. "
      "Rename a key that contains '/'."
    )
  for path, leaf in leaves.items():
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
      raise ValueError(
        f"checkpoint: every leaf must be an array; got {type(leaf).__name__} at {path!r}. "
        "Wrap it in jnp.asarray."
      )
  return leaves


def describe(tree: PyTree) -> dict[str, dict]:
  """Every inner node of a pytree: {path: {"type", "children", "static"}}, plain JSON values.

  `type` is `module:Class` for our own classes, which `rebuild` can make again, and the bare name
  for others (Optax moves its states between modules). `static` holds the fields that are no arrays.
  """
  nodes = {}
  _describe(tree, "", nodes)
  return json.loads(json.dumps(nodes))


def _describe(node, path, nodes):
  children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
  data = treedef.node_data()
  if data is None:  # a leaf
    return
  cls = type(node)
  names = [weights.path_str(key) for key, _ in children]
  static = {}
  if dataclasses.is_dataclass(node):
    fields = {f.name for f in dataclasses.fields(node)} - set(names)
    static = {name: _plain(getattr(node, name)) for name in sorted(fields)}
  elif not isinstance(node, dict | list | tuple | type(None)):
    static = {"aux": repr(data[1])}
  own = cls.__module__.startswith(OWN_PACKAGE)
  name = f"{cls.__module__}:{cls.__qualname__}" if own else cls.__name__
  nodes[path] = {"type": name, "children": names, "static": static}
  for name, (_, child) in zip(names, children, strict=True):
    _describe(child, join(path, name), nodes)


def _plain(value):
  if value is None or isinstance(value, str | bool | int | float):
    return value
  if isinstance(value, tuple | list):
    return [_plain(v) for v in value]
  return repr(value)


def join(path: str, name: str) -> str:
  return f"{path}/{name}" if path else name


def rebuild(nodes: dict[str, dict], leaves: dict[str, Any], path: str = "") -> PyTree:
  """The pytree that `describe` saw, with these leaves; dicts, lists, tuples and our own classes.

  Raises: ValueError for a node of another kind (a class of Optax, or of a test).
  """
  node = nodes.get(path)
  if node is None:
    return leaves[path]
  children = {n: rebuild(nodes, leaves, join(path, n)) for n in node["children"]}
  match node["type"]:
    case "dict":
      return children
    case "list":
      return list(children.values())
    case "tuple":
      return tuple(children.values())
    case "NoneType":
      return None
    case name:
      static = {k: tuple(v) if isinstance(v, list) else v for k, v in node["static"].items()}
      return _own_class(name)(**children, **static)


def _own_class(name: str) -> type:
  module, _, qualname = name.partition(":")
  if not module.startswith(OWN_PACKAGE):
    raise ValueError(
      f"checkpoint: only dicts, lists, tuples and classes of jaxlab can be made from a file; got "
      f"{name!r}. Restore it into a target of the same structure."
    )
  cls = getattr(importlib.import_module(module), qualname)
  if not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
    raise ValueError(f"checkpoint: a node must be a dataclass or a NamedTuple; got {name!r}.")
  return cls


def differences(have: dict[str, Any], want: dict[str, Any], limit: int = 5) -> str:
  """'key: have -> want' for the keys at which two dicts differ, at most `limit`; '' if equal."""
  keys = [k for k in sorted(have.keys() | want.keys()) if have.get(k) != want.get(k)]
  more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
  return ", ".join(f"{k or 'root'}: {have.get(k)} -> {want.get(k)}" for k in keys[:limit]) + more


def sealed(meta: dict[str, Any]) -> dict[str, Any]:
  """The same JSON values with a checksum of their own text: damage is not read as another model."""
  meta = json.loads(json.dumps(meta))  # what comes back from a file: lists for tuples, str keys
  return meta | {"crc": zlib.crc32(json.dumps(meta, sort_keys=True).encode())}


def unsealed(meta: dict[str, Any]) -> dict[str, Any]:
  """Undoes `sealed`.

  Raises: ValueError if the checksum is missing or differs.
  """
  body = {k: v for k, v in meta.items() if k != "crc"}
  if sealed(body) != meta:
    raise ValueError("metadata differs from its checksum")
  return body


def flush(folder: pathlib.Path) -> None:
  """Asks the disk to keep a committed folder through a power cut.

  Orbax syncs the arrays, but neither its JSON files nor the final rename. 20 to 80 ms for 26 files.
  """
  for path in [*folder.rglob("*"), folder, folder.parent]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def to_device(x: np.ndarray | jax.Array, like: Any) -> jax.Array:
  """A restored array as free as its target: one that was bound to no device stays so.

  Orbax commits what it restores; a committed step counter cannot meet parameters on a mesh.
  """
  if not isinstance(like, jax.Array) or like.committed:
    return x
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = jnp.asarray(np.asarray(jax.random.key_data(x)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return jnp.asarray(np.asarray(x))
