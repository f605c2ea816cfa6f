"""FP4 leaves as tensors of compressed-tensors checkpoints. Oracle 7 of arXiv 2509.23202."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlab import errors
from jaxlab.io import fp4_checkpoints
from jaxlab.nn import weights
from jaxlab.quant import fp4

NAME = "model.layers.3.mlp.up_proj"


def leaf():
  return fp4.quantize(jax.random.normal(jax.random.key(0), (64, 48)))


def raw(a):
  return np.asarray(a).view(np.uint8)


# --- worked by hand


def test_names_shapes_and_dtypes():
  tensors = fp4_checkpoints.to_compressed_tensors(NAME, leaf())
  assert {n: (t.dtype, t.shape) for n, t in tensors.items()} == {
    f"{NAME}.weight_packed": (np.uint8, (48, 32)),
    f"{NAME}.weight_scale": (ml_dtypes.float8_e4m3fn, (48, 4)),
    f"{NAME}.weight_global_scale": (np.float32, (1,)),
  }


def test_write_read_write_is_byte_stable():
  w = leaf()
  first = fp4_checkpoints.to_compressed_tensors(NAME, w)
  read = fp4_checkpoints.from_compressed_tensors(first)
  second = fp4_checkpoints.to_compressed_tensors(NAME, read)
  assert first.keys() == second.keys()
  for name, tensor in first.items():
    np.testing.assert_array_equal(raw(tensor), raw(second[name]))
  assert jax.tree.structure(read) == jax.tree.structure(w)
  assert read.tensor_scale.shape == ()
  np.testing.assert_array_equal(weights.dense(read), weights.dense(w))


def test_a_multiplier_is_written_as_a_divisor():
  w = dataclasses.replace(leaf(), tensor_scale=jnp.float32(1 / 4096), scale_is_divisor=False)
  tensors = fp4_checkpoints.to_compressed_tensors(NAME, w)
  np.testing.assert_array_equal(tensors[f"{NAME}.weight_global_scale"], np.float32([4096]))
  read = fp4_checkpoints.from_compressed_tensors(tensors)
  np.testing.assert_array_equal(weights.dense(read), weights.dense(w))


def test_what_is_read_does_not_alias_the_file():
  tensors = {n: t.copy() for n, t in fp4_checkpoints.to_compressed_tensors(NAME, leaf()).items()}
  read = fp4_checkpoints.from_compressed_tensors(tensors)
  before = np.asarray(weights.dense(read))
  tensors[f"{NAME}.weight_packed"][:] = 0
  np.testing.assert_array_equal(weights.dense(read), before)


def test_layers_stack_after_reading():
  tensors = fp4_checkpoints.to_compressed_tensors(NAME, leaf())
  one = fp4_checkpoints.from_compressed_tensors(tensors)
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), one, one)
  assert stacked.shape == (2, 64, 48) and stacked.tensor_scale.shape == (2,)


def test_a_zero_scale_over_zero_codes_is_accepted():
  w = fp4.quantize(jnp.zeros((32, 2)).at[16:].set(1.0))
  tensors = fp4_checkpoints.to_compressed_tensors(NAME, w)
  tensors[f"{NAME}.weight_scale"] = np.asarray(w.scale).copy()
  tensors[f"{NAME}.weight_scale"][:, 0] = 0
  read = fp4_checkpoints.from_compressed_tensors(tensors)
  np.testing.assert_array_equal(weights.dense(read), weights.dense(w))


# --- damage


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_a_missing_tensor_is_damage(part):
  tensors = fp4_checkpoints.to_compressed_tensors(NAME, leaf())
  del tensors[f"{NAME}.{part}"]
  with pytest.raises(errors.CorruptFile, match=rf"a.safetensors: {NAME}\.{part}: .*missing"):
    fp4_checkpoints.from_compressed_tensors(tensors, file="a.safetensors")


@pytest.mark.parametrize(
  ("part", "damage", "message"),
  [
    ("weight_packed", lambda t: t.astype(np.int32), "must be uint8 .*got int32"),
    ("weight_packed", lambda t: t[:, :30], r"multiple of 16; got uint8 \(48, 30\)"),
    ("weight_packed", lambda t: t[None], r"got uint8 \(1, 48, 32\)"),
    ("weight_scale", lambda t: t[:, :3], r"float8_e4m3fn \(48, 4\) for codes .*\(48, 3\)"),
    ("weight_scale", lambda t: t.astype(np.float32), "got float32"),
    ("weight_scale", lambda t: with_first_byte(t, 0x7F), "1 block scales are NaN or negative"),
    ("weight_scale", lambda t: with_first_byte(t, 0xB0), "1 block scales are NaN or negative"),
    ("weight_scale", lambda t: with_first_byte(t, 0), "1 block scales are zero over codes"),
    ("weight_global_scale", lambda t: t * 0, "finite and positive; got 0.0"),
    ("weight_global_scale", lambda t: -t, "finite and positive; got -"),
    ("weight_global_scale", lambda t: t * np.nan, "finite and positive; got nan"),
    ("weight_global_scale", lambda t: np.float32([np.inf]), "finite and positive; got inf"),
    ("weight_global_scale", lambda t: np.float32([1, 2]), r"float32 \[1\]; got float32 \(2,\)"),
    ("weight_global_scale", lambda t: t.astype(np.float64), "got float64"),
  ],
)
def test_damaged_tensors_are_named(part, damage, message):
  tensors = fp4_checkpoints.to_compressed_tensors(NAME, leaf())
  tensors[f"{NAME}.{part}"] = damage(tensors[f"{NAME}.{part}"])
  with pytest.raises(errors.CorruptFile, match=message):
    fp4_checkpoints.from_compressed_tensors(tensors)


def with_first_byte(scale, byte):
  changed = np.array(scale)
  changed.view(np.uint8)[0, 0] = byte
  return changed


def test_tensors_of_another_layout_are_refused():
  tensors = fp4_checkpoints.to_compressed_tensors(NAME, leaf())
  extra = tensors | {f"{NAME}.input_global_scale": np.float32([1])}
  with pytest.raises(ValueError, match="input_global_scale.*Supported: compressed-tensors"):
    fp4_checkpoints.from_compressed_tensors(extra)
  two = tensors | fp4_checkpoints.to_compressed_tensors("other", leaf())
  with pytest.raises(ValueError, match="one linear has"):
    fp4_checkpoints.from_compressed_tensors(two)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"format": "mxfp4"}, "must be nvfp4.*got \\('mxfp4', 'none', 0\\)"),
    ({"activations": "fp4"}, "got \\('nvfp4', 'fp4', 0\\)"),
    ({"rotation": 16}, "got \\('nvfp4', 'none', 16\\)"),
  ],
)
def test_leaves_that_the_layout_cannot_hold_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    fp4_checkpoints.to_compressed_tensors(NAME, dataclasses.replace(leaf(), **change))


def test_a_stack_is_written_layer_by_layer():
  w = fp4.quantize(jnp.ones((2, 32, 4)))
  with pytest.raises(ValueError, match=r"one matrix; got a stack \(2, 4, 16\)"):
    fp4_checkpoints.to_compressed_tensors(NAME, w)


# --- config.json


def test_the_config_that_is_written_can_be_read():
  config = fp4_checkpoints.quantization_config(ignore=("lm_head", "re:.*gate$"))
  parsed = fp4_checkpoints.parse_quantization_config(config)
  assert parsed == fp4_checkpoints.Fp4Config("nvfp4", ("Linear",), ("lm_head", "re:.*gate$"))


@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("quant_method", "modelopt"),
    ("quant_method", "fp_quant"),
    ("quant_method", "gptq"),
    ("quant_method", "bitsandbytes"),
    ("quant_method", None),
    ("format", "mxfp4-pack-quantized"),
    ("format", "mixed-precision"),
    ("kv_cache_scheme", {"num_bits": 8}),
    ("transform_config", {"config_groups": {"a": {}}}),
    ("sparsity_config", {"format": "sparse-24-bitmask"}),
    ("config_groups", {}),
    ("config_groups", {"NVFP4A16": ["Linear"]}),
    ("config_groups.group_0.format", "mxfp4-pack-quantized"),
    ("config_groups.group_0.input_activations", {"num_bits": 4}),
    ("config_groups.group_0.weights.group_size", 32),
    ("config_groups.group_0.weights.type", "int"),
    ("config_groups.group_0.weights.symmetric", False),
  ],
)
def test_other_layouts_are_refused_by_name(path, value):
  config = copy.deepcopy(fp4_checkpoints.quantization_config())
  *parents, last = path.split(".")
  node = config
  for parent in parents:
    node = node[parent]
  node[last] = value
  with pytest.raises(
    ValueError, match="is not supported yet; got .*Supported: compressed-"
  ) as error:
    fp4_checkpoints.parse_quantization_config(config)
  assert not isinstance(error.value, errors.CorruptFile)
  assert last in str(error.value) or parents or "config_groups" in str(error.value)


# --- parity with the package that writes such checkpoints


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
  ours = fp4_checkpoints.to_compressed_tensors("x", fp4.quantize(jnp.asarray(w_OI.T)))
  divisor = ours["x.weight_global_scale"][0]
  # torch divides by reciprocal and product: the last bit of g may differ, so both sides use ours.
  low, high = torch.from_numpy(w_OI).aminmax()
  np.testing.assert_allclose(generate_gparam(low, high).numpy(), [divisor], rtol=2e-7)
  theirs, dense = compressed_tensors_of(w_OI, divisor, "NVFP4A16")
  np.testing.assert_array_equal(ours["x.weight_packed"], theirs["weight_packed"])
  np.testing.assert_array_equal(raw(ours["x.weight_scale"]), theirs["weight_scale"])
  # Their dense weight is rounded to bfloat16 twice, ours is not.
  back = np.asarray(weights.dense(fp4_checkpoints.from_compressed_tensors(ours))).T
  np.testing.assert_allclose(back, dense, rtol=2.0**-7)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
def test_parity_mxfp4_bytes(seed):
  w_OI = parity_weight(seed)
  ours = fp4.quantize(jnp.asarray(w_OI.T), "mxfp4")
  theirs, _ = compressed_tensors_of(w_OI, None, "MXFP4A16")
  np.testing.assert_array_equal(ours.codes, theirs["weight_packed"])
  np.testing.assert_array_equal(ours.scale, theirs["weight_scale"])


@pytest.mark.parity
def test_parity_unpacking():
  import torch
  from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

  w = leaf()
  theirs = unpack_fp4_from_uint8(torch.from_numpy(np.asarray(w.codes).copy()), 48, 64)
  from pallas_kernels.fp4_gemm import codec

  np.testing.assert_array_equal(codec.unpack_codes(w.codes), theirs.float().numpy())


@pytest.mark.parity
def test_parity_config():
  from compressed_tensors.quantization import QuantizationConfig
  from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

  written = fp4_checkpoints.quantization_config()
  theirs = QuantizationConfig.model_validate(written)
  group, preset = theirs.config_groups["group_0"], preset_name_to_scheme("NVFP4A16", ["Linear"])
  for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "scale_dtype"):
    assert getattr(group.weights, key) == getattr(preset.weights, key), key
  assert group.input_activations is None and theirs.ignore == ["lm_head"]
  assert str(theirs.quantization_status).endswith("COMPRESSED")
  parsed = fp4_checkpoints.parse_quantization_config(theirs.to_dict())
  assert parsed == fp4_checkpoints.parse_quantization_config(written)
