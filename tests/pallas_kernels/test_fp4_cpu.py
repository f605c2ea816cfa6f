"""The native CPU kernels against float64 NumPy, every instruction set by force. Oracle 8 of arXiv
2509.23202."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import target
from pallas_kernels.fp4_gemm import api, cpu

MISSING = cpu.why_no_library()
pytestmark = [
  pytest.mark.usefixtures("strict_dtypes"),
  pytest.mark.skipif(MISSING is not None, reason=f"no native library: {MISSING}"),
]
FORMATS = ("nvfp4", "mxfp4")
BLOCK = {"nvfp4": 16, "mxfp4": 32}
ISAS = cpu.isas() or ("none",)
# A sum of K products in float32, in any order, relative to the sum of their magnitudes. [O8]
F32_BOUND = 1e-5
BF16_HALF_ULP = 2.0**-8
# One row; groups of three; a tile (more than five rows), with odd rows of both sides; K of one
# block, one chunk (128 columns), chunks and a rest; more than 1024 columns.
SHAPES = ((1, 5, 32), (2, 1, 128), (5, 6, 288), (7, 9, 160), (13, 35, 1184))

forward = jax.jit(cpu.forward, static_argnames=("isa", "int8"))
backward = jax.jit(cpu.backward, static_argnames="isa")


def matrix(seed, fmt, out, features, *, stack=(), scales=(0.5, 1, 2)):
  """Random codes, zero and negative zero and the largest among them, and scales from a few."""
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 256, (*stack, out, features // 2), np.uint8)
  codes[..., 0, :4], codes[..., -1, -4:] = 0x77, 0x08
  scale = rng.choice(np.asarray(scales, np.float64), (*stack, out, features // BLOCK[fmt]))
  if fmt == "nvfp4":
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
  else:
    scale = (np.floor(np.log2(scale)) + 127).astype(np.uint8)
  tensor_scale = np.ones(stack, np.float32) * np.float32(0.5)
  return tuple(map(jnp.asarray, (codes, scale, tensor_scale)))


def dense(codes, scale, tensor_scale):
  """[*stack, O, K] in float64, by ml_dtypes and NumPy alone."""
  codes = np.asarray(codes)
  nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
  values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
  scale = np.asarray(scale)
  scale = np.ldexp(1.0, scale.astype(int) - 127) if scale.dtype == np.uint8 else scale
  scale = scale.astype(np.float64).repeat(values.shape[-1] // scale.shape[-1], -1)
  return values * scale * np.asarray(tensor_scale, np.float64)[..., None, None]


def integers(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


# --- values


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_integer_data_is_bitwise_exact(isa, fmt):
  """Every partial sum is a multiple of 1/8 below 2^21: no order of summation may show."""
  for m, o, k in SHAPES:
    w, x, dy = matrix(m, fmt, o, k), integers(m, m, k), integers(o, m, o)
    w64 = dense(*w)
    np.testing.assert_array_equal(forward(x, *w, isa=isa), np.asarray(x, np.float64) @ w64.T)
    np.testing.assert_array_equal(backward(dy, *w, isa=isa), np.asarray(dy, np.float64) @ w64)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [3, 300])
def test_large_sizes_on_all_threads_are_exact(fmt, rows):
  """Many tasks; 300 rows are decoded to memory and multiplied by XLA, exact all the same."""
  w, x, dy = matrix(1, fmt, 700, 1056), integers(2, rows, 1056), integers(3, rows, 700)
  w64 = dense(*w)
  for _ in range(3):
    np.testing.assert_array_equal(forward(x, *w), np.asarray(x, np.float64) @ w64.T)
  np.testing.assert_array_equal(backward(dy, *w), np.asarray(dy, np.float64) @ w64)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_random_data_is_rounded_once(isa, fmt, dtype):
  scales = (1.875, 448.0, 2.0**-6, 2.0**-9)  # the largest and the least of e4m3, which is subnormal
  for m, o, k in ((1, 17, 160), (9, 6, 288)):
    w = matrix(m, fmt, o, k, scales=scales)
    x = jax.random.normal(jax.random.key(1), (m, k)).astype(dtype)
    dy = jax.random.normal(jax.random.key(2), (m, o)).astype(dtype)
    w64 = dense(*w)
    for ours, a, b in ((forward(x, *w, isa=isa), x, w64.T), (backward(dy, *w, isa=isa), dy, w64)):
      a = np.asarray(a, np.float64)
      bound = F32_BOUND * (np.abs(a) @ np.abs(b))
      if dtype == jnp.bfloat16:
        bound += BF16_HALF_ULP * np.abs(a @ b)
      assert ours.dtype == dtype
      assert (np.abs(np.asarray(ours, np.float64) - a @ b) <= bound).all()


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_one_matrix_decodes_exactly_in_both_dtypes(rows):
  w = matrix(rows, "nvfp4", rows, 224, scales=(0.5, 448.0, 2.0**-9))
  for isa in ISAS:
    for dtype in (jnp.float32, jnp.bfloat16):
      ours = cpu.decode(*w, dtype=dtype, isa=isa)
      np.testing.assert_array_equal(np.asarray(ours, np.float64), 2 * dense(*w))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_scale_is_nan_where_it_matters_and_nowhere_else(isa, fmt):
  codes, scale, tensor_scale = matrix(0, fmt, 9, 288)
  byte = np.array(scale).view(np.uint8)
  byte[4, -1] = 255 if fmt == "mxfp4" else 127
  scale = jnp.asarray(byte.view(scale.dtype))
  block = slice(288 - BLOCK[fmt], 288)
  for rows in (1, 7, 300):
    y = np.asarray(forward(jnp.ones((rows, 288)), codes, scale, tensor_scale, isa=isa))
    dx = np.asarray(backward(jnp.ones((rows, 9)), codes, scale, tensor_scale, isa=isa))
    assert np.isnan(y[:, 4]).all() and np.isfinite(np.delete(y, 4, 1)).all()
    assert np.isnan(dx[:, block]).all() and np.isfinite(dx[:, : block.start]).all()


def test_exponents_at_both_ends_of_e8m0():
  """The least scale that is a normal float32, and one whose sum is nearly the largest."""
  codes = jnp.full((2, 16), 0x22, jnp.uint8)  # ones
  scale = jnp.asarray([[1], [248]], jnp.uint8)
  for isa in ISAS:
    y = forward(jnp.ones((1, 32)), codes, scale, jnp.float32(1), isa=isa)
    np.testing.assert_array_equal(y[0], np.ldexp(np.float32(32), [1 - 127, 248 - 127]))


@pytest.mark.parametrize("isa", ISAS)
def test_values_that_are_not_finite_spread_as_in_a_dense_product(isa):
  """inf * 0 is NaN, inf - inf too; other rows and the columns that a last chunk lacks are apart."""
  w = matrix(0, "nvfp4", 6, 160)
  x = np.ones((9, 160), np.float32)
  x[1, 3], x[2, 159], x[3, 17], x[4, [0, 1]] = np.inf, -np.inf, np.nan, (np.inf, -np.inf)
  with np.errstate(invalid="ignore"):
    expected = (x.astype(np.float64)[:, None] * dense(*w)).sum(-1)
  for rows in (5, 9):  # decoded in registers with AVX-512, by tiles
    np.testing.assert_array_equal(forward(jnp.asarray(x[:rows]), *w, isa=isa), expected[:rows])


@pytest.mark.parametrize("rows", [0, 1, 9, 300])
def test_nothing_times_nothing(rows):
  for o, k in ((0, 64), (4, 0), (0, 0)):
    w = matrix_of_zeros(o, k)
    for int8 in (False, True):
      y = forward(jnp.ones((rows, k)), *w, int8=int8)
      assert y.shape == (rows, o) and not y.any()
    dx = backward(jnp.ones((rows, o)), *w)
    assert dx.shape == (rows, k) and not dx.any()
    assert cpu.decode(*w, dtype=jnp.float32).shape == (o, k)
  assert forward(jnp.ones((0, 64)), *matrix_of_zeros(4, 64)).shape == (0, 4)


def matrix_of_zeros(o, k):
  empty = lambda columns: jnp.zeros((o, columns), jnp.uint8)
  return empty(k // 2), empty(k // 32), jnp.float32(1)


# --- int8 activations


def rounded_to_int8(x):
  """Blocks of 32 as integers of at most 127 times amax / 127, in float64."""
  blocks = np.asarray(x, np.float64).reshape(len(x), -1, 32)
  scale = np.abs(blocks).max(-1, keepdims=True) / 127
  codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
  return (codes * scale).reshape(x.shape)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_int8_activations_are_rounded_by_blocks_and_otherwise_exact(isa, fmt):
  for m, o, k in ((1, 5, 64), (3, 9, 160), (6, 8, 288)):
    w, x = matrix(m, fmt, o, k), np.array(jax.random.normal(jax.random.key(m), (m, k)))
    x[0, :32] = 0
    y, w64 = forward(jnp.asarray(x), *w, isa=isa, int8=True), dense(*w)
    seen = rounded_to_int8(x)
    assert (np.abs(y - seen @ w64.T) <= F32_BOUND * (np.abs(seen) @ np.abs(w64.T))).all()
    assert (np.abs(y - x @ w64.T) > 1e-4).any()  # which the rounding of x causes


def test_int8_activations_keep_nan():
  w = matrix(0, "nvfp4", 4, 64)
  for bad in (np.nan, np.inf):
    y = forward(jnp.ones((2, 64)).at[1, 40].set(bad), *w, int8=True)
    assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()


# --- stacks, several matrices, transformations


def test_a_layer_of_a_stack_is_read_in_place():
  w = matrix(0, "nvfp4", 48, 256, stack=(5,))
  x, w64 = integers(1, 2, 256), dense(*w)

  @jax.jit
  def layers(x, *w):
    return jax.lax.scan(lambda n, i: (n, cpu.forward(x, *w, i)), 0, jnp.arange(5))[1]

  np.testing.assert_array_equal(layers(x, *w), np.asarray(x, np.float64) @ w64.swapaxes(1, 2))
  for asked, used in ((-3, 0), (99, 4)):  # clamped, as documented
    y = jax.jit(cpu.forward)(x, *w, jnp.int32(asked))
    np.testing.assert_array_equal(y, np.asarray(x, np.float64) @ w64[used].T)
  temporaries = layers.lower(x, *w).compile().memory_analysis().temp_size_in_bytes
  assert temporaries < w[0][0].nbytes  # not even one layer's codes are copied


def test_several_matrices_in_one_call_equal_each_alone():
  ws = [matrix(i, "mxfp4", o, 96) for i, o in enumerate((40, 3, 65))]
  for rows in (1, 9, 300):
    x = integers(rows, rows, 96)
    many = jax.jit(cpu.forward_many)(x, ws)
    for w, y in zip(ws, many, strict=True):
      np.testing.assert_array_equal(y, forward(x, *w))


def test_vmap_over_rows_and_over_matrices():
  w = matrix(0, "nvfp4", 6, 64, stack=(3,))
  x, w64 = integers(1, 3, 4, 64), dense(*w)
  both = jax.jit(jax.vmap(cpu.forward))(x, *w)
  np.testing.assert_array_equal(both, np.asarray(x, np.float64) @ w64.swapaxes(1, 2))
  first = tuple(part[0] for part in w)
  rows = jax.jit(jax.vmap(lambda x: cpu.forward(x, *first)))(x)
  np.testing.assert_array_equal(rows, np.asarray(x, np.float64) @ w64[0].T)


def test_in_a_while_loop_and_under_grad_of_the_public_op():
  w = matrix(0, "nvfp4", 64, 64)
  x, w64 = integers(1, 2, 64) / 64, dense(*w) / 64
  product = functools.partial(api.fp4_matmul, implementation="cpu")

  @jax.jit
  def loop(x):
    step = lambda carry: (carry[0] + 1, product(carry[1], *w) / 64)
    return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (jnp.int32(0), x))[1]

  expected = np.asarray(x, np.float64) @ np.linalg.matrix_power(w64.T, 3)
  np.testing.assert_allclose(loop(x), expected, rtol=1e-4, atol=1e-4)
  dx = jax.jit(jax.grad(lambda x: product(x, *w).sum()))(x)
  np.testing.assert_allclose(dx, np.broadcast_to(dense(*w).sum(0), x.shape), rtol=1e-5, atol=1e-5)


def test_on_several_devices_at_once():
  """Eight virtual devices share the process's threads, each with its rows."""
  w, x = matrix(0, "nvfp4", 40, 128), integers(1, 16, 128)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  run = jax.shard_map(
    cpu.forward, mesh=mesh, in_specs=(P("data"), P(), P(), P()), out_specs=P("data"),
    check_vma=False,
  )  # fmt: skip
  for _ in range(3):
    np.testing.assert_array_equal(jax.jit(run)(x, *w), np.asarray(x, np.float64) @ dense(*w).T)


def test_programs_on_two_threads_at_once():
  """Each has its own memory for rows of x, and both ask the same pool for help."""
  ws = [matrix(i, "nvfp4", 300, 512) for i in range(2)]
  xs = [integers(i, rows, 512) for i, rows in enumerate((5, 40))]
  expected = [np.asarray(x, np.float64) @ dense(*w).T for x, w in zip(xs, ws)]

  def many(i):
    return all(
      (np.asarray(forward(xs[i % 2], *ws[i % 2])) == expected[i % 2]).all() for _ in "abcde"
    )

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert all(pool.map(many, range(16)))


# --- refusals


def test_operands_that_do_not_fit_are_refused_before_memory_is_read():
  codes, scale, tensor_scale = matrix(0, "nvfp4", 4, 128, stack=(2,))

  def call(codes=codes, scale=scale, tensor_scale=tensor_scale, columns=128):
    y = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    product = jax.ffi.ffi_call(cpu._target("jaxlab_fp4_forward"), y)
    x = jnp.ones((1, columns))
    product(x, jnp.int32(0), codes, scale, tensor_scale, isa="", int8=False).block_until_ready()

  call()
  for message, wrong in (
    ("scales must be uint8", {"scale": scale.astype(jnp.float8_e5m2)}),
    ("scales must be uint8", {"scale": scale.astype(jnp.float32)}),
    ("scales must be \\[", {"scale": scale.swapaxes(1, 2)}),
    ("scales must be \\[", {"scale": scale.swapaxes(0, 1)}),
    ("scales must be \\[", {"tensor_scale": tensor_scale[:1]}),
    ("of the same rank", {"scale": scale[0]}),
    ("codes must be uint8", {"codes": codes.view(jnp.int8)}),
    ("do not fit", {"columns": 96}),
    ("without entries", {"codes": codes[:0], "scale": scale[:0], "tensor_scale": tensor_scale[:0]}),
  ):
    with pytest.raises(Exception, match=message):
      call(**wrong)


def test_reasons():
  ask = lambda dtype=jnp.float32, shape=(8, 64), name="cpu": cpu.why_not(
    1, dtype, shape, "mxfp4", target.TARGETS[name]
  )
  assert ask() is None
  assert "not on NVIDIA H100" in ask(name="h100")
  assert "not float16" in ask(dtype=jnp.float16)
  assert "blocks of 32" in ask(shape=(8, 24))


def test_an_unknown_instruction_set_is_refused():
  with pytest.raises(Exception, match="this CPU has no 'sse9'"):
    cpu.forward(jnp.ones((1, 32)), *matrix(0, "nvfp4", 2, 32), isa="sse9").block_until_ready()


def test_the_rule_takes_the_native_kernel():
  device = target.TARGETS["cpu"]
  chosen = api._choose(None, device, 1, jnp.dtype(jnp.float32), (8, 64), "nvfp4", "none")
  assert chosen == "cpu"
