"""Native code for `jax.ffi`: C++ compiled at first use with the system's compiler, then cached.

So the wheel stays pure Python, and a machine without a compiler loses speed but nothing else: who
asks for a library gets it or a reason. A cached library is named by all that it was made from
(sources, compiler, jaxlib, CPU), appears at once by a rename, and ends with its own digest: one
that was cut short or changed is made again rather than loaded.
"""

import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import time

import jax
import jaxlib
from absl import logging

COMPILERS = ("c++", "g++", "clang++")  # after $CXX
COMPILE_SECONDS = 600  # ten times what two busy cores take
SOURCES = (".cc", ".h")
BASE_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-math-errno", "-Wno-psabi", "-w")


class Unavailable(Exception):
  """No library: the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Unit:
  """A source file and the flags that only it gets, such as its instruction set."""

  source: str
  flags: tuple[str, ...] = ()


@functools.cache  # also so that a reason is logged once
def load(name: str, folder: pathlib.Path, units: tuple[Unit, ...]) -> ctypes.CDLL | str:
  """The library made of `units` in `folder`, or the reason why there is none (logged).

  Args:
    name: begins the name of the file; its `tag` attribute tells builds apart.
    folder: holds them and their headers.
  """
  try:
    path = build(name, folder, units)
    library = ctypes.CDLL(str(path))
  except (Unavailable, OSError) as error:
    reason = " ".join(str(error).split())
    logging.warning("%s: no native kernels (%s); XLA's are used.", name, reason)
    return reason
  library.tag = path.stem
  return library


def build(name: str, folder: pathlib.Path, units: tuple[Unit, ...]) -> pathlib.Path:
  """Path of the library in the cache, made if it is not there. Raises: Unavailable, OSError."""
  if os.name != "posix":
    raise Unavailable(f"native code is for Linux and macOS, not {platform.system()}")
  compiler = find_compiler()
  path = cache_dir() / f"{name}_{_key(compiler, folder, units)}.so"
  if path.is_file():
    if _is_whole(path):
      return path
    logging.warning("%s: %s is damaged; it is compiled again.", name, path)
  logging.info("%s: compiling with %s, once on this machine: %s", name, compiler[0], path)
  start = time.monotonic()
  with _scratch(path.parent) as scratch:
    made = _compile(compiler, folder, units, pathlib.Path(scratch))
    with open(made, "ab") as f:  # what follows the last section of a library is not read
      f.write(hashlib.sha256(made.read_bytes()).digest())
    os.replace(made, path)  # same file system: complete or absent
  logging.info("%s: compiled in %.0f s", name, time.monotonic() - start)
  return path


def cache_dir() -> pathlib.Path:
  """$JAXLAB_CACHE/kernels, else ~/.cache/jaxlab/kernels."""
  named = os.environ.get("JAXLAB_CACHE")
  if named:
    return pathlib.Path(named) / "kernels"
  try:
    return pathlib.Path.home() / ".cache" / "jaxlab" / "kernels"
  except RuntimeError as error:  # a container's user without a name
    raise Unavailable(f"{error}; set JAXLAB_CACHE to a folder that can be written") from error


def find_compiler() -> tuple[str, ...]:
  """The words that call the C++ compiler, its path first. Raises: Unavailable.

  $CXX may be a path, blanks and all, or a command with options, such as `ccache g++`.
  """
  named = os.environ.get("CXX")
  for candidate in (named,) if named else COMPILERS:
    if path := shutil.which(candidate):
      return (path,)
  words = named.split() if named else []
  if words and (path := shutil.which(words[0])):
    return (path, *words[1:])
  tried = named or ", ".join(COMPILERS)
  raise Unavailable(f"no C++ compiler found: tried {tried}; set CXX or install one")


def _scratch(parent: pathlib.Path) -> tempfile.TemporaryDirectory:
  try:
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return tempfile.TemporaryDirectory(prefix=".build-", dir=parent)
  except OSError as error:
    raise Unavailable(f"{error}; set JAXLAB_CACHE to a folder that can be written") from error


def _is_whole(path: pathlib.Path) -> bool:
  data = path.read_bytes()
  return hashlib.sha256(data[:-32]).digest() == data[-32:]


def _key(compiler: tuple[str, ...], folder: pathlib.Path, units: tuple[Unit, ...]) -> str:
  parts = [*compiler, _first_line(compiler), jaxlib.__version__, _cpu(), repr(units)]
  parts += list(BASE_FLAGS)
  for path in sorted(folder.iterdir()):
    if path.suffix in SOURCES:
      parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
  return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _first_line(compiler: tuple[str, ...]) -> str:
  return _run([*compiler, "--version"]).partition("\n")[0]


def _cpu() -> str:
  """The architecture and the CPU's features, as far as the system tells them."""
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.is_file() else []
  features = next((x for x in lines if x.startswith(("flags", "Features"))), "")
  return f"{platform.machine()} {features}"


def _compile(
  compiler: tuple[str, ...], folder: pathlib.Path, units: tuple[Unit, ...], scratch: pathlib.Path
) -> pathlib.Path:
  include = f"-I{jax.ffi.include_dir()}"
  commands, objects = [], []
  for unit in units:
    objects.append(str(scratch / f"{unit.source}.o"))
    source = str(folder / unit.source)
    flags = (*BASE_FLAGS, *unit.flags, include)
    commands.append([*compiler, *flags, "-c", source, "-o", objects[-1]])
  _run_together(commands)
  library = scratch / "library.so"
  _run([*compiler, "-shared", "-o", str(library), *objects])
  return library


def _run_together(commands: list[list[str]]) -> None:
  """One process a core; the units are of about equal size."""
  width = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  for first in range(0, len(commands), width):
    running = [_start(command) for command in commands[first : first + width]]
    try:
      for process in running:
        _finish(process)
    finally:
      for process in running:  # after a failure nobody may write into a folder that goes away
        _stop(process)


def _run(command: list[str]) -> str:
  return _finish(_start(command))


def _start(command: list[str]) -> subprocess.Popen:
  return subprocess.Popen(
    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    text=True, errors="replace",
  )  # fmt: skip


def _finish(process: subprocess.Popen) -> str:
  try:
    output, _ = process.communicate(timeout=COMPILE_SECONDS)
  except subprocess.TimeoutExpired as error:
    _stop(process)
    raise Unavailable(f"{process.args[0]} took more than {COMPILE_SECONDS} s") from error
  if process.returncode:
    lines = [line for line in output.splitlines() if "error" in line.lower()] or [output.strip()]
    raise Unavailable(f"{process.args[0]} failed: {lines[0][:300]}")
  return output


def _stop(process: subprocess.Popen) -> None:
  if process.returncode is None:
    process.kill()
    process.communicate()
