"""A decoder that is sampled and trained in a second, as files: model, tokenizer, questions."""

import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import jaxlab
from jaxlab import lora
from jaxlab.decode import sampling
from jaxlab.eval import records
from jaxlab.objectives import policy_gradient
from jaxlab.optim import config as optim
from jaxlab.quant import model as quant
from jaxlab.rl import config as rl_config
from jaxlab.rl import loop
from tests.models import tiny as tiny_models

SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
PAD, EOS = 0, 3
WORDS = ("user", "assistant", "\n", " ", "+", "?", *"0123456789")
# The table has rows that no token has, as released models do.
CONFIG = tiny_models.config(
  "qwen2", vocab_size=24, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
  num_attention_heads=4, tie_word_embeddings=True, eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip
CHAT = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> tokenizers.Tokenizer:
  """One token a character, but for the two roles."""
  vocab = {token: i for i, token in enumerate(SPECIAL + WORDS)}
  backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
  pattern = tokenizers.Regex(r"user|assistant|[\s\S]")
  backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
  backend.decoder = decoders.Fuse()
  backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIAL])
  return backend


def write_model(folder: pathlib.Path) -> pathlib.Path:
  """A folder with weights, config and tokenizer."""
  tiny_models.write_folder(folder, CONFIG)
  (folder / "tokenizer.json").write_text(tokenizer().to_str())
  (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<pad>"}')
  (folder / "chat_template.jinja").write_text(CHAT)
  return folder


def items(n: int = 10) -> list[records.Item]:
  """Sums as text, of different lengths."""
  pairs = [(7 * i % 13, i * i) for i in range(n)]
  return [
    records.Item(f"sum/{i}", "sum", "train", prompt=f"{a}+{b}?", target=str(a + b))
    for i, (a, b) in enumerate(pairs)
  ]


def even_digits(item: records.Item, response: records.Response) -> dict[str, float | None]:
  """How many even digits the answer has: random answers differ in it."""
  del item
  return {"even": float(sum(c in "02468" for c in response.text))}


def constant(item: records.Item, response: records.Response) -> dict[str, float | None]:
  """All answers are equally good: nothing to learn."""
  del item, response
  return {"constant": 1.0}


# Warmup would make the first update nothing; the guard's clip is left as recipes have it.
CONFIG_RL = rl_config.RLConfig(
  steps=4, prompts=4, samples=4, max_prompt_tokens=16,
  sampling=sampling.SamplingConfig(max_new_tokens=6),
  lora=lora.LoRAConfig(rank=4),
  optimizer=optim.OptimizerConfig(lr=1e-2, schedule="constant", warmup=0, weight_decay=0.0),
  loss=policy_gradient.PolicyGradientConfig(chunk_tokens=64),
  aqn=rl_config.AQNConfig(sigma_start=0.1, sigma_end=0.01, stages=4),
  save_every=2,
)  # fmt: skip


@functools.cache
def config(**changes) -> rl_config.RLConfig:
  """`CONFIG_RL` with changes."""
  return dataclasses.replace(CONFIG_RL, **changes)


def quantized(lm: jaxlab.LM, format: str = "nvfp4") -> jaxlab.LM:
  return dataclasses.replace(lm, params=quant.quantize(lm.params, format))


def trainer(lm: jaxlab.LM, *, reward=even_digits, seed: int = 0, **changes) -> loop.Trainer:
  """A run on the tiny questions; `changes` are fields of RLConfig."""
  data = rl_config.RLData(train=items(), rewards=(reward,))
  return loop.prepare(lm, data, config(**changes), seed)


def moved(trainable: dict, size: float = 0.05, seed: int = 0) -> dict:
  """Trainable arrays away from their start, as after some updates: B is not 0."""
  random = np.random.default_rng(seed)
  return {
    path: x + jnp.asarray(size * random.normal(size=x.shape), x.dtype)
    for path, x in sorted(trainable.items())
  }
