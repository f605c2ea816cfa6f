"""Tensors of a checkpoint -> stacked parameters, one tensor in memory beside the model.

Each parameter is one preallocated buffer [L, in, out] into which the layers' tensors are copied,
transposed and converted at once. Buffers start at multiples of 64 bytes, so that JAX on a CPU uses
them as they are. Pages of mapped files are given back after each tensor.
"""

import math
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxlab.io import names
from jaxlab.models import zoo
from jaxlab.nn import weights

PyTree = Any
Shapes = dict[str, tuple[int, ...]]
Place = Callable[[str, Any], Any]  # (path, kernel of host arrays) -> kernel on its devices
ALIGNMENT = 64  # bytes; what XLA's CPU backend asks of a buffer that it does not copy
STRIP = 64  # rows of a transposed copy: a strip's columns stay in the cache, twice as fast
FLOATS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


def parameter_shapes(module: Any) -> Shapes:
  """{path: shape} of a model's dense, stacked parameters, without making any."""
  return {path: x.shape for path, x in weights.leaf_paths(zoo.param_shapes(module)).items()}


def check_names(
  expected: Mapping[str, Any], found: Mapping[str, Any], source: str, *, tied: bool
) -> None:
  """Refuses a checkpoint that lacks a tensor, or has one that nothing would read.

  Raises: ValueError naming the first such tensor and their number.
  """
  if missing := sorted(expected.keys() - found.keys()):
    raise ValueError(
      f"load: {source} has no tensor {missing[0]!r} ({len(missing)} missing). "
      "Fetch the weights again, or correct config.json."
    )
  extra = sorted(n for n in found.keys() - expected.keys() if not is_ignored(n, tied))
  if extra:
    raise ValueError(
      f"load: {source} has {len(extra)} tensors that its config.json does not describe, such as "
      f"{extra[0]!r}. Correct config.json; nothing is left out silently."
    )


def is_ignored(name: str, tied: bool) -> bool:
  """Tensors that no reader needs: recomputed buffers, and the copy of a tied embedding."""
  return (tied and name in names.TIED) or names.IGNORED.fullmatch(name) is not None


def fill(
  shapes: Shapes,
  template: Mapping[str, str],
  read: Callable[[str], np.ndarray],
  *,
  dtype: jax.typing.DTypeLike,
  place: Place,
  source: str,
) -> PyTree:
  """Reads the parameters of `shapes` by their names in `template`.

  Args:
    shapes: {path: shape}, stacked.
    read: a tensor, or part of one, by its checkpoint name; a view of a file is fine.
    dtype: of the parameters.
    place: makes the parameter of a finished buffer.
    source: the checkpoint, for errors.
  Returns: nested dict of what `place` returned.
  Raises: ValueError for a tensor of another shape, or of a dtype that is no plain float.
  """
  params: dict[str, Any] = {}
  for path, shape in shapes.items():
    buffer = aligned_empty(shape, dtype)
    if names.is_stacked(path):
      for i in range(shape[0]):
        name = names.tensor_name(template, path, i)
        _copy(read, name, buffer[i], names.is_transposed(path), source)
    else:
      name = names.tensor_name(template, path)
      _copy(read, name, buffer, names.is_transposed(path), source)
    insert(params, path, place(path, buffer))
  return params


def to_device(path: str, leaf: Any) -> Any:
  """The default `place`: JAX's default device; on a CPU without a copy."""
  del path
  return jax.device_put(leaf)


def insert(params: dict[str, Any], path: str, value: Any) -> None:
  """Sets `params["layers"]["q"]["kernel"]` for 'layers/q/kernel', making the dicts between."""
  *parents, last = path.split("/")
  for parent in parents:
    params = params.setdefault(parent, {})
  params[last] = value


def aligned_empty(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
  """An uninitialised array at a multiple of 64 bytes."""
  dtype = np.dtype(dtype)
  nbytes = math.prod(shape) * dtype.itemsize
  raw = np.empty(nbytes + ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % ALIGNMENT
  return raw[start : start + nbytes].view(dtype).reshape(shape)


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...], source: str) -> None:
  if tuple(found) != tuple(expected):
    raise ValueError(
      f"load: tensor {name!r} of {source} has shape {tuple(found)}, but config.json asks for "
      f"{tuple(expected)}. Fetch the config and the weights of one model."
    )


def _copy(read, name: str, out: np.ndarray, transposed: bool, source: str) -> None:
  tensor = read(name)
  check_shape(name, tensor.shape, out.shape[::-1] if transposed else out.shape, source)
  if tensor.dtype not in FLOATS:
    raise ValueError(
      f"load: tensor {name!r} of {source} is {tensor.dtype}, which is no plain float. Quantised "
      "checkpoints are read as compressed-tensors nvfp4-pack-quantized; convert others to bfloat16."
    )
  if transposed:
    for start in range(0, len(tensor), STRIP):
      rows = slice(start, start + STRIP)
      np.copyto(out[:, rows], tensor[rows].T, casting="unsafe")
  else:
    np.copyto(out, tensor, casting="unsafe")
  release(tensor)


def release(view: np.ndarray) -> None:
  """Gives the mapped pages below `view` back to the system (they are read again when needed).

  Without it a loader holds the model twice: its buffers and the file's pages.
  """
  owner: Any = view
  while owner is not None and not isinstance(owner, mmap.mmap):
    owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
  if owner is None:
    return
  start = view.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
  first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
  last = (start + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
  if last > first:
    owner.madvise(mmap.MADV_DONTNEED, first, last - first)
