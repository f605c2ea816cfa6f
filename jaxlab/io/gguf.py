"""Reading GGUF files: a header reader whose work is bounded by the file's own length.

Layout (little-endian): "GGUF", version u32, tensor count u64, key count u64; keys as
(name, type u32, value); tensors as (name, rank u32, dims u64 x rank, type u32, offset u64); then,
from the next multiple of `general.alignment` (32), the tensors' data at their offsets.
A count is compared with the bytes left before anything is built from it, so a file of n bytes
costs O(n) work and memory; whatever is wrong with it is a `CorruptFile`.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package gives only the
block dequantisers: its own reader loops without end on a 100-byte file.
"""

import dataclasses
import math
import mmap
import os
import pathlib
import struct
from typing import Any

import gguf.quants
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from jaxlab import errors

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_RANK = 4
MAX_NESTING = 3  # arrays of arrays of arrays; real files use 1
MIN_KEY_BYTES = 8 + 4 + 1  # an empty name, a type, one byte
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name and one dim
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
SCALARS = {  # value type -> struct format
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
PLAIN = {  # types that hold one NumPy number an element
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
  """A tensor as stored.

  Invariant: len(raw) = prod(shape) / block elements * block bytes of its type, and the last
  dimension is a multiple of the block.

  Attributes:
    shape: row-major, the reverse of the file's order: a weight is (out, in).
    type: ggml's name of the storage, such as "Q4_1" or "F32".
    raw: its bytes, a view of the mapped file.
  """

  shape: tuple[int, ...]
  type: str
  raw: memoryview


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """A GGUF file: its metadata, and its tensors as views of the mapped file."""

  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, GGUFTensor]

  def dequantize(self, name: str, dtype: DTypeLike = np.float32) -> Shaped[np.ndarray, "..."]:
    """The values of a tensor.

    Args:
      name: a key of `tensors`.
      dtype: of the result; block formats are decoded in float32 first.
    Returns: an array of the tensor's shape; a read-only view of the file where `dtype` is what
      the file holds.
    Raises: KeyError for an unknown name; ValueError for a type without a dequantiser.
    """
    tensor = self.tensors[name]
    if tensor.type in PLAIN:
      stored = np.frombuffer(tensor.raw, PLAIN[tensor.type]).reshape(tensor.shape)
      return stored.astype(dtype, copy=False)
    kind = gguf.GGMLQuantizationType[tensor.type]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = tensor.shape[-1] // block * block_bytes
    rows = np.frombuffer(tensor.raw, np.uint8).reshape(*tensor.shape[:-1], row_bytes)
    try:
      values = gguf.quants.dequantize(rows, kind)
    except NotImplementedError:
      raise ValueError(
        f"GGUFFile.dequantize: the type must have a dequantiser; got {tensor.type} for {name!r} "
        f"in {self.path}. Convert the file to Q8_0 or F16."
      ) from None
    return values.astype(dtype, copy=False)


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
  """Reads the header of a GGUF file and maps its data.

  Args:
    path: a regular file.
  Returns: metadata as Python values (arrays are lists), tensors as views: nothing is copied.
  Raises: ValueError if there is no such file; CorruptFile if it breaks a rule of the format.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"read_gguf: the file must exist; got {str(path)!r}. Check the path.")
  with open(path, "rb") as f:
    size = os.fstat(f.fileno()).st_size
    if size < 24:
      raise errors.CorruptFile(path, "header", f"needs 24 bytes, the file has {size}")
    data = memoryview(mmap.mmap(f.fileno(), size, access=mmap.ACCESS_READ))
  cursor = _Cursor(path, data)
  tensor_count, key_count = _read_counts(cursor)
  metadata = _read_metadata(cursor, key_count)
  alignment = _alignment(path, metadata)
  places = _read_tensor_table(cursor, tensor_count)
  start = math.ceil(cursor.at / alignment) * alignment
  _check_layout(path, places, start, alignment, len(data))
  tensors = {
    name: GGUFTensor(p.shape, p.type, data[start + p.offset : start + p.offset + p.nbytes])
    for name, p in places.items()
  }
  return GGUFFile(path, metadata, tensors)


class _Cursor:
  """Takes values from the front of the file, each only if the bytes left allow it."""

  def __init__(self, path: pathlib.Path, data: memoryview):
    self.path = path
    self.data = data
    self.at = 0

  @property
  def left(self) -> int:
    return len(self.data) - self.at

  def fail(self, what: str, rule: str) -> errors.CorruptFile:
    return errors.CorruptFile(self.path, f"{what} at byte {self.at}", rule)

  def take(self, nbytes: int, what: str) -> memoryview:
    if nbytes > self.left:
      raise self.fail(what, f"needs {nbytes} bytes, the file has {self.left} left")
    self.at += nbytes
    return self.data[self.at - nbytes : self.at]

  def number(self, fmt: str, what: str) -> Any:
    return struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt), what))[0]

  def count(self, smallest: int, what: str) -> int:
    """A u64 count of entries that take at least `smallest` bytes each."""
    n = self.number("Q", what)
    if n * smallest > self.left:
      raise self.fail(what, f"says {n} entries, more than the {self.left} bytes left can hold")
    return n

  def text(self, what: str) -> str:
    raw = self.take(self.count(1, f"length of {what}"), what)
    try:
      return bytes(raw).decode()
    except UnicodeDecodeError:
      raise self.fail(what, "is not UTF-8") from None

  def value(self, kind: int, what: str, nesting: int = 0) -> Any:
    if kind in SCALARS:
      return self.number(SCALARS[kind], what)
    if kind == STRING:
      return self.text(what)
    if kind != ARRAY:
      raise self.fail(what, f"has the unknown value type {kind}")
    if nesting == MAX_NESTING:
      raise self.fail(what, f"nests arrays more than {MAX_NESTING} deep")
    element = self.number("I", what)
    fmt = SCALARS.get(element)
    # An inner array takes at least 12 bytes: a type and a count. A string takes a length.
    smallest = struct.calcsize("<" + fmt) if fmt else 8 if element == STRING else 12
    n = self.count(smallest, what)
    if fmt:
      return list(struct.unpack(f"<{n}{fmt}", self.take(n * smallest, what)))
    if element == STRING:
      return self.texts(n, what)
    return [self.value(element, what, nesting + 1) for _ in range(n)]

  def texts(self, n: int, what: str) -> list[str]:
    """n strings; the loop is flat because a vocabulary has 100,000 of them."""
    length_at = struct.Struct("<Q").unpack_from
    found, data, at, end = [], self.data, self.at, len(self.data)
    for _ in range(n):
      # A length that the file cannot hold reads as the bytes left, which `take` then refuses.
      (nbytes,) = length_at(data, at) if at + 8 <= end else (end,)
      if at + 8 + nbytes > end:
        self.at = at
        self.take(8 + nbytes, what)
      try:
        found.append(str(data[at + 8 : at + 8 + nbytes], "utf-8"))
      except UnicodeDecodeError:
        self.at = at
        raise self.fail(what, "is not UTF-8") from None
      at += 8 + nbytes
    self.at = at
    return found


@dataclasses.dataclass(frozen=True)
class _Place:
  """A row of the tensor table; `offset` counts from the start of the data."""

  shape: tuple[int, ...]
  type: str
  offset: int
  nbytes: int


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
  if bytes(cursor.take(4, "magic")) != MAGIC:
    raise errors.CorruptFile(
      cursor.path, "byte 0", "is not a GGUF file: it must start with 'GGUF'", "Check the path."
    )
  version = cursor.number("I", "version")
  if version not in VERSIONS:
    raise errors.CorruptFile(
        cursor.path, "version", f"must be one of {VERSIONS}, little-endian; got {version}",
        "Convert the file with a current llama.cpp.",
    )  # fmt: skip
  tensor_count = cursor.number("Q", "tensor count")
  key_count = cursor.number("Q", "key count")
  if key_count * MIN_KEY_BYTES + tensor_count * MIN_TENSOR_BYTES > cursor.left:
    raise cursor.fail(
      "counts", f"{tensor_count} tensors and {key_count} keys do not fit in {cursor.left} bytes"
    )
  return tensor_count, key_count


def _read_metadata(cursor: _Cursor, key_count: int) -> dict[str, Any]:
  metadata = {}
  for i in range(key_count):
    key = cursor.text(f"name of key {i}")
    if key in metadata:
      raise cursor.fail(f"key {key!r}", "appears twice")
    metadata[key] = cursor.value(cursor.number("I", f"type of {key!r}"), f"key {key!r}")
  return metadata


def _alignment(path: pathlib.Path, metadata: dict[str, Any]) -> int:
  value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
  if not isinstance(value, int) or not 8 <= value <= 1 << 16 or value & (value - 1):
    raise errors.CorruptFile(
      path, "key 'general.alignment'", f"must be a power of two from 8 to 65536; got {value!r}"
    )
  return value


def _read_tensor_table(cursor: _Cursor, tensor_count: int) -> dict[str, _Place]:
  places = {}
  for i in range(tensor_count):
    name = cursor.text(f"name of tensor {i}")
    what = f"tensor {name!r}"
    if name in places:
      raise cursor.fail(what, "appears twice")
    rank = cursor.number("I", what)
    if not 1 <= rank <= MAX_RANK:
      raise cursor.fail(what, f"must have 1 to {MAX_RANK} dimensions; got {rank}")
    dims = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, what))
    type_number = cursor.number("I", what)
    offset = cursor.number("Q", what)
    try:
      kind = gguf.GGMLQuantizationType(type_number)
    except ValueError:
      raise cursor.fail(what, f"has the unknown type {type_number}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if 0 in dims or dims[0] % block:
      raise cursor.fail(what, f"dims {dims} must be positive, the first a multiple of {block}")
    nbytes = math.prod(dims) // block * block_bytes  # Python integers do not overflow
    places[name] = _Place(dims[::-1], kind.name, offset, nbytes)
  return places


def _check_layout(
  path: pathlib.Path, places: dict[str, _Place], start: int, alignment: int, size: int
) -> None:
  """Every tensor aligned, inside the file, and on bytes of its own."""
  end_before, name_before = 0, ""
  for name, place in sorted(places.items(), key=lambda item: item[1].offset):
    what = f"tensor {name!r}"
    if place.offset % alignment:
      raise errors.CorruptFile(
        path, what, f"offset {place.offset} must be a multiple of {alignment}"
      )
    if place.offset < end_before:
      raise errors.CorruptFile(path, what, f"overlaps with tensor {name_before!r}")
    end_before, name_before = place.offset + place.nbytes, name
    if start + end_before > size:
      raise errors.CorruptFile(
        path, what, f"ends at byte {start + end_before}, the file has {size}: it is truncated"
      )
