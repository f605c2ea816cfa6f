"""The loop over layers: a scan over stacked leaves and a Python loop over a list agree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import stack, weights
from tests.nn.kernels import I, kernels, random

L, B = 3, 2
pytestmark = pytest.mark.usefixtures("strict_dtypes")


def block(params, x, layer_cache):
  y = jnp.tanh(weights.matmul(x, params["kernel"])) * params["gain"][None]
  cache = None if layer_cache is None else layer_cache + y
  return x + y, cache, jnp.sum(y)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
  """A cache as `run_layers` sees one: an array a layer."""

  per_layer: jax.Array

  def layer(self, index):
    return self.per_layer[index]

  def with_layer(self, index, value):
    return Sums(self.per_layer.at[index].set(value))


@pytest.mark.parametrize("kind", kernels(L, i=I, o=I))
def test_scan_and_loop_agree(kind):
  layers = {"kernel": kernels(L, i=I, o=I)[kind], "gain": random(L, I, seed=3)}
  listed = stack.unstack({"layers": layers})["layers"]
  x = random(B, I, seed=4)
  cache = Sums(jnp.zeros((L, B, I)))
  for remat in (False, True):
    run = jax.jit(
      lambda layers, x, c, remat=remat: stack.run_layers(block, layers, x, c, remat=remat)
    )
    carry, sums, stats = run(layers, x, cache)
    carry2, sums2, stats2 = run(listed, x, cache)
    np.testing.assert_allclose(carry, carry2, atol=1e-5)
    np.testing.assert_allclose(sums.per_layer, sums2.per_layer, atol=1e-5)
    np.testing.assert_allclose(stats, stats2, atol=1e-4)
    assert stats.shape == (L,)


def test_gradients_agree():
  layers = {"kernel": kernels(L, i=I, o=I)["lora over nvfp4"], "gain": random(L, I, seed=3)}
  x = random(B, I, seed=4)

  def loss(a, layers):
    kernel = dataclasses.replace(layers["kernel"], a=a)
    return jnp.sum(stack.run_layers(block, layers | {"kernel": kernel}, x)[0] ** 2)

  def loss_of_list(a, layers):
    split = stack.unstack(
      {"layers": layers | {"kernel": dataclasses.replace(layers["kernel"], a=a)}}
    )
    return jnp.sum(stack.run_layers(block, split["layers"], x)[0] ** 2)

  a = layers["kernel"].a
  stacked, listed = jax.jit(jax.grad(loss))(a, layers), jax.jit(jax.grad(loss_of_list))(a, layers)
  np.testing.assert_allclose(stacked, listed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", kernels(L, i=I, o=I))
def test_restack_undoes_unstack(kind):
  params = {"layers": {"q": {"kernel": kernels(L, i=I, o=I)[kind]}}, "norm": jnp.ones(I)}
  again = stack.restack(stack.unstack(params))
  assert jax.tree.structure(again) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, again, params)
  assert stack.unstack(stack.unstack(params))["layers"] is not None  # already a list: unchanged
  assert (
    stack.num_layers(params["layers"]) == stack.num_layers(stack.unstack(params)["layers"]) == L
  )


def test_stack_axes():
  assert stack.stack_axes("layers/q/kernel") == 1
  assert stack.stack_axes("layers/attn_norm") == 1
  assert stack.stack_axes("layers/3/q/kernel") == 0
  assert stack.stack_axes("embed") == 0
  assert stack.stack_axes("head/kernel") == 0


def test_packed_leaves_are_read_at_the_index_not_sliced():
  """Slicing a packed stack inside a decode loop would copy a layer's codes at every token."""
  layers = {"kernel": kernels(L, i=I, o=I)["nvfp4"], "gain": random(L, I, seed=3)}
  seen = []

  def look(params, x, layer_cache):
    seen.append(params["kernel"])
    return block(params, x, layer_cache)

  stack.run_layers(look, layers, random(B, I))
  assert all(isinstance(w, weights.At) and w.leaf.codes.shape[0] == L for w in seen)
