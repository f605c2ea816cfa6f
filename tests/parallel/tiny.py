"""A decoder of two layers that every mesh of eight devices can split, with all kinds of kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import lora
from jaxlab.models import causal_lm
from jaxlab.nn import weights
from jaxlab.objectives import weighted
from jaxlab.quant import fp4

# Inputs of o and down: 8 shards of 32 (mxfp4). Width: 4 shards of 32. Two KV heads: whole over 8.
CONFIG = causal_lm.CausalLMConfig(
  vocab_size=128, width=128, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32, mlp_width=256,
  qkv_bias=True, tie_embeddings=False,
)  # fmt: skip
MODULE = causal_lm.CausalLM(CONFIG)
LORA = lora.LoRAConfig(rank=4)
ROWS, LENGTH = 8, 12


@functools.cache
def params(format: str):
  """Random parameters; quantised ones carry adapters with B != 0."""
  dense = jax.jit(MODULE.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  dense = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, dense)  # nothing vanishes
  if format == "dense":
    return dense
  adapted = lora.attach(fp4.quantize_params(dense, format), LORA, jax.random.key(1))
  return jax.tree_util.tree_map_with_path(_trained, adapted)


def _trained(path, x):
  if weights.path_str(path).endswith("/b"):
    return jax.random.normal(jax.random.key(x.size), x.shape) / 8
  return x


def split(params, format: str):
  """(trainable, frozen) as in a run: everything, or adapters and norms."""
  trains = lora.is_trainable(LORA) if format != "dense" else lambda path: True
  return weights.partition(params, trains)


def batch() -> dict[str, np.ndarray]:
  """Tokens, and how often each row counts (once or twice: a mean of means would be wrong)."""
  random = np.random.default_rng(0)
  tokens = random.integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)
  return {"tokens": tokens, "count": np.arange(1, ROWS + 1, dtype=np.float32) % 2 + 1}


def objective(params, batch, key):
  """Next-token cross-entropy."""
  del key
  logits_BTV = MODULE.apply({"params": params}, batch["tokens"])
  return loss_of(logits_BTV, batch), {}


def loss_of(logits_BTV, batch) -> weighted.Weighted:
  logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
  target_BT1 = batch["tokens"][:, 1:, None]
  logp_BT = jnp.take_along_axis(logp_BTV, target_BT1, axis=-1)[..., 0]
  count_BT = jnp.broadcast_to(batch["count"][:, None], logp_BT.shape)
  return weighted.Weighted(-jnp.sum(logp_BT * count_BT), jnp.sum(count_BT))


@jax.jit
def logits_and_grads(trainable, frozen, batch):
  """(logits_BTV, {path: gradient of the mean loss})."""

  def loss(trainable):
    logits_BTV = MODULE.apply({"params": weights.merge(trainable, frozen)}, batch["tokens"])
    return loss_of(logits_BTV, batch).mean(), logits_BTV

  grads, logits_BTV = jax.grad(loss, has_aux=True)(trainable)
  return logits_BTV, grads
