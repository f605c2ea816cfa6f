"""One setting for all tests: CPU, eight virtual devices, strict ranks, checked shapes.

The environment is set before JAX is imported and is inherited by the processes that tests start.
"""

import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent

if os.environ.get("JAXLAB_AOT") != "cuda":  # whose compiler hides while the platform is named
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
  os.environ["XLA_FLAGS"] = flags.strip()
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Compiled programs outlive the run: a second `make test` spends little time in the compiler.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# Shape annotations are checked in tests only; it must come before anything of ours is imported.
jaxtyping.install_import_hook(["jaxlab", "pallas_kernels"], "beartype.beartype")

# A failure found once is found again: no random seed, no database, no clock.
hypothesis.settings.register_profile(
  "fixed", derandomize=True, database=None, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("fixed")


@pytest.fixture
def workdir(tmp_path) -> pathlib.Path:
  """A --workdir that does not exist yet."""
  return tmp_path / "run"


@pytest.fixture
def strict_dtypes():
  """No silent promotion of dtypes: for the tests of nn, attention, quant and kernels."""
  import jax

  with jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture(scope="module")
def quick_compilation():
  """Half the time in the compiler, which partitions the same. `make test` sets it for all tests."""
  yield from _optimizations(disabled=True)


@pytest.fixture
def full_compilation():
  """For what is said of a compiled program: its text, its memory."""
  yield from _optimizations(disabled=False)


def _optimizations(*, disabled: bool):
  import jax

  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", disabled)
  yield
  jax.config.update("jax_disable_most_optimizations", before)
