"""BERT against a golden of transformers, sentence embeddings by hand, MiniLM's known figures."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab.data import assets
from jaxlab.eval import embeddings
from jaxlab.io import assemble, huggingface
from jaxlab.models import bert, zoo
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4
from tests.models import tiny_bert as tiny

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens" / "bert.npz"
HIDDEN = 2e-5  # states of size 3, three layers, float32
SAME = 1e-5  # sums in another order


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("bert")
  tiny.write_folder(folder, tiny.CONFIG)
  module = zoo.from_config(huggingface.load_config(folder))
  return module, huggingface.load_params(folder, module, jnp.float32)


def hidden_of(module, params, tokens, positions=None, types=None):
  run = lambda p, *xs: module.apply({"params": p}, *xs[:2], types_BT=xs[2], method="hidden")
  return np.asarray(jax.jit(run)(params, tokens, positions, types)[0])


def sentence_of(module, params, tokens, positions=None):
  run = jax.jit(lambda p, *xs: module.apply({"params": p}, *xs, method="sentence"))
  return np.asarray(run(params, tokens, positions))


def test_states_are_those_of_transformers(model):
  module, params = model
  tokens, types, mask = tiny.rows()
  found = hidden_of(module, params, tokens, tiny.positions(mask), types)
  golden = np.load(GOLDENS)
  np.testing.assert_allclose(found[mask == 1], golden["hidden"][mask == 1], atol=HIDDEN)
  pooled = module.apply({"params": params}, jnp.asarray(golden["hidden"]), method="pooled")
  np.testing.assert_allclose(pooled, golden["pooled"], atol=SAME)


def test_padding_changes_nothing(model):
  module, params = model
  tokens, _, mask = tiny.rows()
  padded = sentence_of(module, params, tokens, tiny.positions(mask))
  alone = sentence_of(module, params, tokens[2:, :11])
  np.testing.assert_allclose(padded[2], alone[0], atol=SAME)
  np.testing.assert_allclose(np.linalg.norm(padded, axis=-1), 1, atol=SAME)


def test_a_sentence_is_the_mean_of_its_own_tokens_with_length_1(model):
  module, params = model
  tokens, _, mask = tiny.rows()
  states = hidden_of(module, params, tokens, tiny.positions(mask)).astype(np.float64)
  expected = [row[own == 1].mean(0) for row, own in zip(states, mask, strict=True)]
  expected = [row / np.sqrt((row**2).sum()) for row in expected]
  found = sentence_of(module, params, tokens, tiny.positions(mask))
  np.testing.assert_allclose(found, expected, atol=SAME)


def test_a_list_of_layers_is_the_same_model(model):
  module, params = model
  tokens, _, _ = tiny.rows()
  stacked = hidden_of(module, params, tokens)
  np.testing.assert_allclose(hidden_of(module, stack.unstack(params), tokens), stacked, atol=SAME)


def test_fp4_layers_multiply_as_their_dense_form(model):
  module, params = model
  packed = fp4.quantize_params(params, "nvfp4")
  tokens, _, _ = tiny.rows()
  expected = hidden_of(module, weights.densify(packed), tokens)
  np.testing.assert_allclose(hidden_of(module, packed, tokens), expected, atol=10 * SAME)
  assert np.abs(expected - hidden_of(module, params, tokens)).max() > 0.05


def test_the_folder_comes_back_byte_equal(tmp_path):
  tiny.write_folder(tmp_path / "a", tiny.CONFIG)
  lm = jaxlab.load(tmp_path / "a")
  huggingface.save_pretrained(lm, tmp_path / "b")
  for name in ("config.json", "model.safetensors"):
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_size_of_minilm():
  """22.7 M parameters, 103 tensors but the recomputed position_ids (DATA.md)."""
  config = tiny.CONFIG | {
    "vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 12, "max_position_embeddings": 512,
  }  # fmt: skip
  shapes = assemble.parameter_shapes(zoo.from_config(config))
  assert sum(np.prod(s) for s in shapes.values()) == 22_713_216


@pytest.mark.parametrize(
  "changes,message",
  [
    ({"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new' is not supported"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    ({"is_decoder": True}, "is_decoder = True"),
    ({"architectures": ["BertForMaskedLM"]}, "architectures = .'BertForMaskedLM'"),
    ({"num_attention_heads": 5}, "num_heads must divide width; got 5 and 48"),
    ({"hidden_size": None}, "'hidden_size' is missing"),
  ],
)
def test_what_we_do_not_have_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    zoo.from_config(tiny.CONFIG | changes)


def test_texts_beyond_the_table_of_positions_are_refused(model):
  module, params = model
  with pytest.raises(ValueError, match="at most 40 tokens; got 41"):
    module.apply({"params": params}, jnp.zeros((1, 41), jnp.int32))


# Cosines that transformers 5.24 gives for mean-pooled, normalised states of the same weights.
TEXTS = ("How do I reset my password?", "I forgot my login credentials", "The stock market fell.",
         "Today is a sunny day")  # fmt: skip
RELATED, UNRELATED = 0.677621, 0.152942


@pytest.mark.slow
@pytest.mark.skipif(assets.find_minilm() is None, reason="MiniLM is not fetched yet")
def test_minilm_knows_what_is_related():
  lm = jaxlab.load(assets.minilm_path())
  assert isinstance(lm.module, bert.Bert)
  found = embeddings.embed_texts(lm, TEXTS)
  assert found[0] @ found[1] == pytest.approx(RELATED, abs=1e-4)
  assert found[2] @ found[3] == pytest.approx(UNRELATED, abs=1e-4)
