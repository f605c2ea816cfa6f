"""Which CTA of a persistent grid does which tiles, for the Mosaic-GPU kernels.

A product is `row_tiles * feature_tiles` tiles of `steps` steps along K each. Whole tiles go round
the CTAs in turn. With `split` every CTA takes the same number of steps instead, across the borders
of tiles; a tile that several CTAs share is stored in parts, which are added afterwards in a fixed
order (`add_parts`). Plain integers on the host and int32 in a kernel take the same path.
Dims: S parts, M rows of x, O out.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

BAND = 8  # tiles of rows that neighbours in time go through together, for the L2 cache


@dataclasses.dataclass(frozen=True)
class Share:
  """A CTA's work: `steps` steps, from step `offset` of tile `first` on, every `stride`-th tile."""

  first: Any
  stride: int
  offset: Any
  steps: Any
  steps_of_tile: int

  @property
  def tiles(self) -> Any:
    """How many tiles it has a part in."""
    return lax.div(self.offset + self.steps - 1, self.steps_of_tile) + 1

  def tile(self, i: Any) -> Any:
    """Its i-th tile."""
    return self.first + self.stride * i

  def turns(self, i: Any) -> tuple[Any, Any]:
    """[begin, end) of its steps that are in its i-th tile."""
    begin = lax.max(i * self.steps_of_tile - self.offset, 0)
    return begin, lax.min((i + 1) * self.steps_of_tile - self.offset, self.steps)

  def at(self, turn: Any) -> tuple[Any, Any]:
    """(tile, step in it) of one of its steps."""
    step = self.offset + turn
    return self.tile(lax.div(step, self.steps_of_tile)), lax.rem(step, self.steps_of_tile)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """row_tiles, feature_tiles: of the result. steps: of a tile. ctas: at most tiles, or steps."""

  row_tiles: int
  feature_tiles: int
  steps: int
  ctas: int
  split: bool

  @property
  def tiles(self) -> int:
    return self.row_tiles * self.feature_tiles

  def share(self, cta: Any) -> Share:
    """What a CTA does."""
    if self.split:
      total = self.tiles * self.steps
      begin, end = (lax.div((cta + i) * total, self.ctas) for i in (0, 1))
      first, offset = lax.div(begin, self.steps), lax.rem(begin, self.steps)
      return Share(first, 1, offset, end - begin, self.steps)
    tiles = lax.div(self.tiles - 1 - cta, self.ctas) + 1
    return Share(cta, self.ctas, jnp.int32(0), tiles * self.steps, self.steps)

  def coordinates(self, tile: Any) -> tuple[Any, Any]:
    """(tile of rows, tile of features): bands of BAND tiles of rows, in each feature by feature."""
    if self.row_tiles == 1:
      return jnp.int32(0), tile
    band = lax.div(tile, BAND * self.feature_tiles)
    height = lax.min(self.row_tiles - band * BAND, BAND)
    inside = tile - band * (BAND * self.feature_tiles)
    return band * BAND + lax.rem(inside, height), lax.div(inside, height)

  def owner(self, step: Any) -> Any:
    """With `split`: the CTA that does a step, counted over all tiles."""
    return ((step + 1) * self.ctas - 1) // (self.tiles * self.steps)

  def part(self, cta: Any, tile: Any) -> Any:
    """Which part of a tile is a CTA's."""
    if not self.split:
      return jnp.int32(0)
    return cta - lax.div((tile * self.steps + 1) * self.ctas - 1, self.tiles * self.steps)

  def parts_of_tiles(self) -> np.ndarray:
    """How many CTAs share each tile."""
    tiles = np.arange(self.tiles)
    if not self.split:
      return np.ones_like(tiles)
    return self.owner((tiles + 1) * self.steps - 1) - self.owner(tiles * self.steps) + 1

  @property
  def parts(self) -> int:
    """S, the most CTAs that share a tile."""
    return int(self.parts_of_tiles().max())

  def add_parts(self, y_SMO: Float32[Array, "S M O"]) -> Float32[Array, "M O"]:
    """The sum over each tile's parts, of one tile of rows; the others were never written."""
    of_feature = np.repeat(self.parts_of_tiles(), y_SMO.shape[-1] // self.feature_tiles)
    there_S1O = np.arange(y_SMO.shape[0])[:, None, None] < of_feature
    return jnp.where(there_S1O, y_SMO, 0).sum(0)


def split_pays(tiles: int, rows: int, width: int, multiprocessors: int) -> bool:
  """Whether idle multiprocessors in the last round cost more than storing and adding the parts.

  An estimate from bytes, not measured. `tiles` share one tile of rows.
  """
  rounds = pl.cdiv(tiles, multiprocessors) * multiprocessors / tiles
  # float32 written and read, at half the price of weights: it stays in the L2 cache.
  parts = 0.5 * (1 + multiprocessors / tiles) * 8 * rows / (0.5625 * width)
  return rounds > 1 + parts


@dataclasses.dataclass(frozen=True)
class Ring:
  """Slots that one thread fills and others empty, in turn; `full` and `empty` are barriers."""

  slots: int
  full: Any
  empty: Any

  def fill(self, turn: Any) -> Any:
    """The slot to fill, once it is empty."""
    slot = lax.rem(turn, self.slots)

    @pl.when(turn >= self.slots)
    def _():
      plgpu.barrier_wait(self.empty.at[slot])

    return slot

  def drain(self, turns: Any) -> None:
    """Waits until all that was filled in so many turns has been emptied."""

    def wait(turn, _):
      self.fill(turn)

    lax.fori_loop(turns, turns + self.slots, wait, None)

  def take(self, turn: Any) -> Any:
    """The slot to read, once it is full."""
    slot = lax.rem(turn, self.slots)
    plgpu.barrier_wait(self.full.at[slot])
    return slot
