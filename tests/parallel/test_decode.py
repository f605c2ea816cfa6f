"""Sampling on a mesh: the tokens of one device, from a cache and a vocabulary that are split."""

import jax
import numpy as np
import pytest

from jaxlab.decode import autoregressive, sampling
from jaxlab.nn import stack
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from tests.parallel import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
PROMPTS = [
  np.random.default_rng(1).integers(0, tiny.CONFIG.vocab_size, n).tolist()
  for n in (3, 9, 5, 4, 12, 7, 6, 10)
]
TEMPLATE = [7, 1, 4, 2]


def place(params, **sizes):
  """(module, parameters) on a mesh of all devices."""
  mesh = meshes.make_mesh(meshes.MeshConfig(**sizes))
  where = rules.Placement(mesh, tiny.CONFIG.num_kv_heads)
  return tiny.MODULE.clone(placement=where), rules.shard_params(params, mesh, num_kv_heads=2)


def draw(module, params, config, *, stops=(5, 9), **how):
  sampler = autoregressive.Sampler(module, config, stops, chunk_tokens=2)
  prompts = [TEMPLATE + prompt for prompt in PROMPTS]
  return sampler(params, prompts, KEY, samples=2, prefix=len(TEMPLATE), **how)


CONFIGS = {
  "truncated": sampling.SamplingConfig(max_new_tokens=6, top_k=40, top_p=0.9, min_p=0.01),
  "penalised greedy": sampling.SamplingConfig(
    max_new_tokens=6, temperature=0.0, repetition_penalty=1.3
  ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_split_vocabulary_gives_the_same_tokens(name):
  """Rows drop out when their number halves, and some are stopped by the caller."""
  params, config = tiny.params("dense"), CONFIGS[name]
  stop_odd = lambda tokens_NT, length_N: (np.arange(16) % 2 > 0) & (length_N >= 4)
  want = draw(tiny.MODULE, params, config, on_chunk=stop_odd)
  module, sharded = place(params, data=2, tensor=4)
  assert sharded["head"]["kernel"].sharding.spec == jax.sharding.PartitionSpec(None, "tensor")
  found = draw(module, sharded, config, on_chunk=stop_odd)
  np.testing.assert_array_equal(found.tokens_NT, want.tokens_NT)
  np.testing.assert_array_equal(found.length_N, want.length_N)
  np.testing.assert_array_equal(found.stopped_N, want.stopped_N)
  np.testing.assert_allclose(found.logp_NT, want.logp_NT, atol=1e-5)
  np.testing.assert_allclose(found.logp_kept_NT, want.logp_kept_NT, atol=1e-5)


@pytest.mark.parametrize("layers", ["stacked", "list"])
def test_the_cache_is_split_and_stays_so(layers):
  """One compilation of `decode` for all chunks: a state comes out placed as it went in."""
  params = tiny.params("dense")
  params = stack.unstack(params) if layers == "list" else params
  module, params = place(params, data=2, fsdp=2, tensor=2)
  sampler = autoregressive.Sampler(module, CONFIGS["truncated"], stop_ids=())
  length = np.asarray([len(p) for p in PROMPTS], np.int32)
  tokens = np.zeros((8, 16), np.int32)
  state = autoregressive.prefill(
    sampler, params, tokens, length, np.arange(16, dtype=np.uint32), KEY, None, samples=2, prefix=0
  )
  before = autoregressive.decode._cache_size()
  for _ in range(3):
    cache = state.cache.k[0] if layers == "list" else state.cache.k
    *_, rows, kv_heads, slots, _ = cache.shape
    found = {shard.data.shape[-4:] for shard in cache.addressable_shards}
    assert found == {(rows // 4, kv_heads // 2, slots, tiny.CONFIG.head_dim)}
    assert {shard.data.shape for shard in state.tokens_NT.addressable_shards} == {(4, 6)}
    state = autoregressive.decode(sampler, params, state, KEY, None, steps=1, uniform=False)
  assert autoregressive.decode._cache_size() == before + 1
