"""x @ W for an output matrix in int8 with float32 scales: a head, or the embedding tied to it.

Dims: M rows, K width, V vocabulary, k blocks of K.
"""

import functools

import jax
import jax.numpy as jnp
from absl import logging
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, cpu

IMPLEMENTATIONS = ("cpu", "xla")
BLOCK = 32  # columns of the native kernel's blocks, where there is more than one


def int8_head(
  x: Float[Array, "*lead K"],
  codes: Int8[Array, "V K"],
  scale: Float32[Array, "V k"],
  *,
  implementation: str | None = None,
) -> Float32[Array, "*lead V"]:
  """Float32 logits x @ W, where W[i, v] = codes[v, i] * scale[v, i // (K / k)].

  The only rounding is that of W and of the float32 sums: x is not rounded ("xla" rounds W to x's
  dtype, which shows in bfloat16). Differentiable in x.

  Args:
    x: float32 or bfloat16.
    scale: one for every K / k columns.
    implementation: None (the first that can run), "cpu" (native code), or "xla".
  Raises: ValueError for what does not fit together; NotImplementedError for a forced implementation
    that cannot run here.
  """
  if x.shape[-1] != codes.shape[-1] or codes.shape[-1] % scale.shape[-1]:
    raise ValueError(
      f"int8_head: x must be [..., K], codes [V, K], scale [V, k] with k a divisor of K; got "
      f"{x.shape}, {codes.shape} and {scale.shape}. Quantise with jaxlab.quant.int8."
    )
  device = target.current_target()
  name = _choose(implementation, device, x.dtype, codes.shape, scale.shape)
  with jax.named_scope(f"int8_head:{name}"):
    y = _product(name, x.reshape(-1, x.shape[-1]), codes, scale)
  return y.reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(name, x_MK, codes, scale):
  if name == "cpu":
    return cpu.int8_head(x_MK, codes, scale)
  # Weight first: with one row the usual order is twenty times slower on a CPU.
  w_VK = codec.scale_blocks(codes.astype(jnp.float32), scale).astype(x_MK.dtype)
  exact = jax.lax.Precision.HIGHEST
  return jnp.matmul(w_VK, x_MK.T, precision=exact, preferred_element_type=jnp.float32).T


def _forward(name, x_MK, codes, scale):
  # An empty array carries x's dtype to the gradient.
  return _product(name, x_MK, codes, scale), (x_MK[:0], codes, scale)


def _backward(name, residuals, dy):
  like, codes, scale = residuals
  w_VK = codec.scale_blocks(codes.astype(jnp.float32), scale)
  dx = jnp.matmul(dy, w_VK, precision=jax.lax.Precision.HIGHEST)
  return dx.astype(like.dtype), None, None


_product.defvjp(_forward, _backward)


@functools.cache  # so that each choice is logged once
def _choose(asked, device, dtype, codes_shape, scale_shape) -> str:
  if asked not in (None, *IMPLEMENTATIONS):
    raise ValueError(
      f"int8_head: unknown implementation; got {asked!r}. Use one of "
      f"{', '.join(IMPLEMENTATIONS)}, or None."
    )
  reason = _why_not_cpu(device, dtype, codes_shape, scale_shape)
  if asked == "cpu" and reason:
    raise NotImplementedError(
      f"int8_head: 'cpu' cannot run here: {reason}. Pass None to leave the choice."
    )
  name = asked or ("xla" if reason else "cpu")
  logging.info("int8_head: '%s' on %s (%s)", name, device.device_kind, reason or "as it can run")
  return name


def _why_not_cpu(device, dtype, codes_shape, scale_shape) -> str | None:
  if device.platform != "cpu":
    return f"it runs on a CPU, not on {device.device_kind}"
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"x must be float32 or bfloat16, not {dtype}"
  width, blocks = codes_shape[-1], scale_shape[-1]
  if width % BLOCK or blocks not in (1, width // BLOCK):
    return f"scales must be one a row or one for {BLOCK} columns, not {blocks} for {width} columns"
  return cpu.why_no_library()
