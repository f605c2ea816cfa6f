"""FP4 blocks of GGUF files as packed kernels: nibbles change places, nothing becomes dense.

  MXFP4  32 elements in 17 bytes: E8M0 byte, then 16 bytes whose low nibbles are elements 0-15 and
         whose high nibbles are 16-31
  NVFP4  64 elements in 36 bytes: 4 E4M3 scales, then for each 16 elements 8 bytes, low nibbles
         elements 0-7, high nibbles 8-15

Both are OCP's values: llama.cpp doubles its table of E2M1 and halves the scale. A tensor scale,
where there is one, is a tensor of its own, `blk.0.attn_q.scale`, a multiplier.
Source: llama.cpp ggml-common.h (block_mxfp4, block_nvfp4), gguf-py quants.py.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxlab import errors
from jaxlab.io import fp4_layouts, gguf

FORMATS = {"MXFP4": "mxfp4", "NVFP4": "nvfp4"}
BLOCKS = {"MXFP4": (32, 1, 1), "NVFP4": (64, 4, 4)}  # elements, scale bytes, sub-blocks
TENSOR_SCALE, ACT_SCALE = ".scale", ".input_scale"


def is_packed(tensor: gguf.GGUFTensor) -> bool:
  return tensor.type in FORMATS and len(tensor.shape) == 2


def kind(file: gguf.GGUFFile, name: str) -> tuple | None:
  """`Packed.kind` of a weight; None for other types."""
  tensor = file.tensors.get(name)
  if tensor is None or not is_packed(tensor):
    return None
  return (FORMATS[tensor.type], "none", 0, False, False, False)


def scale_names(file: gguf.GGUFFile, weights: Mapping[str, object]) -> set[str]:
  """The tensors of scales that belong to the NVFP4 weights among these."""
  stems = {
    name.removesuffix(".weight")
    for name in weights
    if name in file.tensors and file.tensors[name].type == "NVFP4"
  }
  return {stem + end for stem in stems for end in (TENSOR_SCALE, ACT_SCALE)} & file.tensors.keys()


def read(file: gguf.GGUFFile, name: str) -> fp4_layouts.Packed:
  """One weight [out, in], 16-bit activations.

  Raises: CorruptFile for scales that are NaN, negative, or zero over codes that are not.
  """
  tensor = file.tensors[name]
  elements, scale_bytes, parts = BLOCKS[tensor.type]
  rows, columns = tensor.shape
  block = np.frombuffer(tensor.raw, np.uint8).reshape(rows, columns // elements, -1)
  scale = np.ascontiguousarray(block[..., :scale_bytes]).reshape(rows, -1)
  if tensor.type == "NVFP4":
    scale = scale.view(ml_dtypes.float8_e4m3fn)
  codes = reorder(block[..., scale_bytes:].reshape(rows, columns // elements, parts, -1))
  codes = codes.reshape(rows, -1)
  format = FORMATS[tensor.type]
  damage = lambda part, rule: errors.CorruptFile(file.path, f"{part} of {name!r}", rule)
  fp4_layouts.check_codes(codes, scale, format, damage)
  return fp4_layouts.Packed(
    codes, scale, _tensor_scale(file, name, damage), None, None, format, "none", 0, False
  )


def reorder(halves: np.ndarray) -> np.ndarray:
  """Bytes of (element j, element j + n) as bytes of (element 2j, element 2j + 1); n a byte's count
  along the last axis."""
  even, odd = halves[..., 0::2], halves[..., 1::2]
  first = (even & 15) | (odd << 4)
  second = (even >> 4) | (odd & 0xF0)
  return np.concatenate([first, second], axis=-1)


def _tensor_scale(file, name, damage) -> np.ndarray:
  stored = name.removesuffix(".weight") + TENSOR_SCALE
  if stored not in file.tensors:
    return np.ones((), np.float32)
  value = file.dequantize(stored)
  if value.size != 1 or not (np.isfinite(value).all() and value.min() > 0):
    raise damage(TENSOR_SCALE, f"must be one positive number; got {value.ravel()[:3].tolist()}")
  return value.reshape(())
