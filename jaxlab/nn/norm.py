"""RMS normalisation in float32. Dims: D width. Source: arXiv 1910.07467 eq. (4)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
  x: Float[Array, "*rows D"], gain_D: Float[Array, "D"], eps: float
) -> Float[Array, "*rows D"]:
  """x / sqrt(mean(x^2) + eps) * gain, computed in float32, returned in x's dtype.

  The product with the gain stays in float32 too: noise on a gain of 1 would vanish in bfloat16
  below 2^-9.
  """
  x32 = x.astype(jnp.float32)
  gain = gain_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + gain_D.shape)
  scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * scale * gain).astype(x.dtype)
