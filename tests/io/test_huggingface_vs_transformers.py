"""Folders of transformers in, ours out, and transformers again. Live: torch, compressed-tensors."""

import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlab
from jaxlab import lm as language_model
from jaxlab.io import huggingface, receipt
from jaxlab.nn import weights
from jaxlab.quant import fp4
from tests.models import tiny

pytestmark = pytest.mark.parity
LOGITS = 1e-4
EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def contents(folder):
  return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def logits_of(folder, tokens):
  import torch
  import transformers

  auto = transformers.AutoModelForCausalLM
  model = auto.from_pretrained(folder, dtype=torch.float32).eval()
  return tiny.torch_logits(model, tokens)


@pytest.mark.parametrize("case", ["llama_tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_a_folder_of_transformers_comes_out_byte_equal(case, shard, tmp_path):
  import torch

  model = tiny.torch_model(tiny.CASES[case]).to(torch.bfloat16)
  model.save_pretrained(tmp_path / "in", max_shard_size=shard)
  assert len(list((tmp_path / "in").glob("*.safetensors"))) > (2 if shard == "50KB" else 0)
  lm = jaxlab.load(tmp_path / "in")
  huggingface.save_pretrained(lm, tmp_path / "out")
  assert contents(tmp_path / "out") == contents(tmp_path / "in")


@pytest.mark.parametrize("case", ["llama3_v4", "llama3_v5", "qwen2_tied", "qwen3_tied_biases"])
def test_transformers_loads_what_we_write(case, tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.CASES[case])
  lm = jaxlab.load(tmp_path / "in")
  huggingface.save_pretrained(lm, tmp_path / "out")
  tokens = tiny.tokens()
  expected = lm.module.apply({"params": lm.params}, jnp.asarray(tokens))
  np.testing.assert_allclose(logits_of(tmp_path / "out", tokens), expected, rtol=0, atol=LOGITS)


@pytest.mark.parametrize("case", ["llama", "llama3", "linear", "qwen2", "qwen3"])
def test_the_config_of_a_gguf_file_is_read_as_meant(case, tmp_path):
  import gguf
  import transformers

  from tests.io import test_gguf_model as files

  config = {
    "llama": tiny.config(**EVEN, attention_bias=True, mlp_bias=True, rope_theta=1e5),
    "llama3": tiny.config(**EVEN, rope_theta=5e5),
    "linear": tiny.config(**EVEN),
    "qwen2": tiny.config("qwen2", **EVEN, tie_word_embeddings=True),
    "qwen3": tiny.config("qwen3", **EVEN),
  }[case]
  more = {}
  if case == "linear":
    more = {
      "add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 4.0,
    }  # fmt: skip
  files.write(tmp_path / "m.gguf", config, **more)
  lm = jaxlab.lm.LM(*_parts(tmp_path / "m.gguf"))
  huggingface.save_pretrained(lm, tmp_path / "out")
  read = transformers.AutoConfig.from_pretrained(tmp_path / "out")
  assert read.architectures == config["architectures"] and read.head_dim == 16
  assert read.rope_parameters["rope_theta"] == config.get("rope_theta", 10_000.0)
  tokens = tiny.tokens()
  expected = lm.module.apply({"params": lm.params}, jnp.asarray(tokens))
  np.testing.assert_allclose(logits_of(tmp_path / "out", tokens), expected, rtol=0, atol=LOGITS)


def _parts(path):
  """As `jaxlab.load`, for a file without a tokenizer."""
  from jaxlab.models import zoo

  config, source = huggingface.load_config(path), huggingface.load_source(path)
  module = zoo.from_config(config)
  params = huggingface.load_params(path, module, jnp.float32)
  return module, params, config, None, str(path), source


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_loads_our_nvfp4_folder(family, tmp_path):
  """compressed-tensors decodes our codes to bfloat16, and computes in it unless told otherwise."""
  import dataclasses

  import torch
  import transformers

  config = tiny.config(family, **EVEN, tie_word_embeddings=family == "qwen2")
  tiny.write_folder(tmp_path / "in", config, dtype=ml_dtypes.bfloat16)
  lm = jaxlab.load(tmp_path / "in")
  lm = dataclasses.replace(lm, params=fp4.quantize_params(lm.params))
  language_model.export(lm, tmp_path / "out")
  tokens = tiny.tokens()
  decoded = weights.map_leaves(lambda _, w: receipt.as_served(w), lm.params)
  expected = lm.module.apply({"params": decoded}, jnp.asarray(tokens))
  auto = transformers.AutoModelForCausalLM
  model = auto.from_pretrained(tmp_path / "out", dtype="auto").eval()
  model(torch.tensor([[0]]))
  torch.nn.Module.float(model)
  for i in range(tiny.LAYERS):
    theirs = model.get_submodule(f"model.layers.{i}.mlp.down_proj").weight.detach().numpy()
    np.testing.assert_array_equal(decoded["layers"]["down"]["kernel"][i], theirs.T)
  np.testing.assert_allclose(tiny.torch_logits(model, tokens), expected, rtol=0, atol=LOGITS)
  run = _verify(tmp_path / "out")
  assert run.returncode == 0, run.stdout + run.stderr


def _verify(folder):
  return subprocess.run(
    [sys.executable, str(folder / "verify.py")], capture_output=True, text=True, cwd="/"
  )


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_the_receipt_is_verified_by_transformers_alone(case, tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.CASES[case], dtype=ml_dtypes.bfloat16)
  language_model.export(jaxlab.load(tmp_path / "in"), tmp_path / "out")
  run = _verify(tmp_path / "out")
  assert run.returncode == 0 and run.stdout.strip().endswith("verified"), run.stdout + run.stderr


def test_the_receipt_notices_other_weights(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.CASES["llama"])
  language_model.export(jaxlab.load(tmp_path / "in"), tmp_path / "out")
  tiny.write_folder(tmp_path / "out", tiny.CASES["llama"], seed=1)
  run = _verify(tmp_path / "out")
  assert run.returncode == 1 and "OTHER BYTES" in run.stdout and "DIFFERENT" in run.stdout


# --- the packaged model


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
  """(ours, the folder that we export)."""
  lm = jaxlab.load("demo")
  folder = tmp_path_factory.mktemp("smollm") / "out"
  language_model.export(lm, folder)
  return lm, folder


QUESTIONS = (
  "What is the capital of France?", "Name three colours.", "What is 2 + 3?", "Who wrote Hamlet?",
  "Write a haiku about rain.", "Translate 'good morning' to Spanish.", "What is photosynthesis?",
  "List the planets.", "How do I boil an egg?", "What is a prime number?", "Define gravity.",
  "Give me a word that rhymes with cat.", "What year did the Second World War end?",
  "Explain recursion in one sentence.", "What is the largest ocean?", "Say hello in French.",
  "Who painted the Mona Lisa?", "What does CPU mean?", "Is a whale a fish?",
  "Write one line of Python.",
)  # fmt: skip


@pytest.mark.slow
def test_the_packaged_model_answers_as_in_transformers(smollm):
  import torch
  import transformers

  lm, folder = smollm
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  prompts = []
  for question in QUESTIONS:
    messages = [{"role": "user", "content": question}]
    text = lm.tokenizer.apply_chat_template(messages)
    assert text == tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True
    )
    assert lm.tokenizer.encode(text) == tokenizer(text, add_special_tokens=False).input_ids
    prompts.append(lm.tokenizer.encode(text))
  ours = receipt.greedy(lm.module, lm.params, prompts, 12)
  for prompt, (tokens, _) in zip(prompts, ours, strict=True):
    ids = torch.tensor([prompt])
    # Without a mask, generate hides every <|im_end|> of the prompt: it is also the pad token.
    mask = torch.ones_like(ids)
    out = model.generate(
      ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert out[0, len(prompt) :].tolist() == tokens


@pytest.mark.slow
def test_the_receipt_of_the_packaged_model_is_verified(smollm):
  _, folder = smollm
  run = _verify(folder)
  assert run.returncode == 0, run.stdout + run.stderr
