"""FP4 blocks of GGUF files as leaves, and K-quants, against gguf's and hand-written decoders."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab import errors
from jaxlab.io import gguf as reader
from jaxlab.io import gguf_fp4, huggingface
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4
from tests.io import test_gguf_model as gguf_files
from tests.models import tiny

TYPES = gguf.GGMLQuantizationType
EVEN = gguf_files.EVEN
ROWS = 6


def write(path, tensors):
  """{name: (bytes [rows, row bytes], type)} -> a file with these and nothing else."""
  w = gguf.GGUFWriter(path, "llama")
  for name, (raw, kind) in tensors.items():
    w.add_tensor(name, raw, raw_dtype=kind)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return reader.read_gguf(path)


def blocks(kind, columns=512, seed=0):
  """Random blocks whose float16 scales are small and finite."""
  elements, size = gguf.GGML_QUANT_SIZES[kind]
  rng = np.random.default_rng(seed)
  raw = rng.integers(0, 256, (ROWS, columns // elements, size), np.uint8)
  d = rng.normal(0, 0.01, (ROWS, columns // elements, 2)).astype(np.float16).view(np.uint8)
  places = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}  # else first; a minimum's follows
  at = places.get(kind.name, 0)
  width = 4 if kind.name in ("Q2_K", "Q4_K", "Q5_K", "Q4_1", "Q5_1") else 2
  if kind.name not in ("MXFP4", "NVFP4"):
    raw[..., at : at + width] = d.reshape(*d.shape[:2], 4)[..., :width]
  return raw.reshape(ROWS, -1)


# --- nibbles


def elements(codes):
  """Codes in column order."""
  return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def packed_as(kind, codes, scale):
  """llama.cpp's blocks of codes [O, K/2] and scale bytes [O, k], written element by element."""
  block = {"MXFP4": 32, "NVFP4": 16}[kind.name]
  e = elements(codes).reshape(len(codes), -1, block)
  half = block // 2
  qs = np.zeros((*e.shape[:2], half), np.uint8)
  for j in range(half):
    qs[..., j] = e[..., j] + 16 * e[..., j + half]
  together = {"MXFP4": 1, "NVFP4": 4}[kind.name]  # blocks that share a struct
  scale = scale.reshape(len(codes), -1, together)
  qs = qs.reshape(len(codes), -1, together * half)
  return np.concatenate([scale, qs], -1).reshape(len(codes), -1)


@pytest.mark.parametrize("kind", [TYPES.MXFP4, TYPES.NVFP4])
def test_codes_change_places_and_stay_what_they_were(kind, tmp_path):
  rng = np.random.default_rng(0)
  codes = rng.integers(0, 256, (ROWS, 64), np.uint8)
  block = {"MXFP4": 32, "NVFP4": 16}[kind.name]
  scale = rng.integers(1, 120, (ROWS, 128 // block), np.uint8)
  raw = packed_as(kind, codes, scale)
  file = write(tmp_path / "a.gguf", {"x.weight": (raw, kind)})
  found = gguf_fp4.read(file, "x.weight")
  np.testing.assert_array_equal(found.codes, codes)
  np.testing.assert_array_equal(found.scale.view(np.uint8), scale)
  w = weights.FP4Array(
    *map(jnp.asarray, (found.codes, found.scale, found.tensor_scale)), format=found.format,
    scale_is_divisor=found.scale_is_divisor,
  )  # fmt: skip
  np.testing.assert_array_equal(np.asarray(weights.dense(w)).T, gguf.quants.dequantize(raw, kind))


def test_a_tensor_scale_beside_the_weight(tmp_path):
  raw = packed_as(TYPES.NVFP4, np.full((2, 32), 0x22, np.uint8), np.full((2, 4), 0x38, np.uint8))
  scale = np.array([0.25], np.float32)
  tensors = {"x.weight": (raw, TYPES.NVFP4), "x.scale": (scale, TYPES.F32)}
  file = write(tmp_path / "a.gguf", tensors)
  assert gguf_fp4.read(file, "x.weight").tensor_scale == 0.25
  assert gguf_fp4.scale_names(file, {"x.weight": None}) == {"x.scale"}
  tensors["x.scale"] = (-scale, TYPES.F32)
  file = write(tmp_path / "b.gguf", tensors)
  with pytest.raises(errors.CorruptFile, match="one positive number; got"):
    gguf_fp4.read(file, "x.weight")


@pytest.mark.parametrize(
  ("kind", "byte", "message"),
  [(TYPES.MXFP4, 255, "NaN"), (TYPES.NVFP4, 0x7F, "NaN or neg"), (TYPES.NVFP4, 0, "zero over")],
)
def test_unusable_scales_are_damage(kind, byte, message, tmp_path):
  together, size = {"MXFP4": (1, 17), "NVFP4": (4, 36)}[kind.name]
  raw = np.full((ROWS, 2, size), 0x11, np.uint8)
  raw[..., :together] = 100
  raw[0, 0, 0] = byte
  raw = raw.reshape(ROWS, -1)
  file = write(tmp_path / "a.gguf", {"x.weight": (raw, kind)})
  with pytest.raises(errors.CorruptFile, match=message):
    gguf_fp4.read(file, "x.weight")


# --- models


def load(path):
  """A model without its tokenizer, which these files lack."""
  config, module, params = gguf_files.load(path)
  source = huggingface.load_source(path)
  return jaxlab.LM(module, params, config, None, str(path), source)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_in_mxfp4_is_never_dense(family, tmp_path):
  """Rows of q and k are put back in order as codes; the embedding alone is decoded."""
  path = tmp_path / "m.gguf"
  expected = gguf_files.write(path, tiny.config(family, **EVEN), TYPES.MXFP4)
  lm = load(path)
  kernels = {p: w for p, w in weights.leaf_paths(lm.params).items() if p.endswith("/kernel")}
  assert all(isinstance(w, weights.FP4Array) and w.format == "mxfp4" for w in kernels.values())
  np.testing.assert_array_equal(lm.params["embed"], expected["model.embed_tokens.weight"])
  for name, linear in (("self_attn.q_proj", "q"), ("self_attn.k_proj", "k"), ("mlp.up_proj", "up")):
    for i in range(tiny.LAYERS):
      dense = np.asarray(weights.dense(kernels[f"layers/{linear}/kernel"]))[i].T
      np.testing.assert_array_equal(dense, expected[f"model.layers.{i}.{name}.weight"])
  huggingface.save_pretrained(lm, tmp_path / "folder")
  again = jaxlab.load(tmp_path / "folder")
  for p, w in kernels.items():
    np.testing.assert_array_equal(weights.leaf_paths(again.params)[p].codes, w.codes)


def test_a_model_in_nvfp4_with_other_types_in_some_layers(tmp_path, monkeypatch):
  """quantize of gguf has no NVFP4: ours, laid out by `packed_as`. One layer's linear is Q8_0."""
  config = tiny.config(**EVEN | {"intermediate_size": 128})
  quantize = gguf.quants.quantize
  seen = []

  def with_nvfp4(x, kind):
    if kind != TYPES.NVFP4:
      return quantize(x, kind)
    seen.append(x.shape)
    w = fp4.quantize(jnp.asarray(x.T))
    return packed_as(kind, np.asarray(w.codes), np.asarray(w.scale).view(np.uint8))

  monkeypatch.setattr(gguf.quants, "quantize", with_nvfp4)
  expected = gguf_files.write(tmp_path / "m.gguf", config, TYPES.NVFP4)
  assert seen
  lm = load(tmp_path / "m.gguf")
  up = lm.params["layers"]["up"]["kernel"]
  assert (up.format, up.scale_is_divisor) == ("nvfp4", False)
  np.testing.assert_array_equal(up.tensor_scale, np.ones(tiny.LAYERS))
  dense = np.asarray(weights.dense(up))[2].T
  np.testing.assert_array_equal(dense, expected["model.layers.2.mlp.up_proj.weight"])

  original = gguf.GGUFWriter.add_tensor

  def one_other(self, name, tensor, raw_dtype=None):
    if name == "blk.1.ffn_up.weight":
      value = gguf.quants.dequantize(tensor, raw_dtype)
      tensor, raw_dtype = quantize(value, TYPES.Q8_0), TYPES.Q8_0
    return original(self, name, tensor, raw_dtype=raw_dtype)

  monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", one_other)
  gguf_files.write(tmp_path / "n.gguf", config, TYPES.NVFP4)
  layers = load(tmp_path / "n.gguf").params["layers"]
  assert isinstance(layers, list) and not weights.is_packed(layers[1]["up"]["kernel"])
  other = stack.unstack(lm.params)["layers"]
  np.testing.assert_array_equal(layers[2]["up"]["kernel"].codes, other[2]["up"]["kernel"].codes)


# --- K-quants and the old ones


def q6_k(raw):
  """ggml's block_q6_K: ql[128], qh[64], int8 scales[16], f16 d; 6-bit values less 32."""
  ql, qh = raw[..., :128], raw[..., 128:192]
  scales = raw[..., 192:208].view(np.int8).astype(np.float64)
  d = raw[..., 208:210].copy().view(np.float16).astype(np.float64)
  out = np.zeros((*raw.shape[:-1], 256))
  for n in (0, 1):  # halves of 128
    low, high = ql[..., 64 * n : 64 * n + 64], qh[..., 32 * n : 32 * n + 32]
    for j in range(32):
      quads = (
        (low[..., j] & 15, 0, 0), (low[..., j + 32] & 15, 2, 32),
        (low[..., j] >> 4, 4, 64), (low[..., j + 32] >> 4, 6, 96),
      )  # fmt: skip
      for nibble, shift, at in quads:
        q = (nibble | (((high[..., j] >> shift) & 3) << 4)).astype(np.float64) - 32
        scale = scales[..., 8 * n + (at + j) // 16]
        out[..., 128 * n + at + j] = d[..., 0] * scale * q
  return out


def q4_k(raw):
  """ggml's block_q4_K: f16 d, f16 dmin, 12 bytes of 6-bit scales and minima, qs[128]."""
  d, dmin = raw[..., :4].copy().view(np.float16).astype(np.float64).transpose(2, 0, 1)
  s, qs = raw[..., 4:16].astype(np.int64), raw[..., 16:]
  out = np.zeros((*raw.shape[:-1], 256))
  for j in range(8):
    if j < 4:
      scale, low = s[..., j] & 63, s[..., j + 4] & 63
    else:
      scale = (s[..., j + 4] & 15) | ((s[..., j - 4] >> 6) << 4)
      low = (s[..., j + 4] >> 4) | ((s[..., j] >> 6) << 4)
    byte = qs[..., 32 * (j // 2) : 32 * (j // 2) + 32]
    q = (byte & 15) if j % 2 == 0 else (byte >> 4)
    out[..., 32 * j : 32 * j + 32] = (d * scale)[..., None] * q - (dmin * low)[..., None]
  return out


@pytest.mark.parametrize(("kind", "decode"), [(TYPES.Q4_K, q4_k), (TYPES.Q6_K, q6_k)])
def test_k_quants_by_hand(kind, decode, tmp_path):
  raw = blocks(kind)
  file = write(tmp_path / "a.gguf", {"x": (raw, kind)})
  expected = decode(raw.reshape(ROWS, 2, -1)).reshape(ROWS, 512)
  np.testing.assert_allclose(file.dequantize("x"), expected, rtol=1e-6, atol=1e-6)


READ = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")


@pytest.mark.parametrize("name", READ)
def test_every_usual_type_is_read(name, tmp_path):
  kind = TYPES[name]
  raw = blocks(kind)
  file = write(tmp_path / "a.gguf", {"x": (raw, kind)})
  found = file.dequantize("x")
  assert found.shape == (ROWS, 512) and np.isfinite(found).all() and len(np.unique(found)) > 100
  np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, kind))
