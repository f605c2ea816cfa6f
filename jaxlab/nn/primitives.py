"""What linen modules are made of: norms in float32, and linears `{"kernel": [in, out], "bias"}`.

Linen's `param` refuses packed kernels, so it is called only to initialise what is not there yet;
what is there is read with `get_variable` and multiplied by the weight seam.
Dims: D width, I in, O out, V vocabulary, M flattened rows.
Source: arXiv 1910.07467 eq. (4) (RMS norm), 1607.06450 eq. (3) (layer norm).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxlab.nn import weights
from pallas_kernels.fp4_gemm import codec

Dtype = jax.typing.DTypeLike


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


def layer_norm(
  x: Float[Array, "*rows D"], gain_D: Float[Array, "D"], eps: float
) -> Float[Array, "*rows D"]:
  """(x - mean(x)) / sqrt(var(x) + eps) * gain, without a bias; precision as in `rms_norm`."""
  x32 = x.astype(jnp.float32)
  return rms_norm(x32 - jnp.mean(x32, axis=-1, keepdims=True), gain_D, eps).astype(x.dtype)


def declare(module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: Dtype) -> None:
  """Initialises the parameter `name` where the module has none."""
  if not module.has_variable("params", name):
    module.param(name, init, shape, dtype)


def declare_gain(module: nn.Module, name: str, features: int, dtype: Dtype) -> None:
  declare(module, name, nn.initializers.ones, (features,), dtype)


def declare_linear(
  module: nn.Module,
  name: str,
  features_in: int,
  features_out: int,
  *,
  use_bias: bool,
  dtype: Dtype,
  kernel_init: nn.initializers.Initializer,
) -> None:
  def init(key, shape, dtype):
    kernel = kernel_init(key, shape, dtype)
    return {"kernel": kernel} | ({"bias": jnp.zeros(shape[1:], dtype)} if use_bias else {})

  declare(module, name, init, (features_in, features_out), dtype)


def declare_layers(module: nn.Module, block: nn.Module, method: Any) -> None:
  """The stacked parameters of a model's `num_layers` equal blocks, where it has none.

  method: any of the block's that takes x_BTD; each declares all parameters.
  """
  if module.has_variable("params", "layers"):
    return
  x = jnp.zeros((1, 1, module.config.width), module.param_dtype)

  def init(key):
    keys = jax.random.split(key, module.config.num_layers)
    return jax.vmap(lambda key: block.init(key, x, method=method)["params"])(keys)

  module.param("layers", init)


def beside_layers(module: nn.Module, path: str) -> Any:
  """A model's parameter such as 'embed' or 'head/kernel', gathered over `fsdp` where it is split.

  module: with the field `placement`, None or a `jaxlab.parallel.rules.Placement`.
  """
  name, *part = path.split("/")
  w = module.get_variable("params", name)
  w = w[part[0]] if part else w
  return w if module.placement is None else module.placement.gather(path, w)


def project(
  module: nn.Module, x: Float[Array, "*rows I"], *names: str
) -> tuple[Float[Array, "*rows O"], ...]:
  """The outputs of the module's linears `names`, which share the input."""
  linears = [module.get_variable("params", name) for name in names]
  ys = weights.matmul_many(x, [linear["kernel"] for linear in linears])
  return tuple(
    y + weights.broadcast_bias(linear["bias"], y) if "bias" in linear else y
    for y, linear in zip(ys, linears, strict=True)
  )


def lookup(embed_VD: Any, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
  """Rows of an embedding, dense or int8 (then as float32)."""
  if isinstance(embed_VD, weights.Int8Array):
    codes, scale = embed_VD.codes[tokens], embed_VD.scale[tokens]
    return codec.scale_blocks(codes.astype(jnp.float32), scale)
  return jnp.take(embed_VD, tokens, axis=0)


def tied_logits(rows: Float[Array, "*rows D"], embed_VD: Any) -> Float32[Array, "*rows V"]:
  """Float32 logits of an output matrix that is the embedding, dense or int8."""
  if isinstance(embed_VD, weights.Int8Array):
    return weights.matmul(rows, embed_VD).astype(jnp.float32)
  embed_VD = embed_VD.astype(rows.dtype)
  flat_MD = rows.reshape(-1, rows.shape[-1])
  # Weight first: with one row the usual order is twenty times slower on a CPU.
  logits_VM = jnp.einsum("VD,MD->VM", embed_VD, flat_MD, preferred_element_type=jnp.float32)
  return logits_VM.T.reshape(*rows.shape[:-1], -1)
