"""Every pair of methods from different seams runs on a tiny model, and makes README's matrix.

`JAXLAB_WRITE_MATRIX=1 pytest tests/test_composition.py` renews the table; without it the test only
compares.
"""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import lora, noise
from jaxlab.decode import autoregressive, sampling
from jaxlab.models import causal_lm
from jaxlab.nn import stack, weights
from jaxlab.objectives import policy_gradient
from jaxlab.optim import config as optim
from jaxlab.quant import fp4
from jaxlab.rl import batch as packing
from jaxlab.train import guard, state, step

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- /matrix -->"
# Widths are multiples of every block (16, 32, 64).
CONFIG = causal_lm.CausalLMConfig(64, 64, 2, 4, 2, 16, 64, max_positions=64)
MODULE = causal_lm.CausalLM(CONFIG)

WEIGHTS = {
  "dense": lambda p: p,
  "nvfp4": lambda p: fp4.quantize_params(p, "nvfp4"),
  "mxfp4": lambda p: fp4.quantize_params(p, "mxfp4"),
  "nf4": lambda p: fp4.quantize_params(p, "nf4"),
}
OTHERS = {
  "LoRA": ("weights", "trains"),
  "noise (AQN)": ("weights", "samples"),
  "unstacked layers": ("weights", "samples"),
  "cached decoding": ("decoding", "samples"),
  "AdamW + guard": ("updates", "trains"),
  "policy gradient": ("objective", "trains"),
  "prefix-tree batch": ("attention", "trains"),
}


@pytest.fixture(scope="module")
def base():
  params = MODULE.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
  return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(1), x.shape), params)


@pytest.fixture(scope="module")
def results(base):
  """{(weight format, method): "yes", or the reason why not}."""
  found = {}
  for name, make in WEIGHTS.items():
    params = make(base)
    trained, sampled = _train_two_steps(params), _sample(params)
    for method, (_, kind) in OTHERS.items():
      found[name, method] = trained if kind == "trains" else sampled[method]
  return found


def _train_two_steps(params) -> str:
  """LoRA, guard, AdamW, policy gradient and packed rows over one weight format."""
  config = lora.LoRAConfig(rank=2)
  adapted = lora.attach(params, config, jax.random.key(2))
  trainable, frozen = weights.partition(adapted, lora.is_trainable(config))
  optimizer = guard.guarded(optim.OptimizerConfig(lr=1e-2, schedule="constant", warmup=0).build(2))
  loss = policy_gradient.PolicyGradientConfig(correction="none")
  train_step = step.make_train_step(packing.make_objective(MODULE, loss), optimizer)
  zeros = np.zeros(3, np.float32)
  samples = [packing.Sample([1, 2, 3], [4 + i, 5, 6], zeros, 1.0 - 2 * i, True) for i in range(2)]
  data = packing.pack(samples, per_row=2, max_answer=4)
  now = state.TrainState.create(trainable, optimizer)
  entropies = []
  for _ in range(2):
    now, metrics = train_step(now, frozen, data, jax.random.key(0))
    entropies.append(float(metrics["entropy"]))  # the loss itself is 0: its ratios are 1
  changed = any((np.asarray(now.trainable[k]) != np.asarray(x)).any() for k, x in trainable.items())
  assert np.isfinite(entropies).all() and changed and entropies[1] != entropies[0]
  return "yes"


def _sample(params) -> dict[str, str]:
  """Noise, both layer layouts and the cache: the sampler's greedy tokens are the full forward's."""
  greedy = sampling.SamplingConfig(max_new_tokens=3, temperature=0.0)
  sampler = autoregressive.Sampler(MODULE, greedy, (), compact=False)
  prompts, key = [[1, 2, 3]], jax.random.key(0)
  drawn = autoregressive.Noise(jnp.float32(0.3), jax.random.key(5))
  noisy = noise.perturb(params, drawn.sigma, drawn.key)
  expected = _greedy(params, prompts[0])
  listed = stack.unstack(params)
  assert sampler(params, prompts, key).ids(0) == expected
  assert sampler(listed, prompts, key).ids(0) == expected
  assert sampler(params, prompts, key, noise=drawn).ids(0) == _greedy(noisy, prompts[0])
  return {"noise (AQN)": "yes", "unstacked layers": "yes", "cached decoding": "yes"}


@jax.jit
def _logits(params, tokens_BT):
  return MODULE.apply({"params": params}, tokens_BT)


def _greedy(params, prompt) -> list[int]:
  tokens = list(prompt)
  for _ in range(3):  # padded to one shape; causal, so the pads are unseen
    padded = jnp.asarray([tokens + [0] * (8 - len(tokens))])
    tokens.append(int(_logits(params, padded)[0, len(tokens) - 1].argmax()))
  return tokens[len(prompt) :]


def test_every_pair_runs(results):
  assert len(results) == len(WEIGHTS) * len(OTHERS)
  assert set(results.values()) == {"yes"}


def test_readme_shows_the_matrix_of_this_test(results):
  header = "| weights | " + " | ".join(OTHERS) + " |\n|" + "---|" * (len(OTHERS) + 1) + "\n"
  rows = "".join(
    f"| {name} | " + " | ".join(results[name, method] for method in OTHERS) + " |\n"
    for name in WEIGHTS
  )
  text = README.read_text()
  before, rest = text.split(BEGIN)
  _, after = rest.split(END)
  if os.environ.get("JAXLAB_WRITE_MATRIX"):
    README.write_text(before + BEGIN + header + rows + END + after)
  assert BEGIN + header + rows + END in README.read_text()
