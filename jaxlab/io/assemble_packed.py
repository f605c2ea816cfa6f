"""Parameters with packed kernels: stacked where all layers are alike, else a list of layers.

A leaf has one format, so a model whose layers differ (mixed precision, some layers left dense)
cannot be stacked; `params["layers"]` is then a list, which every model also takes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxlab.io import assemble, names
from jaxlab.io.fp4_layouts import Packed
from jaxlab.nn import weights

PyTree = Any
Kinds = Mapping[str, list]  # {path: `Packed.kind` of each layer, None where that is dense}


def load(
  shapes: assemble.Shapes,
  template: Mapping[str, str],
  kinds: Kinds,
  *,
  read: Callable[[str], np.ndarray],
  read_packed: Callable[[str], Packed],
  dtype: jax.typing.DTypeLike,
  place: assemble.Place,
  source: str,
) -> PyTree:
  """As `assemble.fill`, with packed kernels.

  Args:
    shapes: {path: shape}, stacked.
    kinds: of the kernels that are packed in some layer; one entry for a kernel outside layers.
    read_packed: a kernel by the checkpoint's name of its tensor ('...up_proj.weight').
  Returns: nested dicts; "layers" is a list if a kernel's layers differ.
  """
  same = lambda path: len(set(kinds[path])) == 1
  if not all(map(same, kinds)):
    return _load_list(
      shapes, template, kinds,
      read=read, read_packed=read_packed, dtype=dtype, place=place, source=source,
    )  # fmt: skip
  dense = {path: shape for path, shape in shapes.items() if path not in kinds}
  params = assemble.fill(dense, template, read, dtype=dtype, place=place, source=source)
  for path in kinds:
    layers = range(shapes[path][0]) if names.is_stacked(path) else (None,)
    names_of_layers = [names.tensor_name(template, path, i) for i in layers]
    leaf = _leaf(read_packed, names_of_layers, shapes[path], source)
    assemble.insert(params, path, place(path, leaf))
  return params


def _load_list(shapes, template, kinds, **common) -> PyTree:
  """Every layer is loaded as a model without layers of its own."""
  place = common.pop("place")
  outside = {path: shape for path, shape in shapes.items() if not names.is_stacked(path)}
  params = load(outside, template, _of(kinds, outside), place=place, **common)
  inside = {path: shape for path, shape in shapes.items() if names.is_stacked(path)}
  depth = next(iter(inside.values()))[0]
  params["layers"] = []
  for i in range(depth):
    rest = lambda path: path.removeprefix("layers/")
    own = {rest(path): shape[1:] for path, shape in inside.items()}
    found = {rest(p): [kinds[p][i]] for p in inside if p in kinds and kinds[p][i] is not None}
    params["layers"].append(
      load(
        own,
        {rest(path): names.tensor_name(template, path, i) for path in inside},
        found,
        place=lambda path, leaf, i=i: place(f"layers/{i}/{path}", leaf),
        **common,
      )
    )
  return params


def _of(kinds: Kinds, paths: Mapping[str, Any]) -> Kinds:
  return {path: kind for path, kind in kinds.items() if path in paths}


def _leaf(
  read_packed: Callable[[str], Packed],
  names_of_layers: list[str],
  shape: tuple[int, ...],
  source: str,
) -> weights.FP4Array:
  """One kernel on the default device, stacked if `shape` is; one layer's views at a time."""
  *stack, features_in, features_out = shape
  buffers: dict[str, np.ndarray] = {}
  for i, name in enumerate(names_of_layers):
    packed = read_packed(name)
    assemble.check_shape(name, packed.codes.shape, (features_out, features_in // 2), source)
    for part, value in packed.arrays.items():
      if part not in buffers:
        buffers[part] = assemble.aligned_empty((*stack, *value.shape), value.dtype)
      buffers[part][(i,) * len(stack)] = value
      assemble.release(value)
  static = dict(zip(Packed._fields[5:], packed[5:], strict=True))
  return weights.FP4Array(**{p: jax.device_put(x) for p, x in buffers.items()}, **static)
