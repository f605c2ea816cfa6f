"""x @ W for a packed W (W4A16) in plain XLA, on any device. Dims: O out, K in, H = K / 2.

The operand of the product is value(code) * block scale, which is exact in bfloat16; the tensor
scale multiplies the float32 sums. Even and odd columns are two products, y = x_even @ lo + x_odd @
hi: no interleaving of W. One layer's decoded halves live for one product; the backward pass decodes
again and keeps the packed arguments only.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec


@jax.custom_vjp
def linear(
  x: Float[Array, "*lead K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Shaped[Array, ""] | None = None,
) -> Float[Array, "*lead O"]:
  """y = tensor_scale * (x @ W), in x's dtype. The packed arguments have no gradient."""
  lo_OH, hi_OH, tensor_scale = _halves(x.dtype, codes, scale, tensor_scale, layer)
  even, odd = codec.deinterleave(x)
  y = _contract(even, lo_OH) + _contract(odd, hi_OH)
  return (y * tensor_scale).astype(x.dtype)


def _linear_fwd(x, codes, scale, tensor_scale, layer):
  return linear(x, codes, scale, tensor_scale, layer), (codes, scale, tensor_scale, layer)


def _linear_bwd(residuals, dy):
  lo_OH, hi_OH, tensor_scale = _halves(dy.dtype, *residuals)
  dx = codec.interleave(_dot(dy, lo_OH, 0), _dot(dy, hi_OH, 0))
  return (dx * tensor_scale).astype(dy.dtype), None, None, None, None


linear.defvjp(_linear_fwd, _linear_bwd)


def _halves(dtype, codes, scale, tensor_scale, layer):
  """Decoded even and odd columns of one layer, without the tensor scale, and that scale."""
  if layer is not None:
    # Only codes and scales of the layer are read; XLA fuses the slice into the decode.
    codes, scale, tensor_scale = (
      jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
      for leaf in (codes, scale, tensor_scale)
    )
  scale_Ok = codec.decode_scale(scale).astype(dtype)
  lo, hi = (codec.scale_blocks(half, scale_Ok) for half in codec.unpack_halves(codes, dtype))
  return lo, hi, tensor_scale


def _contract(x, w_OH):
  """x @ w_OH.T with float32 sums."""
  one_row = math.prod(x.shape[:-1]) == 1
  if one_row and target.current_target().platform == "cpu":
    # One row against a transposed matrix is 20 times slower on a CPU than matrix times vector.
    y = _dot(w_OH, x.reshape(x.shape[-1]), 0)
    return y.reshape(*x.shape[:-1], w_OH.shape[0])
  return _dot(x, w_OH, 1)


def _dot(a, b, b_axis):
  """Contracts a's last axis with axis `b_axis` of b; float32 sums, full precision for float32."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  dims = (((a.ndim - 1,), (b_axis,)), ((), ()))
  return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
