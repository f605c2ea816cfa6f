"""The decoder against committed logits of transformers, and against itself in its other layouts."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.io import huggingface
from jaxlab.models import causal_lm, zoo
from jaxlab.nn import stack
from tests.models import cached, tiny

GOLDEN = pathlib.Path(__file__).parent.parent / "goldens" / "causal_lm.npz"
LOGITS = 1e-4


def load(folder, config):
  tiny.write_folder(folder, config)
  module = zoo.from_config(config)
  return module, huggingface.load_params(folder, module, jnp.float32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
  return load(tmp_path_factory.mktemp("llama"), tiny.CASES["llama"])


@pytest.mark.parametrize("case", tiny.GOLDENS)
def test_logits_are_those_of_transformers(case, tmp_path):
  """tests/goldens/make_causal_lm_goldens.py says what made them."""
  module, params = load(tmp_path, tiny.CASES[case])
  expected = np.load(GOLDEN)[case]
  found = jax.jit(module.apply)({"params": params}, tiny.tokens())
  np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)


def test_a_list_of_layers_is_the_same_model(llama):
  module, params = llama
  tokens = tiny.tokens(2, 9)
  forward = jax.jit(module.apply)
  stacked = forward({"params": params}, tokens)
  listed = forward({"params": stack.unstack(params)}, tokens)
  np.testing.assert_allclose(listed, stacked, rtol=0, atol=1e-5)


def test_cached_decode_is_the_full_forward(llama):
  module, params = llama
  tokens = jnp.asarray(tiny.tokens(2, 10))
  expected = module.apply({"params": params}, tokens)
  for form, stacked in ((params, True), (stack.unstack(params), False)):
    cache = causal_lm.init_cache(module.config, 2, 16, jnp.float32, stacked=stacked)
    found = _decode(module, form, tokens, cache)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def _decode(module, params, tokens, cache):
  step = cached.step(module)
  pieces = []
  for start, stop in ((0, 8), (8, 9), (9, 10)):
    positions = jnp.broadcast_to(jnp.arange(start, stop)[None], (2, stop - start))
    logits, cache = step(params, tokens[:, start:stop], positions, cache.at(jnp.int32(start)))
    pieces.append(logits)
  return jnp.concatenate(pieces, axis=1)


def test_padding_and_neighbours_change_nothing(llama):
  """Left padding is a choice of positions; a row's logits do not depend on the others."""
  module, params = llama
  tokens = tiny.tokens(2, 9)
  forward = jax.jit(module.apply)
  alone = forward({"params": params}, tokens[:1])
  padded = np.zeros((2, 14), np.int32)
  padded[0, 5:], padded[1, :9] = tokens[0], tokens[1]
  positions = np.full((2, 14), -1)
  positions[0, 5:], positions[1, :9] = np.arange(9), np.arange(9)
  found = forward({"params": params}, padded, positions)
  np.testing.assert_allclose(found[0, 5:], alone[0], rtol=0, atol=1e-5)
  assert np.isfinite(found).all()  # a query that sees nothing is no NaN


@pytest.mark.parametrize("case", ["llama", "llama_biases", "qwen2_tied", "qwen3"])
def test_init_makes_the_parameters_that_checkpoints_have(case, tmp_path):
  module, params = load(tmp_path, tiny.CASES[case])
  tokens = jnp.zeros((1, 1), jnp.int32)
  made = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(made) == shapes(params)


def test_remat_gives_the_same_gradient(llama):
  module, params = llama
  tokens = jnp.asarray(tiny.tokens(1, 6))

  def loss(params, module):
    return jnp.mean(jax.nn.log_softmax(module.apply({"params": params}, tokens))[..., 0])

  grad = jax.jit(jax.grad(loss), static_argnums=1)
  plain = grad(params, module)
  remat = grad(params, dataclasses.replace(module, remat=True))
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max())
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(plain))


def test_a_second_batch_of_one_shape_does_not_compile(llama):
  module, params = llama
  traces = []

  @jax.jit
  def forward(params, tokens):
    traces.append(tokens.shape)
    return module.apply({"params": params}, tokens)

  forward(params, tiny.tokens(1, 5))
  forward(params, tiny.tokens(1, 5, seed=1))
  assert traces == [(1, 5)]


def test_bfloat16_parameters_compute_in_bfloat16_and_answer_in_float32(tmp_path):
  tiny.write_folder(tmp_path, tiny.CASES["llama"], dtype=tiny.BF16)
  module = zoo.from_config(tiny.CASES["llama"], jnp.bfloat16)
  params = huggingface.load_params(tmp_path, module, jnp.bfloat16)
  tokens = jnp.asarray(tiny.tokens(1, 6))
  hidden, _ = module.apply({"params": params}, tokens, method="hidden")
  logits = module.apply({"params": params}, tokens)
  assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32


def test_heads_that_do_not_divide_are_named():
  with pytest.raises(ValueError, match="num_kv_heads must divide num_heads; got 4 and 6"):
    zoo.from_config(tiny.config(num_key_value_heads=4))
