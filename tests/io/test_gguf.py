"""GGUF: decoded blocks against their closed form; hostile files only ever raise CorruptFile."""

import pickle
import random
import struct

import ml_dtypes
import numpy as np
import pytest

from jaxlab import errors
from jaxlab.data import assets
from jaxlab.io import gguf

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
U32, STRING, ARRAY = 4, 8, 9


def text(s):
  raw = s.encode() if isinstance(s, str) else s
  return struct.pack("<Q", len(raw)) + raw


def header(tensors=0, keys=0, version=3, magic=b"GGUF"):
  return magic + struct.pack("<IQQ", version, tensors, keys)


def u32(key, value):
  return text(key) + struct.pack("<II", U32, value)


def tensor(name="a", dims=(8,), kind=F32, offset=0):
  return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def pad(raw, alignment=32):
  return raw + b"\0" * (-len(raw) % alignment)


def one_tensor(dims, kind, data):
  return pad(header(1) + tensor("w", dims, kind)) + data


def read(tmp_path, raw):
  path = tmp_path / "x.gguf"
  path.write_bytes(raw)
  return gguf.read_gguf(path)


# --- worked by hand: ggml's block layouts


def test_dims_are_read_in_row_major_order(tmp_path):
  values = np.arange(6, dtype=np.float32)
  file = read(tmp_path, one_tensor((3, 2), F32, values.tobytes()))  # the file names columns first
  assert file.tensors["w"].shape == (2, 3)
  assert file.tensors["w"].type == "F32"
  np.testing.assert_array_equal(file.dequantize("w"), [[0, 1, 2], [3, 4, 5]])


def test_q8_0_is_scale_times_integer(tmp_path):
  codes = np.arange(-16, 16, dtype=np.int8)
  blocks = [struct.pack("<e", s) + codes.tobytes() for s in (0.5, -2.0)]
  file = read(tmp_path, one_tensor((32, 2), Q8_0, b"".join(blocks)))
  np.testing.assert_array_equal(file.dequantize("w"), np.outer([0.5, -2.0], codes))


def nibbles(low, high):
  """16 bytes: elements 0..15 in the low bits, 16..31 in the high bits."""
  return bytes(a | b << 4 for a, b in zip(low, high, strict=True))


def test_q4_0_is_scale_times_code_minus_8(tmp_path):
  data = struct.pack("<e", 0.25) + nibbles(range(16), reversed(range(16)))
  file = read(tmp_path, one_tensor((32,), Q4_0, data))
  codes = [*range(16), *reversed(range(16))]
  np.testing.assert_array_equal(file.dequantize("w"), 0.25 * (np.array(codes) - 8))


def test_q4_1_is_scale_times_code_plus_minimum(tmp_path):
  data = struct.pack("<ee", 0.25, -3.0) + nibbles(range(16), [7] * 16)
  file = read(tmp_path, one_tensor((32,), Q4_1, data))
  np.testing.assert_array_equal(file.dequantize("w"), 0.25 * np.array([*range(16), *[7] * 16]) - 3)


@pytest.mark.parametrize("kind, dtype", [(F16, np.float16), (BF16, ml_dtypes.bfloat16)])
def test_half_floats_in_any_result_dtype(tmp_path, kind, dtype):
  stored = np.array([1.5, -2.0, 0.0, 3e-5], dtype)
  file = read(tmp_path, one_tensor((4,), kind, stored.tobytes()))
  assert file.dequantize("w").dtype == np.float32
  np.testing.assert_array_equal(file.dequantize("w"), stored.astype(np.float32))
  assert file.dequantize("w", ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


def test_metadata_of_every_type(tmp_path):
  keys = [text("s") + struct.pack("<I", STRING) + text("naïve")]
  wanted = {"s": "naïve"}
  scalars = [(0, "B", 200), (1, "b", -3), (2, "H", 9), (3, "h", -9), (4, "I", 7), (5, "i", -7)]
  scalars += [(6, "f", 0.5), (7, "?", True), (10, "Q", 2**40), (11, "q", -(2**40)), (12, "d", 0.1)]
  for kind, fmt, value in scalars:
    keys.append(text(f"k{kind}") + struct.pack("<I" + fmt, kind, value))
    wanted[f"k{kind}"] = value
  keys.append(text("i") + struct.pack("<IIQ3h", ARRAY, 3, 3, 1, -2, 3))
  keys.append(text("t") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("") + text("é"))
  inner = struct.pack("<IQ2B", 0, 2, 5, 6) + struct.pack("<IQ", STRING, 0)
  keys.append(text("n") + struct.pack("<IIQ", ARRAY, ARRAY, 2) + inner)
  wanted |= {"i": [1, -2, 3], "t": ["", "é"], "n": [[5, 6], []]}
  assert read(tmp_path, header(0, len(keys)) + b"".join(keys)).metadata == wanted


# --- hostile files


def array_key(element, count, rest=b""):
  return header(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, element, count) + rest


ZEROS = b"\0" * 64
HOSTILE = {
  "empty": b"",
  "short": b"GG",
  "magic": b"GGML" + ZEROS,
  "version": pad(header(version=99)),
  "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + ZEROS,
  "keys huge": header(0, 2**62) + ZEROS,
  "tensors huge": header(2**62, 0) + ZEROS,
  "key longer than the file": header(0, 1) + struct.pack("<Q", 5000) + ZEROS,
  "key of 2^62 bytes": header(0, 1) + struct.pack("<Q", 2**62) + ZEROS,
  "value of 2^40 bytes": header(0, 1) + text("k") + struct.pack("<IQ", STRING, 2**40) + ZEROS,
  "array huge": array_key(0, 2**40, ZEROS),
  "array of strings huge": array_key(STRING, 2**40, ZEROS),
  "string in array torn": array_key(STRING, 2, text("ab") + struct.pack("<Q", 9) + b"x"),
  "string in array too long": array_key(STRING, 1, struct.pack("<Q", 2**63) + ZEROS),
  "string in array not UTF-8": array_key(STRING, 1, text(b"\xff\xfe")),
  "arrays 5000 deep": array_key(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 5000 + ZEROS),
  "value type": header(0, 1) + text("k") + struct.pack("<I", 77) + ZEROS,
  "key twice": pad(header(0, 2) + u32("k", 1) + u32("k", 2)),
  "key not UTF-8": pad(header(0, 1) + u32(b"\xff\xfe", 1)),
  "rank 0": pad(header(1) + tensor(dims=())) + ZEROS,
  "rank 5": pad(header(1) + tensor(dims=(2,) * 5)) + ZEROS * 2,
  "rank 2^31": header(1) + text("a") + struct.pack("<I", 2**31) + ZEROS,
  "dims overflow 64 bits": pad(header(1) + tensor(dims=(2**33, 2**33))) + ZEROS,
  "dim 0": pad(header(1) + tensor(dims=(0, 2**62))) + ZEROS,
  "ragged block": pad(header(1) + tensor(dims=(33,), kind=Q4_0)) + ZEROS,
  "type 200": pad(header(1) + tensor(kind=200)) + ZEROS,
  "name twice": pad(header(2) + tensor() + tensor()) + ZEROS,
  "name not UTF-8": pad(header(1) + tensor(name=b"\xff\xfe")) + ZEROS,
  "offset beyond": pad(header(1) + tensor(offset=2**40)) + ZEROS,
  "offset wraps": pad(header(1) + tensor(offset=2**64 - 32)) + ZEROS,
  "offset unaligned": pad(header(1) + tensor(offset=3)) + ZEROS,
  "overlap": pad(header(2) + tensor("a", (16,)) + tensor("b", (8,), offset=32)) + ZEROS * 2,
  "truncated": pad(header(1) + tensor(dims=(1024,))) + ZEROS,
  "alignment 0": pad(header(1, 1) + u32("general.alignment", 0) + tensor()) + ZEROS,
  "alignment 3": pad(header(1, 1) + u32("general.alignment", 3) + tensor()) + ZEROS,
  "alignment 2^31": pad(header(1, 1) + u32("general.alignment", 2**31) + tensor()) + ZEROS,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_refused_in_one_line(tmp_path, kind):
  with pytest.raises(errors.CorruptFile) as caught:
    read(tmp_path, HOSTILE[kind])
  assert str(caught.value).isprintable()
  assert "x.gguf" in str(caught.value)


def sound():
  keys = u32("general.alignment", 32) + text("t") + struct.pack("<IIQ", ARRAY, STRING, 2)
  keys += text("ab") + text("c")
  rows = tensor("a", (8, 2)) + tensor("b", (32, 2), Q4_1, 64)
  rng = np.random.default_rng(0)
  return pad(header(2, 2) + keys + rows) + rng.bytes(64 + 40)


def test_truncation_at_any_length_is_refused(tmp_path):
  raw = sound()
  assert set(read(tmp_path, raw).tensors) == {"a", "b"}
  for length in np.linspace(0, len(raw) - 1, 20).astype(int):
    with pytest.raises(errors.CorruptFile):
      read(tmp_path, raw[:length])


def mutate(raw, rng):
  raw = bytearray(raw)
  for _ in range(rng.randint(1, 4)):
    at = rng.randrange(len(raw))
    match rng.randrange(4):
      case 0:
        raw[at] = rng.randrange(256)
      case 1:
        raw[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
      case 2:
        del raw[at : at + rng.randint(1, 16)]
      case 3:
        raw[at:at] = rng.randbytes(rng.randint(1, 16))
  return bytes(raw)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow, as they should
def test_2000_mutations_are_read_or_refused(tmp_path):
  raw, rng = sound(), random.Random(0)
  accepted = 0
  for _ in range(2000):
    try:
      file = read(tmp_path, mutate(raw, rng))
    except errors.CorruptFile:
      continue
    accepted += 1
    for name, stored in file.tensors.items():
      try:
        assert file.dequantize(name).shape == stored.shape
      except ValueError as error:  # a type without a dequantiser
        assert "must have a dequantiser" in str(error)
  assert 100 < accepted < 1900  # both branches were reached


# --- error messages


def test_a_name_cannot_write_on_the_terminal(tmp_path):
  raw = pad(header(1) + tensor(name="a\n\x1b[2J" + "x" * 5000, kind=200)) + ZEROS
  with pytest.raises(errors.CorruptFile) as caught:
    read(tmp_path, raw)
  assert str(caught.value).isprintable()
  assert len(str(caught.value)) < 1000
  again = pickle.loads(pickle.dumps(caught.value))  # as a worker process would send it
  assert (str(again), again.rule) == (str(caught.value), caught.value.rule)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(ValueError, match="no.gguf"):
    gguf.read_gguf(tmp_path / "no.gguf")


def test_a_type_without_a_dequantiser_is_named(tmp_path):
  raw = one_tensor((32,), 9, b"\0" * 40)  # Q8_1: intermediate results only
  with pytest.raises(ValueError, match="Q8_1"):
    read(tmp_path, raw).dequantize("w")


# --- a real file


@pytest.fixture(scope="module")
def smollm2():
  path = assets.find_demo_model()
  if path is None:
    pytest.skip("the demo model is not on this machine; `make demo` fetches it")
  return gguf.read_gguf(path)


def test_smollm2_header(smollm2):
  kinds = [t.type for t in smollm2.tensors.values()]
  assert {k: kinds.count(k) for k in set(kinds)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
  assert sum(np.prod(t.shape) for t in smollm2.tensors.values()) == 134_515_008
  assert smollm2.tensors["token_embd.weight"].shape == (49152, 576)
  assert smollm2.metadata["llama.attention.head_count_kv"] == 3
  assert len(smollm2.metadata["tokenizer.ggml.merges"]) == 48_900


@pytest.mark.slow  # the gguf package's reader takes seconds
def test_smollm2_equals_the_reader_of_the_gguf_package(smollm2):
  import gguf as package

  reader = package.GGUFReader(smollm2.path)
  assert {t.name for t in reader.tensors} == set(smollm2.tensors)
  for theirs in reader.tensors:
    ours = smollm2.tensors[theirs.name]
    assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
    assert ours.raw == theirs.data.tobytes()
  name = "blk.0.attn_q.weight"
  theirs = next(t for t in reader.tensors if t.name == name)
  want = package.dequantize(theirs.data, theirs.tensor_type)
  np.testing.assert_array_equal(smollm2.dequantize(name), want)
