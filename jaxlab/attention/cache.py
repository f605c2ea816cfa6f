"""The one key/value cache: slot = position.

A key of position p lives in slot p, so masks need no bookkeeping, rows may stand at different
positions, and left padding is only a choice of positions. With one `write` a row, what would go
before slot 0 or to slot S and beyond is dropped, never clamped; the scalar `write` is the fast path
of callers whose tokens all fit. Dims: L B K S H T.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlab.nn import pytree


@pytree.pytree()
class LayerCache:
  """One layer's view. With `layer` set, k and v are the whole stack [L, B, K, S, H] and only the
  new tokens of that layer are written; without, they are one layer's [B, K, S, H]."""

  k: Float[Array, "*L B K S H"]
  v: Float[Array, "*L B K S H"]
  write: Int[Array, ""] | Int[Array, "B"]
  layer: Int[Array, ""] | None = None

  def read(self) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    if self.layer is None:
      return self.k, self.v
    at = lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, 0, keepdims=False)
    return at(self.k), at(self.v)

  def append(
    self, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]
  ) -> "LayerCache":
    """Writes T new tokens at slots write .. write + T - 1 of each row."""
    return dataclasses.replace(self, k=self._write(self.k, k_BTKH), v=self._write(self.v, v_BTKH))

  def _write(self, store, new_BTKH):
    new_BKTH = jnp.swapaxes(new_BTKH, 1, 2).astype(store.dtype)
    lead = () if self.layer is None else (self.layer,)
    if jnp.ndim(self.write) == 0:  # one contiguous update
      start = (*lead, 0, 0, self.write, 0)
      update = new_BKTH if self.layer is None else new_BKTH[None]
      return jax.lax.dynamic_update_slice(store, update, start)
    b, kv_heads, t, _ = new_BKTH.shape
    rows = jnp.arange(b)[:, None, None]
    heads = jnp.arange(kv_heads)[None, :, None]
    slots = self.write[:, None, None] + jnp.arange(t)[None, None, :]
    slots = jnp.where(slots < 0, store.shape[-2], slots)  # an index of -1 would be the last slot
    return store.at[(*lead, rows, heads, slots)].set(new_BKTH, mode="drop")


@pytree.pytree()
class KVCache:
  """Keys and values of all layers: stacked arrays [L, B, K, S, H], or lists of [B, K, S, H] for a
  model whose layers are a list. `write`: next slot, one for all rows or one a row; None in a cache
  that is put aside, to be set by `at`."""

  k: Any
  v: Any
  write: Int[Array, ""] | Int[Array, "B"] | None

  def layer(self, index) -> LayerCache:
    if isinstance(self.k, list):
      return LayerCache(self.k[index], self.v[index], self.write)
    return LayerCache(self.k, self.v, self.write, index)

  def with_layer(self, index, layer_cache: LayerCache) -> "KVCache":
    if not isinstance(self.k, list):
      return dataclasses.replace(self, k=layer_cache.k, v=layer_cache.v)
    k, v = list(self.k), list(self.v)
    k[index], v[index] = layer_cache.k, layer_cache.v
    return dataclasses.replace(self, k=k, v=v)

  def at(self, write: Int[Array, ""] | Int[Array, "B"] | None) -> "KVCache":
    """The same cache with another next slot."""
    return dataclasses.replace(self, write=write)


def init_cache(
  *,
  num_layers: int,
  batch: int,
  num_kv_heads: int,
  num_slots: int,
  head_dim: int,
  dtype: jax.typing.DTypeLike,
  stacked: bool,
) -> KVCache:
  """An empty cache whose next slot is 0 in every row."""
  shape = (batch, num_kv_heads, num_slots, head_dim)
  if stacked:
    zeros = lambda: jnp.zeros((num_layers, *shape), dtype)
  else:
    zeros = lambda: [jnp.zeros(shape, dtype) for _ in range(num_layers)]
  return KVCache(zeros(), zeros(), jnp.int32(0))
