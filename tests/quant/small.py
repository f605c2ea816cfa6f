"""Small random models of any family, made by NumPy: nothing is compiled for them."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import lm as language_model
from jaxlab.io import huggingface
from jaxlab.models import zoo
from tests.models import tiny, tiny_bert, tiny_modernbert

# Equal widths: sites of few shapes, so that few programs are compiled.
WIDTH, MLP, LAYERS, VOCAB = 64, 64, 2, 97
SIZES = {"hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS}
SITES = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
LINEARS = [name for site in SITES for name in site]
CONFIGS = {
  "qwen2": tiny.config("qwen2", num_attention_heads=4, **SIZES),  # biases of q, k, v
  "qwen3": tiny.config("qwen3", num_attention_heads=4, **SIZES),  # norms of q and k
  "modernbert": tiny_modernbert.config(
    "encoder", vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=4
  ),
  "bert": tiny_bert.CONFIG | {"num_attention_heads": 4} | SIZES,
}
BERT_SITES = (("q", "k", "v"), ("o",), ("up",), ("down",))
run_hidden = jax.jit(
  lambda module, params, ids: module.apply({"params": params}, ids, method="hidden")[0],
  static_argnums=0,
)
run_logits = jax.jit(
  lambda module, params, ids: module.apply({"params": params}, ids), static_argnums=0
)


def random_params(module, seed: int = 0):
  """Matrices of deviation 0.2, gains around 1."""
  random = np.random.default_rng(seed)

  def make(path, x):
    gain = "norm" in jax.tree_util.keystr(path)
    return jnp.asarray(0.2 * random.standard_normal(x.shape) + gain, jnp.float32)

  return jax.tree_util.tree_map_with_path(make, zoo.param_shapes(module))


@functools.cache
def model(family: str = "qwen2", **changes) -> language_model.LM:
  config = CONFIGS[family] | changes
  module = zoo.from_config(config)
  source = huggingface.Source(pathlib.Path(family), {})
  return language_model.LM(module, random_params(module), config, None, family, source)


def tokens(rows: int = 6, length: int = 24) -> np.ndarray:
  return np.random.default_rng(0).integers(0, VOCAB, (rows, length)).astype(np.int32)
