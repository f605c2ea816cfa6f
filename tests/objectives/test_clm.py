"""The causal LM objective against a float64 softmax in NumPy; the sums that accumulation needs."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.models import causal_lm
from jaxlab.objectives import clm
from jaxlab.objectives.weighted import Weighted

CONFIG = causal_lm.CausalLMConfig(
  vocab_size=19, width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=24
)
MODULE = causal_lm.CausalLM(CONFIG)


def setting(seed=0, batch=4, length=7):
  random = np.random.default_rng(seed)
  tokens = jnp.asarray(random.integers(0, 19, (batch, length)), jnp.int32)
  mask = jnp.asarray(random.random((batch, length)) < 0.6)
  params = MODULE.init(jax.random.key(seed), tokens)["params"]
  params = jax.tree.map(lambda x: x * 5, params)  # far from uniform predictions
  return params, clm.TokenBatch(tokens, mask)


def test_it_is_the_masked_cross_entropy_of_the_next_token():
  params, batch = setting()
  logits = np.asarray(MODULE.apply({"params": params}, batch.tokens_BT), np.float64)
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  total, count, entropy = 0.0, 0, 0.0
  for b in range(4):
    for t in range(1, 7):  # the first token has no past
      if batch.mask_BT[b, t]:
        total -= logp[b, t - 1, batch.tokens_BT[b, t]]
        entropy -= (np.exp(logp[b, t - 1]) * logp[b, t - 1]).sum()
        count += 1
  loss, metrics = clm.make_objective(MODULE)(params, batch, jax.random.key(0))
  assert loss.weight == count
  np.testing.assert_allclose(loss.total, total, rtol=1e-5)
  np.testing.assert_allclose(metrics["entropy"].mean(), entropy / count, rtol=1e-5)


def test_parts_of_a_batch_and_chunks_of_the_head_add_up():
  params, batch = setting()

  def gradient(part, **kwargs):
    def total(params):
      loss, _ = clm.make_objective(MODULE, **kwargs)(params, part, None)
      return loss.total, loss

    return jax.jit(jax.grad(total, has_aux=True))(params)

  halves = [jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(0, 1), slice(1, 4))]
  whole_gradient, whole = gradient(batch)
  gradients, parts = zip(*(gradient(half, chunk_tokens=5) for half in halves))
  added = sum(parts)
  assert added.weight == whole.weight
  np.testing.assert_allclose(added.total, whole.total, rtol=1e-5)
  summed = jax.tree.map(jnp.add, *gradients)
  for a, b in zip(jax.tree.leaves(summed), jax.tree.leaves(whole_gradient), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_padding_and_masked_tokens_do_not_count():
  params, batch = setting()
  mask = np.zeros((4, 7), bool)
  mask[:, 1:4] = True
  tokens = np.array(batch.tokens_BT)
  tokens[:, 4:] = 0  # behind everything that counts
  objective = clm.make_objective(MODULE)
  a, _ = objective(params, clm.TokenBatch(batch.tokens_BT, jnp.asarray(mask)), None)
  b, _ = objective(params, clm.TokenBatch(jnp.asarray(tokens), jnp.asarray(mask)), None)
  np.testing.assert_allclose(a.total, b.total, rtol=1e-6)
  none, _ = objective(params, clm.TokenBatch(batch.tokens_BT, jnp.zeros((4, 7), bool)), None)
  assert none == Weighted(0, 0) and none.mean() == 0
