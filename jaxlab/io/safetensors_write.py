"""Writing safetensors one tensor at a time; a file is complete or absent.

Order, spacing and padding are the safetensors library's, so that a file of the library, read and
written again, is the same bytes.
"""

import json
import math
import os
import pathlib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from jaxlab.io import files
from jaxlab.io.safetensors_read import DTYPES, INDEX, SINGLE

OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
PT_METADATA = types.MappingProxyType({"format": "pt"})  # what transformers wants to see
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
PRECEDENCE = {tag: i for i, tag in enumerate(DTYPES)}


class TensorSpec(NamedTuple):
  """A tensor still to be made: `make()` returns an array of this shape and dtype, when asked."""

  shape: tuple[int, ...]
  dtype: Any
  make: Callable[[], Any]


Writable = np.ndarray | jax.Array | TensorSpec | tuple


def write_safetensors(
  path: str | os.PathLike[str],
  tensors: Mapping[str, Writable],
  metadata: Mapping[str, str] | None = PT_METADATA,
) -> None:
  """Writes one file, complete or absent, one tensor in memory at a time.

  Args:
    path: where to write.
    tensors: name -> array, or `TensorSpec(shape, dtype, make)` whose `make` is called when its
      bytes are due. float4 arrays (one element a byte) are packed two to a byte.
    metadata: of the header, kept in the order given; None for none.
  Raises: ValueError for a dtype that the format lacks, or an array that is not what its spec says.
  """
  specs = {name: _spec(name, value) for name, value in tensors.items()}
  files.write_atomically(pathlib.Path(path), lambda f: _write(f, specs, metadata))


def write_sharded(
  folder: str | os.PathLike[str],
  tensors: Mapping[str, Writable] | Iterable[tuple[str, Writable]],
  *,
  max_shard_bytes: int = 5_000_000_000,
  weight_map: Mapping[str, str] | None = None,
  metadata: Mapping[str, str] | None = PT_METADATA,
) -> list[pathlib.Path]:
  """Writes `model.safetensors`, or `model-00001-of-0000N.safetensors` with their index.

  All files are written under temporary names before the first gets its own. Where the folder holds
  an older checkpoint of these names, a crash leaves the older one or one that is refused for want
  of an index, never a mixture; the older files are removed at the end.

  Args:
    folder: made if absent.
    tensors: as for `write_safetensors`, or an iterable of pairs, which may yield made arrays: no
      more than a shard of them is held.
    max_shard_bytes: a shard is closed before it would grow beyond this.
    weight_map: name -> file name, to write given shards instead.
    metadata: of every shard.
  Returns: the weight files written.
  Raises: ValueError as `write_safetensors` does, or if weight_map and tensors differ.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  if weight_map is not None:
    groups = _groups_of_map(dict(tensors), weight_map)
  else:
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    groups = _groups_by_size(pairs, max_shard_bytes)
  parts, members, shapes = [], [], {}
  try:
    for group in groups:  # enumerate would hold a shard's arrays while the next one's are made
      parts.append(files.temporary_name(folder / f"shard-{len(parts):05}"))
      with open(parts[-1], "wb") as f:
        _write(f, group, metadata)
        f.flush()
        os.fsync(f.fileno())
      members.append(list(group))
      shapes |= {name: (spec.shape, spec.dtype) for name, spec in group.items()}
      del group  # its arrays, before the next shard's are made
    names = _shard_names(members, weight_map)
    _publish(folder, dict(zip(names, parts, strict=True)), _index(names, members, shapes))
  finally:
    for part in parts:
      part.unlink(missing_ok=True)
  return [folder / name for name in names]


def _spec(name: str, value: Writable) -> TensorSpec:
  """Checked and normalised; an array becomes the spec that returns it."""
  lazy = isinstance(value, tuple)
  spec = TensorSpec(*value) if lazy else TensorSpec(value.shape, value.dtype, lambda: value)
  dtype = np.dtype(spec.dtype)
  if dtype not in TAGS:
    raise ValueError(
      f"write_safetensors: the dtype must be one of {', '.join(DTYPES)}; got {dtype} for "
      f"{name!r}. Convert it first."
    )
  spec = TensorSpec(tuple(int(n) for n in spec.shape), dtype, spec.make)
  if dtype == DTYPES["F4"] and math.prod(spec.shape) % 2:
    raise ValueError(
      f"write_safetensors: a float4 tensor must have an even number of elements; got "
      f"{spec.shape} for {name!r}. Pad it."
    )
  return spec


def _nbytes(spec: TensorSpec) -> int:
  count = math.prod(spec.shape)
  return count // 2 if spec.dtype == DTYPES["F4"] else count * spec.dtype.itemsize


def _write(
  f: BinaryIO, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> None:
  order = sorted(specs, key=lambda name: (-PRECEDENCE[TAGS[specs[name].dtype]], name))
  header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
  at = 0
  for name in order:
    spec = specs[name]
    end = at + _nbytes(spec)
    header[name] = {
        "dtype": TAGS[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, end]
    }  # fmt: skip
    at = end
  text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
  f.write(len(text).to_bytes(8, "little") + text)
  for name in order:
    f.write(_stored_bytes(name, specs[name]))


def _stored_bytes(name: str, spec: TensorSpec) -> memoryview:
  array = np.asarray(spec.make())
  if array.shape != spec.shape or array.dtype != spec.dtype:
    raise ValueError(
      f"write_safetensors: {name!r} must be {spec.dtype}{list(spec.shape)}, as announced; got "
      f"{array.dtype}{list(array.shape)}. Correct its spec."
    )
  flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  if spec.dtype == DTYPES["F4"]:
    flat = flat[0::2] | flat[1::2] << 4
  return memoryview(flat)


def _groups_by_size(
  pairs: Iterable[tuple[str, Writable]], max_shard_bytes: int
) -> Iterator[dict[str, TensorSpec]]:
  group: dict[str, TensorSpec] = {}
  seen: set[str] = set()
  filled = 0
  for name, value in pairs:
    if name in seen:
      raise ValueError(f"write_sharded: names must be unique; got {name!r} twice.")
    seen.add(name)
    spec = _spec(name, value)
    if group and filled + _nbytes(spec) > max_shard_bytes:
      yield group
      group, filled = {}, 0
    group[name] = spec
    filled += _nbytes(spec)
  yield group


def _groups_of_map(
  tensors: Mapping[str, Writable], weight_map: Mapping[str, str]
) -> Iterator[dict[str, TensorSpec]]:
  if tensors.keys() != weight_map.keys():
    odd = sorted(tensors.keys() ^ weight_map.keys())
    raise ValueError(
      f"write_sharded: weight_map must name exactly the tensors; got {len(odd)} that only one of "
      f"them has, such as {odd[0]!r}. Pass None to shard by size."
    )
  for file in sorted(set(weight_map.values())):
    yield {n: _spec(n, tensors[n]) for n in tensors if weight_map[n] == file}


def _shard_names(members: list[list[str]], weight_map: Mapping[str, str] | None) -> list[str]:
  if weight_map is not None:
    return [weight_map[names[0]] for names in members]
  if len(members) == 1:
    return [SINGLE]
  return [f"model-{i + 1:05}-of-{len(members):05}.safetensors" for i in range(len(members))]


def _index(
  names: list[str],
  members: list[list[str]],
  shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
) -> str | None:
  """The index as transformers writes it, or None for a single `model.safetensors`."""
  if names == [SINGLE]:
    return None
  sizes = [_nbytes(TensorSpec(shape, dtype, None)) for shape, dtype in shapes.values()]
  index = {
    "metadata": {
      "total_parameters": sum(math.prod(shape) for shape, _ in shapes.values()),
      "total_size": sum(sizes),
    },
    "weight_map": {n: file for file, held in zip(names, members, strict=True) for n in held},
  }
  return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _publish(folder: pathlib.Path, parts: Mapping[str, pathlib.Path], index: str | None) -> None:
  """Gives the parts their names. A reader sees the old checkpoint, none, or the new one."""
  if index is not None:
    (folder / INDEX).unlink(missing_ok=True)  # or an old index would name new shards
  for name, part in parts.items():
    os.replace(part, folder / name)
  if index is not None:
    files.write_atomically(folder / INDEX, lambda f: f.write(index.encode()))
  for path in folder.iterdir():
    stale = path.name not in parts and not (path.name == INDEX and index is not None)
    if stale and OURS.fullmatch(path.name):
      path.unlink()
