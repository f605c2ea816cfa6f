"""Whole FP4 folders of every layout: in, out, and from one layout to another."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlab
from jaxlab import errors
from jaxlab.io import fp4_experts, huggingface, safetensors
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4
from tests.models import tiny

EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """A dense model of bfloat16 numbers, its NVFP4 and its MXFP4 parameters."""
  folder = tmp_path_factory.mktemp("dense")
  tiny.write_folder(folder / "in", tiny.config(**EVEN), dtype=ml_dtypes.bfloat16)
  lm = jaxlab.load(folder / "in")
  return lm, {f: fp4.quantize_params(lm.params, f) for f in ("nvfp4", "mxfp4")}


def changed(params, **fields):
  """The same parameters with other fields in each FP4 leaf; act_scale is a number for each."""

  def change(path, w):
    if not isinstance(w, weights.FP4Array):
      return w
    own = dict(fields)
    if "act_scale" in own:
      own["act_scale"] = jnp.full(w.tensor_scale.shape, own["act_scale"], jnp.float32)
    return dataclasses.replace(w, **own)

  return weights.map_leaves(change, params)


def save(lm, params, folder, layout=None):
  huggingface.save_pretrained(dataclasses.replace(lm, params=params), folder, layout=layout)
  return folder


def contents(folder):
  return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def bits(x):
  return np.asarray(x).view(np.uint8) if x.dtype.itemsize == 1 else np.asarray(x)


def assert_same_params(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), found, expected)


def rewrite(folder, change):
  source = safetensors.SafetensorsFolder(folder)
  tensors = {name: np.array(source.read(name)) for name in source.names()}
  change(tensors)
  safetensors.write_sharded(folder, tensors)


W4A4 = {"activations": "fp4", "act_scale": 7.5}
CASES = {
  "ct_nvfp4": ("compressed_tensors", "nvfp4", {}),
  "ct_nvfp4_w4a4_rotated": ("compressed_tensors", "nvfp4", {**W4A4, "rotation": 32}),
  "ct_mxfp4": ("compressed_tensors", "mxfp4", {}),
  "ct_mxfp4_w4a4_rotated": ("compressed_tensors", "mxfp4", {"activations": "fp4", "rotation": 16}),
  "modelopt": ("modelopt", "nvfp4", W4A4),
  "modelopt_w4a16": ("modelopt", "nvfp4", {}),
  "fp_quant_nvfp4": ("fp_quant", "nvfp4", {**W4A4, "rotation": 16}),
  "fp_quant_mxfp4": ("fp_quant", "mxfp4", {"activations": "fp4", "rotation": 32}),
  "fp_quant_identity": ("fp_quant", "nvfp4", W4A4),
}


@pytest.mark.parametrize("case", CASES)
def test_an_unchanged_folder_comes_out_byte_equal(case, dense, tmp_path):
  lm, packed = dense
  layout, format, fields = CASES[case]
  params = changed(packed[format], **fields)
  if layout == "modelopt":  # as its own writer has them
    multipliers = {f: jax.tree.map(lambda x: x, fields)[f] for f in fields}
    params = changed(params, **multipliers, scale_is_divisor=False)
  folder = save(lm, params, tmp_path / "a", layout)
  again = jaxlab.load(folder)
  assert_same_params(again.params, params)
  assert contents(save(again, again.params, tmp_path / "b")) == contents(folder)


def test_fp_quant_with_values_in_place_of_codes(dense, tmp_path):
  lm, packed = dense
  params = changed(packed["mxfp4"], activations="fp4", rotation=32)
  folder = save(lm, params, tmp_path / "codes", "fp_quant")
  config = json.loads((folder / "config.json").read_text())
  shutil.copytree(folder, tmp_path / "values")
  config["quantization_config"]["pseudoquantization"] = True
  (tmp_path / "values" / "config.json").write_text(json.dumps(config))

  def to_values(tensors):
    for name in [n for n in tensors if n.endswith(".qweight")]:
      module = name.removesuffix(".qweight")
      codes, scale = tensors.pop(name), tensors.pop(f"{module}.scales")
      table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
      value = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(len(codes), -1)
      value = value * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
      tensors[f"{module}.dqweight"] = value.astype(ml_dtypes.bfloat16)

  rewrite(tmp_path / "values", to_values)
  found = jaxlab.load(tmp_path / "values")
  for path, w in weights.leaf_paths(params).items():
    if isinstance(w, weights.FP4Array):
      other = weights.leaf_paths(found.params)[path]
      np.testing.assert_array_equal(weights.dense(other), weights.dense(w))
  written = save(found, found.params, tmp_path / "out")
  assert contents(written) == contents(tmp_path / "values")


def test_a_hf_quant_config_alone_and_scales_of_a_cache_are_kept(dense, tmp_path):
  lm, packed = dense
  folder = save(lm, changed(packed["nvfp4"], **W4A4), tmp_path / "a", "modelopt")
  config = json.loads((folder / "config.json").read_text())
  del config["quantization_config"]
  (folder / "config.json").write_text(json.dumps(config))
  beside = folder / "hf_quant_config.json"
  text = beside.read_text().replace('"kv_cache_quant_algo": null', '"kv_cache_quant_algo": "FP8"')
  beside.write_text(text)

  def with_cache_scales(tensors):
    for i in range(tiny.LAYERS):
      for x in "kv":
        tensors[f"model.layers.{i}.self_attn.{x}_proj.{x}_scale"] = np.array(i + 1, np.float32)

  rewrite(folder, with_cache_scales)
  again = jaxlab.load(folder)
  assert contents(save(again, again.params, tmp_path / "b")) == contents(folder)
  converted = save(again, again.params, tmp_path / "c", "compressed_tensors")
  assert not (converted / "hf_quant_config.json").exists()
  assert not any("k_scale" in n for n in huggingface.load_source(converted).dtypes)


def test_from_layout_to_layout(dense, tmp_path):
  """Codes and block scales go through as they are; tensor scales within one ulp."""
  lm, packed = dense
  params = changed(packed["nvfp4"], **W4A4)
  for i, layout in enumerate(("compressed_tensors", "modelopt", "fp_quant", "modelopt",
                              "compressed_tensors")):  # fmt: skip
    folder = save(lm, lm.params if i else params, tmp_path / f"{i}", layout)
    lm = jaxlab.load(folder)
    for path, w in weights.leaf_paths(params).items():
      found = weights.leaf_paths(lm.params)[path]
      if isinstance(w, weights.FP4Array):
        np.testing.assert_array_equal(found.codes, w.codes)
        np.testing.assert_array_equal(bits(found.scale), bits(w.scale))
        for part in ("tensor_scale", "act_scale"):
          value = getattr(found, part)
          value = value if found.scale_is_divisor else 1 / value
          np.testing.assert_array_max_ulp(np.asarray(value), np.asarray(getattr(w, part)), 1)
      else:
        np.testing.assert_array_equal(found, w)
  assert contents(folder)["config.json"] == contents(tmp_path / "0")["config.json"]


def mixed(lm, packed):
  """Layer 0 in NVFP4, 1 in MXFP4, 2 in NVFP4 but for one dense linear."""
  layers = stack.unstack(packed["nvfp4"])["layers"]
  layers[1] = stack.unstack(packed["mxfp4"])["layers"][1]
  layers[2] = layers[2] | {"down": stack.unstack(lm.params)["layers"][2]["down"]}
  return packed["nvfp4"] | {"layers": layers}


def test_layers_of_different_formats_become_a_list(dense, tmp_path):
  lm, packed = dense
  params = mixed(lm, packed)
  folder = save(lm, params, tmp_path / "a")
  config = json.loads((folder / "config.json").read_text())["quantization_config"]
  assert config["format"] == "mixed-precision" and len(config["config_groups"]) == 2
  assert config["ignore"] == ["lm_head", "model.layers.2.mlp.down_proj"]
  again = jaxlab.load(folder)
  assert_same_params(again.params, params)
  assert contents(save(again, again.params, tmp_path / "b")) == contents(folder)


@pytest.mark.slow
def test_a_list_of_layers_is_the_model(dense, tmp_path):
  again = jaxlab.load(save(dense[0], mixed(*dense), tmp_path / "a"))
  tokens = jnp.asarray(tiny.tokens())
  found = again.module.apply({"params": again.params}, tokens)
  plain = again.module.apply({"params": weights.densify(again.params)}, tokens)
  np.testing.assert_allclose(found, plain, atol=1e-3)


# --- what does not fit together


@pytest.mark.parametrize(
  ("harm", "message"),
  [
    (
      lambda c: c["quantization_config"].update(ignore=["lm_head", UP]),
      f"{UP} is packed .*leaves it dense",
    ),
    (lambda c: c.pop("quantization_config"), "is packed .*no quantization_config in config.json"),
    (lambda c: c["quantization_config"].update(ignore=[]), "lm_head is dense, but config.json"),
    (
      lambda c: c.update(
        quantization_config={"quant_method": "fp_quant", "forward_dtype": "nvfp4"}
      ),
      "no tensor 'model.layers.0.mlp.down_proj.act_global_scale'",
    ),
    (
      lambda c: c["quantization_config"].update(
        transform_config={
          "config_groups": {
            "u": {"type": "hadamard", "head_dim": 64,
                  "apply": [{"targets": ["re:.*down_proj"], "location": "input"}]}
          }
        }
      ),
      "a Hadamard of 64 does not fit 96 inputs",
    ),
  ],
)  # fmt: skip
def test_a_config_of_another_model_is_named(harm, message, dense, tmp_path):
  lm, packed = dense
  folder = save(lm, packed["nvfp4"], tmp_path / "a")
  config = json.loads((folder / "config.json").read_text())
  harm(config)
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=message):
    jaxlab.load(folder)


# --- gpt-oss experts: tensors alone


def test_experts_of_gpt_oss():
  """E = 2 experts, 6 rows, 64 inputs, by a table in float64; and back byte for byte."""
  rng = np.random.default_rng(0)
  blocks = rng.integers(0, 256, (2, 6, 2, 16), np.uint8)
  scales = rng.integers(120, 130, (2, 6, 2), np.uint8)
  name = "model.layers.0.mlp.experts.gate_up_proj"
  w = fp4_experts.from_gpt_oss(blocks, scales, name)
  assert w.shape == (2, 64, 6) and w.tensor_scale.shape == (2,)
  table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
  values = np.stack([table[blocks & 15], table[blocks >> 4]], -1).reshape(2, 6, 2, 32)
  values = (values * 2.0 ** (scales.astype(np.float64) - 127)[..., None]).reshape(2, 6, 64)
  np.testing.assert_array_equal(weights.dense(w), values.transpose(0, 2, 1))
  for key, tensor in fp4_experts.to_gpt_oss(name, w).items():
    np.testing.assert_array_equal(tensor, {"_blocks": blocks, "_scales": scales}[key[-7:]])
  gate, up = fp4_experts.split_gate_up(w)
  np.testing.assert_array_equal(weights.dense(gate), values[:, 0::2].transpose(0, 2, 1))
  np.testing.assert_array_equal(weights.dense(up), values[:, 1::2].transpose(0, 2, 1))
  assert_same_params(fp4_experts.join_gate_up(gate, up), w)


@pytest.mark.parametrize(
  ("blocks", "scales", "message"),
  [
    ((2, 6, 2, 8), (2, 6, 2), r"_blocks: must be uint8 \[experts, out, in/32, 16\]"),
    ((2, 6, 2, 16), (2, 6, 1), r"_scales: must be uint8 \(2, 6, 2\) for codes"),
  ],
)
def test_damaged_experts_are_named(blocks, scales, message):
  with pytest.raises(errors.CorruptFile, match=message):
    fp4_experts.from_gpt_oss(np.zeros(blocks, np.uint8), np.zeros(scales, np.uint8), "x")


def test_experts_that_gpt_oss_cannot_hold():
  w = fp4.quantize(jnp.ones((2, 32, 4)))
  with pytest.raises(ValueError, match="must be mxfp4 .*got nvfp4"):
    fp4_experts.to_gpt_oss("x", w)
  w = fp4.quantize(jnp.ones((2, 32, 4)), "mxfp4")
  with pytest.raises(ValueError, match="no tensor scale"):
    fp4_experts.to_gpt_oss("x", dataclasses.replace(w, tensor_scale=jnp.full(2, 3.0)))
