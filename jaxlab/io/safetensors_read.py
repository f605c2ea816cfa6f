"""Reading safetensors checkpoints as views of mapped files.

The safetensors library validates each header (sizes, offsets, holes, overlaps); we map the file and
view its bytes with ml_dtypes, because the library's NumPy reader knows no float8 or float4.
"""

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
from absl import logging
from jaxtyping import Shaped, UInt8

from jaxlab import errors
from jaxlab.io import files

MAX_TENSORS = 1 << 17  # in one file; the largest checkpoints have a few thousand a shard
MAX_RANK = 8
MAX_ELEMENTS = 1 << 56
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# In the library's own order: it stores the last of these first, then by name.
DTYPES = {
  "BOOL": np.dtype(np.bool_),
  "F4": np.dtype(ml_dtypes.float4_e2m1fn),  # two in a byte, the even element in the low bits
  "U8": np.dtype(np.uint8),
  "I8": np.dtype(np.int8),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
  "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
  "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
  "I16": np.dtype(np.int16),
  "U16": np.dtype(np.uint16),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "I32": np.dtype(np.int32),
  "U32": np.dtype(np.uint32),
  "F32": np.dtype(np.float32),
  "C64": np.dtype(np.complex64),
  "F64": np.dtype(np.float64),
  "I64": np.dtype(np.int64),
  "U64": np.dtype(np.uint64),
}


class _Shard(NamedTuple):
  """An open file. Invariant: the library has validated `entries` against the file's length."""

  path: pathlib.Path
  metadata: dict[str, str]
  entries: dict[str, dict[str, Any]]  # name -> {"dtype", "shape", "data_offsets"}, as in the header
  data: np.ndarray  # uint8, what follows the header


class SafetensorsFolder:
  """The tensors of a checkpoint: one file, or shards with their index.

  Every header is read and checked on opening, so a damaged shard is found before an hour of
  loading; data is mapped, and read from disk when an array is used.

  Args:
    path: a `.safetensors` file, or a folder with `model.safetensors`, with an index, or with one
      `.safetensors` file of another name.
  Raises: ValueError if there is nothing to read, or only formats that run code (it says how to
    convert); CorruptFile for a damaged, truncated or missing shard, naming it.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)
    files_of_names = _find(self.path)
    self._shards = {p.name: _open_shard(p) for p in files_of_names.paths}
    self._shard_of = files_of_names.weight_map
    if self._shard_of is None:
      (shard,) = self._shards.values()
      self._shard_of = dict.fromkeys(shard.entries, shard.path.name)
    self._check_index()

  def _check_index(self) -> None:
    for name, file in self._shard_of.items():
      if name not in self._shards[file].entries:
        raise errors.CorruptFile(
          self._shards[file].path, f"tensor {name!r}", "is in the index but not in the file"
        )
    for file, shard in self._shards.items():
      extra = [name for name in shard.entries if self._shard_of.get(name) != file]
      if extra:
        logging.warning(
            "%s: %d tensors are not in the index and are left out, such as %r",
            shard.path, len(extra), extra[0],
        )  # fmt: skip

  @property
  def metadata(self) -> dict[str, str]:
    """The `__metadata__` of the first shard."""
    return dict(next(iter(self._shards.values())).metadata)

  @property
  def weight_map(self) -> dict[str, str]:
    """Tensor name -> file name; `write_sharded` takes it to write the same files again."""
    return dict(self._shard_of)

  def __contains__(self, name: str) -> bool:
    return name in self._shard_of

  def names(self) -> tuple[str, ...]:
    """All tensor names, in the order of their bytes on disk."""
    return tuple(
      name
      for file, shard in self._shards.items()
      for name in sorted(shard.entries, key=lambda n: tuple(shard.entries[n]["data_offsets"]))
      if self._shard_of.get(name) == file
    )

  def shape_dtype(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a tensor, from the header alone."""
    shard, entry = self._entry(name)
    if entry["dtype"] not in DTYPES:
      raise ValueError(
        f"SafetensorsFolder: the dtype must be one of {', '.join(DTYPES)}; got {entry['dtype']} "
        f"for {name!r} in {shard.path}. Read its bytes with raw()."
      )
    return tuple(entry["shape"]), DTYPES[entry["dtype"]]

  def raw(self, name: str) -> UInt8[np.ndarray, " bytes"]:
    """The stored bytes of a tensor, a read-only view of the file."""
    shard, entry = self._entry(name)
    start, end = entry["data_offsets"]
    return shard.data[start:end]

  def read(self, name: str) -> Shaped[np.ndarray, "..."]:
    """A tensor.

    Returns: an array in the stored dtype; a read-only view of the file, except float4, which is
      unpacked to one element a byte, and data that is not aligned, which are copies.
    Raises: KeyError for an unknown name; ValueError for a dtype that we do not know.
    """
    shape, dtype = self.shape_dtype(name)
    stored = self.raw(name)
    if dtype == DTYPES["F4"]:
      return np.stack([stored & 15, stored >> 4], axis=-1).view(dtype).reshape(shape)
    if stored.ctypes.data % dtype.alignment:
      stored = stored.copy()
    return stored.view(dtype).reshape(shape)

  def _entry(self, name: str) -> tuple[_Shard, dict[str, Any]]:
    if name not in self._shard_of:
      raise KeyError(f"{self.path} has no tensor {name!r}")
    shard = self._shards[self._shard_of[name]]
    return shard, shard.entries[name]


class _Found(NamedTuple):
  paths: list[pathlib.Path]
  weight_map: dict[str, str] | None


def _find(path: pathlib.Path) -> _Found:
  """The weight files of a checkpoint, in the order of preference that transformers has."""
  if path.is_file():
    files.refuse_pickles(path)
    return _Found([path], None)
  if not path.is_dir():
    raise ValueError(f"SafetensorsFolder: the path must exist; got {str(path)!r}. Check it.")
  names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
  if SINGLE in names:
    return _Found([_existing(path, SINGLE, path)], None)
  indexes = [n for n in names if n.endswith(".safetensors.index.json")]
  if len(indexes) == 1 or INDEX in indexes:
    return _read_index(path, INDEX if INDEX in indexes else indexes[0])
  shards = [n for n in names if n.endswith(".safetensors")]
  if len(shards) == 1:
    return _Found([_existing(path, shards[0], path)], None)
  if shards:
    raise ValueError(
      f"SafetensorsFolder: several files need an index; got {len(shards)} .safetensors files and "
      f"no {INDEX} in {path}. Fetch the index, or name one file."
    )
  pickles = [n for n in names if n.endswith(files.PICKLE_SUFFIXES)]
  if pickles:
    files.refuse_pickles(path / pickles[0])
  raise ValueError(f"SafetensorsFolder: no .safetensors file in {path}. Check the path.")


def _existing(folder: pathlib.Path, name: str, named_in: pathlib.Path) -> pathlib.Path:
  path = files.member(folder, name, named_in)
  if path is None:
    raise errors.CorruptFile(
      named_in, repr(name), "this shard is not in the folder", "Finish the download."
    )
  files.refuse_pickles(path)
  return path


def _read_index(folder: pathlib.Path, index_name: str) -> _Found:
  index = _existing(folder, index_name, folder)
  weight_map = files.read_json_object(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise errors.CorruptFile(index, "weight_map", "must be an object that names tensors")
  for name, file in weight_map.items():
    if not isinstance(file, str):
      raise errors.CorruptFile(index, f"tensor {name!r}", f"must name a file; got {file!r}")
  paths = [_existing(folder, file, index) for file in sorted(set(weight_map.values()))]
  return _Found(paths, weight_map)


def _open_shard(path: pathlib.Path) -> _Shard:
  try:
    with safetensors.safe_open(path, framework="numpy"):
      pass  # opening validates the header against the file's length
    header, start = _read_header(path)
  except safetensors.SafetensorError as error:
    raise errors.CorruptFile(path, "header", f"is truncated or damaged: {error}") from None
  metadata = header.pop("__metadata__", None) or {}
  if len(header) > MAX_TENSORS:
    raise errors.CorruptFile(path, "header", f"{len(header)} tensors, more than {MAX_TENSORS}")
  for name, entry in header.items():
    # The library bounds a tensor by the file; an empty one, (0, 2**62), would still break NumPy.
    extent = math.prod(max(n, 1) for n in entry["shape"])
    if len(entry["shape"]) > MAX_RANK or extent > MAX_ELEMENTS:
      raise errors.CorruptFile(
        path,
        f"tensor {name!r}",
        f"must have at most {MAX_RANK} dimensions and {MAX_ELEMENTS} elements; "
        f"got {entry['shape']}",
      )
  data = np.asarray(np.memmap(path, np.uint8, mode="r"))[start:]
  return _Shard(path, metadata, header, data)


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
  """The header, which the library has accepted, and where the data starts."""

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
      raise errors.CorruptFile(path, "header", "a name appears twice")
    return dict(pairs)

  with open(path, "rb") as f:
    length = int.from_bytes(f.read(8), "little")
    return json.loads(f.read(length), object_pairs_hook=unique), 8 + length
