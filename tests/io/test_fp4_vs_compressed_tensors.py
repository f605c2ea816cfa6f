"""Our bytes, configs and folders against the compressed-tensors package and transformers."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlab
from jaxlab.io import (
  fp4_configs,
  fp4_ct_config,
  fp4_experts,
  fp4_layouts,
  huggingface,
  receipt,
)
from jaxlab.io.fp4_layouts import Scheme
from jaxlab.nn import weights
from jaxlab.quant import fp4
from pallas_kernels.fp4_gemm import codec
from tests.models import tiny

CT_NV, CT_MX = Scheme("compressed_tensors", "nvfp4"), Scheme("compressed_tensors", "mxfp4")
EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def raw(a):
  return np.asarray(a).view(np.uint8)


def compressed_tensors_of(w_OI, divisor, preset):
  """What compressed-tensors stores for a weight [out, in], by its own minmax scales and packing."""
  import torch
  from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
  from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
  from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
  from compressed_tensors.quantization.utils.helpers import calculate_qparams

  scheme = preset_name_to_scheme(preset, ["Linear"])
  weight = torch.from_numpy(w_OI)
  blocks = weight.unflatten(-1, (-1, scheme.weights.group_size))
  divisor = None if divisor is None else torch.tensor([float(divisor)])
  scale, _ = calculate_qparams(
    blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor
  )
  state = {"weight": weight, "weight_scale": scale}
  if divisor is not None:
    state["weight_global_scale"] = divisor
  compressor = NVFP4PackedCompressor if divisor is not None else MXFP4PackedCompressor
  packed = compressor.compress(state, scheme)
  dense = compressor.decompress(packed, scheme)["weight"].float().numpy()
  return {k: v.view(torch.uint8).numpy() for k, v in packed.items()}, dense


def parity_weight(seed):
  rng = np.random.default_rng(seed)
  w_OI = rng.normal(size=(96, 256)).astype(np.float32) * np.float32(10.0 ** rng.uniform(-4, 2))
  if seed % 2:  # as checkpoints are; full of ties
    w_OI = w_OI.astype(ml_dtypes.bfloat16).astype(np.float32)
  w_OI[3, :16] = 0
  w_OI[5, ::7] = -0.0
  return w_OI


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(6))
def test_parity_nvfp4_bytes(seed):
  import torch
  from compressed_tensors.quantization.utils.helpers import generate_gparam

  w_OI = parity_weight(seed)
  ours = fp4_layouts.write("x", fp4.quantize(jnp.asarray(w_OI.T)), CT_NV)
  divisor = ours["x.weight_global_scale"][0]
  # torch divides by reciprocal and product: the last bit of g may differ, so both sides use ours.
  low, high = torch.from_numpy(w_OI).aminmax()
  np.testing.assert_allclose(generate_gparam(low, high).numpy(), [divisor], rtol=2e-7)
  theirs, dense = compressed_tensors_of(w_OI, divisor, "NVFP4A16")
  np.testing.assert_array_equal(ours["x.weight_packed"], theirs["weight_packed"])
  np.testing.assert_array_equal(raw(ours["x.weight_scale"]), theirs["weight_scale"])
  # Their dense weight is rounded to bfloat16 twice, ours is not.
  tensors = {name.removeprefix("x."): value for name, value in ours.items()}
  back = np.asarray(weights.dense(fp4_layouts.to_leaf(fp4_layouts.read(tensors, CT_NV, "x")))).T
  np.testing.assert_allclose(back, dense, rtol=2.0**-7)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
def test_parity_mxfp4_bytes(seed):
  w_OI = parity_weight(seed)
  ours = fp4_layouts.write("x", fp4.quantize(jnp.asarray(w_OI.T), "mxfp4"), CT_MX)
  theirs, dense = compressed_tensors_of(w_OI, None, "MXFP4A16")
  np.testing.assert_array_equal(ours["x.weight_packed"], theirs["weight_packed"])
  np.testing.assert_array_equal(ours["x.weight_scale"], theirs["weight_scale"])
  tensors = {name.removeprefix("x."): value for name, value in ours.items()}
  back = np.asarray(weights.dense(fp4_layouts.to_leaf(fp4_layouts.read(tensors, CT_MX, "x")))).T
  np.testing.assert_array_equal(back, dense)  # powers of two: nothing to round


@pytest.mark.parity
def test_parity_packing_and_unpacking():
  import torch
  from compressed_tensors.compressors.nvfp4.helpers import (
    pack_fp4_to_uint8,
    unpack_fp4_from_uint8,
  )

  codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
  theirs = unpack_fp4_from_uint8(torch.from_numpy(codes.copy()), 8, 64)
  np.testing.assert_array_equal(codec.unpack_codes(jnp.asarray(codes)), theirs.float().numpy())
  back = pack_fp4_to_uint8(theirs.float()).numpy()
  np.testing.assert_array_equal(back, codes)
  signs = np.signbit(np.asarray(codec.unpack_codes(jnp.asarray(codes))))
  np.testing.assert_array_equal(signs, np.signbit(theirs.float().numpy()))


@pytest.mark.parity
@pytest.mark.parametrize(
  ("preset", "scheme"),
  [
    ("NVFP4A16", CT_NV),
    ("NVFP4", Scheme("compressed_tensors", "nvfp4", "fp4", True)),
    ("MXFP4A16", CT_MX),
    ("MXFP4", Scheme("compressed_tensors", "mxfp4", "fp4")),
  ],
)
def test_parity_config(preset, scheme):
  from compressed_tensors.quantization import QuantizationConfig
  from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

  written = fp4_ct_config.describe({"a": scheme}, ["lm_head"])
  theirs = QuantizationConfig.model_validate(written)
  group, expected = theirs.config_groups["group_0"], preset_name_to_scheme(preset, ["Linear"])
  for have, want in (
    (group.weights, expected.weights), (group.input_activations, expected.input_activations),
  ):  # fmt: skip
    for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic",
                "scale_dtype"):  # fmt: skip
      assert getattr(have, key, None) == getattr(want, key, None), key
  assert theirs.ignore == ["lm_head"]
  assert str(theirs.quantization_status).endswith("COMPRESSED")
  parsed = fp4_configs.parse(theirs.to_dict())
  assert parsed.scheme_of("a", 64) == scheme


@pytest.mark.parity
def test_parity_targets():
  """The scheme of every module, by their matching of a model's modules and by ours."""
  import torch
  from compressed_tensors.quantization import QuantizationConfig
  from compressed_tensors.utils.match import match_named_modules, match_targets

  names = ["a.q_proj", "a.k_proj", "a.o_proj", "b.up_proj", "b.down_proj", "lm_head"]
  model = torch.nn.Module()
  for name in names:
    parent, _, last = name.rpartition(".")
    if parent and not hasattr(model, parent):
      setattr(model, parent, torch.nn.Module())
    setattr(getattr(model, parent) if parent else model, last, torch.nn.Linear(32, 32))
  groups = [["Linear"], ["re:.*\\.(q|k)_proj$", "b.down_proj"], ["a.k_proj", "re:b.*"], ["re:a\\."]]
  for ignore in ([], ["lm_head"], ["re:.*k_proj"], ["a.q_proj", "re:b\\.up.*"]):
    for used in ([0], [0, 1], [1, 0], [0, 1, 2], [2, 1, 0], [3, 2], [1, 3]):
      schemes = [CT_NV, CT_MX, Scheme("compressed_tensors", "nvfp4", "fp4", True),
                 Scheme("compressed_tensors", "mxfp4", "fp4")]  # fmt: skip
      config = {
        **fp4_ct_config.describe({"x": CT_NV}), "format": "mixed-precision", "ignore": ignore,
        "config_groups": {
          f"group_{i}": {
            **fp4_ct_config.describe({"x": schemes[i]})["config_groups"]["group_0"],
            "targets": groups[i],
          }
          for i in used
        },
      }  # fmt: skip
      theirs = QuantizationConfig.model_validate(config)
      by_target = {t: g for g in theirs.config_groups.values() for t in g.targets}
      matched = dict(match_named_modules(model, by_target, theirs.ignore))
      ours = fp4_configs.parse(config)
      for name in names:
        found = ours.scheme_of(name, 32)
        if name not in matched:
          assert found is None, (name, used, ignore)
          continue
        want = by_target[match_targets(name, matched[name], by_target)[0]]
        assert found.format == ("nvfp4" if want.weights.group_size == 16 else "mxfp4")
        assert (found.activations == "fp4") == (want.input_activations is not None)


@pytest.mark.parity
@pytest.mark.parametrize("case", ["nvfp4", "mxfp4", "mixed", "nvfp4_w4a4", "mxfp4_w4a4"])
def test_parity_a_folder_that_transformers_loads(case, tmp_path):
  """The same logits in float32, from the weights as compressed-tensors decodes them (bfloat16), and
  for W4A4 with its rounding of activations."""
  import torch
  import transformers

  config = tiny.config(**EVEN)
  tiny.write_folder(tmp_path / "in", config, dtype=ml_dtypes.bfloat16)
  lm = jaxlab.load(tmp_path / "in")
  format = case.partition("_")[0]
  params = fp4.quantize_params(lm.params, "nvfp4" if format == "mixed" else format)
  if format == "mixed":
    other = fp4.quantize_params(lm.params, "mxfp4")["layers"]
    params = params | {"layers": params["layers"] | {"up": other["up"], "q": other["q"]}}
  if case.endswith("w4a4"):
    params = weights.map_leaves(with_rounded_activations, params)
  huggingface.save_pretrained(dataclasses.replace(lm, params=params), tmp_path / "out")
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
  theirs(torch.tensor([[0]]))  # packed weights are decoded at the first call
  torch.nn.Module.float(theirs)
  tokens = tiny.tokens()
  logits = tiny.torch_logits(theirs, tokens)
  loaded = jaxlab.load(tmp_path / "out").params
  if not case.endswith("w4a4"):
    loaded = weights.map_leaves(lambda _, w: receipt.as_served(w), loaded)
  ours = np.asarray(lm.module.apply({"params": loaded}, jnp.asarray(tokens)))
  np.testing.assert_allclose(ours, logits, atol=1e-4)


def with_rounded_activations(path, w):
  """W4A4. NVFP4 tensor scales become powers of two, with which bfloat16 weights are exact: any
  rounding of weights would move activations across rounding steps."""
  if not isinstance(w, weights.FP4Array):
    return w
  if w.format == "mxfp4":
    return dataclasses.replace(w, activations="fp4")
  power = 2.0 ** jnp.floor(jnp.log2(w.tensor_scale))
  act = jnp.full(w.tensor_scale.shape, 2688 / 8.0)  # inputs beyond 8 are clipped
  return dataclasses.replace(w, tensor_scale=power, activations="fp4", act_scale=act)


@pytest.mark.parity
def test_parity_modelopt_by_their_converter():
  """Our ModelOpt tensors, converted by compressed-tensors, are our compressed-tensors tensors."""
  import torch
  from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

  w = fp4.quantize(jnp.asarray(parity_weight(0).T), activations="fp4")
  w = dataclasses.replace(w, act_scale=jnp.float32(12.5))
  module = "model.layers.0.mlp.up_proj"
  modelopt = fp4_layouts.write(module, w, Scheme("modelopt", "nvfp4", "fp4", True))
  ours = fp4_layouts.write(module, w, Scheme("compressed_tensors", "nvfp4", "fp4", True))
  in_torch = {
    name: torch.from_numpy(np.array(raw(x) if x.dtype.itemsize == 1 else x))
    for name, x in modelopt.items()
  }
  converter = ModelOptNvfp4Converter(targets=["re:.*_proj$"])
  theirs = converter.process(in_torch)
  assert theirs.keys() == ours.keys()
  for name, x in ours.items():
    found = theirs[name].numpy()
    if "global_scale" in name:
      np.testing.assert_array_max_ulp(found.reshape(1), x, 1)
    else:
      np.testing.assert_array_equal(found, raw(x))


@pytest.mark.parity
@pytest.mark.parametrize("size", [16, 128])
def test_parity_hadamard_transforms(size):
  """The written transform_config in their classes: weights fused offline, inputs rotated online."""
  import torch
  from compressed_tensors.transform import TransformConfig, TransformFactory

  scheme = Scheme("compressed_tensors", "mxfp4", "fp4", rotation=size)
  written = fp4_ct_config.describe({"a": scheme}, ["lm_head"])["transform_config"]
  (theirs,) = TransformConfig.model_validate(written).config_groups.values()
  factory = TransformFactory.from_scheme(theirs, name="x")
  linear = torch.nn.Linear(256, 32, bias=False)
  online, offline = (factory.create_transform(linear, args) for args in theirs.apply)
  x = torch.randn(5, 256)
  ours = np.asarray(codec.rotate(jnp.asarray(x.numpy()), size))
  np.testing.assert_allclose(online(x).detach().numpy(), ours, atol=1e-5)
  rotated = offline(linear.weight.data.double()).detach().numpy()
  ours = np.asarray(codec.rotate(jnp.asarray(linear.weight.detach().numpy()), size))
  np.testing.assert_allclose(rotated, ours, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_parity_fp_quant_config(format):
  import transformers

  size = {"nvfp4": 128, "mxfp4": 32}[format]
  scheme = Scheme("fp_quant", format, "fp4", True, size)
  written = fp4_configs.describe({"a": (scheme, 256)}, {})
  theirs = transformers.FPQuantConfig.from_dict(written)
  assert fp4_configs.parse(theirs.to_dict()).scheme_of("a", 256) == scheme
  assert theirs.modules_to_not_convert == ["lm_head"]


@pytest.mark.parity
def test_parity_gpt_oss_experts():
  import torch
  from transformers.integrations.mxfp4 import convert_moe_packed_tensors

  rng = np.random.default_rng(0)
  blocks = rng.integers(0, 256, (3, 8, 4, 16), np.uint8)
  scales = rng.integers(110, 140, (3, 8, 4), np.uint8)
  theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
  ours = weights.dense(fp4_experts.from_gpt_oss(blocks, scales, "x"))  # [E, in, out], as theirs
  np.testing.assert_array_equal(ours, theirs.float().numpy())
