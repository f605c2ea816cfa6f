"""Where compilers for absent devices are looked for, and the environment in which they work."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from jaxlab.parallel import compilers

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def no_modules(monkeypatch):
  """An interpreter in which no compiler is installed."""
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def make_venv(root: pathlib.Path, platform: str, finished: bool = True) -> pathlib.Path:
  python = root / f".venv-aot-{platform}" / "bin" / "python"
  python.parent.mkdir(parents=True)
  python.touch()
  if finished:
    (python.parents[1] / ".made").touch()
  return python


def test_this_interpreter_compiles_for_its_cpu():
  assert compilers.missing("cpu") is None
  assert compilers.other_python("cpu") is None


@pytest.mark.parametrize("platform, package", [("tpu", "libtpu"), ("cuda", r"jax\[cuda13\]")])
def test_without_an_environment(platform, package, no_modules, monkeypatch, tmp_path):
  monkeypatch.setattr(compilers, "ROOT", tmp_path)
  assert compilers.other_python(platform) is None
  assert re.search(rf'Run make aot-venv, or pip install "{package}"', compilers.missing(platform))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_another_environment_is_found(platform, no_modules, monkeypatch, tmp_path):
  monkeypatch.setattr(compilers, "ROOT", tmp_path)
  python = make_venv(tmp_path, platform)
  assert compilers.other_python(platform) == python
  assert compilers.missing(platform) == f"Use {python}, which has it."


def test_a_half_made_environment_is_none(monkeypatch, tmp_path):
  monkeypatch.setattr(compilers, "ROOT", tmp_path)
  make_venv(tmp_path, "tpu", finished=False)
  assert compilers.other_python("tpu") is None


def test_the_running_environment_is_no_other(no_modules, monkeypatch, tmp_path):
  """Else a launcher would start itself again for ever where the package was removed."""
  monkeypatch.setattr(compilers, "ROOT", tmp_path)
  python = make_venv(tmp_path, "tpu")
  monkeypatch.setattr(sys, "prefix", str(python.parents[1]))
  assert compilers.other_python("tpu") is None
  assert "make aot-venv" in compilers.missing("tpu")


@pytest.mark.parametrize(
  "platform, module",
  [("tpu", "libtpu"), ("cuda", "jax_cuda13_plugin"), ("cuda", "jax_cuda12_plugin")],
)
def test_an_installed_compiler_is_found(platform, module, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == module or None)
  assert compilers.missing(platform) is None


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_make_aot_sets_the_same_variables(platform):
  text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
  for name in ("NO_CACHE", "NO_TPU"):
    text = text.replace(f"$({name})", re.search(rf"{name} := (.*)", text)[1])
  line = re.search(rf"JAXLAB_AOT={platform} (.*) -m pytest", text)[1]
  assert dict(re.findall(r"([A-Z_]+)=(\S+)", line)) == compilers.environment(platform)


@pytest.mark.parametrize("ask", [compilers.missing, compilers.environment, compilers.other_python])
def test_unknown_platform(ask):
  with pytest.raises(ValueError, match="must be one of cpu, tpu, cuda; got 'rocm'"):
    ask("rocm")


def test_asking_does_not_start_jax():
  """A launcher sets the environment in which JAX starts by what it learns here."""
  code = "import sys; from jaxlab.parallel import compilers, targets; targets.parse('v5e:4x4'); "
  code += "compilers.missing('tpu'); compilers.environment('tpu'); print('jax' in sys.modules)"
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  assert done.stdout.strip() == "False", done.stderr
