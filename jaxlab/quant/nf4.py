"""NF4, the baseline format of QLoRA (arXiv 2305.14314 §3): quantiles of the normal distribution.

Blocks of 64 along the input axis, block maxima stored in 8 bits (double quantisation). The second
level differs: one affine scale a matrix instead of blocks of 256 [ours: a pair of scalars a matrix
travels with the stack]. Dims: I in, O out.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.nn import weights
from jaxlab.quant import formats
from pallas_kernels.fp4_gemm import codec


def quantize(w: Float[Array, "*stack I O"]) -> weights.NF4Array:
  """Nearest NF4 codes of a kernel; scales are per matrix of the stack.

  Raises: ValueError if I is no multiple of 64 or a concrete w is not finite.
  """
  require_block("quantize", w, codec.NF4_BLOCK)
  formats.require_finite("quantize", w)
  return _quantize(jnp.asarray(w))


def dequantize(
  w: weights.NF4Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "*stack I O"]:
  """The dense kernel."""
  return weights.dense(w, dtype)


def require_block(name: str, w: Float[Array, "*stack I O"], block: int) -> None:
  """Raises ValueError unless w is a kernel whose input axis is a multiple of `block`."""
  if w.ndim < 2 or w.shape[-2] % block:
    raise ValueError(
      f"{name}: a kernel must be [*stack, in, out] with in a multiple of {block}; got {w.shape}. "
      "Leave this kernel out, or choose a format with a smaller block."
    )


@jax.jit
def _quantize(w):
  return weights.map_stack(_quantize_matrix, w, w.ndim - 2)


def _quantize_matrix(w_IO):
  w_OI = w_IO.T.astype(jnp.float32)
  blocks = w_OI.reshape(w_OI.shape[0], -1, codec.NF4_BLOCK)
  absmax = jnp.max(jnp.abs(blocks), axis=-1)
  scale, step, low = _affine_8bit(absmax)
  # Codes are taken against the scale that will be read back: its rounding is not added to theirs.
  read = scale.astype(jnp.float32) * step + low
  unit = jnp.where(absmax[..., None] > 0, blocks / jnp.where(read > 0, read, 1.0)[..., None], 0.0)
  codes = _nearest(unit).reshape(w_OI.shape)
  return weights.NF4Array(formats.pack(codes), scale, step, low)


def _affine_8bit(absmax):
  """absmax ~ code * step + low. `low` is the smallest maximum of a block that is not all zero, so
  that no block is rounded to nothing; zero blocks hold the code of 0 and any scale."""
  high = jnp.max(absmax)
  low = jnp.where(high > 0, jnp.min(jnp.where(absmax > 0, absmax, jnp.inf)), 0.0)
  step = (high - low) / 255
  code = jnp.round((absmax - low) / jnp.where(step > 0, step, 1.0))
  return jnp.clip(code, 0, 255).astype(jnp.uint8), step, low


def _nearest(unit):
  values = np.array(codec.NF4_VALUES, np.float32)
  thresholds = (values[1:] + values[:-1]) / 2
  return sum((unit > float(t)).astype(jnp.uint8) for t in thresholds)
