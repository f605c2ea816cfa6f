"""Compiling at first use: the cache, what becomes of damage, and life without a compiler."""

import ctypes
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

from pallas_kernels import ffi_build

ROOT = pathlib.Path(__file__).resolve().parents[2]
HAS_COMPILER = any(map(shutil.which, ffi_build.COMPILERS))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
UNITS = (ffi_build.Unit("answer.cc", ("-DANSWER=42",)),)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / "src"
  path.mkdir()
  (path / "answer.cc").write_text('extern "C" int answer() { return ANSWER; }\n')
  return path


def answer(path) -> int:
  return ctypes.CDLL(str(path)).answer()


@needs_compiler
def test_a_library_is_compiled_once_and_works(folder):
  path = ffi_build.build("test", folder, UNITS)
  before = path.stat()
  assert answer(path) == 42
  assert ffi_build.build("test", folder, UNITS) == path
  assert path.stat().st_mtime_ns == before.st_mtime_ns
  assert [p.name for p in path.parent.iterdir()] == [path.name]  # no scratch stays behind
  assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@needs_compiler
def test_other_sources_flags_or_compilers_are_other_libraries(folder, monkeypatch):
  first = ffi_build.build("test", folder, UNITS)
  other_flags = (ffi_build.Unit("answer.cc", ("-DANSWER=43",)),)
  second = ffi_build.build("test", folder, other_flags)
  (folder / "header.h").write_text("// any file of the folder counts\n")
  third = ffi_build.build("test", folder, UNITS)
  monkeypatch.setattr(ffi_build, "_cpu", lambda: "another CPU")
  fourth = ffi_build.build("test", folder, UNITS)
  assert len({first, second, third, fourth}) == 4
  assert (answer(first), answer(second)) == (42, 43)


@needs_compiler
@pytest.mark.parametrize(
  "damage", [lambda data: data[:1000], lambda data: b"", lambda data: data + b"x"]
)
def test_a_damaged_library_is_never_loaded_but_made_again(folder, damage):
  path = ffi_build.build("test", folder, UNITS)
  path.write_bytes(damage(path.read_bytes()))
  assert ffi_build.build("test", folder, UNITS) == path
  assert answer(path) == 42


@needs_compiler
def test_processes_that_build_at_once_get_the_same_library(folder):
  code = f"""
import pathlib
from pallas_kernels import ffi_build
units = (ffi_build.Unit("answer.cc", ("-DANSWER=42",)),)
print(ffi_build.load("test", pathlib.Path({str(folder)!r}), units).answer())
"""
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  start = lambda: subprocess.Popen(
    [sys.executable, "-c", code], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True
  )
  both = [start(), start()]
  assert [process.communicate(timeout=120)[0].strip() for process in both] == ["42", "42"]
  assert len(list(ffi_build.cache_dir().iterdir())) == 1


@needs_compiler
def test_another_jaxlib_is_another_library(folder, monkeypatch):
  first = ffi_build.build("test", folder, UNITS)
  monkeypatch.setattr(ffi_build.jaxlib, "__version__", "0.0.1")
  assert ffi_build.build("test", folder, UNITS) != first


@needs_compiler
def test_cxx_may_have_blanks_in_its_path_or_options_behind_it(folder, monkeypatch, tmp_path):
  tools = tmp_path / "my tools"
  tools.mkdir()
  (tools / "c++").symlink_to(shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"))
  monkeypatch.setenv("CXX", str(tools / "c++"))
  monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "my cache"))
  assert ffi_build.find_compiler() == (str(tools / "c++"),)
  first = ffi_build.build("test", folder, UNITS)
  monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
  monkeypatch.setenv("CXX", "c++ -DOPTION")
  second = ffi_build.build("test", folder, UNITS)
  assert answer(first) == answer(second) == 42 and first != second


@needs_compiler
def test_code_that_does_not_compile_is_a_reason(folder):
  (folder / "answer.cc").write_text("int answer() { return nothing; }\n")
  reason = ffi_build.load("test", folder, UNITS)
  assert isinstance(reason, str) and "failed" in reason and "nothing" in reason
  assert not list(ffi_build.cache_dir().iterdir())


def test_no_compiler_is_a_reason(folder, monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  reason = ffi_build.load("test", folder, UNITS)
  assert reason.startswith("no C++ compiler found: tried c++, g++, clang++")
  monkeypatch.setenv("CXX", "/nowhere/c++")
  with pytest.raises(ffi_build.Unavailable, match="tried /nowhere/c"):
    ffi_build.find_compiler()


@needs_compiler
def test_after_a_failure_no_compiler_goes_on(folder):
  """The first unit fails at once, the second would write into a folder that is gone by then."""
  (folder / "wrong.cc").write_text("#error at once\n")
  units = (ffi_build.Unit("wrong.cc"), *UNITS)
  commands = [["sh", "-c", "exit 1"], ["sleep", "60"]]
  ours = []
  start = ffi_build._start
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ffi_build.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    patch.setattr(ffi_build, "_start", lambda command: ours.append(start(command)) or ours[-1])
    with pytest.raises(ffi_build.Unavailable, match="sh failed"):
      ffi_build._run_together(commands)
  assert [process.returncode for process in ours] == [1, -9]
  assert "at once" in ffi_build.load("test", folder, units)
  assert not list(ffi_build.cache_dir().iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(folder, monkeypatch, tmp_path):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "file"))
  reason = ffi_build.load("test", folder, UNITS)
  assert (
    "Not a directory" in reason and "set JAXLAB_CACHE to a folder that can be written" in reason
  )


@needs_compiler
def test_what_is_in_a_cache_that_cannot_be_written_is_used(folder, monkeypatch):
  path = ffi_build.build("test", folder, UNITS)

  def refuse(*args, **kwargs):
    raise PermissionError("read-only")  # the tests may run as root, whom no mode stops

  monkeypatch.setattr(ffi_build.tempfile, "TemporaryDirectory", refuse)
  assert ffi_build.load("test", folder, UNITS).answer() == 42
  path.unlink()
  with pytest.raises(ffi_build.Unavailable, match="read-only; set JAXLAB_CACHE"):
    ffi_build.build("test", folder, UNITS)


@needs_compiler
def test_a_user_without_a_home_is_told(folder, monkeypatch):
  monkeypatch.delenv("JAXLAB_CACHE")

  def nobody():
    raise RuntimeError("Could not determine home directory.")

  monkeypatch.setattr(pathlib.Path, "home", nobody)
  assert "set JAXLAB_CACHE" in ffi_build.load("test", folder, UNITS)


def test_products_fall_back_to_xla_and_say_so_once(tmp_path):
  code = """
import logging, jax.numpy as jnp
from absl import logging as absl
absl.set_verbosity("info")
from pallas_kernels.fp4_gemm import fp4_matmul
w = (jnp.full((4, 16), 0x22, jnp.uint8), jnp.full((4, 1), 127, jnp.uint8), jnp.float32(1))
for _ in range(2):
  assert (fp4_matmul(jnp.ones((1, 32)), *w) == 32).all()
try:
  fp4_matmul(jnp.ones((1, 32)), *w, implementation="cpu")
except NotImplementedError as error:
  print("refused:", error)
"""
  env = {**os.environ, "CXX": str(tmp_path / "missing"), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True,
    timeout=120, check=True,
  )  # fmt: skip
  assert done.stderr.count("no native kernels (no C++ compiler found") == 1
  assert done.stderr.count("fp4_matmul: 'xla' on cpu") == 1
  assert "refused: fp4_matmul: 'cpu' cannot run here: no C++ compiler found" in done.stdout
