"""ModernBERT on a mesh: logits and gradients are those of one device, on every axis."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlab.models import presets, zoo
from jaxlab.nn import weights
from jaxlab.objectives import clm
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules

pytestmark = pytest.mark.usefixtures("quick_compilation")

# As in test_rules.py: sums of float32 products in another order; an axis summed twice would be 1.
LOGITS, GRADS = 1e-4, 2e-4
SHAPES = {
  "data": (8, 1, 1, 1), "fsdp": (1, 8, 1, 1), "tensor": (1, 1, 8, 1), "sequence": (1, 1, 1, 8),
  "rows and heads": (2, 2, 2, 1), "all but data": (1, 2, 2, 2),
}  # fmt: skip
ROWS, LENGTH, VOCAB = 8, 16, 96
# Eight heads and shards of everything; windows of five tokens on each side.
CONFIG = {
  "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
  "num_attention_heads": 8, "local_attention": 10, "local_rope_theta": 1e4,
}  # fmt: skip
PRESETS = {"encoder": presets.ettin_encoder_17m, "decoder": presets.ettin_decoder_17m}


@functools.cache
def module_of(kind: str):
  return zoo.from_config(PRESETS[kind]() | CONFIG)


@functools.cache
def params_of(kind: str):
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  shapes = jax.eval_shape(module_of(kind).init, jax.random.key(0), tokens)["params"]
  random = np.random.default_rng(0)
  normal = lambda x: random.normal(size=x.shape).astype(np.float32)
  return weights.map_leaves(lambda path, x: normal(x) / 8 + path.endswith("norm"), shapes)


def batch() -> clm.TokenBatch:
  """A decoder's loss counts some tokens only: a mean of the devices' means would be wrong."""
  random = np.random.default_rng(1)
  tokens = random.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
  mask = np.arange(LENGTH)[None] < random.integers(2, LENGTH, (ROWS, 1))
  return clm.TokenBatch(jnp.asarray(tokens), jnp.asarray(mask))


@functools.partial(jax.jit, static_argnames=("kind", "placement"))
def logits_and_grads(kind: str, params, batch, placement=None):
  """(logits_BTV, gradients of the mean loss); with a placement, rematerialised."""
  module = dataclasses.replace(module_of(kind), placement=placement, remat=placement is not None)

  def masked_lm(params):  # every token that counts, from both sides
    logp = jax.nn.log_softmax(module.apply({"params": params}, batch.tokens_BT))
    logp = jnp.take_along_axis(logp, batch.tokens_BT[..., None], axis=-1)[..., 0]
    return -jnp.sum(logp * batch.mask_BT) / batch.mask_BT.sum()

  def causal_lm(params):
    return clm.make_objective(module)(params, batch, jax.random.key(0))[0].mean()

  grads = jax.grad(causal_lm if kind == "decoder" else masked_lm)(params)
  return module.apply({"params": params}, batch.tokens_BT), grads


@functools.cache
def one_device(kind: str):
  return jax.device_get(logits_and_grads(kind, params_of(kind), batch()))


@pytest.mark.parametrize("axes", SHAPES)
@pytest.mark.parametrize("kind", PRESETS)
def test_logits_and_gradients_are_those_of_one_device(kind, axes):
  mesh = meshes.make_mesh(meshes.MeshConfig(*SHAPES[axes]), jax.devices())
  heads = module_of(kind).config.num_kv_heads
  params = rules.shard_params(params_of(kind), mesh, num_kv_heads=heads)
  placed = rules.shard_rows(batch(), mesh)
  logits, grads = logits_and_grads(kind, params, placed, rules.Placement(mesh, heads))
  for path, grad in weights.leaf_paths(grads).items():  # born where their parameters are
    param = weights.leaf_paths(params)[path]
    assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim), path
  want_logits, want_grads = one_device(kind)
  np.testing.assert_allclose(np.asarray(logits), want_logits, rtol=0, atol=LOGITS)
  for path, want in weights.leaf_paths(want_grads).items():
    found = np.asarray(weights.leaf_paths(grads)[path])
    atol = GRADS * np.abs(want).max()
    assert atol > 0, path
    np.testing.assert_allclose(found, want, rtol=0, atol=atol, err_msg=path)


def test_specs_of_ettin_1b():
  """28 heads over four, its vocabulary over four; nothing of the size of a kernel stays whole."""
  mesh = jax.sharding.AbstractMesh((1, 4, 4, 1), meshes.AXES)
  module = zoo.from_config(presets.ettin_decoder_1b())
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  shapes = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
  specs = rules.param_specs(shapes, mesh, num_kv_heads=module.config.num_kv_heads)
  layers = specs["layers"]
  assert layers["q"]["kernel"] == layers["k"]["kernel"] == P(None, "fsdp", "tensor")
  assert layers["gate"]["kernel"] == layers["up"]["kernel"] == P(None, "fsdp", "tensor")
  assert layers["o"]["kernel"] == layers["down"]["kernel"] == P(None, "tensor", "fsdp")
  assert specs["embed"] == P("tensor", "fsdp") and specs["head"]["bias"] == P("tensor")
  assert specs["head_dense"]["kernel"] == P("fsdp")
  assert layers["attn_norm"] == layers["mlp_norm"] == specs["norm"] == specs["head_norm"] == P()
  whole = [
    x.shape for path, x in weights.leaf_paths(shapes).items()
    if rules.leaf_specs(path, x, mesh, num_kv_heads=28) == P()
  ]  # fmt: skip
  assert max(map(math.prod, whole)) == 28 * 1792
