"""Block scales in tiles of 128 rows by 4 blocks, as Blackwell's tensor cores and cuBLAS read them.

Checkpoints and leaves hold rows; the swizzle is never on disk. Dims: R rows, k blocks of a row, r
and b tiles of them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

ROWS, BLOCKS = 128, 4  # of a tile


def shape(rows: int, columns: int) -> tuple[int, ...]:
  """[r, b, 32, 16] of the swizzled scales of `rows` x `columns`, both rounded up to tiles."""
  return (-(-rows // ROWS), -(-columns // BLOCKS), ROWS // 4, 4 * BLOCKS)


def swizzle(scale: Shaped[Array, "*stack R k"]) -> Shaped[Array, "*stack r b 32 16"]:
  """Scales in tiles, rows and blocks padded with byte 0.

  Element (r, c) comes to [r // 128, c // 4, r % 32, 4 * ((r % 128) // 32) + c % 4], that is to the
  flat offset ((r // 128) * (k / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4.
  """
  *stack, rows, columns = scale.shape
  r, b, *tile = shape(rows, columns)
  padding = [(0, 0)] * len(stack) + [(0, ROWS * r - rows), (0, BLOCKS * b - columns)]
  padded = jnp.pad(lax.bitcast_convert_type(scale, jnp.uint8), padding)
  tiles = jnp.moveaxis(padded.reshape(*stack, r, 4, 32, b, BLOCKS), (-2, -3, -4), (-4, -3, -2))
  return lax.bitcast_convert_type(tiles.reshape(*stack, r, b, *tile), scale.dtype)


def unswizzle(tiles: Shaped[Array, "*stack r b 32 16"], rows: int, columns: int) -> Array:
  """The inverse of `swizzle`: [*stack, rows, columns], the padding dropped.

  Raises: ValueError if `tiles` is not the swizzled form of such a matrix.
  """
  *stack, r, b, _, _ = tiles.shape
  if tiles.shape[-4:] != shape(rows, columns):
    raise ValueError(
      f"unswizzle: {rows} x {columns} scales are swizzled as {shape(rows, columns)}; got "
      f"{tiles.shape[-4:]}. Give the size before padding."
    )
  parts = tiles.reshape(*stack, r, b, 32, 4, BLOCKS)
  padded = jnp.moveaxis(parts, (-4, -3, -2), (-2, -3, -4)).reshape(*stack, ROWS * r, BLOCKS * b)
  return padded[..., :rows, :columns]
