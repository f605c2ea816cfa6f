"""FP-Quant's pseudo-quantised weights: bfloat16 values that lie on an FP4 grid, and back to codes.

A value is bf16(e2m1 * s / g) with the tensor's divisor g and one scale s a block of 16 (E4M3) or 32
(a power of two). s is not stored, but the block's largest magnitude m is one of seven code values
times s / g: the seven candidates are tried, and one is right where all values lie on its grid.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.fp4_gemm import codec

MAGNITUDES = np.asarray(codec.E2M1_VALUES, np.float32)
# Rounding to bfloat16 once or twice moves a value by 2^-8 of itself; neighbours on a grid are 1/6
# apart, neighbouring E4M3 scales 1/16.
TOLERANCE = 2.0**-7


def recover(
  values_OI: np.ndarray,
  format: str,
  divisor: np.ndarray,
  damage: Callable[[str], Exception],
) -> tuple[np.ndarray, np.ndarray]:
  """(codes u8 [O, I/2], block scales as stored) whose values are these.

  Where several pairs have the same values, the one whose largest code is 6.

  Args:
    damage: rule -> the exception to raise where some block lies on no grid.
  """
  block = codec.BLOCK[format]
  if values_OI.ndim != 2 or values_OI.shape[1] % block:
    raise damage(f"must be [out, in], in a multiple of {block}; got {values_OI.shape}")
  x = values_OI.astype(np.float32).reshape(len(values_OI), -1, block) * np.float32(divisor)
  if not np.isfinite(x).all():
    raise damage("must be finite")
  amax = np.abs(x).max(-1)
  dtype = ml_dtypes.float8_e4m3fn if format == "nvfp4" else np.uint8
  scale = np.full(amax.shape, 0.125 if format == "nvfp4" else 127, dtype)
  magnitude = np.zeros(x.shape, np.uint8)
  todo = amax > 0
  for largest in MAGNITUDES[:0:-1]:
    if not todo.any():
      break
    stored, unit = _nearest_scale(amax[todo] / largest, format)
    code, fits = _on_grid(np.abs(x[todo]), unit[:, None])
    index = np.argwhere(todo)[fits]
    scale[tuple(index.T)], magnitude[tuple(index.T)] = stored[fits], code[fits]
    todo[tuple(index.T)] = False
  if todo.any():
    raise damage(f"{int(todo.sum())} of {todo.size} blocks of {block} are not {format} values")
  code = magnitude | np.where(np.signbit(x), np.uint8(8), np.uint8(0))
  code = code.reshape(values_OI.shape)
  return code[:, 0::2] | (code[:, 1::2] << 4), scale


def values(w: Any) -> np.ndarray:
  """The values of a leaf in its rotated basis, bfloat16 [O, I]."""
  multiplier = np.asarray(w.tensor_scale, np.float32)
  multiplier = np.float32(1) / multiplier if w.scale_is_divisor else multiplier
  parts = map(jnp.asarray, (w.codes, w.scale, multiplier))
  return np.asarray(codec.decode(*parts, jnp.bfloat16))


def _nearest_scale(wanted: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
  """(as stored, as float32)."""
  if format == "nvfp4":
    stored = np.minimum(wanted, codec.E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return stored, stored.astype(np.float32)
  exponent = np.clip(np.rint(np.log2(wanted)), -127, 127).astype(np.int32)
  return (exponent + 127).astype(np.uint8), np.ldexp(np.float32(1), exponent)


def _on_grid(x: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(nearest magnitude codes, whether all of a block are right)."""
  ratio = x / np.where(unit > 0, unit, 1)
  code = np.searchsorted((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2, ratio).astype(np.uint8)
  error = np.abs(MAGNITUDES[code] - ratio)
  return code, ((error <= TOLERANCE * ratio) & (unit > 0)).all(-1)
