"""Folders that appear whole or not at all: what a killed run left, a full disk, foreign locks."""

import errno
import os

import pytest

from jaxlab.io import export, files


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_run_left_goes_and_what_is_in_use_stays(tmp_path):
  left = tmp_path / ".out.99.part"
  left.mkdir()
  (left / "model.safetensors").write_bytes(b"half")
  other = tmp_path / ".other.99.part"
  other.mkdir()
  with files.temporary_folder(tmp_path / "out") as mine:
    assert names(tmp_path) == [".other.99.part", mine.name]
    mine = mine.rename(tmp_path / ".out.77.part")  # as another process would have it
    with files.temporary_folder(tmp_path / "out") as second:
      assert mine.is_dir() and second.is_dir()
    assert names(tmp_path) == [".other.99.part", ".out.77.part"]


def test_without_locks_nothing_is_taken_away(tmp_path, monkeypatch):
  def unsupported(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(files.fcntl, "flock", unsupported)
  (tmp_path / ".out.99.part").mkdir()
  with export.new_folder(tmp_path / "out") as part:
    (part / "a").write_text("a")
  assert names(tmp_path) == [".out.99.part", "out"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  with pytest.raises(OSError, match=f"No space left.*{tmp_path / 'out'}"):
    with export.new_folder(tmp_path / "out"):
      full()
  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match=f"No space left.*{tmp_path / 'file'}"):
    files.write_atomically(tmp_path / "file", lambda f: f.write(b"x"))
  assert names(tmp_path) == []
