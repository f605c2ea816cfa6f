"""MXFP4 experts of gpt-oss checkpoints as leaves with a leading expert axis, and back.

  X_blocks  u8 [E, out, in/32, 16]   codes, the even column in the low nibble
  X_scales  u8 [E, out, in/32]       E8M0 bytes
for X = '..mlp.experts.gate_up_proj' and '..mlp.experts.down_proj'. The rows of gate_up_proj are
interleaved: gate is row 0, 2, 4, .., up is row 1, 3, 5, ..; the model computes
(up + 1) * gate * sigmoid(1.702 * gate) with gate <= 7 and |up| <= 7. No model of ours has them.
Dims: E experts, O out, I in. Source: openai/gpt-oss; transformers integrations/mxfp4.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxlab import errors
from jaxlab.io import fp4_layouts
from jaxlab.nn import weights

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16


def from_gpt_oss(
  blocks: np.ndarray, scales: np.ndarray, name: str, file: str = "checkpoint"
) -> weights.FP4Array:
  """The leaf [E, in, out] of one `..._proj`, bytes as they are.

  Raises: CorruptFile for another dtype or shape, or a scale that is NaN.
  """
  suffix = {"codes": BLOCKS, "scale": SCALES}
  damage = lambda part, rule: errors.CorruptFile(file, f"{name}{suffix[part]}", rule)
  if blocks.dtype != np.uint8 or blocks.ndim != 4 or blocks.shape[-1] != BLOCK_BYTES:
    raise damage(
      "codes", f"must be uint8 [experts, out, in/32, 16]; got {blocks.dtype} {blocks.shape}"
    )
  codes = blocks.reshape(*blocks.shape[:2], -1)
  fp4_layouts.check_codes(codes, scales, "mxfp4", damage)
  ones = np.ones(len(codes), np.float32)
  return fp4_layouts.to_leaf(
    fp4_layouts.Packed(codes, scales, ones, None, None, "mxfp4", "none", 0, True)
  )


def to_gpt_oss(name: str, w: weights.FP4Array) -> dict[str, np.ndarray]:
  """{'X_blocks': .., 'X_scales': ..}.

  Raises: ValueError unless w is [E, in, out] in MXFP4, not rotated, with tensor scales of 1.
  """
  if w.codes.ndim != 3 or w.format != "mxfp4" or w.rotation:
    raise ValueError(
      f"to_gpt_oss: {name} must be mxfp4 [experts, in, out] without rotation; got {w.format} "
      f"{w.shape}, rotation {w.rotation}."
    )
  if (np.asarray(w.tensor_scale) != 1).any():
    raise ValueError(
      f"to_gpt_oss: {name} must have no tensor scale; got {np.unique(w.tensor_scale)[:3]}. "
      "Quantise with the rule 'even'."
    )
  codes, scales = np.asarray(w.codes), np.asarray(w.scale)
  return {f"{name}{BLOCKS}": codes.reshape(*scales.shape, BLOCK_BYTES), f"{name}{SCALES}": scales}


def split_gate_up(w: weights.FP4Array) -> tuple[weights.FP4Array, weights.FP4Array]:
  """(gate, up) of a `gate_up_proj`: its even and its odd rows."""

  def rows(start):
    return dataclasses.replace(w, codes=w.codes[..., start::2, :], scale=w.scale[..., start::2, :])

  return rows(0), rows(1)


def join_gate_up(gate: weights.FP4Array, up: weights.FP4Array) -> weights.FP4Array:
  """The inverse of `split_gate_up`.

  Raises: ValueError if the two do not belong together.
  """
  if gate.codes.shape != up.codes.shape or (gate.tensor_scale != up.tensor_scale).any():
    raise ValueError(
      "join_gate_up: gate and up must have one shape and equal tensor scales; got "
      f"{gate.shape} and {up.shape}."
    )

  def interleaved(a, b):
    return jnp.stack([a, b], axis=-2).reshape(*a.shape[:-2], -1, a.shape[-1])

  return dataclasses.replace(
    gate, codes=interleaved(gate.codes, up.codes), scale=interleaved(gate.scale, up.scale)
  )
