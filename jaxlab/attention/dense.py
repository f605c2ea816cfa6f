"""Dense attention with grouped queries: the reference of the attention seam, and its default.

Scores and softmax in float32. Long query ranges are processed in rematerialised chunks, so that
memory is chunk * S, not T * S. Dims: B T S N K G H. Source: arXiv 2305.13245 §2 (GQA).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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

    @jax.checkpoint
    def rows(q_BTNH, positions_BT, start):
      keep_BTS = self.where.dense(positions_BT, k_positions, start)
      return attention(q_BTNH, k_BKSH, v_BKSH, keep_BTS)

    t = q_BTNH.shape[1]
    if t <= QUERY_CHUNK:
      keep_BTS = self.where.dense(rope.positions_BT, k_positions)
      return attention(q_BTNH, k_BKSH, v_BKSH, keep_BTS), layer_cache, None
    count = t // QUERY_CHUNK
    whole = count * QUERY_CHUNK
    chunks = lambda x: jnp.stack(jnp.split(x[:, :whole], count, axis=1))
    xs = (chunks(q_BTNH), chunks(rope.positions_BT), jnp.arange(0, whole, QUERY_CHUNK))
    o = list(jax.lax.map(lambda x: rows(*x), xs))
    if whole < t:
      o.append(rows(q_BTNH[:, whole:], rope.positions_BT[:, whole:], whole))
    return jnp.concatenate(o, axis=1), layer_cache, None


def attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BKSH: Float[Array, "B K S H"],
  v_BKSH: Float[Array, "B K S H"],
  keep_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
  """softmax(q k / sqrt(H)) v; a query that may see nothing gets zeros, not NaN."""
  b, t, n, h = q_BTNH.shape
  num_kv = k_BKSH.shape[1]
  q_BKGTH = q_BTNH.reshape(b, t, num_kv, n // num_kv, h).transpose(0, 2, 3, 1, 4)
  q_BKRH = q_BKGTH.reshape(b, num_kv, -1, h)  # R = G * T rows share their keys
  s_BKRS = jnp.einsum("BKRH,BKSH->BKRS", q_BKRH, k_BKSH, preferred_element_type=jnp.float32)
  s_BKGTS = s_BKRS.reshape(b, num_kv, n // num_kv, t, -1) / math.sqrt(h)
  keep_B11TS = keep_BTS[:, None, None]
  s_BKGTS = jnp.where(keep_B11TS, s_BKGTS, -jnp.inf)
  top = jnp.max(s_BKGTS, axis=-1, keepdims=True)
  top = jnp.where(jnp.isfinite(top), top, 0.0)
  p_BKGTS = jnp.exp(s_BKGTS - jax.lax.stop_gradient(top))
  total = jnp.sum(p_BKGTS, axis=-1, keepdims=True)
  p_BKGTS = p_BKGTS / jnp.where(total == 0, 1.0, total)
  p_BKRS = p_BKGTS.reshape(s_BKRS.shape).astype(v_BKSH.dtype)
  o_BKRH = jnp.einsum("BKRS,BKSH->BKRH", p_BKRS, v_BKSH)
  o_BKGTH = o_BKRH.reshape(b, num_kv, n // num_kv, t, h)
  return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h).astype(q_BTNH.dtype)
