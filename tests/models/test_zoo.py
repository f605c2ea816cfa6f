"""config.json -> architecture, in the spellings of transformers 4 and 5."""

import pytest

from jaxlab.models import zoo
from jaxlab.nn import rotary
from tests.models import tiny


def test_both_spellings_of_rope_are_one_config():
  four = zoo.causal_lm_config(tiny.CASES["llama3_v4"])
  five = zoo.causal_lm_config(tiny.CASES["llama3_v5"])
  assert four == five
  assert four.rope == rotary.RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize("case", tiny.CASES)
def test_widths(case):
  config = tiny.CASES[case]
  found = zoo.causal_lm_config(config)
  assert found.vocab_size == tiny.VOCAB and found.width == tiny.WIDTH
  assert found.num_kv_heads == config["num_key_value_heads"]
  assert found.head_dim == config.get("head_dim", 8)
  assert found.tie_embeddings == config["tie_word_embeddings"]


def test_biases_are_those_of_the_family():
  flags = lambda c: (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm)
  of = lambda case: flags(zoo.causal_lm_config(tiny.CASES[case]))
  assert of("llama") == (False, False, False, False)
  assert of("llama_biases") == (True, True, True, False)
  assert of("qwen2") == (True, False, False, False)
  assert of("qwen3") == (False, False, False, True)
  assert of("qwen3_tied_biases") == (True, True, False, True)


# Released models by their config.json: width, layers, heads, kv heads, MLP, vocabulary, head, sum.
RELEASED = [
  (896, 24, 14, 2, 4864, 151936, 64, 494_032_768),  # Qwen2.5-0.5B
  (3584, 28, 28, 4, 18944, 152064, 128, 7_615_616_512),  # Qwen2.5-7B
]


@pytest.mark.parametrize("width,depth,heads,kv,mlp,vocab,head_dim,count", RELEASED)
def test_parameter_counts_of_released_models(width, depth, heads, kv, mlp, vocab, head_dim, count):
  import math

  from jaxlab.io import assemble

  module = zoo.from_config({
    "model_type": "qwen2", "hidden_size": width, "num_hidden_layers": depth,
    "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": mlp,
    "vocab_size": vocab, "tie_word_embeddings": width == 896,
  })  # fmt: skip
  assert module.config.head_dim == head_dim
  assert sum(math.prod(s) for s in assemble.parameter_shapes(module).values()) == count


@pytest.mark.parametrize(
  "changes,message",
  [
    ({"model_type": "mamba"}, "model_type = 'mamba' is not supported; jaxlab has one of llama"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
    (
      {"layer_types": ["full_attention", "sliding_attention"]},
      "layer_types = .'sliding_attention'",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"vocab_size": None}, "'vocab_size' is missing"),
  ],
)
def test_what_we_do_not_have_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    zoo.from_config(tiny.config(**changes))


def test_sliding_windows_of_qwen_are_refused():
  with pytest.raises(ValueError, match="use_sliding_window = True"):
    zoo.from_config(tiny.config("qwen2", use_sliding_window=True))
