"""Live parity with transformers on tiny random encoders and decoders, one switch each.

Reference: transformers >= 5.24, torch 2.13, eager float32. Weights are of size 0.2 with gains
around 1, so that logits are of size 3 and every term matters. Configs go to transformers as the
text of a config.json, so that both sides read the same fields.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.io import huggingface
from jaxlab.models import zoo
from tests.models import tiny_modernbert as tiny

pytestmark = pytest.mark.parity
LOGITS = 1e-4
V5 = {
  "layer_types": ["full_attention", "sliding_attention"] * 3 + ["sliding_attention"],
  "rope_parameters": {
    "full_attention": {"rope_type": "default", "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
  },
}
# Lengths are 37 and odd ones below; a window of five on each side is far smaller.
CASES = {
  "plain": {},
  "thetas": {"global_rope_theta": 1e4, "local_rope_theta": 50.0},
  "equal_thetas": {"local_rope_theta": 160_000.0},
  "v5": V5,  # another order of layers, and a theta for each type
  "odd_local_attention": {"local_attention": 7},
  "window_of_one": {"local_attention": 2},
  "window_beyond_the_text": {"local_attention": 128},
  "sliding_window": {"sliding_window": 3},
  "every_two": {"global_attn_every_n_layers": 2},
  "all_global": {"global_attn_every_n_layers": 1},
  "untied": {"tie_word_embeddings": False},
  "eps": {"norm_eps": 1e-2},
}


@pytest.fixture(scope="module", autouse=True)
def single_thread():
  import torch

  torch.set_num_threads(1)


def torch_model(folder, kind):
  """As a user of transformers loads it, float32."""
  import transformers

  names = {"encoder": "ModernBertForMaskedLM", "decoder": "ModernBertDecoderForCausalLM"}
  model, info = getattr(transformers, names[kind]).from_pretrained(
    folder, attn_implementation="eager", output_loading_info=True
  )
  assert not info["unexpected_keys"] and not info["mismatched_keys"]
  assert set(info["missing_keys"]) <= {"decoder.weight"}
  return model.eval().float()


@pytest.fixture(scope="module", params=[(k, c) for k in ("encoder", "decoder") for c in CASES])
def pair(request, tmp_path_factory):
  """(our module, our params, the transformers model) with one set of weights."""
  kind, case = request.param
  config = tiny.config(kind, **tiny.WIDE | CASES[case])
  folder = tmp_path_factory.mktemp(f"{kind}_{case}")
  tiny.write_folder(folder, config, tiny.random_weights(config))
  module = zoo.from_config(huggingface.load_config(folder))
  params = huggingface.load_params(folder, module, jnp.float32)
  return module, params, torch_model(folder, kind)


def logits_of(model, tokens, mask=None):
  import torch

  with torch.no_grad():
    mask = None if mask is None else torch.tensor(mask, dtype=torch.long)
    return model(torch.tensor(tokens, dtype=torch.long), attention_mask=mask).logits.numpy()


def test_logits(pair):
  module, params, model = pair
  forward = jax.jit(lambda p, t: module.apply({"params": p}, t))
  for batch, length in ((2, 37), (1, 1)):
    tokens = tiny.tokens(batch, length)
    expected = logits_of(model, tokens)
    assert np.abs(expected).max() > 1  # a model that says something
    np.testing.assert_allclose(forward(params, tokens), expected, rtol=0, atol=LOGITS)


PADDED = [(k, c) for k in ("encoder", "decoder") for c in ("thetas", "v5")]


@pytest.mark.parametrize("pair", PADDED, indirect=True)
@pytest.mark.parametrize("left", [0, 13])
def test_padding(pair, left):
  """Rows of 37 and 24 tokens; the shorter one has its padding behind it or before it."""
  module, params, model = pair
  tokens = tiny.tokens(2, 37)
  mask = np.ones((2, 37), np.int32)
  mask[1] = 0
  mask[1, left : left + 24] = 1
  tokens[mask == 0] = 0
  positions = np.where(mask == 1, np.cumsum(mask, axis=1) - 1, -1).astype(np.int32)
  found = jax.jit(lambda p, t, at: module.apply({"params": p}, t, at))(params, tokens, positions)
  expected = logits_of(model, tokens, mask)
  real = mask == 1
  np.testing.assert_allclose(np.asarray(found)[real], expected[real], rtol=0, atol=LOGITS)


@pytest.mark.parametrize("pair", [("encoder", "v5"), ("decoder", "v5")], indirect=True)
def test_a_config_that_transformers_wrote(pair, tmp_path):
  """Saved by transformers 5, the same architecture and the same parameters."""
  module, params, model = pair
  model.save_pretrained(tmp_path)
  config = huggingface.load_config(tmp_path)
  assert zoo.from_config(config) == module
  again = huggingface.load_params(tmp_path, module, jnp.float32)
  jax.tree.map(np.testing.assert_array_equal, again, params)
