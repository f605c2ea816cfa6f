"""FP4 leaves to and from the tensors of compressed-tensors checkpoints, W4A16 NVFP4. No files here.

Layout `nvfp4-pack-quantized` for a linear X: element = value(code) * weight_scale / g, where
  X.weight_packed        u8 [out, in/2], even column in the low nibble
  X.weight_scale         f8_e4m3 [out, in/16]
  X.weight_global_scale  f32 [1], the divisor g
Source: neuralmagic/compressed-tensors, compressors/nvfp4 and quant_scheme.py (NVFP4A16).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlab import errors
from jaxlab.nn import weights

FORMAT = "nvfp4-pack-quantized"
BLOCK = 16
PACKED, SCALE, GLOBAL_SCALE = "weight_packed", "weight_scale", "weight_global_scale"
SUPPORTED = f"Supported: compressed-tensors '{FORMAT}' with 16-bit activations (NVFP4A16)."


@dataclasses.dataclass(frozen=True)
class Fp4Config:
  """What a `quantization_config` says: the leaves' format, which modules have it, which do not."""

  format: str
  targets: tuple[str, ...]
  ignore: tuple[str, ...]


def to_compressed_tensors(name: str, w: weights.FP4Array) -> dict[str, np.ndarray]:
  """The three tensors of one linear; `name` is its module path, e.g. "model.layers.0.mlp.up_proj".

  Raises: ValueError if w is a stack, or anything but W4A16 NVFP4 without a rotation.
  """
  if w.codes.ndim != 2:
    raise ValueError(
      f"to_compressed_tensors: {name} must be one matrix; got a stack {w.codes.shape}. "
      "Write one layer at a time."
    )
  kind = (w.format, w.activations, w.rotation)
  if kind != ("nvfp4", "none", 0):
    raise ValueError(
      f"to_compressed_tensors: {name} must be nvfp4, activations none, rotation 0; got {kind}. "
      f"{SUPPORTED}"
    )
  scale = np.asarray(w.tensor_scale, np.float32).reshape(1)
  divisor = scale if w.scale_is_divisor else np.float32(1) / scale
  return {
    f"{name}.{PACKED}": np.asarray(w.codes),
    f"{name}.{SCALE}": np.asarray(w.scale),
    f"{name}.{GLOBAL_SCALE}": divisor,
  }


def from_compressed_tensors(
  tensors: Mapping[str, np.ndarray], file: str = "checkpoint"
) -> weights.FP4Array:
  """The leaf of one linear from its three tensors, bytes as they are.

  Args:
    tensors: {"X.weight_packed": ..., "X.weight_scale": ..., "X.weight_global_scale": ...}.
    file: named in errors.
  Raises: CorruptFile if one is missing, has another dtype or shape, or a scale is not usable (not
    finite, negative, or zero over codes that are not); ValueError for tensors of another layout.
  """
  by_part = {name.rpartition(".")[2]: name for name in tensors}
  module = next(iter(tensors), "(no tensors)").rpartition(".")[0]
  unknown = sorted(set(by_part) - {PACKED, SCALE, GLOBAL_SCALE})
  if unknown or len(by_part) != len(tensors):
    raise ValueError(
      f"from_compressed_tensors: one linear has {PACKED}, {SCALE}, {GLOBAL_SCALE}; got also "
      f"{unknown or sorted(tensors)} for {module}. {SUPPORTED}"
    )
  for part in (PACKED, SCALE, GLOBAL_SCALE):
    if part not in by_part:
      raise errors.CorruptFile(file, f"{module}.{part}", "the tensor must be there; it is missing")
  codes, scale, divisor = (tensors[by_part[part]] for part in (PACKED, SCALE, GLOBAL_SCALE))

  def damaged(part, rule):
    return errors.CorruptFile(file, f"{module}.{part}", rule)

  _check_codes(codes, damaged)
  _check_divisor(divisor, damaged)
  _check_scale(scale, codes, damaged)
  # Copies: an array that aliases a mapped file would change when the file does.
  leaf = (jnp.array(part) for part in (codes, scale, divisor.reshape(())))
  return weights.FP4Array(*leaf, format="nvfp4", scale_is_divisor=True)


def _check_codes(codes, damaged):
  if codes.dtype != np.uint8 or codes.ndim != 2 or codes.shape[1] * 2 % BLOCK:
    raise damaged(
      PACKED,
      f"must be uint8 [out, in/2], in a multiple of {BLOCK}; got {codes.dtype} {codes.shape}",
    )


def _check_divisor(divisor, damaged):
  if divisor.dtype != np.float32 or divisor.size != 1:
    raise damaged(GLOBAL_SCALE, f"must be float32 [1]; got {divisor.dtype} {divisor.shape}")
  value = divisor.reshape(())
  if not (np.isfinite(value) and value > 0):
    raise damaged(GLOBAL_SCALE, f"the divisor must be finite and positive; got {value}")


def _check_scale(scale, codes, damaged):
  shape = (codes.shape[0], codes.shape[1] * 2 // BLOCK)
  if scale.dtype != ml_dtypes.float8_e4m3fn or scale.shape != shape:
    raise damaged(
      SCALE,
      f"must be float8_e4m3fn {shape} for codes {codes.shape}; got {scale.dtype} {scale.shape}",
    )
  byte = scale.view(np.uint8)
  if (byte >= 0x7F).any():  # 0x7f is NaN, the upper half is negative
    raise damaged(SCALE, f"{int((byte >= 0x7F).sum())} block scales are NaN or negative")
  # Some writers give an all-zero block a zero scale; over real codes it would erase them.
  erased = (byte == 0) & ((codes.reshape(*shape, BLOCK // 2) & 0x77) != 0).any(-1)
  if erased.any():
    raise damaged(SCALE, f"{int(erased.sum())} block scales are zero over codes that are not")


def quantization_config(ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
  """The `quantization_config` of config.json for W4A16 NVFP4, as transformers and vLLM read it.

  Args:
    ignore: modules left dense, by Hugging Face name or "re:" pattern.
  """
  return {
    "quant_method": "compressed-tensors",
    "format": FORMAT,
    "quantization_status": "compressed",
    "ignore": list(ignore),
    "config_groups": {
      "group_0": {
        "targets": ["Linear"],
        "format": FORMAT,
        "input_activations": None,
        "output_activations": None,
        "weights": {
          "num_bits": 4,
          "type": "float",
          "strategy": "tensor_group",
          "group_size": BLOCK,
          "symmetric": True,
          "dynamic": False,
          "scale_dtype": "torch.float8_e4m3fn",
        },
      }
    },
  }


def parse_quantization_config(config: Mapping[str, Any]) -> Fp4Config:
  """What a `quantization_config` asks for, if this module can read it.

  Raises: ValueError naming the layout and what is supported, for every other layout (ModelOpt,
    FP-Quant, GPTQ, bitsandbytes, MXFP4, quantised activations or caches, rotations, mixed groups).
  """
  method = config.get("quant_method")
  if method != "compressed-tensors":
    raise _unsupported("quant_method", method)
  if config.get("format") != FORMAT:
    raise _unsupported("format", config.get("format"))
  for key in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
    if config.get(key):
      raise _unsupported(key, config[key])
  sparsity = config.get("sparsity_config") or {}
  if sparsity.get("format", "dense") != "dense":
    raise _unsupported("sparsity_config", sparsity)
  groups = config.get("config_groups") or {}
  if not groups:
    raise _unsupported("config_groups", groups)
  for name, group in groups.items():
    _check_group(f"config_groups.{name}", group)
  targets = tuple(t for group in groups.values() for t in group.get("targets", ()))
  return Fp4Config("nvfp4", targets, tuple(config.get("ignore") or ()))


def _check_group(path, group):
  if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
    raise _unsupported(path, group)
  if group.get("format") not in (None, FORMAT):
    raise _unsupported(f"{path}.format", group["format"])
  for key in ("input_activations", "output_activations"):
    if group.get(key) is not None:
      raise _unsupported(f"{path}.{key}", "quantised activations")
  wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK}
  for key, value in wanted.items():
    if group["weights"].get(key) != value:
      raise _unsupported(f"{path}.weights.{key}", group["weights"].get(key))
  if not group["weights"].get("symmetric", True):
    raise _unsupported(f"{path}.weights.symmetric", False)


def _unsupported(key, value):
  return ValueError(
    f"parse_quantization_config: {key} is not supported yet; got {value!r}. {SUPPORTED} "
    "Load the 16-bit checkpoint and run launch.quantize instead."
  )
