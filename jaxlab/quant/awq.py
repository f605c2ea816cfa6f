"""AWQ: inputs of large magnitude get finer steps, by scales that are fused into what comes before.

  W s and x / s multiply to the same; s = m^r, m = mean |x| of each input, s / sqrt(max s min s)
  r = argmin over a grid of [0, 1) of |(W - Q(W s) / s) x|^2 = tr(D H D^T), H = 2/N sum x^T x
1 / s goes into the gain of the norm before (q/k/v, gate/up), or the outputs of the linear before (v
for o, up for down): the model computes what it did. The error is that of the site's own outputs,
where the paper takes its block's [ours: H holds all that is needed, and no forward pass is]. With a
rotation Q rounds in the rotated basis.
Source: arXiv 2306.00978 §3.2, appendix. Dims: I in, O out, N query heads, K kv heads, H head width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxlab.models import causal_lm
from jaxlab.quant import blocks, calibrate, gptq

PyTree = Any
GRID = 20  # ratios 0, .05, ... [paper: grid search over 20]
# What the inputs of a causal LM's sites are a product with: a norm's gain, or a linear's outputs.
PRODUCERS = {("q", "k", "v"): "attn_norm", ("o",): "v", ("gate", "up"): "mlp_norm", ("down",): "up"}


class Folded(NamedTuple):
  """A layer that computes the same, and the ratio r of each site, by its first linear."""

  layer: PyTree
  ratios: dict[str, float]


def require_decoder(module: Any) -> None:
  """Raises ValueError for a model in which scales cannot be fused before the sites."""
  if not isinstance(module, causal_lm.CausalLM):
    raise ValueError(
      f"awq: only blocks whose norms feed nothing but linears can be scaled (Llama, Qwen); got a "
      f"{type(module).__name__}. Set awq=False."
    )


def fold(
  layer: PyTree,
  seen: dict[str, calibrate.Statistics],
  config: causal_lm.CausalLMConfig,
  quantize: Callable[[tuple[Array, ...]], tuple[Array, ...]],
) -> Folded:
  """Scales every site of a dense layer by its best s.

  Args:
    seen: statistics of the plain (not rotated) inputs, with Hessians.
    quantize: kernels of one site -> what they are once rounded to nearest, in the plain basis.
  """
  group = config.num_heads // config.num_kv_heads
  ratios = {}
  for site, producer in PRODUCERS.items():
    first = site[0]
    magnitude_I = seen[first].magnitude_I
    if producer == "v":
      magnitude_I = _shared(magnitude_I, group, config.head_dim)
    dense = blocks.kernels(layer)
    w_site = tuple(dense[name] for name in site)
    scale_I, ratio = search(w_site, seen[first].hessian_II, magnitude_I, quantize)
    ratios[first] = float(ratio)
    scaled = {name: (dense[name] * scale_I[:, None]).astype(dense[name].dtype) for name in site}
    out_scale = scale_I
    if producer == "v":  # heads of a group read one channel of v
      out_scale = scale_I.reshape(-1, group, config.head_dim)[:, 0].reshape(-1)
    layer = _divide(blocks.replace_kernels(layer, scaled), producer, out_scale)
  return Folded(layer, ratios)


@functools.partial(jax.jit, static_argnames="quantize")
def search(
  w_site: tuple[Array, ...],
  hessian_II: Float32[Array, "I I"],
  magnitude_I: Float32[Array, "I"],
  quantize: Callable[[tuple[Array, ...]], tuple[Array, ...]],
) -> tuple[Float32[Array, "I"], Float32[Array, ""]]:
  """(s, r) of the least error of the outputs of linears that share their inputs."""
  w_site = tuple(w.astype(jnp.float32) for w in w_site)

  def error(ratio):
    scale_I1 = scales_of(magnitude_I, ratio)[:, None]
    rounded = quantize(tuple(w * scale_I1 for w in w_site))
    change = jnp.concatenate(
      [w - q / scale_I1 for w, q in zip(w_site, rounded, strict=True)], axis=1
    )
    return jnp.sum(gptq.squared_outputs(change, hessian_II))

  ratios = jnp.arange(GRID, dtype=jnp.float32) / GRID
  ratio = ratios[jnp.argmin(jax.lax.map(error, ratios))]
  return scales_of(magnitude_I, ratio), ratio


def scales_of(magnitude_I: Float32[Array, "I"], ratio: Float32[Array, ""]) -> Float32[Array, "I"]:
  """m^r around 1; inputs that are never seen count as the smallest that are."""
  seen = jnp.min(jnp.where(magnitude_I > 0, magnitude_I, jnp.inf))
  m_I = jnp.maximum(magnitude_I, jnp.where(jnp.isfinite(seen), seen, 1.0))
  scale_I = m_I**ratio
  return scale_I / jnp.sqrt(scale_I.max() * scale_I.min())


def _shared(magnitude_I, group, head_dim):
  """One magnitude for the channels of o that read the same channel of v."""
  m_KGH = magnitude_I.reshape(-1, group, head_dim)
  return jnp.broadcast_to(m_KGH.mean(1, keepdims=True), m_KGH.shape).reshape(-1)


def _divide(layer, producer, scale_I):
  """1 / s into a gain, or into the outputs of a linear and its bias."""

  def divided(w):
    return (w / scale_I.reshape((1,) * (w.ndim - 1) + scale_I.shape)).astype(w.dtype)

  return layer | {producer: jax.tree.map(divided, layer[producer])}
