"""Block rotations of a model's linears: which size, and their fusion into the weights.

  x' = reshape(x, [..., I/g, g]) H,  W' likewise on I,  y = x' W' = x W;  H = Sylvester / sqrt(g)
The weights are rotated once, the activations online (`FP4Array.rotation`); residual stream, norms,
cache and embeddings keep their basis. Source: arXiv 2509.23202, code. Dims: I in, O out.
"""

import math
from collections.abc import Mapping

from jaxtyping import Array, Float

from pallas_kernels.fp4_gemm import codec

MAX_SIZE = 128  # the largest that the official kernels have


def choose_size(widths: Mapping[str, int], size: int | None) -> int:
  """The size of one rotation for all sites, 0 for none.

  Args:
    widths: inputs of each site by name, such as {"q/k/v": 576, "down": 1536}.
    size: None takes the largest power of two up to 128 that divides every width.
  Raises: ValueError naming the site for a size that does not divide its width, or is no power of 2.
  """
  if size is None:
    common = math.gcd(MAX_SIZE, *widths.values())
    return common if common > 1 else 0
  if size and (size < 2 or size & (size - 1)):
    raise ValueError(f"choose_size: rotation must be a power of two, or 0 for none; got {size}.")
  for name, width in widths.items():
    if size and width % size:
      fits = math.gcd(width & -width, MAX_SIZE)
      raise ValueError(
        f"choose_size: rotation must divide the inputs of every site; got {size} for {name} with "
        f"{width}. Use at most {fits}, or None for the largest that fits all."
      )
  return size


def rotate_kernel(w_IO: Float[Array, "*stack I O"], size: int) -> Float[Array, "*stack I O"]:
  """W' of a kernel; its own inverse. rotate(x, size) @ rotate_kernel(w, size) = x @ w."""
  return codec.unrotate(w_IO, size)
