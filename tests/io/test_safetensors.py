"""safetensors: the library's own bytes, float8 and float4 too; complete or absent on disk."""

import json
import os
import struct
import weakref

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxlab.io import safetensors as st

FLOATS_8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
NUMBERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
NUMBERS += ("float16", "bfloat16", "float32", "float64", "complex64", *FLOATS_8)


def array(dtype, shape=(3, 4), seed=0):
  """Random bytes seen as `dtype`; bool only as 0 and 1."""
  dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
  rng = np.random.default_rng(seed)
  if dtype == np.bool_:
    return rng.integers(0, 2, shape).astype(bool)
  raw = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
  return np.frombuffer(raw, dtype).reshape(shape)


def library_bytes(arrays, metadata=None):
  """The file as the safetensors library writes it. "f4:" names hold packed float4 bytes."""
  specs = {
    name: safetensors.TensorSpec(
      dtype="float4_e2m1fn_x2" if name.startswith("f4:") else a.dtype.name,
      shape=a.shape,
      data_ptr=a.ctypes.data,
      data_len=a.nbytes,
    )
    for name, a in arrays.items()
  }
  return bytes(safetensors.serialize(specs, metadata))


def assert_same(got, want):
  assert got.dtype == want.dtype
  assert got.shape == want.shape
  assert got.tobytes() == want.tobytes()


# --- reading what the library wrote


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_dtype_is_read(tmp_path, dtype):
  want = array(dtype)
  path = tmp_path / "model.safetensors"
  path.write_bytes(library_bytes({"w": want, "scalar": array(dtype, ())}))
  folder = st.SafetensorsFolder(tmp_path)
  assert folder.shape_dtype("w") == ((3, 4), want.dtype)
  assert_same(folder.read("w"), want)
  assert_same(folder.read("scalar"), array(dtype, ()))
  assert not folder.read("w").flags.writeable  # a view of the file


def test_float4_by_hand(tmp_path):
  # Codes 1, 2, 3, 15 are 0.5, 1, 1.5, -6; the even element is in the low bits.
  packed = np.array([[0x21, 0xF3]], np.uint8)
  (tmp_path / "model.safetensors").write_bytes(library_bytes({"f4:w": packed}))
  folder = st.SafetensorsFolder(tmp_path)
  assert folder.shape_dtype("f4:w") == ((1, 4), np.dtype(ml_dtypes.float4_e2m1fn))
  np.testing.assert_array_equal(folder.read("f4:w").astype(np.float32), [[0.5, 1.0, 1.5, -6.0]])
  np.testing.assert_array_equal(folder.raw("f4:w"), [0x21, 0xF3])


def test_unaligned_data_is_read(tmp_path):
  header = {
    "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    "b": {"dtype": "BF16", "shape": [2], "data_offsets": [3, 7]},
  }
  want = np.array([1.5, -3.0], ml_dtypes.bfloat16)
  raw = json.dumps(header).encode()
  (tmp_path / "model.safetensors").write_bytes(
    struct.pack("<Q", len(raw)) + raw + b"abc" + want.tobytes()
  )
  assert_same(st.SafetensorsFolder(tmp_path).read("b"), want)


def test_names_come_in_the_order_of_the_file(tmp_path):
  arrays = {"z": array("float32"), "a": array("int8"), "m": array("float32")}
  (tmp_path / "odd.safetensors").write_bytes(library_bytes(arrays, {"format": "pt"}))
  for path in (tmp_path, tmp_path / "odd.safetensors"):
    folder = st.SafetensorsFolder(path)
    assert folder.names() == ("m", "z", "a")
    assert folder.metadata == {"format": "pt"}
    assert folder.weight_map["a"] == "odd.safetensors"
  with pytest.raises(KeyError, match="nope"):
    folder.read("nope")


# --- writing what the library would write


def all_dtypes():
  """Tensors that the library can write, under names that sort unlike their dtypes."""
  arrays = {f"{i:02}.{d}": array(d, seed=i) for i, d in enumerate(NUMBERS)}
  arrays |= {"é\n\x1f\"'": array("float32"), "empty": np.zeros((0, 3), np.float32)}
  return arrays | {"scalar": array("bfloat16", ()), "f4:w": array("uint8", (2, 8))}


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None, {"one": "é"}])
def test_read_and_written_again_is_the_same_file(tmp_path, metadata):
  want = library_bytes(all_dtypes(), metadata)
  (tmp_path / "model.safetensors").write_bytes(want)
  folder = st.SafetensorsFolder(tmp_path)
  arrays = {n: folder.read(n) for n in reversed(folder.names())}
  st.write_safetensors(tmp_path / "again.safetensors", arrays, folder.metadata or None)
  assert (tmp_path / "again.safetensors").read_bytes() == want
  assert len(list(tmp_path.iterdir())) == 2  # no temporary file is left


def test_the_library_reads_what_we_write(tmp_path):
  arrays = {"w": array("float32"), "v": array("int64", (5,))}
  st.write_safetensors(tmp_path / "x.safetensors", arrays)
  for name, got in safetensors.numpy.load_file(tmp_path / "x.safetensors").items():
    assert_same(got, arrays[name])


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
  made = []

  class Array(np.ndarray):
    """An array that a weak reference can watch."""

  def make(i):
    assert all(ref() is None for ref in made)  # those before are written and gone
    result = np.full((1000,), i, np.float32).view(Array)
    made.append(weakref.ref(result))
    return result

  specs = {f"t{i}": st.TensorSpec((1000,), np.float32, lambda i=i: make(i)) for i in range(5)}
  st.write_safetensors(tmp_path / "model.safetensors", specs)
  assert len(made) == 5
  assert st.SafetensorsFolder(tmp_path).read("t3")[0] == 3


def test_not_contiguous_and_plain_tuples(tmp_path):
  want = np.arange(6.0).reshape(2, 3).T
  st.write_safetensors(tmp_path / "model.safetensors", {"w": ((3, 2), "float64", lambda: want)})
  assert_same(st.SafetensorsFolder(tmp_path).read("w"), np.ascontiguousarray(want))


def test_a_failing_write_leaves_the_old_file(tmp_path):
  path = tmp_path / "model.safetensors"
  st.write_safetensors(path, {"w": array("float32")})
  before = path.read_bytes()
  with pytest.raises(ValueError, match=r"float32\[3\], as announced; got float32\[4\]"):
    wrong = st.TensorSpec((3,), np.float32, lambda: np.zeros(4, np.float32))
    st.write_safetensors(path, {"a": array("float64"), "w": wrong})
  assert path.read_bytes() == before
  assert os.listdir(tmp_path) == ["model.safetensors"]


def test_what_the_format_lacks_is_refused(tmp_path):
  with pytest.raises(ValueError, match="complex128"):
    st.write_safetensors(tmp_path / "x.safetensors", {"w": np.zeros(2, np.complex128)})
  with pytest.raises(ValueError, match="even number"):
    st.write_safetensors(tmp_path / "x.safetensors", {"w": np.zeros(3, ml_dtypes.float4_e2m1fn)})


# --- shards


def five():
  return {f"t{i}": np.full((256,), i, np.float32) for i in range(5)}  # 1 KiB each


def shard_names(folder):
  return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("as_iterator", [False, True])
def test_shards_are_filled_in_order(tmp_path, as_iterator):
  tensors = iter(five().items()) if as_iterator else five()
  paths = st.write_sharded(tmp_path, tensors, max_shard_bytes=2500)
  assert [p.name for p in paths] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
  index = json.loads((tmp_path / st.INDEX).read_text())
  assert index["metadata"] == {"total_parameters": 1280, "total_size": 5120}
  assert index["weight_map"]["t2"] == "model-00002-of-00003.safetensors"
  folder = st.SafetensorsFolder(tmp_path)
  assert folder.names() == ("t0", "t1", "t2", "t3", "t4")
  assert folder.weight_map == index["weight_map"]
  for name, want in five().items():
    assert_same(folder.read(name), want)


def test_what_fits_is_one_file_without_an_index(tmp_path):
  st.write_sharded(tmp_path / "new" / "folder", five())
  assert shard_names(tmp_path / "new" / "folder") == ["model.safetensors"]


def test_a_weight_map_gives_the_same_files_again(tmp_path):
  st.write_sharded(tmp_path / "a", five(), max_shard_bytes=1500)
  old = st.SafetensorsFolder(tmp_path / "a")
  again = {n: old.read(n) for n in reversed(old.names())}
  st.write_sharded(tmp_path / "b", again, weight_map=old.weight_map)
  for name in shard_names(tmp_path / "a"):
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
  with pytest.raises(ValueError, match="t4"):
    again.pop("t4")
    st.write_sharded(tmp_path / "c", again, weight_map=old.weight_map)
  assert shard_names(tmp_path / "c") == []


@pytest.mark.parametrize("first, second", [(1500, 9999), (9999, 1500), (1500, 2500)])
def test_an_older_checkpoint_is_replaced(tmp_path, first, second):
  st.write_sharded(tmp_path, five(), max_shard_bytes=first)
  (tmp_path / "adapter.safetensors").write_bytes(b"not ours")
  new = {n: a + 10 for n, a in five().items()}
  st.write_sharded(tmp_path, new, max_shard_bytes=second)
  folder = st.SafetensorsFolder(tmp_path)
  assert folder.read("t3")[0] == 13
  assert set(shard_names(tmp_path)) - {st.INDEX} == {
    "adapter.safetensors",
    *folder.weight_map.values(),
  }


@pytest.mark.parametrize("first, second", [(1500, 9999), (9999, 1500), (1500, 1500)])
@pytest.mark.parametrize("crash_at", range(6))
def test_a_crash_never_leaves_a_mixture(tmp_path, monkeypatch, first, second, crash_at):
  st.write_sharded(tmp_path, five(), max_shard_bytes=first)
  calls = []

  def replace(source, target, real=os.replace):
    if len(calls) == crash_at:
      raise KeyboardInterrupt
    calls.append(target)
    real(source, target)

  monkeypatch.setattr(os, "replace", replace)
  try:
    st.write_sharded(tmp_path, {n: a + 10 for n, a in five().items()}, max_shard_bytes=second)
  except KeyboardInterrupt:
    pass
  try:
    folder = st.SafetensorsFolder(tmp_path)
  except ValueError:
    return  # refused
  values = {int(folder.read(f"t{i}")[0]) - i for i in range(5)}
  assert values in ({0}, {10})


# --- parity


@pytest.mark.parity
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_save_pretrained_read_and_written_again(tmp_path, max_shard_size):
  import torch
  import transformers

  config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
  )
  torch.manual_seed(0)
  model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
  model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
  folder = st.SafetensorsFolder(tmp_path / "theirs")
  sharded_by_them = (tmp_path / "theirs" / st.INDEX).exists()
  assert sharded_by_them == (max_shard_size == "20KB")
  for name, want in model.state_dict().items():
    if name in folder.names():
      np.testing.assert_array_equal(folder.read(name).astype(np.float32), want.float().numpy())
  tensors = {name: folder.read(name) for name in folder.names()}
  weight_map = folder.weight_map if sharded_by_them else None
  st.write_sharded(tmp_path / "ours", tensors, weight_map=weight_map, metadata=folder.metadata)
  for path in (tmp_path / "ours").iterdir():
    assert path.read_bytes() == (tmp_path / "theirs" / path.name).read_bytes(), path.name
