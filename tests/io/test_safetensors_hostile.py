"""safetensors from strangers: hostile files and folders are refused, and nothing else is opened."""

import ast
import json
import os
import pathlib
import pickle
import random
import struct
import sys

import numpy as np
import pytest

from jaxlab import errors
from jaxlab.io import files
from jaxlab.io import safetensors as st


def row(dtype="F32", shape=(2,), offsets=(0, 8)):
  return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# --- hostile files


def raw_file(header, data=b"", length=None):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack("<Q", len(text) if length is None else length) + text + data


SAME = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HOSTILE = {
  "empty": b"",
  "seven bytes": b"\1" * 7,
  "no header": raw_file(b""),
  "length 2^63": raw_file(b"{}", length=2**63),
  "length 2^40": raw_file(b"{}", length=2**40),
  "length beyond the file": raw_file(b"{}", length=1000),
  "not JSON": raw_file(b"{{{{"),
  "a list": raw_file(b"[]"),
  "not UTF-8": raw_file(b'{"\xff":1}'),
  "50,000 deep": raw_file(b"[" * 50000),
  "objects 50,000 deep": raw_file(b'{"a":' * 50000),
  "truncated": raw_file({"a": row()}, b"\0" * 4),
  "extra data": raw_file({"a": row()}, b"\0" * 9),
  "negative offset": raw_file({"a": row(offsets=(-8, 0))}, b"\0" * 8),
  "reversed offsets": raw_file({"a": row(offsets=(8, 0))}, b"\0" * 8),
  "hole": raw_file({"a": row(), "b": row(offsets=(16, 24))}, b"\0" * 24),
  "overlap": raw_file({"a": row(), "b": row(offsets=(4, 12))}, b"\0" * 12),
  "same bytes twice": raw_file({"a": row(), "b": row()}, b"\0" * 8),
  "shape and size differ": raw_file({"a": row(shape=(3,))}, b"\0" * 8),
  "shape overflows": raw_file({"a": row(shape=(2**33, 2**33))}, b"\0" * 8),
  "empty but huge": raw_file({"a": row(shape=(0, 2**62), offsets=(0, 0))}),
  "rank 9": raw_file({"a": row(shape=(1,) * 8 + (2,))}, b"\0" * 8),
  "negative dim": raw_file({"a": row(shape=(-2,))}, b"\0" * 8),
  "float dim": raw_file({"a": row(shape=(2.0,))}, b"\0" * 8),
  "NaN dim": raw_file({"a": row(shape=(float("nan"),))}, b"\0" * 8),
  "huge integer": raw_file({"a": row(shape=(10**23,))}, b"\0" * 8),
  "unknown dtype": raw_file({"a": row("F33")}, b"\0" * 8),
  "odd float4": raw_file({"a": row("F4", (15,))}, b"\0" * 8),
  "metadata no text": raw_file({"__metadata__": {"x": 1}, "a": row()}, b"\0" * 8),
  "name twice": raw_file(b"{" + SAME + b"," + SAME + b"}"),
  "too many tensors": raw_file({f"t{i}": row(shape=(0,), offsets=(0, 0)) for i in range(131073)}),
  "pickle": pickle.dumps({"w": 1}),
  "zip": b"PK\x03\x04" + b"\0" * 64,
  "npy": b"\x93NUMPY\x01\x00" + b"\0" * 64,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_refused_in_one_line(tmp_path, kind):
  (tmp_path / "model.safetensors").write_bytes(HOSTILE[kind])
  with pytest.raises(errors.CorruptFile) as caught:
    st.SafetensorsFolder(tmp_path)
  assert str(caught.value).isprintable()
  assert "model.safetensors" in str(caught.value)


def test_names_are_never_paths(tmp_path):
  header = {"../../etc/passwd": row("U8", (1,), (0, 1)), "": row("U8", (1,), (1, 2))}
  (tmp_path / "model.safetensors").write_bytes(raw_file(header, b"ab"))
  assert st.SafetensorsFolder(tmp_path).read("../../etc/passwd")[0] == ord("a")


def test_a_dtype_that_we_do_not_know_is_named(tmp_path):
  header = {"w": row("F6_E2M3", (4,), (0, 3))}
  (tmp_path / "model.safetensors").write_bytes(raw_file(header, b"abc"))
  folder = st.SafetensorsFolder(tmp_path)
  with pytest.raises(ValueError, match="F6_E2M3"):
    folder.read("w")
  assert bytes(folder.raw("w")) == b"abc"


def test_2000_mutations_are_read_or_refused(tmp_path):
  rows = {"a": row(), "b": row("BF16", (2, 2), (8, 16)), "c": row("F4", (2, 8), (16, 24))}
  rows["d"] = row("U8", (200,), (24, 224))
  rng = random.Random(0)
  raw = raw_file({"__metadata__": {"format": "pt"}} | rows, rng.randbytes(224))
  path, accepted = tmp_path / "model.safetensors", 0
  for _ in range(2000):
    mutant = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
      at = rng.randrange(len(mutant))
      match rng.randrange(4):
        case 0:
          mutant[at] = rng.randrange(256)
        case 1:
          mutant[at] = rng.choice(b'0123456789"{}[],:-')
        case 2:
          del mutant[at : at + rng.randint(1, 16)]
        case 3:
          mutant[at:at] = rng.randbytes(rng.randint(1, 16))
    path.write_bytes(bytes(mutant))
    try:
      folder = st.SafetensorsFolder(path)
      shapes = {n: folder.shape_dtype(n)[0] for n in folder.names()}
    except errors.CorruptFile:
      continue
    accepted += 1
    for name, shape in shapes.items():
      assert folder.read(name).shape == shape
  assert 100 < accepted < 1900  # both branches were reached


# --- hostile folders

FIVE = {f"t{i}": np.full((256,), i, np.float32) for i in range(5)}  # 1 KiB each


def sharded(tmp_path):
  folder = tmp_path / "folder"
  st.write_sharded(folder, FIVE, max_shard_bytes=2500)
  return folder


def edit_index(folder, **changes):
  index = json.loads((folder / st.INDEX).read_text())
  index["weight_map"] |= changes
  (folder / st.INDEX).write_text(json.dumps(index))


def test_a_truncated_shard_is_named_at_any_length(tmp_path):
  folder = sharded(tmp_path)
  shard = folder / "model-00002-of-00003.safetensors"
  raw = shard.read_bytes()
  for length in np.linspace(0, len(raw) - 1, 20).astype(int):
    shard.write_bytes(raw[:length])
    with pytest.raises(errors.CorruptFile, match="model-00002-of-00003.safetensors"):
      st.SafetensorsFolder(folder)


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path):
  folder = sharded(tmp_path)
  edit_index(folder, t9="model-00001-of-00003.safetensors")
  with pytest.raises(errors.CorruptFile, match="'t9'.*in the index but not in the file"):
    st.SafetensorsFolder(folder)
  (folder / "model-00003-of-00003.safetensors").unlink()
  with pytest.raises(errors.CorruptFile, match="model-00003-of-00003.*not in the folder"):
    st.SafetensorsFolder(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_of_another_shape_is_refused(tmp_path, index):
  folder = sharded(tmp_path)
  (folder / st.INDEX).write_text(index)
  with pytest.raises(errors.CorruptFile, match="index.json"):
    st.SafetensorsFolder(folder)


@pytest.mark.parametrize("index", ["[" * 100_000, "1" * 5000, '{"a":', "\x80"])
def test_an_index_that_is_no_json_is_refused(tmp_path, index):
  folder = sharded(tmp_path)
  (folder / st.INDEX).write_bytes(index.encode("latin-1"))
  with pytest.raises(errors.CorruptFile, match="index.json"):
    st.SafetensorsFolder(folder)


recorders: list[list[str]] = []


def record_open(event, args):
  if event == "open" and recorders:
    recorders[0].append(os.fsdecode(args[0]) if isinstance(args[0], str | bytes) else "")


@pytest.fixture(scope="module", autouse=True)
def audit_hook():
  sys.addaudithook(record_open)  # it cannot be removed, so it is silent without a recorder


@pytest.fixture
def opened():
  """Every path that is opened during the test."""
  recorders.append([])
  yield recorders[0]
  recorders.clear()


OUTSIDE = ("../secret", "..", ".", "", "/etc/passwd", "a/../../secret", "..\\secret", "a\0b")


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_shard_outside_the_folder_is_never_opened(tmp_path, opened, name):
  folder = sharded(tmp_path)
  (tmp_path / "secret").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
  edit_index(folder, t0=name)
  opened.clear()
  with pytest.raises(errors.CorruptFile, match="plain"):
    st.SafetensorsFolder(folder)
  assert opened and all(os.path.dirname(p) == str(folder) for p in opened)


def test_a_link_out_of_the_folder_is_never_opened(tmp_path, opened):
  folder = sharded(tmp_path)
  shard = folder / "model-00002-of-00003.safetensors"
  shard.rename(tmp_path / "secret")
  shard.symlink_to(tmp_path / "secret")
  opened.clear()
  with pytest.raises(errors.CorruptFile, match="link"):
    st.SafetensorsFolder(folder)
  assert str(tmp_path / "secret") not in [os.path.realpath(p) for p in opened]
  (tmp_path / "secret").unlink()  # a dangling link is a missing shard
  with pytest.raises(errors.CorruptFile, match="not in the folder"):
    st.SafetensorsFolder(folder)


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path):
  blobs, snapshot = tmp_path / "models--o--n/blobs", tmp_path / "models--o--n/snapshots/abc"
  blobs.mkdir(parents=True)
  st.write_sharded(snapshot, FIVE, max_shard_bytes=2500)
  for i, path in enumerate(sorted(snapshot.iterdir())):
    path.rename(blobs / f"{i}")
    path.symlink_to(f"../../blobs/{i}")
  assert st.SafetensorsFolder(snapshot).read("t4")[0] == 4


def test_what_is_no_regular_file_is_refused(tmp_path):
  os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
  with pytest.raises(errors.CorruptFile, match="regular file"):
    st.SafetensorsFolder(tmp_path)


class Canary:
  """Unpickling one makes a file."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return (open, (self.path, "w"))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npy"])
def test_formats_that_run_code_are_refused_with_advice(tmp_path, suffix):
  canary = str(tmp_path / "canary")
  path = tmp_path / f"pytorch_model{suffix}"
  path.write_bytes(pickle.dumps(Canary(canary)))
  for target in (tmp_path, path):
    with pytest.raises(ValueError, match="safetensors.torch.save_file"):
      st.SafetensorsFolder(target)
  assert not os.path.exists(canary)


def test_no_module_of_io_can_unpickle():
  for path in pathlib.Path(files.__file__).parent.glob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
      names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
      roots = {name.partition(".")[0] for name in names}
      assert not roots & {"torch", "pickle", "cloudpickle", "dill", "joblib"}, path
      assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle"), path


def test_an_empty_a_missing_and_an_ambiguous_folder(tmp_path):
  with pytest.raises(ValueError, match=r"no \.safetensors file"):
    st.SafetensorsFolder(tmp_path)
  with pytest.raises(ValueError, match="must exist"):
    st.SafetensorsFolder(tmp_path / "nowhere")
  folder = sharded(tmp_path)
  (folder / st.INDEX).unlink()
  with pytest.raises(ValueError, match="need an index"):
    st.SafetensorsFolder(folder)
