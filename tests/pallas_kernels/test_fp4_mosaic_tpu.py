"""The TPU kernel in interpret mode, with uninitialised memory full of NaN, against float64 NumPy.

Oracle 8 of arXiv 2509.23202 (specs/mr_gptq.md §10). What the compilers of absent TPUs make of it is
in test_fp4_mosaic_tpu_aot.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, mosaic_tpu

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")
FORMATS = ("nvfp4", "mxfp4")
TPUS = ("v5e", "v5p", "v6e", "tpu7x")
INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan")
# |error| of a float32 sum of K products in any order, relative to the sum of magnitudes [oracle 8].
F32_BOUND = 1e-5
BF16_HALF_ULP = 2.0**-8


def packed(seed, format, out, features, layers=2):
  """Random codes with scales around 1, the extremes of both, a zero block and a negative zero."""
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 256, (layers, out, features // 2), np.uint8)
  block = codec.BLOCK[format]
  shape = (layers, out, features // block)
  if format == "nvfp4":
    scale = rng.uniform(0.01, 448, shape).astype(ml_dtypes.float8_e4m3fn)
    scale[:, 0, 0] = 448
    scale[:, 0, -1] = 2.0**-9
  else:
    scale = rng.integers(120, 134, shape, np.uint8)
  codes[:, 0, : block // 2] = 0x77
  codes[:, -1, : block // 2] = 0x80
  codes[:, -1, -block // 2 :] = 0
  tensor_scale = rng.uniform(1e-4, 1e-2, layers).astype(np.float32)
  return tuple(map(jnp.asarray, (codes, scale, tensor_scale)))


def dense_f64(codes, scale, tensor_scale):
  """[L, O, K] decoded by ml_dtypes and NumPy alone."""
  codes, tensor_scale = np.asarray(codes), np.asarray(tensor_scale, np.float64)
  nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
  values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
  if scale.dtype == jnp.uint8:
    scale = 2.0 ** (np.asarray(scale, np.float64) - 127)
  scale = np.asarray(scale, np.float64).repeat(values.shape[-1] // scale.shape[-1], -1)
  return values * scale * tensor_scale[:, None, None]


def rows_of(seed, rows, features, dtype):
  return jax.random.normal(jax.random.key(seed), (rows, features)).astype(dtype)


def run(direction, device, x, w, layer=None, **options):
  with target.use_target(device):
    return direction(x, *w, layer, interpret=INTERPRET, **options)


def within_the_bound(got, x, w_OK):
  """|error| <= 1e-5 sum |x||w|, and half a unit of y in its last place if that is bfloat16."""
  x = np.asarray(x, np.float64)
  exact, terms = x @ w_OK.T, np.abs(x) @ np.abs(w_OK).T
  rounding = BF16_HALF_ULP * np.abs(exact) if got.dtype == jnp.bfloat16 else 0
  return (np.abs(np.asarray(got, np.float64) - exact) <= F32_BOUND * terms + rounding).all()


# --- values


@pytest.mark.parametrize(
  ("device", "format", "rows", "out", "features", "dtype"),
  [
    ("v5e", "nvfp4", 1, 40, 8192, jnp.bfloat16),  # few rows
    ("v6e", "mxfp4", 6, 136, 8192, jnp.bfloat16),  # many
    ("tpu7x", "nvfp4", 2, 8, 2304, jnp.float32),  # in three terms: many
  ],
)
def test_integer_data_is_bitwise_exact(device, format, rows, out, features, dtype):
  """Every partial sum is a multiple of 1/4 below 2^22, so no order of summation may show."""
  rng = np.random.default_rng(features)
  codes = jnp.asarray(rng.integers(0, 256, (1, out, features // 2), np.uint8))
  scale = rng.choice([0.5, 1, 2], (1, out, features // codec.BLOCK[format]))
  if format == "mxfp4":
    scale = jnp.asarray(127 + np.log2(scale), jnp.uint8)
  else:
    scale = jnp.asarray(scale.astype(ml_dtypes.float8_e4m3fn))
  x = jnp.asarray(rng.integers(-4, 5, (rows, features)), dtype)
  w = codes, scale, jnp.ones(1, jnp.float32)
  exact = np.asarray(x, np.float64) @ dense_f64(*w)[0].T
  y = run(mosaic_tpu.forward, device, x, w, jnp.int32(0))
  np.testing.assert_array_equal(y, exact.astype(dtype))


def check(device, format, dtype, rows, out, features, rotation=0):
  w = packed(rows, format, out, features)
  w64 = dense_f64(*w)[1]
  if rotation:  # by float32, which is near enough
    unrotated = codec.unrotate(jnp.asarray(w64.T, jnp.float32), rotation)
    w64 = np.asarray(unrotated, np.float64).T
  x, dy = rows_of(1, rows, features, dtype), rows_of(2, rows, out, dtype)
  y = run(mosaic_tpu.forward, device, x, w, jnp.int32(1), rotation=rotation)
  assert y.dtype == dtype and y.shape == (rows, out) and within_the_bound(y, x, w64)
  dx = run(mosaic_tpu.backward, device, dy, w, jnp.int32(1), rotation=rotation)
  assert dx.dtype == dtype and dx.shape == x.shape and within_the_bound(dx, dy, w64.T)


@pytest.mark.parametrize(
  ("device", "format", "dtype", "rows", "out", "features", "rotation"),
  [
    ("v6e", "nvfp4", jnp.float32, 5, 7, 160, 32),
    ("v5e", "mxfp4", jnp.bfloat16, 17, 300, 32, 0),
    ("tpu7x", "nvfp4", jnp.bfloat16, 3, 130, 2016, 0),  # eight groups, of which the last is ragged
  ],
)
def test_product_and_gradient(device, format, dtype, rows, out, features, rotation):
  """dx = dy @ W^T, too; nothing beyond an odd edge is read, though it is NaN."""
  check(device, format, dtype, rows, out, features, rotation)


@pytest.mark.slow
@pytest.mark.parametrize("device", TPUS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  ("rows", "out", "features", "rotation"),
  [
    (1, 24, 64, 64), (4, 3, 32, 0), (5, 512, 96, 0), (17, 130, 4192, 0), (2, 256, 8192, 0),
    (129, 640, 2304, 0),
  ],
)  # fmt: skip
def test_every_kind_of_shape(device, format, dtype, rows, out, features, rotation):
  check(device, format, dtype, rows, out, features, rotation if dtype == jnp.float32 else 0)


def test_scales_of_mxfp4():
  """255 is NaN; so are exponents that the decoding has no room for; the others are exact."""
  scale = jnp.asarray([[1], [20], [127], [240], [250], [255]], jnp.uint8)
  codes = jnp.full((6, 16), 0x22, jnp.uint8)  # 1.0
  x = jnp.zeros((1, 32), jnp.bfloat16).at[0, 0].set(1)
  y = np.asarray(run(mosaic_tpu.forward, "v6e", x, (codes, scale, jnp.float32(1))))[0]
  np.testing.assert_array_equal(y[:4].astype(np.float64), 2.0 ** np.array([-126, -107, 0, 113]))
  assert np.isnan(y[4:]).all()


def test_vmap_reads_the_stack_by_its_index():
  """Over stacked weights, over rows, and over layers."""
  w = packed(6, "nvfp4", 24, 64, 3)
  x = rows_of(7, 6, 64, jnp.float32).reshape(3, 2, 64)
  w64 = dense_f64(*w)
  product = functools.partial(mosaic_tpu.forward, interpret=INTERPRET)
  with target.use_target("v6e"):
    over_weights = jax.vmap(product)(x, *w)
    over_rows = jax.vmap(lambda x: product(x, *w, jnp.int32(2)))(x)
    over_layers = jax.vmap(lambda i: product(x[0], *w, i))(jnp.arange(3))
  for i in range(3):
    assert within_the_bound(over_weights[i], x[i], w64[i])
    assert within_the_bound(over_rows[i], x[i], w64[2])
    assert within_the_bound(over_layers[i], x[0], w64[i])


# --- lowering and rules


@pytest.mark.parametrize("device", ["v5e", "tpu7x"])
def test_it_lowers_for_absent_tpus(device):
  """The lowering refuses blocks that the interpreters accept."""
  shape = jax.ShapeDtypeStruct

  def both(x, codes, scale, tensor_scale, layer):
    y = mosaic_tpu.forward(x, codes, scale, tensor_scale, layer)
    return mosaic_tpu.backward(y, codes, scale, tensor_scale, layer)

  for (rows, out, features), format in itertools.product([(1, 100, 96), (600, 640, 4192)], FORMATS):
    block = codec.BLOCK[format]
    dtype = jnp.uint8 if format == "mxfp4" else jnp.float8_e4m3fn
    w = (
      shape((2, out, features // 2), jnp.uint8), shape((2, out, features // block), dtype),
      shape((2,), jnp.float32),
    )  # fmt: skip
    with target.use_target(device):
      traced = jax.jit(both).trace(shape((rows, features), jnp.bfloat16), *w, shape((), jnp.int32))
      text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 2


def test_why_not():
  ask = lambda rows, features, device, dtype=jnp.bfloat16: mosaic_tpu.why_not(
    rows, dtype, (28, 5120, features // 2), "nvfp4", device
  )
  for name in TPUS:
    for rows, features in itertools.product((1, 8, 64, 513, 4096), (32, 3584, 27648)):
      assert ask(rows, features, target.TARGETS[name]) is None
  assert "it is for TPUs, and this is cpu" in ask(1, 64, target.TARGETS["cpu"])
  assert "TPU v5 lite" in ask(1, 64, target.Target("tpu", "TPU v4"))
  reason = ask(64, 2**20, target.TARGETS["tpu7x"])
  assert "16 rows of 1048576 columns need" in reason and "has 56 for it" in reason


@pytest.mark.parametrize("device", TPUS)
def test_tiles_fit_and_divide(device):
  chosen = target.TARGETS[device]
  for rows, out, half in itertools.product((1, 64, 600, 4096), (3, 512, 18944), (16, 1792, 13824)):
    sizes = mosaic_tpu.block_sizes(rows, jnp.bfloat16, (out, half), "nvfp4", chosen)
    assert sizes.rows % 16 == 0 and sizes.out % 128 == 0 and sizes.out % sizes.tile == 0
    assert sizes.vmem_bytes <= mosaic_tpu.DEVICES[chosen.device_kind][1]
    blocks = -(-rows // sizes.rows)
    assert blocks * sizes.rows - rows < 16 * blocks  # blocks of rows share what is left over


# --- on a TPU, where there is one


@pytest.mark.tpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 600])
def test_a_tpu_decodes_every_code(format, rows):
  """No interpreter can tell whether the hardware's conversions keep 8-bit subnormals: code 1."""
  if target.current_target().platform != "tpu":
    pytest.skip("needs a TPU")
  rng = np.random.default_rng(rows)
  codes = jnp.asarray(rng.integers(0, 256, (2, 640, 2048), np.uint8))
  scale = rng.choice([0.5, 1, 2], (2, 640, 4096 // codec.BLOCK[format]))
  if format == "mxfp4":
    scale = jnp.asarray(127 + np.log2(scale), jnp.uint8)
  else:
    scale = jnp.asarray(scale.astype(ml_dtypes.float8_e4m3fn))
  w = codes, scale, jnp.ones(2, jnp.float32)
  x = jnp.asarray(rng.integers(-4, 5, (rows, 4096)), jnp.float32)
  exact = np.asarray(x, np.float64) @ dense_f64(*w)[1].T
  np.testing.assert_array_equal(mosaic_tpu.forward(x, *w, jnp.int32(1)), exact)
  dy = jnp.asarray(rng.integers(-4, 5, (rows, 640)), jnp.float32)
  dx = mosaic_tpu.backward(dy, *w, jnp.int32(1))
  np.testing.assert_array_equal(dx, np.asarray(dy, np.float64) @ dense_f64(*w)[1])
