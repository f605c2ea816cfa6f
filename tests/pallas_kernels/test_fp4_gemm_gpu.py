"""Every implementation on the NVIDIA GPU that is there, against float64 NumPy; what cannot run on
it is skipped with the reason. On a machine with one, after `pip install -e ".[dev,gpu]"`:

  JAX_PLATFORMS=cuda python -m pytest -m gpu -rs tests/pallas_kernels

Widths are those of Qwen2.5-7B's MLP. Oracle 8 of arXiv 2509.23202 (specs/mr_gptq.md §10).
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, fp4_matmul, producer_triton
from pallas_kernels.fp4_gemm.api import hadamard_quantize
from tests.pallas_kernels.test_fp4_gemm import BF16_HALF_ULP, F32_BOUND, dense_f64

pytestmark = pytest.mark.gpu
FORMATS = ("nvfp4", "mxfp4")
UP, DOWN = (18944, 3584), (3584, 18944)  # [O, K]
LAYERS, LAYER = 2, 1  # of the stacks, and the one that is multiplied
ROWS = (1, 5, 8, 16, 64, 200, 1024)  # each kind of tile
SAMPLE = 256  # outputs that are compared: float64 of all would take minutes
EXACT = (1, 0.5, 2)  # block scales that leave integers exact in every order of summation
W4A16 = ("xla", "triton", "mosaic_gpu")
W4A4 = ("xla", "cudnn", "blackwell")


@pytest.fixture(autouse=True)
def device():
  if target.current_target().platform != "cuda":
    pytest.skip("needs an NVIDIA GPU, and JAX_PLATFORMS=cuda")


def packed(seed, format, shape, scales):
  """A stack with random codes, whose block scales are drawn from `scales`."""
  rng, (out, features) = np.random.default_rng(seed), shape
  codes = rng.integers(0, 256, (LAYERS, out, features // 2), np.uint8)
  scale = rng.choice(scales, (LAYERS, out, features // codec.BLOCK[format]))
  if format == "mxfp4":
    scale = (127 + np.log2(scale)).astype(np.uint8)
  else:
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
  return tuple(map(jnp.asarray, (codes, scale, np.float32([3, 1]))))


def decoded(w, outputs=slice(None)):
  """float64 [outputs, K] of the layer."""
  codes, scale, tensor_scale = w
  return dense_f64(codes[LAYER, outputs], scale[LAYER, outputs], tensor_scale[LAYER])


@functools.partial(jax.jit, static_argnames=("implementation", "activations"))
def product(x, w, layer, *, implementation, activations="none"):
  """y, and the gradient of x for dy = y."""
  multiply = lambda x: fp4_matmul(
    x, *w, layer=layer, implementation=implementation, activations=activations
  )
  y, transpose = jax.vjp(multiply, x)
  return y, transpose(y)[0]


def run(x, w, implementation, **options):
  """float64 of both; skips what the implementation refuses, with its reason."""
  try:
    y, dx = product(x, w, jnp.int32(LAYER), implementation=implementation, **options)
  except NotImplementedError as reason:
    pytest.skip(str(reason))
  assert y.dtype == dx.dtype == x.dtype
  return np.asarray(y, np.float64), np.asarray(dx, np.float64)


@pytest.mark.parametrize("implementation", W4A16)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [UP, DOWN], ids=["up", "down"])
@pytest.mark.parametrize("rows", ROWS)
def test_integers_are_exact(rows, shape, format, implementation):
  """Every partial sum of y is a multiple of 1/4 below 2^22: bitwise, for all tiles and parts."""
  w = packed(rows, format, shape, EXACT)
  rng = np.random.default_rng(rows)
  x = rng.integers(-4, 5, (rows, shape[1])).astype(np.float64)
  y, _ = run(jnp.asarray(x, jnp.bfloat16), w, implementation)
  chosen = rng.choice(shape[0], SAMPLE, replace=False)
  exact = x @ decoded(w, chosen).T
  np.testing.assert_array_equal(y[:, chosen], exact.astype(ml_dtypes.bfloat16).astype(np.float64))


@pytest.mark.parametrize("implementation", W4A16)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 64, 1024])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_normal_numbers_both_ways(dtype, rows, format, implementation):
  """Within the rounding of float32 sums, and of the result; dx from y as it came out."""
  w = packed(rows, format, UP, 2.0 ** np.arange(-6, 7))
  rng = np.random.default_rng(rows)
  x = jnp.asarray(rng.standard_normal((rows, UP[1])), dtype)
  y, dx = run(x, w, implementation)
  w64, x64 = decoded(w), np.asarray(x, np.float64)
  half_ulp = BF16_HALF_ULP if dtype == jnp.bfloat16 else 0.0
  for got, a, b in ((y, x64, w64.T), (dx, y, w64)):
    chosen = rng.choice(b.shape[1], SAMPLE, replace=False)
    exact, terms = a @ b[:, chosen], np.abs(a) @ np.abs(b[:, chosen])
    error = np.abs(got[:, chosen] - exact)
    assert (error <= F32_BOUND * terms + half_ulp * np.abs(exact)).all()


@pytest.mark.parametrize("implementation", W4A16)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [8, 64, 256])
def test_every_code_with_every_scale(rows, format, implementation):
  """x picks single weights: each comes back as it is, subnormal scales of E4M3 too."""
  out, features = 256, 4096
  block = codec.BLOCK[format]
  codes = np.arange(out * features // 2, dtype=np.int64).reshape(1, out, -1) * 37 % 256
  order = np.arange(out * features // block).reshape(1, out, -1)
  if format == "nvfp4":
    scale = (order % 126 + 1).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
  else:  # from 2^-64 to 2^63: products with 6 are normal bfloat16
    scale = (order % 128 + 63).astype(np.uint8)
  w = tuple(map(jnp.asarray, (codes.astype(np.uint8), scale, np.ones(1, np.float32))))
  columns = np.arange(rows) * (features // rows) + np.arange(rows) % (features // rows)
  x = np.zeros((rows, features))
  x[np.arange(rows), columns] = 1
  y, _ = run(jnp.asarray(x, jnp.bfloat16), w, implementation)  # the layer is clamped to 0
  np.testing.assert_array_equal(y, dense_f64(*w)[0][:, columns].T)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_a_scan_over_layers_is_each_layer(implementation):
  w = packed(0, "nvfp4", UP, EXACT)
  x = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (8, UP[1])), jnp.bfloat16)
  multiply = functools.partial(fp4_matmul, implementation=implementation)
  run(x, w, implementation)  # or skips
  scan = jax.jit(
    lambda x, w: jax.lax.map(lambda layer: multiply(x, *w, layer=layer), jnp.arange(LAYERS))
  )
  for layer, y in enumerate(scan(x, w)):
    np.testing.assert_array_equal(y, multiply(x, *(leaf[layer] for leaf in w)))


@pytest.mark.parametrize("implementation", W4A4)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [8, 200])
def test_fp4_by_fp4(rows, format, implementation):
  """Tensor cores that multiply FP4, and the simulation, against rows rounded by jnp."""
  w = packed(rows, format, UP, EXACT)
  x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, UP[1])), jnp.bfloat16)
  y, _ = run(x, w, implementation, activations="fp4")
  rounded = hadamard_quantize(x, format, implementation="xla")
  x64 = dense_f64(rounded.codes, rounded.scale, np.float32(1))
  x64 = x64 * np.asarray(rounded.multiplier, np.float64)[:, None]
  chosen = np.random.default_rng(0).choice(UP[0], SAMPLE, replace=False)
  exact = x64 @ decoded(w, chosen).T
  # The simulation rounds rows to bfloat16, and a code beside a tie may be its neighbour; a block of
  # the 224 with a wrong scale would be 7 %.
  assert np.linalg.norm(y[:, chosen] - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("rotation", [0, 128])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 300])
def test_the_producer_of_rows(rows, format, rotation):
  """As by jnp, but for values beside a tie."""
  x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, UP[1])), jnp.bfloat16)
  make = functools.partial(hadamard_quantize, x, format, rotation=rotation)
  here = target.current_target()
  if reason := producer_triton.why_not(rows, x.dtype, UP[1], format, rotation, here):
    pytest.skip(reason)
  got, want = make(implementation="triton"), make(implementation="xla")
  np.testing.assert_allclose(got.multiplier, want.multiplier, rtol=2**-7)
  assert np.mean(np.asarray(got.codes) != np.asarray(want.codes)) < 2e-3
  assert np.mean(np.asarray(got.scale) != np.asarray(want.scale)) < 2e-3
