"""Rotary position embeddings, split-half pairs as in transformers. Dims: B T S H, h = H/2.

Source: arXiv 2104.09864 §3; scaling of Llama 3.1 as in its released configs (`rope_type` "llama3").
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxlab.nn import pytree


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Base and scaling. `kind`: "default", "linear" (position interpolation) or "llama3"."""

  theta: float = 10_000.0
  kind: str = "default"
  factor: float = 1.0
  low_freq_factor: float = 1.0  # llama3 only
  high_freq_factor: float = 4.0  # llama3 only
  original_max_positions: int = 8192  # llama3 only

  def __post_init__(self):
    if self.kind not in ("default", "linear", "llama3"):
      raise ValueError(
        f"RopeConfig.kind: must be default, linear or llama3; got {self.kind!r}. "
        "Other scalings are not supported."
      )


@pytree.pytree()
class Rope:
  """Rotation tables at the positions of the current queries (and of their own keys)."""

  positions_BT: Int[Array, "B T"]  # negative = padding
  cos_BTH: Float32[Array, "B T H"]
  sin_BTH: Float32[Array, "B T H"]

  def __call__(self, x_BTNH: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Rotates q or k; float32 inside, x's dtype outside."""
    x = x_BTNH.astype(jnp.float32)
    left, right = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([-right, left], axis=-1)
    out = x * self.cos_BTH[:, :, None] + rotated * self.sin_BTH[:, :, None]
    return out.astype(x_BTNH.dtype)


def rope_at(config: RopeConfig, head_dim: int, positions_BT: Int[Array, "B T"]) -> Rope:
  """Tables for the given positions; computed once a forward pass, shared by all layers."""
  freq_h = jnp.asarray(inverse_frequencies(config, head_dim))
  angle_BTh = positions_BT.astype(jnp.float32)[..., None] * freq_h[None, None]
  angle_BTH = jnp.concatenate([angle_BTh, angle_BTh], axis=-1)
  return Rope(positions_BT, jnp.cos(angle_BTH), jnp.sin(angle_BTH))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
  """float32 [head_dim / 2] angular frequencies after scaling."""
  exponent_h = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
  freq_h = (1.0 / np.power(np.float32(config.theta), exponent_h)).astype(np.float32)
  match config.kind:
    case "linear":
      return freq_h / np.float32(config.factor)
    case "llama3":
      return _llama3(freq_h, config)
    case _:
      return freq_h


def _llama3(freq_h: np.ndarray, config: RopeConfig) -> np.ndarray:
  """Long wavelengths are divided by factor, short ones kept, the band between blended."""
  wavelength_h = 2 * math.pi / freq_h
  ratio_h = config.original_max_positions / wavelength_h
  span = config.high_freq_factor - config.low_freq_factor
  blend_h = np.clip((ratio_h - config.low_freq_factor) / span, 0.0, 1.0)
  return ((1 - blend_h) * freq_h / config.factor + blend_h * freq_h).astype(np.float32)
