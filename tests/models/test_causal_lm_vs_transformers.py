"""Live parity with transformers on tiny random models of every family, one switch each.

Reference: transformers >= 5.24, torch 2.13, eager float32. Weights are of size 0.2 with gains
around 1, so that logits are of size 3 and every term matters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.attention import dense
from jaxlab.io import huggingface
from jaxlab.models import causal_lm, zoo
from jaxlab.nn import rotary, stack
from tests.models import cached, tiny

pytestmark = pytest.mark.parity
LAYER, LOGITS = 1e-5, 1e-4  # of one layer, relative to its largest output; of the logits, absolute


@pytest.fixture(scope="module", autouse=True)
def single_thread():
  import torch

  torch.set_num_threads(1)


@pytest.fixture(scope="module", params=tiny.CASES)
def pair(request, tmp_path_factory):
  """(our module, our stacked params, the transformers model) with one set of weights."""
  config = tiny.CASES[request.param]
  folder = tmp_path_factory.mktemp(request.param)
  tiny.write_folder(folder, config)
  module = zoo.from_config(huggingface.load_config(folder))
  return module, huggingface.load_params(folder, module, jnp.float32), tiny.torch_model(config)


def test_logits(pair):
  module, params, model = pair
  forward = jax.jit(lambda p, t: module.apply({"params": p}, t))
  for batch, length in ((3, 37), (1, 1)):
    tokens = tiny.tokens(batch, length)
    expected = tiny.torch_logits(model, tokens)
    assert np.abs(expected).max() > 1  # a model that says something
    np.testing.assert_allclose(forward(params, tokens), expected, rtol=0, atol=LOGITS)


def test_every_layer(pair):
  import torch

  module, params, model = pair
  tokens = tiny.tokens()
  with torch.no_grad():
    taps = model(torch.tensor(tokens), output_hidden_states=True).hidden_states
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  c = module.config
  rope = rotary.rope_at(c.rope, c.head_dim, positions)
  block = causal_lm.Block(c)
  step = jax.jit(lambda p, x: block.apply({"params": p}, x, rope, dense.DenseAttention())[0])
  layers = stack.unstack(params)["layers"]
  np.testing.assert_array_equal(params["embed"][tokens], taps[0].numpy())
  for i in range(c.num_layers - 1):  # transformers gives the last one after the final norm
    expected = taps[i + 1].numpy()
    found = step(layers[i], jnp.asarray(taps[i].numpy()))  # each layer from the reference's input
    assert np.abs(found - expected).max() <= LAYER * np.abs(expected).max()


@pytest.mark.parametrize("pair", tiny.GOLDENS, indirect=True)
def test_cached_decode(pair):
  """Prefill of 30, then one token at a time, rows at positions of their own."""
  module, params, model = pair
  tokens = tiny.tokens()
  expected = tiny.torch_logits(model, tokens)
  cache = causal_lm.init_cache(module.config, 2, 64, jnp.float32, stacked=True)
  step = cached.step(module)
  starts = np.array([30, 25])  # the second row has decoded less
  positions = np.broadcast_to(np.arange(30)[None], (2, 30))
  positions = np.where(positions < starts[:, None], positions, -1)  # padding writes nothing visible
  logits, cache = step(params, tokens[:, :30], positions, cache.at(jnp.int32(0)))
  np.testing.assert_allclose(logits[0], expected[0, :30], rtol=0, atol=LOGITS)
  np.testing.assert_allclose(logits[1, :25], expected[1, :25], rtol=0, atol=LOGITS)
  rows = np.arange(2)
  for j in range(7):
    at = starts + j
    logits, cache = step(params, tokens[rows, at][:, None], at[:, None], cache.at(jnp.asarray(at)))
    np.testing.assert_allclose(logits[:, 0], expected[rows, at], rtol=0, atol=LOGITS)
