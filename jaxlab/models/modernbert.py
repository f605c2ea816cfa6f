"""ModernBERT and Ettin: a pre-norm block for encoders and decoders, with global and local layers.

  x = LN(E[ids])
  x += attention(LN(x)) Wo;  z = LN(x);  x += (gelu(z Wgate) * z Wup) Wdown     in each layer
  logits = LN(gelu(LN(x) Wdense)) E^T + bias

LN subtracts the mean and has no bias. Local layers see a window of keys and may rotate by another
theta than global ones. The first layer's attention reads its input as it is, and that input is
normalised once, behind the embedding: here the gain of that norm is `attn_norm` of layer 0, so that
all layers hold the same parameters and stack. One scan runs them; what differs is data: which rope
table, which window, whether the residual stream starts here. Dims: B T D F N H V L as in causal_lm.
Sources: arXiv 2412.13663 (ModernBERT), 2507.11412 (Ettin); transformers 5.24 for the windows.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlab.attention import cache as kv
from jaxlab.attention import dense
from jaxlab.nn import primitives, rotary, stack, weights

EVERYWHERE = np.iinfo(np.int32).max  # the window of a global layer
STD = 0.02  # of matrices that read the residual stream; cut off at two


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
  """Architecture; `jaxlab.models.zoo` builds it from a `config.json`."""

  vocab_size: int  # V
  width: int  # D
  num_heads: int  # N
  mlp_width: int  # F
  local_layers: tuple[bool, ...]  # of each layer: whether it sees its window only
  window: int  # a local query i sees the keys j with |i - j| < window
  global_rope: rotary.RopeConfig
  local_rope: rotary.RopeConfig
  causal: bool  # a decoder
  norm_eps: float = 1e-5
  max_positions: int = 8192
  tie_embeddings: bool = True

  def __post_init__(self):
    if self.width % self.num_heads:
      raise ValueError(
        f"ModernBertConfig: num_heads must divide width; got {self.num_heads} and {self.width}. "
        "Fix num_attention_heads in config.json."
      )

  @property
  def num_layers(self) -> int:
    return len(self.local_layers)

  @property
  def num_kv_heads(self) -> int:
    return self.num_heads

  @property
  def head_dim(self) -> int:
    return self.width // self.num_heads


class Block(nn.Module):
  """One layer; `qkv`, `out` and `mlp` are separate as in `causal_lm.Block`."""

  config: ModernBertConfig
  param_dtype: jax.typing.DTypeLike = jnp.float32

  def setup(self):
    c, dtype = self.config, self.param_dtype
    inner = STD / math.sqrt(2 * c.num_layers)  # of matrices that write to the residual stream
    primitives.declare_gain(self, "attn_norm", c.width, dtype)
    for name in ("q", "k", "v"):
      _linear(self, name, c.width, c.width, STD, dtype)
    _linear(self, "o", c.width, c.width, inner, dtype)
    primitives.declare_gain(self, "mlp_norm", c.width, dtype)
    for name in ("gate", "up"):
      _linear(self, name, c.width, c.mlp_width, STD, dtype)
    _linear(self, "down", c.mlp_width, c.width, inner, dtype)

  def qkv(self, y_BTD: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
    """q, k, v, each BTNH, before rotation, of the normalised input."""
    c = self.config
    heads = lambda x: x.reshape(*x.shape[:-1], c.num_heads, c.head_dim)
    q, k, v = primitives.project(self, y_BTD, "q", "k", "v")
    return heads(q), heads(k), heads(v)

  def out(self, o_BTNH: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    (y_BTD,) = primitives.project(self, o_BTNH.reshape(*o_BTNH.shape[:-2], -1), "o")
    return y_BTD

  def mlp(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """down(gelu(gate(x)) * up(x)) of the normalised input; `gate` is the first half of Wi."""
    y_BTD = self._norm("mlp_norm", x_BTD)
    gate_BTF, up_BTF = primitives.project(self, y_BTD, "gate", "up")
    (y_BTD,) = primitives.project(self, jax.nn.gelu(gate_BTF, approximate=False) * up_BTF, "down")
    return y_BTD

  def __call__(self, x_BTD, first, rope, attend, layer_cache=None):
    """Returns (x_BTD, layer_cache, stats of the attention); `first`: x is the raw embedding."""
    y_BTD = self._norm("attn_norm", x_BTD)
    x_BTD = jnp.where(first, y_BTD, x_BTD)
    o_BTNH, layer_cache, stats = attend(*self.qkv(y_BTD), rope, layer_cache)
    x_BTD = x_BTD + self.out(o_BTNH)
    return x_BTD + self.mlp(x_BTD), layer_cache, stats

  def _norm(self, name, x):
    return primitives.layer_norm(x, self.get_variable("params", name), self.config.norm_eps)


class ModernBert(nn.Module):
  """Encoder or decoder on the model contract: embed, hidden, head, __call__."""

  config: ModernBertConfig
  param_dtype: jax.typing.DTypeLike = jnp.float32
  remat: bool = False  # keep only each block's input for the backward pass
  placement: Any = None  # `jaxlab.parallel.rules.Placement`: kernels are gathered over `fsdp`

  def setup(self):
    c, dtype = self.config, self.param_dtype
    primitives.declare(self, "embed", _init(STD), (c.vocab_size, c.width), dtype)
    primitives.declare_layers(self, self._block, Block.mlp)
    primitives.declare_gain(self, "norm", c.width, dtype)
    _linear(self, "head_dense", c.width, c.width, STD, dtype)
    primitives.declare_gain(self, "head_norm", c.width, dtype)
    primitives.declare(self, "head", self._init_head, (c.width, c.vocab_size), dtype)

  def _init_head(self, key, shape, dtype):
    kernel = {} if self.config.tie_embeddings else {"kernel": _init(STD)(key, shape, dtype)}
    return kernel | {"bias": jnp.zeros(shape[1:], dtype)}

  @property
  def _block(self) -> Block:
    return Block(self.config, self.param_dtype, parent=None)

  def embed(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the embedding; the norm behind it belongs to the first layer."""
    return primitives.lookup(primitives.beside_layers(self, "embed"), tokens_BT)

  def hidden(
    self,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None = None,
    attend: Any = None,
    cache: kv.KVCache | None = None,
  ) -> tuple[Float[Array, "B T D"], kv.KVCache | None]:
    """Final normalised hidden states.

    Args:
      positions_BT: absolute positions, default 0..T-1; negative marks padding.
      attend: a dataclass with a `where`, as `DenseAttention`, which is the default; `causal` and
        `window` in it are set by the layer, the other fields (segments, lengths) are the caller's.
      cache: of a decoder, keys and values so far; the new tokens go to slots `cache.write` onwards.
    Raises: ValueError for a cache of an encoder, whose states change with every new token.
    """
    c = self.config
    if cache is not None and not c.causal:
      raise ValueError(
        "ModernBert: only a decoder continues texts; got an encoder. Load a modernbert-decoder."
      )
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    attend = attend or dense.DenseAttention()
    tables = [rotary.rope_at(r, c.head_dim, positions_BT) for r in (c.global_rope, c.local_rope)]
    ropes = jax.tree.map(lambda *x: jnp.stack(x), *tables)
    module = self._block

    def block(layer, x_BTD, layer_cache):
      params, local = layer["params"], layer["local"]
      window = jnp.where(local, c.window, EVERYWHERE)
      where = dataclasses.replace(attend.where, causal=c.causal, window=window)
      own = dataclasses.replace(attend, where=where)
      if self.placement is not None:
        params, x_BTD = self.placement.layer(params), self.placement.rows(x_BTD)
        own = self.placement.attend(own)
      rope = jax.tree.map(lambda x: weights.take(x, local), ropes)
      return module.apply({"params": params}, x_BTD, layer["first"], rope, own, layer_cache)

    layers = _with_kinds(self.get_variable("params", "layers"), c)
    x_BTD, cache, _ = stack.run_layers(
      block, layers, self.embed(tokens_BT), cache, remat=self.remat
    )
    return primitives.layer_norm(x_BTD, self.get_variable("params", "norm"), c.norm_eps), cache

  def head(self, rows: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Float32 logits of hidden rows, by the prediction head and the output matrix."""
    w_DD = primitives.beside_layers(self, "head_dense/kernel")
    y = jax.nn.gelu(weights.matmul(rows, w_DD), approximate=False)
    y = primitives.layer_norm(y, self.get_variable("params", "head_norm"), self.config.norm_eps)
    if self.config.tie_embeddings:
      logits = primitives.tied_logits(y, primitives.beside_layers(self, "embed"))
    else:
      logits = weights.matmul(y, primitives.beside_layers(self, "head/kernel")).astype(jnp.float32)
    return logits + weights.broadcast_bias(self.get_variable("params", "head")["bias"], logits)

  def __call__(self, tokens_BT, positions_BT=None, attend=None) -> Float[Array, "B T V"]:
    hidden_BTD, _ = self.hidden(tokens_BT, positions_BT, attend)
    return self.head(hidden_BTD)


def _with_kinds(layers: Any, config: ModernBertConfig) -> Any:
  """Each layer's parameters, whether it is the first, and whether it is local (0 or 1)."""
  local_L = np.asarray(config.local_layers, np.int32)
  first_L = np.arange(config.num_layers) == 0
  if isinstance(layers, list):
    kinds = zip(layers, first_L, local_L, strict=True)
    return [{"params": p, "first": first, "local": local} for p, first, local in kinds]
  return {"params": layers, "first": first_L, "local": local_L}


def _init(std: float) -> nn.initializers.Initializer:
  return nn.initializers.truncated_normal(std)


def _linear(module, name, features_in, features_out, std, dtype):
  primitives.declare_linear(
    module, name, features_in, features_out, use_bias=False, dtype=dtype, kernel_init=_init(std)
  )
