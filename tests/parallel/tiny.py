"""A decoder of two layers that every mesh of eight devices can split, with all kinds of kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import lora
from jaxlab.models import causal_lm
from jaxlab.nn import weights
from jaxlab.objectives import weighted
from jaxlab.quant import fp4, nf4

# Eight shards of the inputs of `down` hold a block of nf4 each (64), four of the width one of mxfp4
# (32); two KV heads cannot be split over eight.
CONFIG = causal_lm.CausalLMConfig(
  vocab_size=128, width=128, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32, mlp_width=512,
  qkv_bias=True, tie_embeddings=False,
)  # fmt: skip
MODULE = causal_lm.CausalLM(CONFIG)
LORA = lora.LoRAConfig(rank=4)
ROWS, LENGTH = 16, 12


@functools.cache
def params(kind: str):
  """Random parameters: "dense"; "nvfp4" (all linears, with adapters); or "mixed": q, k and v dense,
  o nvfp4, gate and up mxfp4, down nf4, adapters over the packed ones."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  shapes = jax.eval_shape(MODULE.init, jax.random.key(0), tokens)["params"]
  random = np.random.default_rng(0)
  normal = lambda x: random.normal(size=x.shape).astype(np.float32)
  made = weights.map_leaves(lambda path, x: normal(x) / 12 + path.endswith("norm"), shapes)
  if kind == "dense":
    return jax.tree.map(jnp.asarray, made)
  adapted = jax.jit(functools.partial(_adapted, kind=kind))(made)  # one compilation, not fifty
  trained = lambda path, x: normal(x) / 8 if weights.path_str(path).endswith("/b") else x
  return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(trained, adapted))


def _adapted(params, kind):
  if kind == "nvfp4":
    return lora.attach(fp4.quantize_params(params, "nvfp4"), LORA, jax.random.key(1))
  mxfp4 = functools.partial(fp4.quantize, format="mxfp4")
  formats = {"o": fp4.quantize, "gate": mxfp4, "up": mxfp4, "down": nf4.quantize}
  packed = {
    name: {"kernel": quantize(params["layers"][name]["kernel"])}
    for name, quantize in formats.items()
  }
  config = lora.LoRAConfig(rank=4, targets=tuple(formats))
  return lora.attach(params | {"layers": params["layers"] | packed}, config, jax.random.key(1))


def split(params):
  """(trainable, frozen): every float array but the parts of packed kernels."""
  packed = ("/codes", "/scale", "/tensor_scale", "/scale_step", "/scale_min")
  return weights.partition(params, lambda path: not path.endswith(packed))


def batch() -> dict[str, np.ndarray]:
  """Tokens, and how often each row counts (once or twice: a mean of means would be wrong)."""
  tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH))
  count = np.arange(1, ROWS + 1) % 2 + 1
  return {"tokens": tokens.astype(np.int32), "count": count.astype(np.float32)}


def forward(params, tokens_BT, placement=None):
  """The logits; with a placement, rematerialised and on gathered kernels."""
  module = dataclasses.replace(MODULE, placement=placement, remat=placement is not None)
  return module.apply({"params": params}, tokens_BT)


def objective(params, batch, key, placement=None):
  """Next-token cross-entropy."""
  del key
  return loss_of(forward(params, batch["tokens"], placement), batch), {}


def loss_of(logits_BTV, batch) -> weighted.Weighted:
  logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
  logp_BT = jnp.take_along_axis(logp_BTV, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
  count_BT = jnp.broadcast_to(batch["count"][:, None], logp_BT.shape)
  return weighted.Weighted(-jnp.sum(logp_BT * count_BT), jnp.sum(count_BT))


@functools.partial(jax.jit, static_argnames="placement")
def logits_and_grads(trainable, frozen, batch, placement=None):
  """(logits_BTV, {path: gradient of the mean loss})."""

  def loss(trainable):
    logits_BTV = forward(weights.merge(trainable, frozen), batch["tokens"], placement)
    return loss_of(logits_BTV, batch).mean(), logits_BTV

  grads, logits_BTV = jax.grad(loss, has_aux=True)(trainable)
  return logits_BTV, grads
