"""Runs a kernel on every device's part of a split product, under `jax.shard_map`.

A kernel is a custom call: left alone, XLA would gather its operands. Dims: O out, K in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

Axes = tuple[str, ...] | str | None


@dataclasses.dataclass(frozen=True)
class Split:
  """How W [O, K] lies on a mesh, and over which axes the leading axes of x may be split."""

  mesh: Mesh | AbstractMesh
  in_axis: str | None  # splits K: partial sums are added over it
  out_axis: str | None  # splits O
  lead: tuple[Axes, ...] = (("data", "fsdp"), "sequence")  # of x [B, T, K]

  def rows(self, shape: tuple[int, ...]) -> tuple[Axes, ...]:
    """The axes of x's leading axes of sizes `shape`; an axis that does not divide is dropped."""
    taken = {self.in_axis, self.out_axis}
    found = []
    for size, axes in zip(shape, (*self.lead, *[None] * len(shape)), strict=False):
      names = (axes,) if isinstance(axes, str) else axes or ()
      names = tuple(n for n in names if self.mesh.shape[n] > 1 and n not in taken)
      shards = 1
      for name in names:
        shards *= self.mesh.shape[name]
      found.append(names if names and size % shards == 0 else None)
    return tuple(found)


def run(
  product: Callable[..., Array],
  split: Split,
  x: Any,
  packed: tuple[Shaped[Array, "..."], ...],
  layer: Shaped[Array, ""] | None,
  *,
  transposed: bool = False,
) -> Float[Array, "*lead J"]:
  """`product(x, codes, scale, tensor_scale, layer)` of every device's part.

  Args:
    x: [*lead, I], or FP4 rows: a tuple of [*lead, ...] and the multipliers [*lead].
    product: x @ W, or dy @ W^T where `transposed`.
    packed: codes [*stack, O, K / 2], scale [*stack, O, K / block], tensor_scale [*stack].
  Returns: split over `out_axis` (`in_axis` where transposed), summed over the other.
  """
  contracted, kept = split.in_axis, split.out_axis
  if transposed:
    contracted, kept = kept, contracted
  lead = jax.tree.leaves(x)[0].shape[:-1]
  rows = split.rows(lead)
  x_specs = jax.tree.map(lambda a: P(*rows, contracted) if a.ndim > len(lead) else P(*rows), x)
  stack = [None] * (packed[0].ndim - 2)
  matrix = P(*stack, split.out_axis, split.in_axis)

  def local(x, codes, scale, tensor_scale, *layer):
    y = product(x, codes, scale, tensor_scale, *(layer or (None,)))
    return jax.lax.psum(y, contracted) if contracted else y

  operands = (x, *packed, *(() if layer is None else (layer,)))
  specs = (x_specs, matrix, matrix, P(*stack), *(() if layer is None else (P(),)))
  return jax.shard_map(
    local, mesh=split.mesh, in_specs=specs, out_specs=P(*rows, kept), check_vma=False
  )(*operands)
