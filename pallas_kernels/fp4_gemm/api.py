"""The public FP4 product: checks its arguments, picks an implementation by rule, runs it."""

import functools

import jax
import jax.numpy as jnp
from absl import logging
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, reference, xla

IMPLEMENTATIONS = {"reference": reference.linear, "xla": xla.linear}
ACTIVATIONS = ("none", "fp4")


def fp4_matmul(
  x: Float[Array, "*lead K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  *,
  layer: Int[Array, ""] | int | None = None,
  activations: str = "none",
  act_scale: Float32[Array, "*stack"] | None = None,
  rotation: int = 0,
  implementation: str | None = None,
) -> Float[Array, "*lead O"]:
  """x @ W for W in NVFP4 or MXFP4, with float32 sums.

  Differentiable in x only (dx = dy @ W^T, straight through the rounding of activations); works
  under jit, scan, remat and vmap. Needs no `shard_map`: under a mesh XLA partitions it like a dense
  product, with W sharded along O, or along K at multiples of the block.

  Args:
    x: float32 or bfloat16.
    codes: two E2M1 codes a byte along K (H = K / 2), even k in the low nibble.
    scale: float8_e4m3fn, one per 16 of K (NVFP4), or uint8 E8M0 exponents, one per 32 (MXFP4).
    tensor_scale: multiplier, applied to the float32 sums (1 / g where a file stores the divisor g).
    layer: index into the stack when there is one stack axis, in [0, L); traced values are clamped.
    activations: "none" (W4A16), or "fp4": x is rounded to the format of W first (W4A4, simulated).
    act_scale: NVFP4 with "fp4": static multiplier for x; None takes it from each row.
    rotation: size of the block Hadamard applied to x first (W must be rotated already); 0 for none.
    implementation: None (by rule), "xla", or "reference".
  Returns: [*lead, O] in x's dtype.
  Raises: ValueError for shapes, dtypes or options that do not fit together.
  """
  _check(x, codes, scale, tensor_scale, layer)
  _check_options(x, scale, activations, act_scale, rotation)
  name = _choose(implementation, target.current_target())
  layer = None if layer is None else jnp.asarray(layer, jnp.int32)
  x = codec.rotate(x, rotation)
  if activations == "fp4":
    if act_scale is not None and layer is not None:
      act_scale = jax.lax.dynamic_index_in_dim(act_scale, layer, 0, keepdims=False)
    x = codec.fake_quantize(x, codec.format_of(scale), act_scale)
  with jax.named_scope(f"fp4_matmul:{name}"):  # read by profilers and by `launch.plan`
    return IMPLEMENTATIONS[name](x, codes, scale, tensor_scale, layer)


@functools.cache  # so that each choice is logged once
def _choose(implementation: str | None, device: target.Target) -> str:
  """XLA everywhere until a kernel beats it; the reference only on request."""
  if implementation not in (None, *IMPLEMENTATIONS):
    raise ValueError(
      f"fp4_matmul: unknown implementation; got {implementation!r}. "
      f"Use one of {', '.join(IMPLEMENTATIONS)}, or None."
    )
  name = implementation or "xla"
  reason = "as asked" if implementation else "the only fast implementation for it so far"
  logging.info("fp4_matmul: '%s' on %s (%s)", name, device.device_kind, reason)
  return name


def _check(x, codes, scale, tensor_scale, layer):
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"fp4_matmul: x must be float32 or bfloat16; got {x.dtype}. Cast it.")
  if codes.dtype != jnp.uint8:
    raise ValueError(f"fp4_matmul: codes must be uint8, two a byte; got {codes.dtype}. Pack them.")
  block = codec.BLOCK[codec.format_of(scale)]
  *stack, features, half = codes.shape
  if x.shape[-1] != 2 * half:
    raise ValueError(
      f"fp4_matmul: x must have {2 * half} columns for codes {codes.shape}; got {x.shape}. "
      "Kernels are packed as [out, in / 2]."
    )
  if 2 * half % block or scale.shape != (*stack, features, 2 * half // block):
    raise ValueError(
      f"fp4_matmul: scale must be [*stack, out, in / {block}] for codes {codes.shape}; "
      f"got {scale.shape}. Check the format and that in is a multiple of {block}."
    )
  if tensor_scale.shape != tuple(stack):
    raise ValueError(
      f"fp4_matmul: tensor_scale must have the stack's shape {tuple(stack)}; "
      f"got {tensor_scale.shape}. Give one multiplier a matrix."
    )
  if len(stack) != (layer is not None):
    raise ValueError(
      f"fp4_matmul: codes must be one matrix, or a stack of one axis with a layer; got "
      f"{codes.shape} and layer={layer}. Pass layer, or use jax.vmap."
    )
  if isinstance(layer, int) and not 0 <= layer < stack[0]:
    raise ValueError(f"fp4_matmul: layer must be in [0, {stack[0]}); got {layer}. Count from 0.")


def _check_options(x, scale, activations, act_scale, rotation):
  if activations not in ACTIVATIONS:
    raise ValueError(
      f"fp4_matmul: activations must be one of {', '.join(ACTIVATIONS)}; got {activations!r}. "
      "Use 'none' for W4A16."
    )
  if act_scale is not None and (activations, codec.format_of(scale)) != ("fp4", "nvfp4"):
    raise ValueError(
      f"fp4_matmul: act_scale needs activations='fp4' and nvfp4; got activations={activations!r} "
      f"and {codec.format_of(scale)}. Pass None."
    )
  features = x.shape[-1]
  if rotation and (rotation < 2 or rotation & (rotation - 1) or features % rotation):
    raise ValueError(
      f"fp4_matmul: rotation must be a power of two that divides in={features}; got {rotation}. "
      "Use the size that the weights were rotated with, or 0."
    )
