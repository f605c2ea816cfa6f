"""x @ W for a packed W in plain float32 jnp: the truth for values and, by autodiff, gradients."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from pallas_kernels.fp4_gemm import codec


def forward(
  x: Float[Array, "*lead K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Shaped[Array, ""] | None = None,
) -> Float[Array, "*lead O"]:
  """The dense product in float32, rounded once to x's dtype."""
  if layer is not None:
    codes, scale, tensor_scale = codes[layer], scale[layer], tensor_scale[layer]
  w_OK = jax.lax.stop_gradient(codec.decode(codes, scale, tensor_scale, jnp.float32))
  y = jnp.einsum("...k,ok->...o", x.astype(jnp.float32), w_OK, precision="highest")
  return y.astype(x.dtype)
