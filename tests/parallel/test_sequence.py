"""Positions split over `sequence`: the numbers of one device, and its share of the scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.attention import dense
from jaxlab.models import causal_lm
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from tests.parallel import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 2048  # four chunks of queries
HIDDEN, GRADS = 1e-4, 2e-4  # as in test_rules


def placement(**sizes):
  config = meshes.MeshConfig(**sizes)
  count = config.data * config.fsdp * config.tensor * config.sequence
  return rules.Placement(meshes.make_mesh(config, jax.devices()[:count]), 2)


def hidden(params, tokens_BT, where):
  module = tiny.MODULE.clone(remat=True, placement=where)
  return module.apply({"params": params}, tokens_BT, method="hidden")[0]


def loss(params, tokens_BT, where):
  """(mean of the hidden states, each weighted otherwise; the hidden states)."""
  hidden_BTD = hidden(params, tokens_BT, where)
  weight_1TD = jnp.cos(jnp.arange(hidden_BTD[0].size, dtype=jnp.float32))
  weighted_BTD = hidden_BTD * weight_1TD.reshape(1, *hidden_BTD.shape[1:])
  return jnp.mean(weighted_BTD), hidden_BTD


@pytest.mark.parametrize("length", [24, 22])  # three chunks of 8; of 8 with two queries to fill up
def test_chunks_of_split_queries_are_the_whole(monkeypatch, length):
  monkeypatch.setattr(dense, "QUERY_CHUNK", 8)
  tokens = np.random.default_rng(0).integers(0, tiny.CONFIG.vocab_size, (4, length))
  params = tiny.params("dense")
  both = jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)
  want_grads, want = both(params, tokens, None)
  where = placement(data=2, tensor=2, sequence=2)
  sharded = rules.shard_params(params, where.mesh, num_kv_heads=2)
  grads, found = both(sharded, tokens, where)
  np.testing.assert_allclose(found, want, rtol=0, atol=HIDDEN)
  for name in ("embed", "layers"):
    for a, b in zip(jax.tree.leaves(grads[name]), jax.tree.leaves(want_grads[name]), strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=GRADS * np.abs(b).max())


@functools.cache
def temporary_bytes(sequence: int, gradient: bool) -> int:
  """Of one device, for a forward pass over LENGTH tokens or its gradient; nothing is run."""
  where = placement(sequence=sequence)
  shapes = jax.eval_shape(
    causal_lm.CausalLM(tiny.CONFIG).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  specs = rules.param_specs(shapes, where.mesh, num_kv_heads=2)
  placed = lambda x, spec: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=jax.sharding.NamedSharding(where.mesh, spec)
  )
  function = jax.grad(loss, has_aux=True) if gradient else hidden
  lowered = jax.jit(function, static_argnums=2).lower(
    jax.tree.map(placed, shapes, specs), jax.ShapeDtypeStruct((2, LENGTH), jnp.int32), where
  )
  return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True])
def test_a_device_holds_the_scores_of_its_queries_only(gradient):
  """B * N * chunk * S scores in float32 are most of it: 67 MB on one device, a quarter on four."""
  scores = 4 * 2 * tiny.CONFIG.num_heads * dense.QUERY_CHUNK * LENGTH
  alone, split = temporary_bytes(1, gradient), temporary_bytes(4, gradient)
  assert alone > scores
  assert split < alone / 3  # keys and values of all positions are on every device
