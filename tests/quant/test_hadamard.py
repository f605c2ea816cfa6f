"""Block rotations: oracle 4 of the specification of arXiv 2509.23202, and which size is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.quant import hadamard
from pallas_kernels.fp4_gemm import codec

SMOLLM2 = {"q/k/v": 576, "o": 576, "gate/up": 576, "down": 1536}


def sylvester(size):
  h = np.ones((1, 1))
  while len(h) < size:
    h = np.kron([[1, 1], [1, -1]], h)
  return h / np.sqrt(size)


def test_worked_row():
  x = 8 * jnp.eye(16)[3:4]
  np.testing.assert_array_equal(codec.rotate(x, 16)[0], 2 * np.tile([1, -1, -1, 1], 4))


@pytest.mark.parametrize("size", [2, 16, 64, 128])
def test_a_rotation_is_its_own_inverse_and_keeps_products(size):
  random = np.random.default_rng(size)
  x, w = random.standard_normal((5, 256)), random.standard_normal((256, 7))
  turn = np.kron(np.eye(256 // size), sylvester(size))
  np.testing.assert_allclose(turn @ turn, np.eye(256), atol=1e-12)
  x_turned = codec.rotate(jnp.float32(x), size)
  w_turned = hadamard.rotate_kernel(jnp.float32(w), size)
  np.testing.assert_allclose(x_turned, x @ turn, atol=2e-6)
  np.testing.assert_allclose(w_turned, turn @ w, atol=2e-6)
  np.testing.assert_allclose(x_turned @ w_turned, x @ w, atol=1e-6 * np.abs(x @ w).max() * 16)
  np.testing.assert_allclose(hadamard.rotate_kernel(w_turned, size), w, atol=2e-6)


def test_a_rotation_stays_within_shards_of_whole_blocks():
  mesh = jax.sharding.Mesh(jax.devices()[:4], ("in",))
  x = jnp.float32(np.random.default_rng(0).standard_normal((3, 256)))
  split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "in")))
  run = jax.jit(lambda x: codec.rotate(x, 64))
  np.testing.assert_array_equal(run(split), run(x))
  assert "all-" not in run.lower(split).compile().as_text()


@pytest.mark.parametrize(
  ("widths", "size"),
  [(SMOLLM2, 64), ({"q/k/v": 4096, "down": 14336}, 128), ({"a": 48}, 16), ({"a": 35}, 0)],
)
def test_the_largest_power_of_two_that_fits_everywhere(widths, size):
  assert hadamard.choose_size(widths, None) == size


def test_a_size_is_taken_or_refused_by_name():
  assert hadamard.choose_size(SMOLLM2, 32) == 32
  assert hadamard.choose_size(SMOLLM2, 0) == 0
  message = "inputs of every site; got 128 for q/k/v with 576. Use at most 64, or None"
  with pytest.raises(ValueError, match=message):
    hadamard.choose_size(SMOLLM2, 128)
  for size in (-2, 1, 48):
    with pytest.raises(ValueError, match=f"a power of two, or 0 for none; got {size}"):
      hadamard.choose_size(SMOLLM2, size)
