"""BERT: a post-norm encoder with learned positions, and the sentence embeddings made of it.

  x = LN(E[ids] + P[position] + T[type])
  x = LN(x + attention(x) Wo);  x = LN(x + gelu(x Wup) Wdown)                   in each layer
  sentence = mean over a text's own tokens of x, divided by its length (all-MiniLM, sentence-BERT)
  pooled   = tanh(x[0] Wpool)                                                 (next-sentence input)

All linears and norms have biases; attention sees everything but padding. There is no head:
checkpoints of the bare encoder have none, so `__call__` gives hidden states where other models of
the contract give logits. Dims: B T D F N H V L as in causal_lm.
Sources: arXiv 1810.04805 (BERT), 1908.10084 §3 (mean pooling); transformers 5.24 for the details.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlab.attention import cache as kv
from jaxlab.attention import dense
from jaxlab.nn import primitives, rotary, stack, weights

INIT = nn.initializers.truncated_normal(0.02)
LEAST_LENGTH = 1e-12  # of an embedding that is divided by its length [torch's normalize]


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """Architecture; `jaxlab.models.zoo` builds it from a `config.json`."""

  vocab_size: int  # V
  width: int  # D
  num_layers: int  # L
  num_heads: int  # N
  mlp_width: int  # F
  token_types: int = 2
  norm_eps: float = 1e-12
  max_positions: int = 512
  causal: ClassVar[bool] = False
  tie_embeddings: ClassVar[bool] = True  # no matrix of its own maps states to tokens

  def __post_init__(self):
    if self.width % self.num_heads:
      raise ValueError(
        f"BertConfig: num_heads must divide width; got {self.num_heads} and {self.width}. "
        "Fix num_attention_heads in config.json."
      )

  @property
  def num_kv_heads(self) -> int:
    return self.num_heads

  @property
  def head_dim(self) -> int:
    return self.width // self.num_heads


class Block(nn.Module):
  """One layer; `qkv`, `out` and `mlp` are separate as in `causal_lm.Block`, without their norms."""

  config: BertConfig
  param_dtype: jax.typing.DTypeLike = jnp.float32

  def setup(self):
    c, dtype = self.config, self.param_dtype
    for name in ("q", "k", "v", "o"):
      _linear(self, name, c.width, c.width, dtype)
    _declare_norm(self, "attn_norm", c.width, dtype)
    _linear(self, "up", c.width, c.mlp_width, dtype)
    _linear(self, "down", c.mlp_width, c.width, dtype)
    _declare_norm(self, "mlp_norm", c.width, dtype)

  def qkv(self, x_BTD: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
    """q, k, v, each BTNH."""
    c = self.config
    heads = lambda x: x.reshape(*x.shape[:-1], c.num_heads, c.head_dim)
    q, k, v = primitives.project(self, x_BTD, "q", "k", "v")
    return heads(q), heads(k), heads(v)

  def out(self, o_BTNH: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    (y_BTD,) = primitives.project(self, o_BTNH.reshape(*o_BTNH.shape[:-2], -1), "o")
    return y_BTD

  def mlp(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """down(gelu(up(x)))."""
    (up_BTF,) = primitives.project(self, x_BTD, "up")
    (y_BTD,) = primitives.project(self, jax.nn.gelu(up_BTF, approximate=False), "down")
    return y_BTD

  def __call__(self, x_BTD, rope, attend, layer_cache=None):
    """Returns (x_BTD, layer_cache, stats of the attention)."""
    o_BTNH, layer_cache, stats = attend(*self.qkv(x_BTD), rope, layer_cache)
    x_BTD = _norm(self, "attn_norm", x_BTD + self.out(o_BTNH))
    return _norm(self, "mlp_norm", x_BTD + self.mlp(x_BTD)), layer_cache, stats


class Bert(nn.Module):
  """Encoder on the model contract: embed, hidden, __call__; and `sentence`, `pooled`."""

  config: BertConfig
  param_dtype: jax.typing.DTypeLike = jnp.float32
  remat: bool = False  # keep only each block's input for the backward pass
  placement: Any = None  # `jaxlab.parallel.rules.Placement`: where activations and kernels are

  def setup(self):
    c, dtype = self.config, self.param_dtype
    primitives.declare(self, "embed", INIT, (c.vocab_size, c.width), dtype)
    primitives.declare(self, "position_embed", INIT, (c.max_positions, c.width), dtype)
    primitives.declare(self, "type_embed", INIT, (c.token_types, c.width), dtype)
    _declare_norm(self, "embed_norm", c.width, dtype)
    primitives.declare_layers(self, self._block, Block.mlp)
    _linear(self, "pooler", c.width, c.width, dtype)

  @property
  def _block(self) -> Block:
    return Block(self.config, self.param_dtype, parent=None)

  def embed(
    self,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None = None,
    types_BT: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """What the first block reads: normalised sums of three embeddings; see `hidden`."""
    positions_BT = self._positions(tokens_BT, positions_BT)
    types_BT = jnp.zeros_like(tokens_BT) if types_BT is None else types_BT
    x_BTD = primitives.lookup(primitives.beside_layers(self, "embed"), tokens_BT)
    for name, index_BT in (("type_embed", types_BT), ("position_embed", positions_BT)):
      table = primitives.beside_layers(self, name)
      x_BTD = x_BTD + jnp.take(table, jnp.maximum(index_BT, 0), axis=0)  # padding: any row will do
    return _norm(self, "embed_norm", x_BTD)

  def hidden(
    self,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None = None,
    attend: Any = None,
    cache: kv.KVCache | None = None,
    types_BT: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], None]:
    """Final hidden states, and None where decoders have a cache.

    Args:
      positions_BT: below `max_positions`, default 0..T-1; negative marks padding.
      attend: a dataclass with a `where`, as `DenseAttention`, which is the default; `causal` in it
        is set here, the other fields are the caller's.
      types_BT: 0 for a text (the default), 1 for the second of a pair.
    Raises: ValueError for a cache, or for rows longer than the table of positions.
    """
    if cache is not None:
      raise ValueError("Bert: only a decoder continues texts; got a cache. Load a causal model.")
    positions_BT = self._positions(tokens_BT, positions_BT)
    attend = attend or dense.DenseAttention()
    attend = dataclasses.replace(attend, where=dataclasses.replace(attend.where, causal=False))
    if self.placement is not None:
      attend = self.placement.attend(attend)
    rope, module = _unrotated(positions_BT, self.config.head_dim), self._block

    def block(params, x_BTD, layer_cache):
      if self.placement is not None:
        params, x_BTD = self.placement.layer(params), self.placement.rows(x_BTD)
      return module.apply({"params": params}, x_BTD, rope, attend, layer_cache)

    layers = self.get_variable("params", "layers")
    x_BTD = self.embed(tokens_BT, positions_BT, types_BT)
    x_BTD, _, _ = stack.run_layers(block, layers, x_BTD, remat=self.remat)
    return x_BTD, None

  def sentence(
    self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"] | None = None
  ) -> Float[Array, "B D"]:
    """A vector of length 1 for each row: the mean of its tokens' states, padding left out."""
    positions_BT = self._positions(tokens_BT, positions_BT)
    hidden_BTD, _ = self.hidden(tokens_BT, positions_BT)
    own_BT1 = (positions_BT >= 0)[..., None].astype(hidden_BTD.dtype)
    total_BD = jnp.sum(hidden_BTD * own_BT1, axis=1)
    mean_BD = total_BD / jnp.maximum(jnp.sum(own_BT1, axis=1), 1.0)
    return mean_BD / jnp.maximum(jnp.linalg.norm(mean_BD, axis=-1, keepdims=True), LEAST_LENGTH)

  def pooled(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B D"]:
    """tanh of a linear of the first token's state (`pooler_output` in transformers)."""
    linear = self.get_variable("params", "pooler")
    y_BD = weights.matmul(hidden_BTD[:, 0], primitives.beside_layers(self, "pooler/kernel"))
    return jnp.tanh(y_BD + weights.broadcast_bias(linear["bias"], y_BD))

  def __call__(self, tokens_BT, positions_BT=None, attend=None) -> Float[Array, "B T D"]:
    hidden_BTD, _ = self.hidden(tokens_BT, positions_BT, attend)
    return hidden_BTD

  def _positions(self, tokens_BT, positions_BT):
    length, most = tokens_BT.shape[1], self.config.max_positions
    if length > most:
      raise ValueError(
        f"Bert: rows must have at most {most} tokens; got {length}. Cut the text, or choose a "
        "model with more positions."
      )
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(length)[None], tokens_BT.shape)
    return positions_BT


def _unrotated(positions_BT: Int[Array, "B T"], head_dim: int) -> rotary.Rope:
  """The attention seam rotates q and k: by no angle where positions are learned."""
  one_BTH = jnp.ones((*positions_BT.shape, head_dim), jnp.float32)
  return rotary.Rope(positions_BT, one_BTH, jnp.zeros_like(one_BTH))


def _norm(module: nn.Module, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
  p = module.get_variable("params", name)
  y = primitives.layer_norm(x, p["gain"], module.config.norm_eps)
  return y + weights.broadcast_bias(p["bias"], y)


def _declare_norm(module: nn.Module, name: str, features: int, dtype: Any) -> None:
  def init(key, shape, dtype):
    return {"gain": jnp.ones(shape, dtype), "bias": jnp.zeros(shape, dtype)}

  primitives.declare(module, name, init, (features,), dtype)


def _linear(module: nn.Module, name: str, features_in: int, features_out: int, dtype: Any) -> None:
  primitives.declare_linear(
    module, name, features_in, features_out, use_bias=True, dtype=dtype, kernel_init=INIT
  )
