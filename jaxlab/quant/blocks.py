"""Runs one block of a model, and sees or changes the inputs of its linears. No copy of the model.

`hidden` runs as it is, with every block skipped but one, whose input is ours. A linear's input is
seen where it is multiplied: its kernel stands behind a first factor that is a function, in place of
the matrix of a `LowRank` kernel. Linears that are handed the very same array share a site (q/k/v,
gate/up): sites are found by a trace, not listed by family.
Dims: B sequences, T tokens, D width, L layers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.models import zoo
from jaxlab.nn import weights

PyTree = Any
Site = tuple[str, ...]  # linears that share their input, by path in a layer: ("q", "k", "v")
KERNEL = "/kernel"


def run(
  module: Any, index: int, layer: PyTree, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
  """Block `index` with the parameters `layer` on x_BTD, called as `module.hidden` calls it.

  Args:
    module: on the model contract: the only modules that `hidden` calls are its blocks, as
      `block(x, ...) -> (x, cache, stats)`, and no other parameter reaches what they are called with
      but x.
  """
  found = []

  def one(i, call, args, kwargs):
    if i == index:
      found.append(call(x_BTD, *args[1:], **kwargs)[0])

  _hidden(module, layer, x_BTD.shape[:2], one)
  return found[0]


def first_alike(module: Any, layer: PyTree) -> list[int]:
  """For each layer, the first whose block is called alike: they share a program.

  Blocks of a causal LM are all alike; those of ModernBERT differ by window and rotation.
  """
  structures: list[Any] = []

  def arguments():
    found = []

    def one(i, call, args, kwargs):
      found.append([])
      structures.append(_structure((args[1:], kwargs), found[-1]))

    _hidden(module, layer, (1, 2), one)
    return found

  arrays = jax.device_get(jax.jit(arguments)())
  seen: dict[Any, int] = {}
  first = []
  for i, (structure, values) in enumerate(zip(structures, arrays, strict=True)):
    contents = tuple((str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in values)
    first.append(seen.setdefault((structure, contents), i))
  return first


def find_sites(module: Any, layer: PyTree) -> tuple[Site, ...]:
  """The sites of a block in the order of its computation; shapes of parameters are enough."""
  inputs, sites = [], []

  def see(name, x):
    same = [site for y, site in zip(inputs, sites, strict=True) if y is x]
    if same:
      same[0].append(name)
    else:
      inputs.append(x)
      sites.append([name])
    return x

  shape = (1, 2, module.config.width)
  jax.eval_shape(lambda layer: run(module, 0, watch(layer, see), jnp.zeros(shape)), layer)
  return tuple(map(tuple, sites))


def kernels(layer: PyTree) -> dict[str, Any]:
  """{linear: its kernel} of a layer."""
  leaves = weights.leaf_paths(layer)
  return {p.removesuffix(KERNEL): w for p, w in leaves.items() if p.endswith(KERNEL)}


def replace_kernels(layer: PyTree, new: dict[str, Any]) -> PyTree:
  """The layer with other kernels for the linears that are named."""
  return weights.map_leaves(lambda path, w: new.get(path.removesuffix(KERNEL), w), layer)


def watch(layer: PyTree, see: Callable[[str, Array], Array]) -> PyTree:
  """The layer with each kernel multiplying `see(linear, its input)` in place of its input."""

  def behind(name, w):
    pair = jax.tree.structure(weights.LowRank(w, w.T))
    return jax.tree.unflatten(pair, (_Seen(functools.partial(see, name)), w))

  dense = kernels(layer)
  return replace_kernels(layer, {name: behind(name, w) for name, w in dense.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class _Seen:
  """The first factor of a kernel, where that is a function: x @ it = see(x)."""

  see: Callable[[Array], Array]

  def astype(self, dtype: jax.typing.DTypeLike) -> "_Seen":
    return self

  def __rmatmul__(self, x: Array) -> Array:
    return self.see(x)


def _hidden(module, layer, shape, on_block):
  """Runs `hidden` on zeros, with `on_block(i, call, args, kwargs)` in place of each block."""
  numbers, inside = itertools.count(), []

  def intercept(call, args, kwargs, context):
    if context.method_name != "__call__" or inside:  # also of modules that a block holds
      return call(*args, **kwargs)
    inside.append(True)
    on_block(next(numbers), call, args, kwargs)
    inside.clear()
    return args[0], None, None

  beside = {name: x for name, x in zoo.param_shapes(module).items() if name != "layers"}
  params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), beside)
  params["layers"] = [layer] * module.config.num_layers
  with nn.intercept_methods(intercept):
    module.apply({"params": params}, jnp.zeros(shape, jnp.int32), method="hidden")


def _structure(x: Any, arrays: list[Array]) -> Any:
  """An argument without its arrays, which go to `arrays`; it can be compared and hashed."""
  if dataclasses.is_dataclass(x):
    fields = [getattr(x, f.name) for f in dataclasses.fields(x)]
    return type(x), tuple(_structure(field, arrays) for field in fields)
  if isinstance(x, dict):
    return tuple((k, _structure(v, arrays)) for k, v in sorted(x.items()))
  if isinstance(x, list | tuple):
    return tuple(_structure(v, arrays) for v in x)
  if isinstance(x, jax.Array | np.ndarray):
    arrays.append(x)
    return None
  return x
