"""One NVFP4 tensor scale for linears that servers multiply as one matrix (q/k/v, gate/up).

vLLM keeps one scale of a fused set. With g the divisor of a member and g' the smallest of the set
(that of the largest magnitude), a block scale s becomes s' = e4m3(s g' / g), and its codes those
nearest to the values that they had: value * (s / g) / (s' / g').
Dims: L layers, O out, H in / 2, k blocks.
Source: FP-Quant `--fuse_global_scale`, arXiv 2509.23202 and its code.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxlab.nn import weights
from pallas_kernels.fp4_gemm import codec

PyTree = Any
SETS = (("q", "k", "v"), ("gate", "up"))


def fuse_tensor_scales(params: PyTree, sets: Sequence[Sequence[str]] = SETS) -> PyTree:
  """The model with equal tensor scales, of weights and of activations, within each set.

  Members whose scale is the set's already keep their bytes; sets that are not all NVFP4 are left
  alone.

  Args:
    params: stacked or a list of layers.
  """
  replaced = {}
  for paths, leaves in _sets(params, sets):
    scale = _shared(leaves, [w.tensor_scale for w in leaves])
    acts = [w.act_scale for w in leaves]
    act = None if None in acts else _shared(leaves, acts)
    for path, w in zip(paths, leaves, strict=True):
      tensor_scale = _convert(scale, leaves[0], w)
      act_scale = w.act_scale if act is None else _convert(act, leaves[0], w)
      codes, blocks = _rescale(w, tensor_scale)
      replaced[path] = dataclasses.replace(
        w, codes=codes, scale=blocks, tensor_scale=tensor_scale, act_scale=act_scale
      )
  return weights.map_leaves(lambda path, leaf: replaced.get(path, leaf), params)


def unequal(params: PyTree, sets: Sequence[Sequence[str]] = SETS) -> list[str]:
  """The paths of the first members of sets whose tensor scales differ."""
  return [
    paths[0]
    for paths, leaves in _sets(params, sets)
    if any(
      bool((_convert(w.tensor_scale, w, leaves[0]) != leaves[0].tensor_scale).any())
      for w in leaves[1:]
    )
  ]


def _sets(params, sets) -> Iterator[tuple[list[str], list[weights.FP4Array]]]:
  """(paths, leaves) of every set whose members are all there and NVFP4."""
  leaves = weights.leaf_paths(params)
  for path in leaves:
    parent, _, rest = path.rpartition("/")[0].rpartition("/")
    for names in sets:
      if rest != names[0]:
        continue
      paths = [f"{parent}/{name}/kernel" for name in names]
      members = [leaves.get(p) for p in paths]
      if all(isinstance(w, weights.FP4Array) and w.format == "nvfp4" for w in members):
        yield paths, members


def _shared(leaves: list[weights.FP4Array], scales: list[Array]) -> Array:
  """The scale of the largest magnitude, in the convention of the first leaf."""
  pick = jnp.minimum if leaves[0].scale_is_divisor else jnp.maximum
  converted = (_convert(x, w, leaves[0]) for x, w in zip(scales, leaves, strict=True))
  return functools.reduce(pick, converted)


def _convert(scale: Array, of: weights.FP4Array, to: weights.FP4Array) -> Array:
  """A scale in the convention (divisor or multiplier) of one leaf in that of another."""
  return scale if of.scale_is_divisor == to.scale_is_divisor else 1.0 / scale


def _rescale(w: weights.FP4Array, tensor_scale: Float32[Array, "*stack"]) -> tuple[Array, Array]:
  """(codes, block scales) of nearly the same values under another tensor scale."""
  ratio = tensor_scale / w.tensor_scale if w.scale_is_divisor else w.tensor_scale / tensor_scale
  return _rescale_stack((w.codes, w.scale, ratio), w.codes.ndim - 2)


@functools.partial(jax.jit, static_argnums=1)
def _rescale_stack(arrays, stack_axes):
  return weights.map_stack(_rescale_matrix, arrays, stack_axes)


def _rescale_matrix(arrays):
  codes_OH, scale_Ok, ratio = arrays
  wanted_Ok = scale_Ok.astype(jnp.float32) * ratio
  new_Ok = jnp.clip(wanted_Ok, codec.E4M3_TINY, codec.E4M3_MAX).astype(scale_Ok.dtype)
  moved_Ok = wanted_Ok / new_Ok.astype(jnp.float32)
  new_OH = codec.pack(codec.encode_e2m1(codec.scale_blocks(codec.unpack_codes(codes_OH), moved_Ok)))
  same = ratio == 1
  return jnp.where(same, codes_OH, new_OH), jnp.where(same, scale_Ok, new_Ok)
