"""Attention masks as small descriptions; [B, T, S] booleans are built only where they are small.

Dims: B T S. Positions are absolute; a negative position is padding: never attended, never written.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxlab.nn import pytree


@pytree.pytree(static=("causal", "window"))
class Where:
  """Which keys a query may see: all fields given must agree.

  causal: key position <= query position. window: |query - key| < window. Segments: equal ids
  (packed sequences). lengths: key position < length of the row. until: the key in slot j is seen by
  the queries in slots j <= i < until[j]; with tokens in depth-first order that is a tree of
  sequences which share their prefixes.
  """

  causal: bool = True
  window: int | None = None
  segment_q_BT: Int[Array, "B T"] | None = None
  segment_k_BS: Int[Array, "B S"] | None = None
  lengths_B: Int[Array, "B"] | None = None
  until_BS: Int[Array, "B S"] | None = None

  def dense(
    self, q_BT: Int[Array, "B T"], k_BS: Int[Array, "#B S"], start: int | Int[Array, ""] = 0
  ) -> Bool[Array, "B T S"]:
    """The mask for the given query and key positions (a key row of 1 serves all rows).

    start: slot of the first of these queries, for the fields that are kept per query slot.
    """
    q_BT1, k_B1S = q_BT[:, :, None], k_BS[:, None, :]
    keep_BTS = (k_B1S >= 0) & (q_BT1 >= 0)
    if self.causal:
      keep_BTS &= k_B1S <= q_BT1
    if self.window is not None:
      keep_BTS &= jnp.abs(q_BT1 - k_B1S) < self.window
    if self.segment_q_BT is not None:
      segment_BT = jax.lax.dynamic_slice_in_dim(self.segment_q_BT, start, q_BT.shape[1], axis=1)
      keep_BTS &= segment_BT[:, :, None] == self.segment_k_BS[:, None, :]
    if self.lengths_B is not None:
      keep_BTS &= k_B1S < self.lengths_B[:, None, None]
    if self.until_BS is not None:
      slot_T1 = (start + jnp.arange(q_BT.shape[1]))[:, None]
      slot_1S = jnp.arange(k_BS.shape[1])[None]
      keep_BTS &= (slot_1S <= slot_T1)[None] & (slot_T1[None] < self.until_BS[:, None, :])
    return keep_BTS
