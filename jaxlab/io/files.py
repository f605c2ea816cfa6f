"""Opening files of a folder that a stranger wrote, and writing files that are complete or absent.

Every file inside a model folder is opened through `member`, so nothing outside the folder is
reached by a crafted name or link; JSON goes through `read_json`, which bounds size and depth.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from jaxlab import errors

MAX_JSON_BYTES = 64 << 20  # the index of a 100,000-tensor checkpoint is about 10 MB
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npy")
# A zip (torch.save), a pickle of protocol 2 to 5, a NumPy array (which may hold a pickle).
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x93NUMPY")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONVERT = (
  "Convert it once, on a machine where running its code does no harm: "
  "`safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')`."
)


def member(
  folder: pathlib.Path, name: str, named_in: pathlib.Path | None = None
) -> pathlib.Path | None:
  """The path of `name` inside `folder`, or None where there is no such file.

  Args:
    folder: the folder.
    name: a plain file name, possibly read from a file of the folder.
    named_in: the file that gave the name, for the error.
  Returns: a path to a regular file; a link only where it is one of the Hugging Face cache, that
    is from `snapshots/<revision>/` into `blobs/` beside `snapshots`.
  Raises: CorruptFile if the name has a path in it, or leads to something else.
  """
  plain = pathlib.PurePosixPath(name).name
  if name != plain or name in ("", "..") or "\0" in name or "\\" in name:
    raise errors.CorruptFile(
      named_in or folder,
      repr(name),
      "a file name must be plain, without a path",
      "Do not use this folder unless you trust its origin.",
    )
  path = folder / name
  if path.is_symlink() and path.exists():
    blobs = _blobs_of(folder)
    if blobs is None or path.resolve().parent != blobs:
      raise errors.CorruptFile(
        path,
        "symbolic link",
        "links are followed only inside a Hugging Face cache",
        "Replace the link by the file.",
      )
  if not path.exists():
    return None
  if not path.is_file():
    raise errors.CorruptFile(path, "file", "must be a regular file", "Remove it.")
  return path


def _blobs_of(folder: pathlib.Path) -> pathlib.Path | None:
  """`<repo>/blobs` for a folder at or below `<repo>/snapshots/<revision>`, else None."""
  for parent in [folder.resolve(), *folder.resolve().parents]:
    if parent.parent.name == "snapshots":
      return parent.parent.parent / "blobs"
  return None


def read_json(path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
  """The parsed JSON of a file.

  Raises: CorruptFile if it is larger than max_bytes, not UTF-8, not JSON, or nested too deeply.
  """
  text = read_text(path, max_bytes=max_bytes)
  try:
    return json.loads(text)
  except RecursionError:
    raise errors.CorruptFile(path, "JSON", "nests too deeply") from None
  except ValueError as error:  # JSONDecodeError, or an integer with thousands of digits
    raise errors.CorruptFile(path, "JSON", f"does not parse: {error}") from None


def read_json_object(path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
  """`read_json`, for a file that must hold one object."""
  value = read_json(path, max_bytes=max_bytes)
  if not isinstance(value, dict):
    raise errors.CorruptFile(path, "JSON", f"must be an object; got {type(value).__name__}")
  return value


def read_text(path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES) -> str:
  """The UTF-8 text of a file. Raises: CorruptFile if it is too large or not UTF-8."""
  size = path.stat().st_size
  if size > max_bytes:
    raise errors.CorruptFile(path, "size", f"must be at most {max_bytes} bytes; got {size}")
  try:
    return path.read_bytes().decode()
  except UnicodeDecodeError as error:
    raise errors.CorruptFile(path, f"byte {error.start}", "is not UTF-8") from None


def refuse_pickles(path: pathlib.Path) -> None:
  """Raises ValueError if the file may hold a pickle: loading one runs the code inside it."""
  if path.suffix in PICKLE_SUFFIXES:
    raise ValueError(
      f"{path}: weights are read from .safetensors and .gguf only; got {path.suffix!r}, a format "
      f"that can run code. {CONVERT}"
    )
  with open(path, "rb") as f:
    start = f.read(9)
  # A safetensors file begins with the length of its header, which may look like a pickle's first
  # bytes (640 is 0x80 0x02); the brace that opens the header cannot be there in a pickle that runs.
  is_safetensors = path.suffix == ".safetensors" and start[8:] == b"{"
  if start.startswith(PICKLE_STARTS) and not is_safetensors:
    raise errors.CorruptFile(
      path,
      "byte 0",
      f"is a {path.suffix!r} file by name but starts like a pickle or a zip",
      CONVERT,
    )


def write_atomically(path: pathlib.Path, write: Callable[[BinaryIO], None]) -> None:
  """Calls `write(file)` on a temporary neighbour and renames it: complete or absent."""
  part = temporary_name(path)
  try:
    with open(part, "wb") as f:
      write(f)
      f.flush()
      os.fsync(f.fileno())  # else a power cut can leave the new name with no data
    os.replace(part, path)
  except OSError as error:
    raise named(error, path) from None
  finally:
    part.unlink(missing_ok=True)


def named(error: OSError, path: pathlib.Path) -> OSError:
  """The error of a full disk with what was written there: it does not say so itself."""
  if error.errno not in DISK_FULL or error.filename:
    return error
  return type(error)(error.errno, error.strerror, str(path))


def temporary_name(path: pathlib.Path) -> pathlib.Path:
  """A hidden name beside `path` that no other process picks."""
  return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def temporary_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A hidden folder beside `path`, gone at the end unless it was renamed.

  It is locked while its process lives. What killed processes left there, gigabytes perhaps, has
  lost its lock, and goes too.
  """
  for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
    if (lock := _lock(left)) is not None:
      shutil.rmtree(left, ignore_errors=True)
      os.close(lock)
  part = temporary_name(path)
  part.mkdir()
  lock = _lock(part)
  try:
    yield part
  finally:
    shutil.rmtree(part, ignore_errors=True)
    if lock is not None:
      os.close(lock)


def _lock(folder: pathlib.Path) -> int | None:
  """The descriptor that holds it; None where another process has it, or there are no such locks."""
  descriptor = None
  try:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    if descriptor is not None:
      os.close(descriptor)
    return None
  return descriptor
