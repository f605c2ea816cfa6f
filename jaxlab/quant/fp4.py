"""Kernels to NVFP4 and MXFP4 by rounding to nearest, one kernel or a whole model.

NVFP4 (arXiv 2510.11696 §3, compressed-tensors' arithmetic), for a matrix W and its blocks b of 16:
  g = 448 * 6 / max|W|,  s_b = e4m3(g * max|W_b| / 6),  q = e2m1(W_b / (s_b / g)),  W^ = q * s_b / g
MXFP4: blocks of 32, s_b = 2^E by a rule of `formats.e8m0_byte`, no g. Searches for better scales:
`scales.py`. Dims: I in, O out.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jaxtyping import Array, Float, Float32

from jaxlab.nn import weights
from jaxlab.quant import formats, nf4
from jaxlab.quant import scales as scale_fit
from pallas_kernels.fp4_gemm import codec

FORMATS = ("nvfp4", "mxfp4", "nf4", "bf16")
FP43_MAX = 2.0**126  # 6 * 2^E / 3 for the largest exponent that is written


def quantize(
  w: Float[Array, "*stack I O"],
  format: str = "nvfp4",
  *,
  scales: scale_fit.ScaleConfig = scale_fit.ABSMAX,
  tensor_amax: Float32[Array, "*stack"] | None = None,
  activations: str = "none",
) -> weights.FP4Array:
  """A dense kernel in FP4, rounded to nearest; each matrix of the stack has its own tensor scale.

  Blocks below about 2e-7 of the matrix' largest (NVFP4) or 2^-126 (MXFP4) are nearest to zero, and
  become it: a warning counts them.

  Args:
    scales: rule and search of the scales.
    tensor_amax: nvfp4 only: the magnitude that g is made for, when several kernels share one g; at
      least the kernel's own largest.
    activations: stored in the leaf: "none" (W4A16) or "fp4" (W4A4).
  Raises: ValueError if I is no multiple of the block, a concrete w is not finite or beyond what
    "fp43" can hold, or an option is unknown or belongs to the other format.
  """
  _check_options("quantize", format, scales, activations)
  nf4.require_block("quantize", w, codec.BLOCK[format])
  w = jnp.asarray(w)
  formats.require_finite("quantize", w)
  if format == "mxfp4":
    _check_mxfp4(w, tensor_amax, scales.rule)
  elif tensor_amax is not None:
    tensor_amax = jnp.asarray(tensor_amax, jnp.float32)
    _check_amax(tensor_amax, _amax(w))
  fitted, codes, vanished = _quantize(w, tensor_amax, format=format, config=scales)
  _warn_vanished(format, vanished)
  return weights.FP4Array(codes, *fitted, format=format, activations=activations)


def quantize_fused(
  ws: Sequence[Float[Array, "*stack I _"]],
  format: str = "nvfp4",
  *,
  scales: scale_fit.ScaleConfig = scale_fit.ABSMAX,
  activations: str = "none",
) -> list[weights.FP4Array]:
  """Kernels of the same inputs (q/k/v, gate/up), in nvfp4 with one tensor scale for all.

  Joint rounds fit it to all of them side by side, which takes a copy of them.

  Raises: as `quantize`.
  """
  make = functools.partial(quantize, format=format, scales=scales, activations=activations)
  if format == "mxfp4" or len(ws) == 1:
    return [make(w) for w in ws]
  if not scales.joint_rounds:
    amax = functools.reduce(jnp.maximum, [_amax(jnp.asarray(w)) for w in ws])
    return [make(w, tensor_amax=amax) for w in ws]
  # The tensor scale is fitted to the error: only of all members at once.
  whole = make(jnp.concatenate(list(ws), axis=-1))
  ends = [sum(w.shape[-1] for w in ws[: i + 1]) for i in range(len(ws))][:-1]
  parts = zip(jnp.split(whole.codes, ends, -2), jnp.split(whole.scale, ends, -2), strict=True)
  return [
    weights.FP4Array(*part, whole.tensor_scale, format=format, activations=activations)
    for part in parts
  ]


def dequantize(
  w: weights.FP4Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "*stack I O"]:
  """The dense kernel, with a rotation undone."""
  return weights.dense(w, dtype)


def quantize_params(
  params: Any,
  format: str = "nvfp4",
  *,
  scales: scale_fit.ScaleConfig = scale_fit.ABSMAX,
  activations: str = "none",
  skip: Sequence[str] = ("head", "embed"),
  fuse: Sequence[Sequence[str]] = (("q", "k", "v"), ("gate", "up")),
) -> Any:
  """A model with every linear kernel below "layers" in `format`; all else is kept as it is.

  One matrix is rounded at a time, so the peak is the model, the result and one matrix in float32.

  Args:
    params: stacked or unstacked layers of dense kernels.
    format: "nvfp4", "mxfp4", "nf4", or "bf16" (the baseline: linear kernels cast to bfloat16).
    scales: rule and search of the scales ("nvfp4", "mxfp4").
    skip: path components that keep a kernel dense.
    fuse: siblings that share one g (nvfp4), because vLLM multiplies them as one matrix.
  Raises: ValueError if there is nothing to quantise, a kernel is not dense any more, or one has an
    input axis that the block does not divide (all are named before any work starts); for options
    that the format does not have.
  """
  if format not in FORMATS:
    raise ValueError(
      f"quantize_params: unknown format; got {format!r}. Use one of {', '.join(FORMATS)}."
    )
  kernels = _linear_kernels(params, skip)
  _check_kernels(kernels, format)
  if format in codec.BLOCK:
    _check_options("quantize_params", format, scales, activations)
    make = functools.partial(quantize_fused, format=format, scales=scales, activations=activations)
    groups = _fused_paths(kernels, fuse if format == "nvfp4" else ())
    replace = {
      path: leaf
      for paths in groups
      for path, leaf in zip(paths, make([kernels[p] for p in paths]), strict=True)
    }
  else:
    _check_plain(format, scales, activations)
    make = nf4.quantize if format == "nf4" else lambda w: w.astype(jnp.bfloat16)
    replace = {path: make(w) for path, w in kernels.items()}
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


def _fused_paths(kernels, fuse):
  """The paths of the kernels, those that share a tensor scale together."""

  def group(path):
    parent, name, _ = path.rsplit("/", 2)
    return parent, next((tuple(names) for names in fuse if name in names), name)

  groups = {}
  for path in kernels:
    groups.setdefault(group(path), []).append(path)
  return list(groups.values())


@functools.partial(jax.jit, static_argnames=("format", "config"))
def _quantize(w, tensor_amax, *, format, config):
  def matrix(xs):
    w_IO = xs[0].astype(jnp.float32)
    fitted = scale_fit.fit(w_IO.T, format, config, xs[1])
    codes = scale_fit.encode(w_IO.T, format, fitted)
    return fitted, codes, formats.vanished(w_IO, scale_fit.block_units(fitted))

  return weights.map_stack(matrix, (w, tensor_amax), w.ndim - 2)


def _warn_vanished(format, vanished):
  if isinstance(vanished, jax.core.Tracer):
    return
  if lost := int(jnp.sum(vanished)):
    logging.warning(
      "quantize: %d block(s) of a kernel are too small for %s, or beside its largest value: they "
      "are zero now.", lost, format,
    )  # fmt: skip


@jax.jit
def _amax(w):
  return jnp.max(jnp.abs(w.astype(jnp.float32)), axis=(-2, -1))


def _check_options(name, format, scales, activations):
  scale_fit.require_config(name, format, scales)
  if activations not in ("none", "fp4"):
    raise ValueError(f"{name}: activations must be none or fp4; got {activations!r}.")


def _check_plain(format, scales, activations):
  if scales != scale_fit.ABSMAX or activations != "none":
    raise ValueError(
      f"quantize_params: {format} has no scale options and dense activations; got {scales} and "
      f"activations={activations!r}. Leave them out, or choose nvfp4 or mxfp4."
    )


def _check_mxfp4(w, tensor_amax, rule):
  if tensor_amax is not None:
    raise ValueError(f"quantize: mxfp4 has no tensor scale; got {tensor_amax=}. Pass None.")
  if rule != "fp43" or isinstance(w, jax.core.Tracer):
    return
  if (largest := float(jnp.max(_amax(w)))) > FP43_MAX:
    raise ValueError(
      f"quantize: fp43 holds magnitudes up to {FP43_MAX:.3g}; got {largest:.3g}. Use another rule."
    )


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
