"""Llama, SmolLM2, Qwen2.5 and Qwen3: one pre-norm decoder with grouped-query attention and SwiGLU.

The families differ by switches of `CausalLMConfig`, not by code. Modules are pure: caches,
attention and keys are arguments. Dims: B rows, T tokens, D width, F MLP width, N query heads, K kv
heads, H head width, V vocabulary, L layers.
Sources: arXiv 2302.13971 (Llama), 2407.21783 (Llama 3), 2412.15115 (Qwen2.5), 2505.09388 (Qwen3).
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

INIT = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class CausalLMConfig:
  """Architecture of a decoder; `jaxlab.models.zoo` builds it from a `config.json`."""

  vocab_size: int  # V
  width: int  # D
  num_layers: int  # L
  num_heads: int  # N
  num_kv_heads: int  # K, divides N
  head_dim: int  # H
  mlp_width: int  # F
  norm_eps: float = 1e-6
  rope: rotary.RopeConfig = rotary.RopeConfig()
  max_positions: int = 2048
  tie_embeddings: bool = True
  qkv_bias: bool = False  # Qwen2.5
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False  # Qwen3
  causal: ClassVar[bool] = True  # so are all of these families

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"CausalLMConfig: num_kv_heads must divide num_heads; got {self.num_kv_heads} and "
        f"{self.num_heads}. Fix num_key_value_heads in config.json."
      )


class Block(nn.Module):
  """One layer. `qkv`, `out` and `mlp` are separate, so that other attention schemes can call
  them."""

  config: CausalLMConfig
  param_dtype: jax.typing.DTypeLike = jnp.float32

  def setup(self):
    c, dtype = self.config, self.param_dtype
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    primitives.declare_gain(self, "attn_norm", c.width, dtype)
    _linear(self, "q", c.width, heads, c.qkv_bias, dtype)
    _linear(self, "k", c.width, kv_heads, c.qkv_bias, dtype)
    _linear(self, "v", c.width, kv_heads, c.qkv_bias, dtype)
    _linear(self, "o", heads, c.width, c.o_bias, dtype)
    if c.qk_norm:
      primitives.declare_gain(self, "q_norm", c.head_dim, dtype)
      primitives.declare_gain(self, "k_norm", c.head_dim, dtype)
    primitives.declare_gain(self, "mlp_norm", c.width, dtype)
    _linear(self, "gate", c.width, c.mlp_width, c.mlp_bias, dtype)
    _linear(self, "up", c.width, c.mlp_width, c.mlp_bias, dtype)
    _linear(self, "down", c.mlp_width, c.width, c.mlp_bias, dtype)

  def qkv(self, x_BTD: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
    """q_BTNH, k_BTKH, v_BTKH before rotation, from the normalised input."""
    c = self.config
    y_BTD = primitives.rms_norm(x_BTD, self._get("attn_norm"), c.norm_eps)
    q, k, v = primitives.project(self, y_BTD, "q", "k", "v")
    heads = lambda x, n: x.reshape(*x.shape[:-1], n, c.head_dim)
    q, k, v = heads(q, c.num_heads), heads(k, c.num_kv_heads), heads(v, c.num_kv_heads)
    if c.qk_norm:
      q = primitives.rms_norm(q, self._get("q_norm"), c.norm_eps)
      k = primitives.rms_norm(k, self._get("k_norm"), c.norm_eps)
    return q, k, v

  def out(self, o_BTNH: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    (y_BTD,) = primitives.project(self, o_BTNH.reshape(*o_BTNH.shape[:-2], -1), "o")
    return y_BTD

  def mlp(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """down(silu(gate(x)) * up(x)) of the normalised input."""
    y_BTD = primitives.rms_norm(x_BTD, self._get("mlp_norm"), self.config.norm_eps)
    gate_BTF, up_BTF = primitives.project(self, y_BTD, "gate", "up")
    (y_BTD,) = primitives.project(self, jax.nn.silu(gate_BTF) * up_BTF, "down")
    return y_BTD

  def __call__(self, x_BTD, rope, attend, layer_cache=None):
    """Returns (x_BTD, layer_cache, stats of the attention)."""
    q, k, v = self.qkv(x_BTD)
    o_BTNH, layer_cache, stats = attend(q, k, v, rope, layer_cache)
    x_BTD = x_BTD + self.out(o_BTNH)
    return x_BTD + self.mlp(x_BTD), layer_cache, stats

  def _get(self, name):
    return self.get_variable("params", name)


class CausalLM(nn.Module):
  """Decoder-only language model on the model contract: embed, hidden, head, __call__."""

  config: CausalLMConfig
  param_dtype: jax.typing.DTypeLike = jnp.float32
  remat: bool = False  # keep only each block's input for the backward pass
  placement: Any = None  # `jaxlab.parallel.rules.Placement`: where activations and kernels are

  def setup(self):
    c = self.config
    primitives.declare(self, "embed", INIT, (c.vocab_size, c.width), self.param_dtype)
    primitives.declare_layers(self, self._block, Block.mlp)
    primitives.declare_gain(self, "norm", c.width, self.param_dtype)
    if not c.tie_embeddings:
      _linear(self, "head", c.width, c.vocab_size, False, self.param_dtype)

  @property
  def _block(self) -> Block:
    return Block(self.config, self.param_dtype, parent=None)

  def embed(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
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
      attend: an implementation of the attention seam; default dense causal.
      cache: keys and values so far; the new tokens go to slots `cache.write` onwards.
    """
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    attend = attend or dense.DenseAttention()
    if self.placement is not None:
      attend = self.placement.attend(attend)
    rope = rotary.rope_at(self.config.rope, self.config.head_dim, positions_BT)
    module = self._block

    def block(params, x_BTD, layer_cache):
      if self.placement is not None:
        params, x_BTD = self.placement.layer(params), self.placement.rows(x_BTD)
      return module.apply({"params": params}, x_BTD, rope, attend, layer_cache)

    layers = self.get_variable("params", "layers")
    x_BTD, cache, _ = stack.run_layers(
      block, layers, self.embed(tokens_BT), cache, remat=self.remat
    )
    gain_D = self.get_variable("params", "norm")
    return primitives.rms_norm(x_BTD, gain_D, self.config.norm_eps), cache

  def head(self, rows: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Float32 logits of hidden rows."""
    if not self.config.tie_embeddings:
      return weights.matmul(rows, primitives.beside_layers(self, "head/kernel")).astype(jnp.float32)
    return primitives.tied_logits(rows, primitives.beside_layers(self, "embed"))

  def __call__(self, tokens_BT, positions_BT=None, attend=None) -> Float[Array, "B T V"]:
    hidden_BTD, _ = self.hidden(tokens_BT, positions_BT, attend)
    return self.head(hidden_BTD)


def init_cache(config: Any, batch: int, num_slots: int, dtype, *, stacked: bool) -> kv.KVCache:
  """An empty cache for `batch` rows of up to `num_slots` positions; `config` is any family's."""
  return kv.init_cache(
    num_layers=config.num_layers,
    batch=batch,
    num_kv_heads=config.num_kv_heads,
    num_slots=num_slots,
    head_dim=config.head_dim,
    dtype=dtype,
    stacked=stacked,
  )


def _linear(module, name, features_in, features_out, use_bias, dtype):
  primitives.declare_linear(
    module, name, features_in, features_out, use_bias=use_bias, dtype=dtype, kernel_init=INIT
  )
