"""Every kernel type multiplies like its dense form, splits and merges by path."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import weights
from jaxlab.quant import fp4
from pallas_kernels.fp4_gemm import codec
from tests.nn.kernels import I, O, R, kernels, random

M = 5
pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.mark.parametrize("kind", kernels())
def test_matmul_is_the_product_with_the_dense_kernel(kind):
  w, x = kernels()[kind], random(M, I, seed=3)
  dense = np.asarray(weights.dense(w), np.float64)
  expected = np.asarray(x, np.float64) @ dense
  np.testing.assert_allclose(weights.matmul(x, w), expected, atol=2e-5)
  assert w.shape == (I, O)


@pytest.mark.parametrize("kind", kernels())
def test_the_stack_axis_is_only_in_front(kind):
  w = kernels(2)[kind]
  assert w.shape == (2, I, O)
  one = jax.tree.map(lambda x: x[1], w)
  np.testing.assert_allclose(weights.dense(w)[1], weights.dense(one), atol=1e-6)


@pytest.mark.parametrize("kind", kernels())
def test_gradient_in_x_is_that_of_the_dense_kernel(kind):
  w, x = kernels()[kind], random(M, I, seed=3)
  dy = random(M, O, seed=4)
  _, vjp = jax.vjp(lambda x: weights.matmul(x, w), x)
  expected = np.asarray(dy, np.float64) @ np.asarray(weights.dense(w), np.float64).T
  np.testing.assert_allclose(vjp(dy)[0], expected, atol=2e-5)


def test_an_adapter_with_b_zero_is_the_base_bit_for_bit():
  base, x = kernels()["nvfp4"], random(M, I, seed=3)
  w = weights.LoRA(base, random(I, R, seed=1), jnp.zeros((R, O)), 1.0)
  np.testing.assert_array_equal(weights.matmul(x, w), weights.matmul(x, base))


def test_bfloat16_input_gives_bfloat16_output():
  x = random(M, I, seed=3).astype(jnp.bfloat16)
  for w in kernels().values():
    assert weights.matmul(x, w).dtype == jnp.bfloat16


@pytest.mark.parametrize("kinds", [("dense", "lora"), ("lora", "lora over nvfp4", "lora")])
def test_matmul_many_is_matmul_of_each(kinds):
  ws, x = [kernels()[k] for k in kinds], random(M, I, seed=3)
  for found, w in zip(weights.matmul_many(x, ws), ws, strict=True):
    np.testing.assert_allclose(found, weights.matmul(x, w), atol=1e-5)


def test_matmul_many_with_unequal_ranks():
  small = weights.LoRA(random(I, O), random(I, 2, seed=5), random(2, O, seed=6), 2.0)
  ws, x = [small, kernels()["lora"]], random(M, I, seed=3)
  for found, w in zip(weights.matmul_many(x, ws), ws, strict=True):
    np.testing.assert_allclose(found, weights.matmul(x, w), atol=1e-5)


def test_a_rotated_kernel_is_multiplied_in_its_own_basis():
  dense, x = random(I, O), random(M, I, seed=3)
  rotated = fp4.quantize(codec.unrotate(dense, 16))  # H is its own inverse
  w = dataclasses.replace(rotated, rotation=16)
  expected = np.asarray(x, np.float64) @ np.asarray(weights.dense(w), np.float64)
  np.testing.assert_allclose(weights.matmul(x, w), expected, atol=2e-5)
  assert np.abs(weights.dense(w) - dense).max() < 0.15  # the same matrix, but for rounding


def test_divisor_and_multiplier_are_one_kernel():
  w = kernels()["nvfp4"]
  other = dataclasses.replace(w, tensor_scale=1.0 / w.tensor_scale, scale_is_divisor=False)
  np.testing.assert_allclose(weights.dense(w), weights.dense(other), rtol=1e-6)
  assert jax.tree.structure(w) != jax.tree.structure(other)  # static: jit tells them apart


def params() -> dict:
  return {
    "embed": random(9, I),
    "layers": {"attn_norm": jnp.ones((2, I)), "q": {"kernel": kernels(2)["lora over nvfp4"]}},
  }


@pytest.mark.parametrize("divisor", [True, False])
def test_static_activation_scales_reach_the_product(divisor):
  """Stacked or not, as divisor and as multiplier; under 1e-6 no value above 0.003 is left."""
  x, w = random(M, I, seed=3), fp4.quantize(random(2, I, O))
  layer = lambda w, i: jax.tree.map(lambda part: part[i], w)
  scale = jnp.asarray([1.0, 1e-6], jnp.float32)
  own = 1 / w.multiplier if divisor else w.multiplier
  w = dataclasses.replace(
    w, activations="fp4", tensor_scale=own, act_scale=1 / scale if divisor else scale,
    scale_is_divisor=divisor,
  )  # fmt: skip
  for i in (0, 1):
    expected = codec.fake_quantize(x, "nvfp4", scale[i]) @ weights.dense(layer(w, i))
    np.testing.assert_allclose(weights.matmul(x, weights.At(w, jnp.int32(i))), expected, atol=1e-5)
    np.testing.assert_allclose(weights.matmul(x, layer(w, i)), expected, atol=1e-5)
  assert np.abs(expected).max() < 0.1  # of the last layer


def test_paths():
  assert set(weights.leaf_paths(params())) == {"embed", "layers/attn_norm", "layers/q/kernel"}
  trainable, _ = weights.partition(params(), lambda path: True)
  assert "layers/q/kernel/a" in trainable and "layers/q/kernel/base/codes" in trainable


def test_merge_undoes_partition():
  before = params()
  trainable, frozen = weights.partition(before, lambda p: p.endswith(("/a", "/b", "norm")))
  assert set(trainable) == {"layers/attn_norm", "layers/q/kernel/a", "layers/q/kernel/b"}
  assert frozen["layers"]["q"]["kernel"].a is None
  assert frozen["layers"]["q"]["kernel"].base.codes is before["layers"]["q"]["kernel"].base.codes
  after = weights.merge(trainable, frozen)
  assert jax.tree.structure(after) == jax.tree.structure(before)
  assert all(a is b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))


def test_partition_and_merge_refuse_what_cannot_be_meant():
  with pytest.raises(ValueError, match="some parameter must train; got a predicate"):
    weights.partition(params(), lambda p: False)
  trainable, frozen = weights.partition(params(), lambda p: p == "embed")
  with pytest.raises(ValueError, match="no free place for .'other'"):
    weights.merge(trainable | {"other": jnp.ones(1)}, frozen)


def test_densify_keeps_adapters_and_the_function():
  before, x = params(), random(M, I, seed=3)
  after = weights.densify(before)
  leaf = after["layers"]["q"]["kernel"]
  assert isinstance(leaf, weights.LoRA) and leaf.base.shape == (2, I, O)
  one = lambda tree: jax.tree.map(lambda a: a[1], tree["layers"]["q"]["kernel"])
  np.testing.assert_allclose(
    weights.matmul(x, one(after)), weights.matmul(x, one(before)), atol=1e-5
  )
  assert weights.densify(before, jnp.bfloat16)["layers"]["q"]["kernel"].base.dtype == jnp.bfloat16


def test_packed_weights_have_no_gradient_and_no_dense_residual():
  w, x = kernels()["nvfp4"], random(M, I, seed=3)
  _, vjp = jax.vjp(lambda x: weights.matmul(x, w), x)
  kept = [r for r in jax.tree.leaves(vjp) if hasattr(r, "shape")]
  assert not any(r.size >= I * O and jnp.issubdtype(r.dtype, jnp.floating) for r in kept)


def test_what_is_no_kernel_is_refused():
  with pytest.raises(TypeError, match="must be an array or a leaf of weights.py"):
    weights.matmul(random(M, I), "kernel")


def test_map_stack_goes_one_matrix_at_a_time():
  w = random(3, 4, 5)
  np.testing.assert_allclose(weights.map_stack(lambda m: m.T, w, 1), jnp.swapaxes(w, 1, 2))
  np.testing.assert_allclose(weights.map_stack(lambda m: m * 2, w[0], 0), w[0] * 2)
