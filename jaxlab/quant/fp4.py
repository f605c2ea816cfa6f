"""Kernels to NVFP4 and MXFP4 by rounding to nearest, one kernel or a whole model.

NVFP4 (arXiv 2510.11696 §3, compressed-tensors' arithmetic), for a matrix W and its blocks b of 16:
  g = 448 * 6 / max|W|,  s_b = e4m3(g * max|W_b| / 6),  q = e2m1(W_b / (s_b / g)),  W^ = q * s_b / g
MXFP4: blocks of 32, s_b = 2^E by a rule of `formats.e8m0_byte`, no g. Dims: I in, O out.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxlab.nn import weights
from jaxlab.quant import formats, nf4
from pallas_kernels.fp4_gemm import codec

FORMATS = ("nvfp4", "mxfp4", "nf4", "bf16")
# Largest g: 2^-9 / g is still a normal float32, so a matrix of tiny numbers is not flushed to zero.
MAX_DIVISOR = 2.0**117
# Scale of an all-zero block: any will do; this is the one that compressed-tensors writes.
ZERO_BLOCK_SCALE = 0.125


def quantize(
  w: Float[Array, "*stack I O"],
  format: str = "nvfp4",
  *,
  rule: str = "even",  # [ours: smallest error on weights of the four]
  tensor_amax: Float32[Array, "*stack"] | None = None,
  activations: str = "none",
) -> weights.FP4Array:
  """A dense kernel in FP4, rounded to nearest; each matrix of the stack has its own tensor scale.

  Values below about 2e-7 of the matrix' largest (NVFP4) or 2^-128 (MXFP4) become zero.

  Args:
    rule: mxfp4 only: "even", "floor", "ceil" or "fp43".
    tensor_amax: nvfp4 only: the magnitude that g is made for, when several kernels share one g; at
      least the kernel's own largest.
    activations: stored in the leaf: "none" (W4A16) or "fp4" (W4A4).
  Raises: ValueError if I is no multiple of the block, a concrete w is not finite, or an option is
    unknown or belongs to the other format.
  """
  _check_options("quantize", format, rule, activations)
  nf4.require_block("quantize", w, codec.BLOCK[format])
  formats.require_finite("quantize", w)
  w = jnp.asarray(w)
  if format == "mxfp4":
    if tensor_amax is not None:
      raise ValueError(f"quantize: mxfp4 has no tensor scale; got {tensor_amax=}. Pass None.")
    codes, scale = _mxfp4(w, rule)
    tensor_scale = jnp.full(w.shape[:-2], 3.0 if rule == "fp43" else 1.0, jnp.float32)
  else:
    own_amax = _amax(w)
    tensor_amax = own_amax if tensor_amax is None else jnp.asarray(tensor_amax, jnp.float32)
    _check_amax(tensor_amax, own_amax)
    codes, scale, tensor_scale = _nvfp4(w, tensor_amax)
  return weights.FP4Array(codes, scale, tensor_scale, format=format, activations=activations)


def dequantize(
  w: weights.FP4Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "*stack I O"]:
  """The dense kernel, with a rotation undone."""
  return weights.dense(w, dtype)


def quantize_params(
  params: Any,
  format: str = "nvfp4",
  *,
  rule: str = "even",
  activations: str = "none",
  skip: Sequence[str] = ("head", "embed"),
  fuse: Sequence[Sequence[str]] = (("q", "k", "v"), ("gate", "up")),
) -> Any:
  """A model with every linear kernel below "layers" in `format`; all else is kept as it is.

  One matrix is rounded at a time, so the peak is the model, the result and one matrix in float32.

  Args:
    params: stacked or unstacked layers of dense kernels.
    format: "nvfp4", "mxfp4", "nf4", or "bf16" (the baseline: linear kernels cast to bfloat16).
    skip: path components that keep a kernel dense.
    fuse: siblings that share one g (nvfp4), because vLLM multiplies them as one matrix.
  Raises: ValueError if there is nothing to quantise, a kernel is not dense any more, or one has an
    input axis that the block does not divide (all are named before any work starts).
  """
  if format not in FORMATS:
    raise ValueError(
      f"quantize_params: unknown format; got {format!r}. Use one of {', '.join(FORMATS)}."
    )
  kernels = _linear_kernels(params, skip)
  _check_kernels(kernels, format)
  if format == "bf16":
    replace = {path: w.astype(jnp.bfloat16) for path, w in kernels.items()}
  elif format == "nf4":
    replace = {path: nf4.quantize(w) for path, w in kernels.items()}
  else:
    amax = _shared_amax(kernels, fuse) if format == "nvfp4" else {}
    replace = {
      path: quantize(w, format, rule=rule, tensor_amax=amax.get(path), activations=activations)
      for path, w in kernels.items()
    }
  return weights.map_leaves(lambda path, leaf: replace.get(path, leaf), params)


def weight_bytes(params: Any) -> dict[str, int]:
  """Bytes of the linear kernels below "layers" ("linears": packed, adapters left out) and of all
  parameters ("total")."""

  def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

  kernels = _linear_kernels(params, skip=())
  bases = (w.base if isinstance(w, weights.LoRA) else w for w in kernels.values())
  return {"linears": sum(map(size, bases)), "total": size(params)}


def _linear_kernels(params, skip):
  def is_linear(path):
    parts = path.split("/")
    return "layers" in parts and parts[-1] == "kernel" and not set(skip) & set(parts)

  return {path: w for path, w in weights.leaf_paths(params).items() if is_linear(path)}


def _shared_amax(kernels, fuse):
  """Per kernel, the largest magnitude within its fused set: the smallest g of the members."""
  amax = {path: _amax(jnp.asarray(w)) for path, w in kernels.items()}

  def shared(path):
    parent, name, _ = path.rsplit("/", 2)
    names = next((names for names in fuse if name in names), (name,))
    members = [amax[m] for n in names if (m := f"{parent}/{n}/kernel") in amax]
    return functools.reduce(jnp.maximum, members)

  return {path: shared(path) for path in kernels}


@functools.partial(jax.jit, static_argnames="rule")
def _mxfp4(w, rule):
  return weights.map_stack(functools.partial(_mxfp4_matrix, rule=rule), w, w.ndim - 2)


def _mxfp4_matrix(w_IO, rule):
  blocks = _blocks(w_IO, codec.BLOCK["mxfp4"])
  byte_Oi = formats.e8m0_byte(jnp.max(jnp.abs(blocks), axis=-1), rule)
  unit = blocks / codec.decode_scale(byte_Oi)[..., None]  # exact: a power of two
  unit = unit * 3 if rule == "fp43" else unit
  return _pack(unit), byte_Oi


@jax.jit
def _nvfp4(w, tensor_amax):
  # torch divides a number by a tensor as reciprocal and product, so compressed-tensors' own g can
  # differ from this one in the last bit.
  divisor = jnp.full_like(tensor_amax, codec.E4M3_MAX * codec.E2M1_MAX) / tensor_amax
  divisor = jnp.where(tensor_amax > 0, jnp.minimum(divisor, MAX_DIVISOR), 1.0)
  codes, scale = weights.map_stack(lambda xs: _nvfp4_matrix(*xs), (w, divisor), w.ndim - 2)
  return codes, scale, divisor


def _nvfp4_matrix(w_IO, divisor):
  blocks = _blocks(w_IO, codec.BLOCK["nvfp4"])
  amax_Oi = jnp.max(jnp.abs(blocks), axis=-1)
  scale_Oi = formats.to_e4m3(
    jnp.maximum(divisor * _divide(amax_Oi, codec.E2M1_MAX), codec.E4M3_TINY)
  )
  scale_Oi = jnp.where(amax_Oi > 0, scale_Oi, jnp.asarray(ZERO_BLOCK_SCALE, scale_Oi.dtype))
  unit = _divide(blocks, _divide(scale_Oi.astype(jnp.float32), divisor)[..., None])
  return _pack(unit), scale_Oi


def _divide(a, b):
  """a / b rounded once. XLA rewrites a / broadcast(b) as a * broadcast(1 / b) and a / (b / c) as
  a * c / b; either changes codes at ties, where bfloat16 weights often are. The barrier hides b."""
  return a / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.float32(b), a.shape))


def _blocks(w_IO, block):
  w_OI = w_IO.T.astype(jnp.float32)
  return w_OI.reshape(w_OI.shape[0], -1, block)


def _pack(unit_Oib):
  return formats.pack(formats.encode_e2m1(unit_Oib).reshape(unit_Oib.shape[0], -1))


@jax.jit
def _amax(w):
  return jnp.max(jnp.abs(w), axis=(-2, -1)).astype(jnp.float32)


def _check_options(name, format, rule, activations):
  if format not in codec.BLOCK:
    raise ValueError(f"{name}: format must be one of {', '.join(codec.BLOCK)}; got {format!r}.")
  formats.require_rule(name, rule)
  if format == "nvfp4" and rule != "even":
    raise ValueError(f"{name}: nvfp4 has no scale rule; got {rule!r}. Leave it, or choose mxfp4.")
  if activations not in ("none", "fp4"):
    raise ValueError(f"{name}: activations must be none or fp4; got {activations!r}.")


def _check_amax(tensor_amax, own_amax):
  if tensor_amax.shape != own_amax.shape:
    raise ValueError(
      f"quantize: tensor_amax must have the stack's shape {own_amax.shape}; "
      f"got {tensor_amax.shape}. Give one magnitude a matrix."
    )
  if isinstance(own_amax, jax.core.Tracer) or isinstance(tensor_amax, jax.core.Tracer):
    return
  if bool(jnp.any(tensor_amax < own_amax)):
    raise ValueError(
      f"quantize: tensor_amax must be at least the largest magnitude {own_amax}; "
      f"got {tensor_amax}. Smaller would clip: pass the maximum of all members."
    )


def _check_kernels(kernels, format):
  if not kernels:
    raise ValueError(
      "quantize_params: params must have kernels below 'layers'; got none. Check the tree and skip."
    )
  block = {"nf4": codec.NF4_BLOCK, "bf16": 1}.get(format) or codec.BLOCK[format]
  for path, w in kernels.items():
    if weights.is_leaf(w):
      raise ValueError(
        f"quantize_params: {path} must be dense; got {type(w).__name__}. Quantise a dense "
        "checkpoint before adapters are attached, or weights.densify it first."
      )
    nf4.require_block(f"quantize_params: {path}", w, block)
