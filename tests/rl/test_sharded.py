"""Rollout and update on a mesh of eight (virtual) devices equal those on one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab import lora
from jaxlab.decode import autoregressive, sampling
from jaxlab.nn import weights
from jaxlab.objectives import policy_gradient
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from jaxlab.rl import batch
from jaxlab.train import guard, state, step
from tests.parallel import tiny

CONFIG = policy_gradient.PolicyGradientConfig(chunk_tokens=256)
KV_HEADS = tiny.CONFIG.num_kv_heads
OPTIMIZER = guard.guarded(optax.sgd(1.0))
KEY = jax.random.key(0)


def make_mesh(**sizes):
  if len(jax.devices()) < 8:
    pytest.skip("needs eight (virtual) devices")
  return meshes.make_mesh(meshes.MeshConfig(**sizes))


def packed_rows() -> batch.PackedBatch:
  """Sixteen rows of two answers each, of different lengths, some without a gradient."""
  random = np.random.default_rng(0)
  draw = lambda low, high: random.integers(0, tiny.CONFIG.vocab_size, random.integers(low, high))
  samples = []
  for i in range(16):
    prompt = draw(3, 8).tolist()
    for _ in range(2):
      answer = draw(1, 7).tolist()
      logp = random.normal(-5, 0.3, len(answer)).astype(np.float32)
      samples.append(batch.Sample(prompt, answer, logp, float(random.normal()), i % 5 > 0))
  return batch.pack(samples, per_row=2, max_answer=6)


def update(params, packed, module):
  """(metrics, gradients of what trains) of one train step, rows in two micro-batches."""
  trainable, frozen = weights.partition(params, lora.is_trainable(tiny.LORA))
  before = state.TrainState.create(trainable, OPTIMIZER)
  if module.placement is not None:
    before = rules.replicate(before, module.placement.mesh)
  objective = batch.make_objective(module, CONFIG)
  train_step = step.make_train_step(objective, OPTIMIZER, micro_batch=8)
  after, metrics = train_step(before, frozen, packed, KEY)
  grads = {path: np.asarray(trainable[path] - x) for path, x in after.trainable.items()}
  return {name: float(x) for name, x in metrics.items()}, grads


@pytest.fixture(scope="module")
def alone():
  return update(tiny.params("nvfp4"), packed_rows(), tiny.MODULE.clone(remat=True))


@pytest.mark.parametrize(
  "sizes",
  [
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, id="data_fsdp_tensor"),
    pytest.param({"fsdp": 2, "sequence": 4}, id="fsdp_sequence", marks=pytest.mark.slow),
  ],
)
def test_an_update_on_eight_devices_is_the_one_on_one(alone, sizes):
  mesh = make_mesh(**sizes)
  params = rules.shard_params(tiny.params("nvfp4"), mesh, num_kv_heads=KV_HEADS)
  module = tiny.MODULE.clone(remat=True, placement=rules.Placement(mesh, KV_HEADS))
  metrics, grads = update(params, rules.shard_rows(packed_rows(), mesh), module)
  expected_metrics, expected = alone
  for name, value in expected_metrics.items():
    assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
  for path, value in expected.items():
    largest = np.abs(value).max()
    assert largest > 1e-4, path
    np.testing.assert_allclose(grads[path], value, atol=2e-5 * largest, rtol=0, err_msg=path)


def rollout(params, prompts, key, placed=lambda x: x):
  """Final state of the two programs of a rollout, with inputs placed on a mesh."""
  config = sampling.SamplingConfig(max_new_tokens=6)
  sampler = autoregressive.Sampler(tiny.MODULE, config, stop_ids=(5, 9), compact=False)
  lengths = np.asarray([len(p) for p in prompts], np.int32)
  tokens = np.zeros((len(prompts), 16), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt)] = prompt
  rows = np.arange(2 * len(prompts), dtype=np.uint32)
  noise = autoregressive.Noise(jnp.float32(0.05), key)
  started = autoregressive.prefill(
    sampler, params, *map(placed, (tokens, lengths, rows)), key, noise, samples=2, prefix=0
  )
  return autoregressive.decode(sampler, params, started, key, noise, steps=6, uniform=False)


def test_rollouts_on_a_data_mesh_draw_the_same_tokens():
  mesh = make_mesh(data=8)
  random = np.random.default_rng(1)
  prompts = [random.integers(0, 128, n).tolist() for n in (3, 9, 5, 4, 12, 7, 6, 10)]
  params = tiny.params("nvfp4")
  expected = rollout(params, prompts, KEY)
  sharded = rollout(
    rules.shard_params(params, mesh), prompts, rules.replicate(KEY, mesh),
    placed=lambda x: rules.shard_rows(x, mesh),
  )  # fmt: skip
  np.testing.assert_array_equal(sharded.tokens_NT, expected.tokens_NT)
  np.testing.assert_array_equal(sharded.length_N, expected.length_N)
  np.testing.assert_allclose(sharded.logp_NT, expected.logp_NT, atol=1e-5)
  assert len(np.unique(expected.length_N)) > 1  # some rows stop early
  # Every device holds its own rows: of the tokens, and of the cache.
  assert {s.data.shape for s in sharded.tokens_NT.addressable_shards} == {(2, 6)}
  assert {s.data.shape[1] for s in sharded.cache.k.addressable_shards} == {2}
