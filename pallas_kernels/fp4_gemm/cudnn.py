"""FP4 times FP4 on Blackwell's tensor cores (W4A4), by cuDNN through `jax.nn.scaled_matmul`: NVFP4.

Scales stay row-major: XLA brings them into cuDNN's 128 x 4 tiles. The multipliers of rows and of
the tensor are no part of the call; they are applied to its float32 result. What XLA does around the
call (compiled for a B200, jax 0.10.2): rows are padded to 128, the scales of W are rearranged at
every call, and from a stack of layers it first copies the layer's codes, so that a product with few
rows reads and writes W three times over; made for many rows. Dims: M rows, O out, K in, H = K / 2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec


def why_not(
  rows: int, x_dtype: Any, codes_shape: tuple[int, ...], format: str, device: target.Target
) -> str | None:
  """None if cuDNN can run the product, else a sentence."""
  del rows, x_dtype, codes_shape  # XLA pads what cuDNN has no shape for
  gpu = target.gpu(device)
  if gpu is None or gpu.capability[0] != 10:
    return (
      "it needs the FP4 units of a B200 or its kin (compute capability 10); "
      f"this is {device.device_kind}"
    )
  if format != "nvfp4":
    return f"cuDNN multiplies FP4 in blocks of 16 with E4M3 scales, which is nvfp4; got {format}"
  return None


def forward_rows(
  rows: codec.Rows,
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None,
  dtype: jax.typing.DTypeLike,
) -> Float[Array, "M O"]:
  """The product of FP4 rows with W, in `dtype`, with float32 sums."""
  if layer is not None:
    codes, scale, tensor_scale = (
      jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
      for leaf in (codes, scale, tensor_scale)
    )
  y_MO = jax.nn.scaled_matmul(
    values(rows.codes)[None],
    values(codes)[None],
    rows.scale[None],
    scale[None],
    preferred_element_type=jnp.float32,
  )[0]
  return (y_MO * (rows.multiplier[:, None] * tensor_scale)).astype(dtype)


def values(codes: UInt8[Array, "N H"]) -> Float[Array, "N K"]:
  """Packed codes as float4_e2m1fn: the same bits, the low nibble first."""
  return jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(codes.shape[0], -1)
