"""Dense attention with grouped queries: the reference of the attention seam, and its default.

Scores and softmax in float32. Long query ranges are processed in rematerialised chunks, so that
memory is chunk * S, not T * S. Chunk i takes every n-th query from i on: where the queries are
split over devices (`sequence`), each device then works on its share of every chunk.
Dims: B T S N K G H; n chunks of c queries. Source: arXiv 2305.13245 §2 (GQA).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxlab.attention import cache as kv
from jaxlab.attention import masks
from jaxlab.nn import rotary

QUERY_CHUNK = 512  # rows of scores alive at once; above, memory wins over one fused product


@dataclasses.dataclass(frozen=True)
class DenseAttention:
  """`attend` over all keys that `where` admits; rotates q and k, stores rotated keys in the
  cache."""

  where: masks.Where = masks.Where()

  def __call__(
    self,
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    rope: rotary.Rope,
    layer_cache: kv.LayerCache | None,
  ) -> tuple[Float[Array, "B T N H"], kv.LayerCache | None, None]:
    q_BTNH, k_BTKH = rope(q_BTNH), rope(k_BTKH)
    if layer_cache is None:
      k_BKSH, v_BKSH = jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2)
      k_positions = rope.positions_BT
    else:
      layer_cache = layer_cache.append(k_BTKH, v_BTKH)
      k_BKSH, v_BKSH = layer_cache.read()
      k_positions = jnp.arange(k_BKSH.shape[-2])[None]

    def rows(q_BTNH, positions_BT, slot_T=None):
      keep_BTS = self.where.dense(positions_BT, k_positions, slot_T)
      return attention(q_BTNH, k_BKSH, v_BKSH, keep_BTS)

    t = q_BTNH.shape[1]
    if t <= QUERY_CHUNK:
      return rows(q_BTNH, rope.positions_BT), layer_cache, None
    count = num_chunks(t)
    slot_nc = _chunks(jnp.arange(t)[None], count, fill=t)[:, 0]
    xs = (_chunks(q_BTNH, count, fill=0), _chunks(rope.positions_BT, count, fill=-1), slot_nc)
    o_nBcNH = jax.lax.map(jax.checkpoint(lambda x: rows(*x)), xs)
    o_BTNH = jnp.moveaxis(o_nBcNH, 0, 2).reshape(q_BTNH.shape[0], -1, *q_BTNH.shape[2:])
    return o_BTNH[:, :t], layer_cache, None


def num_chunks(length: int) -> int:
  """Chunks of at most QUERY_CHUNK queries: a few more than needed where those are all full."""
  least = -(-length // QUERY_CHUNK)
  return next((n for n in range(least, 2 * least) if length % n == 0), least)


def _chunks(x: Shaped[Array, "B T *rest"], count: int, fill: int) -> Shaped[Array, "n B c *rest"]:
  """Every `count`-th entry along T, filled up to whole chunks."""
  b, t, *rest = x.shape
  x = jnp.pad(x, [(0, 0), (0, -t % count)] + [(0, 0)] * len(rest), constant_values=fill)
  return jnp.moveaxis(x.reshape(b, -1, count, *rest), 2, 0)


def attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BKSH: Float[Array, "B K S H"],
  v_BKSH: Float[Array, "B K S H"],
  keep_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
  """softmax(q k / sqrt(H)) v; a query that may see nothing gets zeros, not NaN."""
  b, t, n, h = q_BTNH.shape
  num_kv = k_BKSH.shape[1]
  # R = T * G rows share their keys; T outside, so that queries split over devices stay so.
  q_BKRH = q_BTNH.reshape(b, t, num_kv, -1, h).swapaxes(1, 2).reshape(b, num_kv, -1, h)
  s_BKRS = jnp.einsum("BKRH,BKSH->BKRS", q_BKRH, k_BKSH, preferred_element_type=jnp.float32)
  s_BKTGS = s_BKRS.reshape(b, num_kv, t, n // num_kv, -1) / math.sqrt(h)
  keep_B1T1S = keep_BTS[:, None, :, None]
  s_BKTGS = jnp.where(keep_B1T1S, s_BKTGS, -jnp.inf)
  top = jnp.max(s_BKTGS, axis=-1, keepdims=True)
  top = jnp.where(jnp.isfinite(top), top, 0.0)
  p_BKTGS = jnp.exp(s_BKTGS - jax.lax.stop_gradient(top))
  total = jnp.sum(p_BKTGS, axis=-1, keepdims=True)
  p_BKTGS = p_BKTGS / jnp.where(total == 0, 1.0, total)
  p_BKRS = p_BKTGS.reshape(s_BKRS.shape).astype(v_BKSH.dtype)
  o_BKRH = jnp.einsum("BKRS,BKSH->BKRH", p_BKRS, v_BKSH)
  o_BTKGH = o_BKRH.reshape(b, num_kv, t, n // num_kv, h).swapaxes(1, 2)
  return o_BTKGH.reshape(b, t, n, h).astype(q_BTNH.dtype)
