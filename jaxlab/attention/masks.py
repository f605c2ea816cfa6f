"""Attention masks as small descriptions; [B, T, S] booleans are built only where they are small.

Dims: B T S. Positions are absolute; a negative position is padding: never attended, never written.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxlab.nn import pytree


@pytree.pytree(static=("causal",))
class Where:
  """Which keys a query may see: all fields given must agree.

  causal: key position <= query position. window: |query - key| < window. Segments: equal ids
  (packed sequences). lengths: key position < length of the row. until: the key in slot j is seen by
  the queries in slots j <= i < until[j]; with tokens in depth-first order that is a tree of
  sequences which share their prefixes.
  """

  causal: bool = True
  window: int | Int[Array, ""] | None = None  # traced where the layers of one loop differ
  segment_q_BT: Int[Array, "B T"] | None = None
  segment_k_BS: Int[Array, "B S"] | None = None
  lengths_B: Int[Array, "B"] | None = None
  until_BS: Int[Array, "B S"] | None = None

  def dense(
    self,
    q_BT: Int[Array, "B T"],
    k_BS: Int[Array, "#B S"],
    slot_T: Int[Array, "T"] | None = None,
  ) -> Bool[Array, "B T S"]:
    """The mask for the given query and key positions (a key row of 1 serves all rows).

    slot_T: slots of these queries, for the fields that are kept per query slot; None: 0 to T - 1.
    """
    q_BT1, k_B1S = q_BT[:, :, None], k_BS[:, None, :]
    keep_BTS = (k_B1S >= 0) & (q_BT1 >= 0)
    if self.causal:
      keep_BTS &= k_B1S <= q_BT1
    if self.window is not None:
      keep_BTS &= jnp.abs(q_BT1 - k_B1S) < self.window
    if self.segment_q_BT is not None:
      segment_BT = self.segment_q_BT
      if slot_T is not None:  # a slot past the end belongs to a query that only fills a chunk
        segment_BT = jnp.take(segment_BT, slot_T, axis=1, mode="clip")
      keep_BTS &= segment_BT[:, :, None] == self.segment_k_BS[:, None, :]
    if self.lengths_B is not None:
      keep_BTS &= k_B1S < self.lengths_B[:, None, None]
    if self.until_BS is not None:
      slot_T1 = (jnp.arange(q_BT.shape[1]) if slot_T is None else slot_T)[:, None]
      slot_1S = jnp.arange(k_BS.shape[1])[None]
      keep_BTS &= (slot_1S <= slot_T1)[None] & (slot_T1[None] < self.until_BS[:, None, :])
    return keep_BTS
