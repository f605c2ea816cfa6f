"""Which compiler a platform needs, whether this interpreter has it, and which one does.

A TPU's compiler is the package libtpu, an NVIDIA GPU's is jax[cuda13]. They live in environments of
their own (`make aot-venv`), so that the default install stays small. Nothing here imports JAX: a
launcher asks before JAX starts and, where needed, starts again in the right interpreter.
"""

import importlib.util
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What pip installs, and the modules of which any one will do.
PACKAGES = {
  "cpu": ("jax", ("jax",)),
  "tpu": ("libtpu", ("libtpu",)),
  "cuda": ("jax[cuda13]", ("jax_cuda13_plugin", "jax_cuda12_plugin")),
}


def missing(platform: str) -> str | None:
  """None if this interpreter can compile for `platform`, else a sentence: how to get there.

  Raises: ValueError unless it is "cpu", "cuda" or "tpu".
  """
  package, modules = _compiler(platform)
  if any(importlib.util.find_spec(name) for name in modules):
    return None
  if (python := other_python(platform)) is not None:
    return f"Use {python}, which has it."
  return f'Run make aot-venv, or pip install "{package}" into an environment of its own.'


def environment(platform: str) -> dict[str, str]:
  """Variables to set before JAX starts in order to compile for a `platform` that is not there.

  Raises: ValueError unless it is "cpu", "cuda" or "tpu".
  """
  _compiler(platform)
  variables = {"JAX_PLATFORMS": "cpu"}  # a device that is there is left to others
  if platform != "cpu":  # JAX cannot read back what it cached for a device that is not there
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  if platform == "cuda":
    variables["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # asks the driver, which may be absent
  if platform == "tpu":
    variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several processes may compile
    variables["TPU_SKIP_MDS_QUERY"] = "1"  # no metadata server: the next two stand for its answers
    variables["TPU_ACCELERATOR_TYPE"] = "v6e-4"
    variables["TPU_WORKER_HOSTNAMES"] = "localhost"
  return variables


def other_python(platform: str) -> pathlib.Path | None:
  """The interpreter that `make aot-venv` made for `platform`; None if there is none but this.

  Raises: ValueError unless it is "cpu", "cuda" or "tpu".
  """
  _compiler(platform)
  venv = ROOT / f".venv-aot-{platform}"
  python = venv / "bin" / "python"
  # Made to its end (the stamp), and not the one that runs: starting it again would never stop.
  made = (venv / ".made").exists() and python.exists()
  return python if made and pathlib.Path(sys.prefix) != venv else None


def _compiler(platform: str) -> tuple[str, tuple[str, ...]]:
  if platform not in PACKAGES:
    raise ValueError(
      f"compilers: the platform must be one of {', '.join(PACKAGES)}; got {platform!r}. "
      "targets.parse(...).device.platform is one."
    )
  return PACKAGES[platform]
