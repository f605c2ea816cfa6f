"""Live parity of BERT with transformers on tiny random encoders, one switch each.

Reference: transformers >= 5.24, torch 2.13, eager float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.data import assets
from jaxlab.io import huggingface
from jaxlab.models import zoo
from tests.models import tiny_bert as tiny

pytestmark = pytest.mark.parity
HIDDEN = 1e-4


def ours(folder, tokens, types, mask):
  module = zoo.from_config(huggingface.load_config(folder))
  params = huggingface.load_params(folder, module, jnp.float32)

  def run(params, tokens, positions, types):
    states, _ = module.apply({"params": params}, tokens, positions, types_BT=types, method="hidden")
    return states, module.apply({"params": params}, states, method="pooled")

  return map(np.asarray, jax.jit(run)(params, tokens, tiny.positions(mask), types))


@pytest.mark.parametrize("case", tiny.CASES)
def test_states_and_pooled(case, tmp_path):
  tiny.write_folder(tmp_path, tiny.CASES[case])
  tokens, types, mask = tiny.rows()
  hidden, pooled = ours(tmp_path, tokens, types, mask)
  expected, expected_pooled = tiny.torch_outputs(tmp_path, tokens, types, mask)
  assert np.abs(expected).max() > 1  # a model that says something
  np.testing.assert_allclose(hidden[mask == 1], expected[mask == 1], rtol=0, atol=HIDDEN)
  np.testing.assert_allclose(pooled, expected_pooled, rtol=0, atol=HIDDEN)


@pytest.mark.slow
@pytest.mark.skipif(assets.find_minilm() is None, reason="MiniLM is not fetched yet")
def test_minilm():
  folder = assets.minilm_path()
  tokens = np.random.RandomState(0).randint(1000, 30_000, (2, 32)).astype(np.int32)
  mask, types = np.ones_like(tokens), np.zeros_like(tokens)
  mask[1, 20:] = 0
  hidden, _ = ours(folder, tokens, types, mask)
  expected, _ = tiny.torch_outputs(folder, tokens, types, mask)
  np.testing.assert_allclose(hidden[mask == 1], expected[mask == 1], rtol=0, atol=HIDDEN)
