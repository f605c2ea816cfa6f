"""Real weights: SmolLM2-135M-Instruct, exported and loaded by transformers, says the same tokens.

Reference: transformers >= 5.24 `generate` without sampling, torch 2.13, float32, a prompt at a
time.
"""

import jax
import pytest

import jaxlab
from jaxlab import lm as language_model
from jaxlab.data import assets
from jaxlab.decode import sampling, text

pytestmark = [
  pytest.mark.slow,
  pytest.mark.parity,
  pytest.mark.skipif(assets.find_demo_model() is None, reason="the demo model is not here"),
]
NEW = 32
QUESTIONS = (
  "What is the capital of France?", "Name three primary colours.", "What is 2 + 2?",
  "Write a haiku about the sea.", "Why is the sky blue?", "Who wrote Hamlet?",
  "Translate 'good morning' to Spanish.", "List the days of the week.", "What is gravity?",
  "Give me a recipe for pancakes.",
)  # fmt: skip
TEXTS = (
  "The capital of France is", "Water boils at a temperature of", "def add(a, b):\n  return",
  "Once upon a time, there was a", "1, 2, 3, 4, 5,", "The opposite of hot is",
  "Dear Sir or Madam,\n\nI am writing to", "Bonjour, je m'appelle", "import numpy as np\n",
  "Roses are red,",
)  # fmt: skip


@pytest.fixture(scope="module")
def lm():
  return jaxlab.load("demo")


def test_greedy_tokens_are_those_of_transformers(lm, tmp_path):
  import torch
  import transformers

  language_model.export(lm, tmp_path / "hf")
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
  prompts = [[{"role": "user", "content": q}] for q in QUESTIONS] + list(TEXTS)
  out = lm.generate(prompts, sampling.SamplingConfig(max_new_tokens=NEW, temperature=0.0))
  ids = text.encode_prompts(lm.tokenizer, prompts)
  for row, prompt in enumerate(ids):
    with torch.no_grad():
      said = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        eos_token_id=list(lm.tokenizer.eos_ids), attention_mask=torch.ones(1, len(prompt)),
      )  # fmt: skip
    assert out.completions.ids(row) == said[0, len(prompt) :].tolist(), prompts[row]


def test_tokens_do_not_depend_on_batch_or_prefix(lm):
  """Twenty rows together, each alone, and with their template computed once."""
  prompts = [[{"role": "user", "content": q}] for q in QUESTIONS]
  ids = text.encode_prompts(lm.tokenizer, prompts)
  sampler = text.make_sampler(lm, sampling.SamplingConfig(max_new_tokens=12, temperature=0.7))
  params, key = text.serving_params(lm.params), jax.random.key(1)
  together = sampler(params, ids, key)
  shared = sampler(params, ids, key, prefix=16)
  for row in range(len(ids)):
    assert shared.ids(row) == together.ids(row)
    if row < 3:
      assert sampler(params, [ids[row]], key, row_ids=[row]).ids(0) == together.ids(row)
