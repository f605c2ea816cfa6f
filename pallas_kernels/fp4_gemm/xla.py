"""x @ W for a packed W (W4A16) in plain XLA, on any device. Dims: O out, K in, H = K / 2.

The operand of the product is value(code) * block scale, which is exact in bfloat16; the tensor
scale multiplies the float32 sums. W is never interleaved: its even and odd columns stay apart, and
those of x are put into that order instead. They are two products, y = x_even @ lo + x_odd @ hi; a
TPU decodes both in its vector memory (for a v5p XLA first copies the layer's codes). On a GPU one
array [O, 2, H] is decoded and contracted over both its last axes: with one reader of the codes XLA
decodes a layer straight from the stack, with two it first copies the layer's codes, at every token.
One layer's decoded columns live for one product; the backward pass decodes again and keeps the
packed arguments only.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec


def forward(
  x: Float[Array, "*lead K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Shaped[Array, ""] | None = None,
) -> Float[Array, "*lead O"]:
  """y = tensor_scale * (x @ W), in x's dtype."""
  codes, scale, tensor_scale = _layer(codes, scale, tensor_scale, layer)
  even, odd = codec.deinterleave(x)
  if _in_one():
    y = _dot(jnp.stack([even, odd], axis=-2), _planes(x.dtype, codes, scale), (1, 2))
  else:
    lo_OH, hi_OH = _halves(x.dtype, codes, scale)
    y = _contract(even, lo_OH) + _contract(odd, hi_OH)
  return (y * tensor_scale).astype(x.dtype)


def backward(
  dy: Float[Array, "*lead O"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Shaped[Array, ""] | None = None,
) -> Float[Array, "*lead K"]:
  """dx = tensor_scale * (dy @ W^T), in dy's dtype."""
  codes, scale, tensor_scale = _layer(codes, scale, tensor_scale, layer)
  if _in_one():
    both = _dot(dy, _planes(dy.dtype, codes, scale), (0,))
    even, odd = both[..., 0, :], both[..., 1, :]
  else:
    lo_OH, hi_OH = _halves(dy.dtype, codes, scale)
    even, odd = _dot(dy, lo_OH, (0,)), _dot(dy, hi_OH, (0,))
  return (codec.interleave(even, odd) * tensor_scale).astype(dy.dtype)


def _in_one() -> bool:
  return target.current_target().platform == "cuda"


def _layer(codes, scale, tensor_scale, layer):
  """The arguments of one layer."""
  if layer is None:
    return codes, scale, tensor_scale
  return tuple(
    jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
    for leaf in (codes, scale, tensor_scale)
  )


def _halves(dtype, codes, scale):
  """Decoded even and odd columns, [O, H] each, without the tensor scale."""
  scale_Ok = codec.decode_scale(scale).astype(dtype)
  return tuple(codec.scale_blocks(half, scale_Ok) for half in codec.unpack_halves(codes, dtype))


def _planes(dtype, codes, scale):
  """The same in one array, [O, 2, H]."""
  values_O2H = codec.unpack_planes(codes, dtype)
  scale_O1k = codec.decode_scale(scale).astype(dtype)[..., None, :]
  scale_O2k = jnp.broadcast_to(scale_O1k, (*values_O2H.shape[:-1], scale.shape[-1]))
  return codec.scale_blocks(values_O2H, scale_O2k)


def _contract(x, w_OH):
  """x @ w_OH.T with float32 sums."""
  one_row = math.prod(x.shape[:-1]) == 1
  if one_row and target.current_target().platform == "cpu":
    # One row against a transposed matrix is 20 times slower on a CPU than matrix times vector.
    y = _dot(w_OH, x.reshape(x.shape[-1]), (0,))
    return y.reshape(*x.shape[:-1], w_OH.shape[0])
  return _dot(x, w_OH, (1,))


def _dot(a, b, b_axes):
  """Contracts a's last axes with `b_axes` of b; float32 sums, full precision for float32."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  a_axes = tuple(range(a.ndim - len(b_axes), a.ndim))
  dims = ((a_axes, b_axes), ((), ()))
  return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
