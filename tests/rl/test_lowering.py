"""The programs of the 7B recipe lower for GPUs and TPUs that are not here; nothing is allocated."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest

from jaxlab import lora
from jaxlab.decode import autoregressive
from jaxlab.models import zoo
from jaxlab.nn import weights
from jaxlab.rl import batch, rollout
from jaxlab.train import guard, state, step
from launch import registry
from pallas_kernels import target

RECIPE = pathlib.Path(__file__).parents[2] / "configs" / "qerl" / "qwen2p5_7b_gsm8k.gin"
QWEN = {
  "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
  "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
  "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
  "tie_word_embeddings": False,
}  # fmt: skip
STOP_IDS = (151645, 151643)
MACHINES = (("h100", "cuda"), ("v6e", "tpu"))


class Recipe:
  """The configured run of the 7B recipe as shapes."""

  def __init__(self):
    registry.parse([str(RECIPE)], [])
    self.config = registry.get("RLConfig")()
    self.quantize = registry.get("quantize")
    self.module = zoo.from_config(QWEN, jnp.bfloat16)
    self.key = jax.eval_shape(jax.random.key, 0)
    self.optimizer = guard.guarded(self.config.optimizer.build(self.config.updates))
    self.state, self.frozen = jax.eval_shape(self._build, self.key)

  def _build(self, key):
    """(state, frozen), as `rl.loop.prepare` makes them."""
    dense = self.module.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    params = lora.attach(self.quantize(dense), self.config.lora, key)
    trainable, frozen = weights.partition(params, lora.is_trainable(self.config.lora))
    return state.TrainState.create(trainable, self.optimizer), frozen

  @functools.cached_property
  def sampler(self):
    return autoregressive.Sampler(
      self.module, self.config.sampling, STOP_IDS, STOP_IDS[1], compact=False
    )

  def policy(self):
    """The parameters that a rollout gets on the machine in use."""
    serve = lambda trainable, frozen: rollout.Serving(frozen).params(trainable)
    return jax.eval_shape(serve, self.state.trainable, self.frozen)

  def prefill(self):
    c = self.config
    ints = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    noise = jax.eval_shape(lambda key: autoregressive.Noise(jnp.float32(0), key), self.key)
    arguments = (
      self.sampler, self.policy(), ints(c.prompts, c.max_prompt_tokens), ints(c.prompts),
      ints(c.prompts * c.samples, dtype=jnp.uint32), self.key, noise,
    )  # fmt: skip
    return autoregressive.prefill, arguments, {"samples": c.samples, "prefix": 0}

  def decode(self):
    program, arguments, named = self.prefill()
    shapes = jax.eval_shape(functools.partial(program, arguments[0], **named), *arguments[1:])
    arguments = (self.sampler, self.policy(), shapes, *arguments[-2:])
    return autoregressive.decode, arguments, {"steps": 128, "uniform": False}

  def train_step(self):
    c = self.config
    answers = c.prompts * c.samples
    sample = batch.Sample([1] * c.max_prompt_tokens, [2], jnp.zeros(1), 0.0, True)
    tokens = c.sampling.max_new_tokens
    longest = sample._replace(answer=[2] * tokens, logp=jnp.zeros(tokens))
    one = batch.pack([longest], per_row=c.sequences_per_row, max_answer=tokens)
    rows = -(-answers // c.sequences_per_row)
    packed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), one)
    objective = batch.make_objective(self.module.clone(remat=c.remat), c.loss)
    program = step.make_train_step(objective, self.optimizer, micro_batch=c.micro_rows)
    return program, (self.state, self.frozen, packed, self.key), {}


@pytest.fixture(scope="module")
def recipe():
  return Recipe()


@pytest.mark.parametrize("machine, platform", MACHINES)
@pytest.mark.parametrize("name", ["prefill", "decode", "train_step"])
def test_it_lowers(recipe, name, machine, platform):
  with target.use_target(machine):
    program, arguments, named = getattr(recipe, name)()
    lowered = program.trace(*arguments, **named).lower(lowering_platforms=(platform,))
  text = lowered.as_text()
  assert "stablehlo.while" in text  # the layers are a loop
  # Codes are arguments as packed, and no kernel of all layers is ever unpacked.
  assert "tensor<28x18944x1792xui8>" in text
  for dtype in ("bf16", "f32"):
    assert f"tensor<28x3584x18944x{dtype}>" not in text
    assert f"tensor<28x18944x3584x{dtype}>" not in text


def test_the_recipe_is_the_7b_model_at_4_bits(recipe):
  params = jax.eval_shape(weights.merge, recipe.state.trainable, recipe.frozen)
  kernels = weights.leaf_paths(params)
  packed = [w.base for w in kernels.values() if isinstance(w, weights.LoRA)]
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  linears = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
  assert size(packed) == pytest.approx(linears * 4.5 / 8, rel=1e-6)
  masters = sum(x.size for x in recipe.state.trainable.values())
  assert masters - 2 * 28 * 3584 == 80_740_352  # rank 32
  assert sum(x.size for x in jax.tree.leaves(recipe.state.opt_state)) > 2 * masters
