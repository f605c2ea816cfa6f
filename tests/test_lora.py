"""Adapters: attached without changing the model, trained by path, merged onto the packed base."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import lora
from jaxlab.models import zoo
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4, nf4
from tests.models import tiny

CONFIG = tiny.config(
  hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16, num_hidden_layers=2
)
MODULE = zoo.from_config(CONFIG)
KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def base():
  return MODULE.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def trained(params, config=None, seed=1):
  """Adapters whose B is not zero, and moved norms."""
  config = config or lora.LoRAConfig(rank=4, alpha=8)
  params = lora.attach(params, config, KEY)
  trainable, frozen = weights.partition(params, lora.is_trainable(config))
  random = np.random.RandomState(seed)
  moved = {
    path: x + 0.1 * random.standard_normal(x.shape).astype(np.float32)
    for path, x in sorted(trainable.items())
  }
  return weights.merge(moved, frozen)


FORWARD = jax.jit(MODULE.apply)


def logits(params):
  return FORWARD({"params": params}, tiny.tokens(1, 5))


def test_attaching_does_not_change_the_function(base):
  for params in (base, fp4.quantize_params(base)):
    adapted = lora.attach(params, lora.LoRAConfig(rank=4), KEY)
    # B = 0: equal but for the order of sums in another program (bit for bit in test_weights.py).
    np.testing.assert_allclose(logits(adapted), logits(params), rtol=0, atol=1e-6)
    leaf = adapted["layers"]["q"]["kernel"]
    assert leaf.base is params["layers"]["q"]["kernel"]  # shared, not copied


def test_shapes_scale_and_masters(base):
  config = lora.LoRAConfig(rank=4, alpha=8, targets=("down", "q"))
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
  adapted = lora.attach(half, config, KEY)
  leaf = adapted["layers"]["down"]["kernel"]
  assert (leaf.a.shape, leaf.b.shape, leaf.scale) == ((2, 128, 4), (2, 4, 64), 2.0)
  assert leaf.a.dtype == leaf.b.dtype == jnp.float32
  assert adapted["layers"]["attn_norm"].dtype == adapted["layers"]["mlp_norm"].dtype == jnp.float32
  assert adapted["norm"].dtype == adapted["layers"]["up"]["kernel"].dtype == jnp.bfloat16
  frozen = lora.attach(half, dataclasses.replace(config, train_norms=False), KEY)
  assert frozen["layers"]["attn_norm"].dtype == jnp.bfloat16


def test_a_is_kaiming_uniform(base):
  """PEFT: kaiming_uniform_(a=sqrt(5)), which is U(-1/sqrt(in), 1/sqrt(in)); B = 0."""
  leaf = lora.attach(base, lora.LoRAConfig(rank=32), KEY)["layers"]["down"]["kernel"]
  bound = 1 / math.sqrt(128)
  assert np.abs(leaf.a).max() <= bound
  assert np.abs(leaf.a).max() > 0.99 * bound and abs(leaf.a.mean()) < 0.02 * bound
  assert float(leaf.a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
  np.testing.assert_array_equal(leaf.b, 0)


def test_layers_and_targets_get_their_own_numbers(base):
  layers = lora.attach(base, lora.LoRAConfig(rank=4), KEY)["layers"]
  seen = [np.asarray(layers[t]["kernel"].a[i]) for t in ("q", "k", "gate") for i in range(2)]
  for i, x in enumerate(seen):
    assert all(not np.array_equal(x, y) for y in seen[i + 1 :])


def test_stacked_and_unstacked_models_get_the_same_adapters(base):
  config = lora.LoRAConfig(rank=4)
  stacked = stack.unstack(lora.attach(base, config, KEY))
  listed = lora.attach(stack.unstack(base), config, KEY)
  assert jax.tree.structure(stacked) == jax.tree.structure(listed)
  jax.tree.map(np.testing.assert_array_equal, stacked, listed)


def test_choosing_fewer_targets_leaves_the_others_as_they_were(base):
  everything = lora.attach(base, lora.LoRAConfig(rank=4), KEY)["layers"]
  few = lora.attach(base, lora.LoRAConfig(rank=4, targets=("v",)), KEY)["layers"]
  np.testing.assert_array_equal(few["v"]["kernel"].a, everything["v"]["kernel"].a)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("train_norms", [True, False])
def test_what_trains(base, listed, train_norms):
  config = lora.LoRAConfig(rank=4, targets=("q", "up"), train_norms=train_norms)
  params = lora.attach(stack.unstack(base) if listed else base, config, KEY)
  trainable, _ = weights.partition(params, lora.is_trainable(config))
  prefixes = ["layers/0/", "layers/1/"] if listed else ["layers/"]
  names = ["q/kernel/a", "q/kernel/b", "up/kernel/a", "up/kernel/b"]
  names += ["attn_norm", "mlp_norm"] if train_norms else []
  assert set(trainable) == {p + n for p in prefixes for n in names}
  assert all(x.dtype == jnp.float32 for x in trainable.values())


@pytest.mark.parametrize("kind", ["dense", "nvfp4", "mxfp4", "nf4"])
def test_merged_is_the_adapted_model(base, kind):
  """Onto the decoded base: W^ + scale A B, in float64 by hand; and the same logits."""
  params = base if kind == "dense" else fp4.quantize_params(base, kind)
  adapted = trained(params)
  merged = lora.merge_adapters(adapted)
  leaf = adapted["layers"]["up"]["kernel"]
  decoded = weights.dense(params["layers"]["up"]["kernel"])
  expected = np.asarray(decoded, np.float64) + 2.0 * (
    np.asarray(leaf.a, np.float64) @ np.asarray(leaf.b, np.float64)
  )
  np.testing.assert_allclose(merged["layers"]["up"]["kernel"], expected, atol=1e-5)
  np.testing.assert_array_equal(merged["layers"]["attn_norm"], adapted["layers"]["attn_norm"])
  np.testing.assert_allclose(logits(merged), logits(adapted), atol=1e-4)
  assert np.abs(logits(merged) - logits(params)).max() > 0.05
  assert not any(weights.is_leaf(w) for w in weights.leaf_paths(merged).values())


def test_merging_an_unstacked_model(base):
  adapted = trained(fp4.quantize_params(base))
  listed = lora.merge_adapters(stack.unstack(adapted))
  stacked = stack.unstack(lora.merge_adapters(adapted))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), listed, stacked)


def test_the_dtype_of_merged_kernels(base):
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
  kernel = lambda params, **kw: lora.merge_adapters(params, **kw)["layers"]["q"]["kernel"].dtype
  assert kernel(trained(half)) == jnp.bfloat16
  packed = half | {"layers": fp4.quantize_params(base)["layers"]}
  assert kernel(trained(packed)) == jnp.bfloat16  # the embedding's
  assert kernel(trained(half), dtype=jnp.float32) == jnp.float32


def test_detach_gives_the_base_back(base):
  packed = fp4.quantize_params(base)
  config = lora.LoRAConfig(rank=4, train_norms=False)
  back = lora.detach(trained(packed, config))
  assert jax.tree.structure(back) == jax.tree.structure(packed)
  assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(packed), strict=True))


def test_gradients_reach_b_first(base):
  """At the start B is zero: A gets none, B and the norms do; the base has no gradient leaf."""
  config = lora.LoRAConfig(rank=4)
  params = lora.attach(fp4.quantize_params(base), config, KEY)
  trainable, frozen = weights.partition(params, lora.is_trainable(config))

  def loss(trainable):
    tokens = jnp.asarray(tiny.tokens(1, 5))
    return jnp.mean(MODULE.apply({"params": weights.merge(trainable, frozen)}, tokens) ** 2)

  grads = jax.jit(jax.grad(loss))(trainable)
  for path, g in grads.items():
    assert np.abs(g).max() == 0 if path.endswith("/a") else np.abs(g).max() > 0, path


def test_the_config_is_found_again(base):
  config = lora.LoRAConfig(rank=4, alpha=8, targets=("q", "down"))
  assert lora.config_of(lora.attach(base, config, KEY)) == config
  with pytest.raises(ValueError, match="config_of: adapters must be there"):
    lora.config_of(base)


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"rank": 0}, "rank must be at least 1; got 0"),
    ({"alpha": 0.0}, "alpha must be > 0; got 0.0"),
    ({"targets": ()}, "name at least one"),
    ({"targets": ("q", "q")}, "distinct names"),
    ({"targets": ("q", "q_proj")}, r"Remove \['q_proj'\]"),
  ],
)
def test_configs_that_cannot_be_meant(fields, message):
  with pytest.raises(ValueError, match=message):
    lora.LoRAConfig(**fields)


def test_scale():
  assert lora.LoRAConfig(rank=16).scale == 1.0 and lora.LoRAConfig(rank=16, alpha=32).scale == 2.0


def test_what_cannot_be_attached_is_named(base):
  config = lora.LoRAConfig(rank=4)
  with pytest.raises(ValueError, match="layers/down/kernel has an adapter already"):
    lora.attach(lora.attach(base, config, KEY), config, KEY)
  layers = {k: v for k, v in base["layers"].items() if k != "gate"}
  with pytest.raises(ValueError, match=r"no kernels named \['gate'\]"):
    lora.attach(base | {"layers": layers}, config, KEY)


def test_nf4_is_a_base_like_any_other(base):
  kernel = nf4.quantize(base["layers"]["q"]["kernel"])
  assert isinstance(
    lora.attach(
      base | {"layers": base["layers"] | {"q": {"kernel": kernel}}},
      lora.LoRAConfig(rank=2, targets=("q",)), KEY,
    )["layers"]["q"]["kernel"].base,
    weights.NF4Array,
  )  # fmt: skip
