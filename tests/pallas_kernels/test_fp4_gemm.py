"""fp4_matmul against float64 NumPy and its own reference. Oracle O3 of arXiv 2510.11696, 8 of
2509.23202."""

import functools
import logging

import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import target
from pallas_kernels.fp4_gemm import api, codec, cpu, fp4_matmul

pytestmark = pytest.mark.usefixtures("strict_dtypes")
FORMATS = ("nvfp4", "mxfp4")
# |error| of a float32 sum of K products in any order, relative to the sum of magnitudes: K eps / 2
# for K <= 160. [O3: 1e-5]
F32_BOUND = 1e-5
BF16_HALF_ULP = 2.0**-8


def packed(key, fmt, out, features, stack=()):
  """Random codes with scales around 1, the extremes of both, and a zero block."""
  rng = np.random.default_rng(key)
  codes = rng.integers(0, 256, (*stack, out, features // 2), np.uint8)
  block = codec.BLOCK[fmt]
  if fmt == "nvfp4":
    scale = rng.uniform(0.01, 448, (*stack, out, features // block)).astype(ml_dtypes.float8_e4m3fn)
    scale[..., 0, 0] = 448
  else:
    scale = rng.integers(120, 134, (*stack, out, features // block), np.uint8)
  codes[..., 0, : block // 2] = 0x77
  codes[..., -1, : block // 2] = 0x80  # zero and negative zero
  tensor_scale = rng.uniform(1e-4, 1e-2, stack).astype(np.float32)
  return tuple(map(jnp.asarray, (codes, scale, tensor_scale)))


def dense_f64(codes, scale, tensor_scale):
  """[*stack, O, K] decoded by ml_dtypes and NumPy alone."""
  codes, tensor_scale = np.asarray(codes), np.asarray(tensor_scale, np.float64)
  nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
  values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
  if scale.dtype == jnp.uint8:
    scale = 2.0 ** (np.asarray(scale, np.float64) - 127)
  scale = np.asarray(scale, np.float64).repeat(values.shape[-1] // scale.shape[-1], -1)
  return values * scale * tensor_scale[..., None, None]


# One compiled program: an operation at a time, each would be compiled alone.
product = jax.jit(fp4_matmul, static_argnames=("activations", "rotation", "implementation"))


@pytest.fixture(params=["cpu", "h100"])
def device(request):
  """Code for a CPU and for accelerators, both run here."""
  with target.use_target(request.param):
    yield request.param


# --- values


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
  ("lead", "out", "features"), [((1,), 24, 64), ((5,), 7, 160), ((), 3, 32), ((2, 3), 16, 32)]
)
def test_float32_product(implementation, fmt, lead, out, features):
  w = packed(0, fmt, out, features)
  x = jax.random.normal(jax.random.key(1), (*lead, features))
  y = product(x, *w, implementation=implementation)
  w64, x64 = dense_f64(*w), np.asarray(x, np.float64)
  assert y.dtype == jnp.float32 and y.shape == (*lead, out)
  assert (np.abs(y - x64 @ w64.T) <= F32_BOUND * (np.abs(x64) @ np.abs(w64).T)).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 6])
def test_bfloat16_product_is_rounded_once(implementation, fmt, rows):
  w = packed(0, fmt, 24, 96)
  x = jax.random.normal(jax.random.key(1), (rows, 96)).astype(jnp.bfloat16)
  y = product(x, *w, implementation=implementation)
  w64, x64 = dense_f64(*w), np.asarray(x, np.float64)
  exact, terms = x64 @ w64.T, np.abs(x64) @ np.abs(w64).T
  assert y.dtype == jnp.bfloat16
  error = np.abs(np.asarray(y, np.float64) - exact)
  assert (error <= F32_BOUND * terms + BF16_HALF_ULP * np.abs(exact)).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "features"), [(1, 2048), (3, 8192)])
def test_integer_data_is_bitwise_exact(dtype, rows, features):
  """Every partial sum is a multiple of 1/4 below 2^22, so no order of summation may show."""
  rng = np.random.default_rng(features)
  codes = jnp.asarray(rng.integers(0, 256, (5, features // 2), np.uint8))
  scale = jnp.asarray(rng.choice([0.5, 1, 2], (5, features // 16)).astype(ml_dtypes.float8_e4m3fn))
  x = jnp.asarray(rng.integers(-4, 5, (rows, features)), dtype)
  exact = np.asarray(x, np.float64) @ dense_f64(codes, scale, np.float32(1)).T
  for implementation in ("xla", "reference"):
    y = product(x, codes, scale, jnp.float32(1), implementation=implementation)
    np.testing.assert_array_equal(y, exact.astype(dtype))


@pytest.mark.parametrize("activations", ["none", "fp4"])
@pytest.mark.parametrize("rotation", [0, 16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rotation_and_activations_are_applied_in_that_order(fmt, rotation, activations):
  w = packed(2, fmt, 12, 64)
  x = jax.random.normal(jax.random.key(3), (5, 64))
  seen = codec.rotate(x, rotation)
  seen = codec.fake_quantize(seen, fmt) if activations == "fp4" else seen
  expected = np.asarray(seen, np.float64) @ dense_f64(*w).T
  for implementation in ("xla", "reference"):
    y = product(x, *w, rotation=rotation, activations=activations, implementation=implementation)
    np.testing.assert_allclose(y, expected, atol=F32_BOUND * np.abs(expected).max())


def test_static_activation_scale_of_a_layer():
  w = packed(2, "nvfp4", 12, 64, (2,))
  x = jax.random.normal(jax.random.key(3), (5, 64))
  act_scale = jnp.asarray([1e-3, 4e-3])
  y = product(x, *w, layer=1, activations="fp4", act_scale=act_scale)
  one = product(x, *(p[1] for p in w), activations="fp4", act_scale=act_scale[1])
  np.testing.assert_array_equal(y, one)


# --- stacks


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_layer_of_a_stack_equals_the_matrix_alone(fmt):
  w = packed(4, fmt, 8, 64, (3,))
  x = jax.random.normal(jax.random.key(5), (2, 64))
  stacked = jax.jit(lambda x, i: product(x, *w, layer=i))
  for i in range(3):
    alone = product(x, *(p[i] for p in w))
    np.testing.assert_array_equal(stacked(x, i), alone)


def test_vmap_over_the_stack():
  w = packed(4, "nvfp4", 8, 64, (3,))
  x = jax.random.normal(jax.random.key(5), (3, 2, 64))
  got = jax.jit(jax.vmap(fp4_matmul))(x, *w)
  dx = jax.jit(jax.vmap(jax.grad(lambda x, *w: jnp.sum(fp4_matmul(x, *w) ** 2))))(x, *w)
  for i in range(3):
    np.testing.assert_allclose(got[i], product(x[i], *w, layer=i), rtol=1e-6, atol=1e-6)
  y64 = np.einsum("imk,iok->imo", x, dense_f64(*w))
  expected = 2 * np.einsum("imo,iok->imk", y64, dense_f64(*w))
  np.testing.assert_allclose(dx, expected, atol=F32_BOUND * np.abs(expected).max())


# --- gradients


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("rotation", [0, 32])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_gradient_is_dy_times_w(implementation, rotation, rows):
  w = packed(6, "nvfp4", 20, 64)
  kx, ky = jax.random.split(jax.random.key(7))
  x, dy = jax.random.normal(kx, (rows, 64)), jax.random.normal(ky, (rows, 20))
  f = functools.partial(
    fp4_matmul, rotation=rotation, activations="fp4", implementation=implementation
  )
  dx = jax.jit(lambda x, dy: jax.vjp(lambda x: f(x, *w), x)[1](dy)[0])(x, dy)
  w64 = dense_f64(*w)
  w64 = np.asarray(codec.unrotate(jnp.asarray(w64.T, jnp.float32), rotation), np.float64).T
  terms = np.abs(np.asarray(dy, np.float64)) @ np.abs(w64)
  assert (np.abs(dx - np.asarray(dy, np.float64) @ w64) <= F32_BOUND * terms).all()


@pytest.mark.usefixtures("device")
def test_the_bfloat16_gradient_is_rounded_once():
  w = packed(6, "nvfp4", 20, 64)
  x = jnp.ones((3, 64), jnp.bfloat16)
  dy = jax.random.normal(jax.random.key(8), (3, 20)).astype(jnp.bfloat16)
  dx = jax.jit(
    lambda x, dy: jax.vjp(lambda x: fp4_matmul(x, *w, implementation="xla"), x)[1](dy)[0]
  )(x, dy)
  exact = np.asarray(dy, np.float64) @ dense_f64(*w)
  assert dx.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(dx, np.float64), exact, rtol=BF16_HALF_ULP, atol=1e-3)


def test_packed_arguments_have_no_gradient():
  codes, scale, tensor_scale = packed(6, "nvfp4", 4, 32)
  x = jnp.ones((2, 32))
  _, vjp = jax.vjp(product, x, codes, scale, tensor_scale)
  _, d_codes, d_scale, d_tensor_scale = vjp(jnp.ones((2, 4)))
  assert d_codes.dtype == jax.dtypes.float0
  assert d_scale.dtype == jnp.float8_e4m3fn and not np.asarray(d_scale, np.float32).any()
  assert float(d_tensor_scale) == 0


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_layers_keeps_no_weights(remat):
  """Residuals are the packed arguments by reference: nothing of [L, O, K/2] is stored."""
  layers, width = 6, 64
  codes, scale, tensor_scale = packed(9, "nvfp4", width, width, (layers,))
  w = codes, scale, tensor_scale / 100  # else tanh saturates and roundings grow with the layers

  def loss(x, w):
    def block(x, i):
      return jnp.tanh(fp4_matmul(x, *w, layer=i))

    block = jax.checkpoint(block) if remat else block
    return jnp.sum(jax.lax.scan(lambda x, i: (block(x, i), None), x, jnp.arange(layers))[0])

  x = jax.random.normal(jax.random.key(0), (2, width))
  jaxpr = jax.make_jaxpr(jax.grad(loss))(x, w)
  scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
  assert len(scans) == 2
  stored = max(np.prod(v.aval.shape) for eqn in scans for v in eqn.outvars)
  assert stored <= layers * 2 * width  # one activation a layer

  def by_hand(x):
    for i in range(layers):
      x = jnp.tanh(fp4_matmul(x, *(p[i] for p in w), implementation="reference"))
    return jnp.sum(x)

  expected = jax.jit(jax.grad(by_hand))(x)
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(x, w), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("full_compilation")
def test_temporary_memory_does_not_grow_with_depth():
  def temp_bytes(layers):
    w = packed(9, "nvfp4", 256, 256, (layers,))

    def loss(x, w):
      block = jax.checkpoint(lambda x, i: jnp.tanh(product(x, *w, layer=i)))
      return jnp.sum(jax.lax.scan(lambda x, i: (block(x, i), None), x, jnp.arange(layers))[0])

    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones((2, 256)), w).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  grown = temp_bytes(12) - temp_bytes(4)
  assert grown < 0.5 * 8 * 256 * 256 / 2  # half of the codes of eight layers


# --- compilation


@pytest.mark.parametrize(
  ("device", "platform"), [("h200", "cuda"), ("b200", "cuda"), ("v6e", "tpu")]
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_it_lowers_for_absent_accelerators(device, platform, fmt):
  w = packed(0, fmt, 32, 64, (2,))
  x = jnp.ones((4, 64), jnp.bfloat16)

  def step(x, i):
    f = functools.partial(fp4_matmul, layer=i, activations="fp4", rotation=16)
    return jax.value_and_grad(lambda x: jnp.sum(f(x, *w).astype(jnp.float32)))(x)

  with target.use_target(device):
    text = jax.jit(step).trace(x, 1).lower(lowering_platforms=(platform,)).as_text()
  assert "stablehlo.gather" not in text  # the table is for CPUs


def test_a_second_call_does_not_compile_again():
  w = packed(0, "nvfp4", 8, 32, (2,))
  traced = []

  @jax.jit
  def f(x, i):
    traced.append(i)
    return fp4_matmul(x, *w, layer=i)

  for i in range(2):
    f(jnp.ones((2, 32)), i)
  assert len(traced) == 1


def test_one_row_on_a_cpu_is_matrix_times_vector():
  w = packed(0, "nvfp4", 8, 32)

  def left_operands(device):
    with target.use_target(device):
      jaxpr = jax.make_jaxpr(lambda x: fp4_matmul(x, *w, implementation="xla"))(jnp.ones((1, 32)))
    return {v.aval.shape for v in _dot_operands(jaxpr.jaxpr)}

  assert left_operands("cpu") == {(8, 16)}
  assert left_operands("v6e") == {(1, 16)}
  assert left_operands("h100") == {(1, 2, 16)}  # even and odd columns in one product


def _dot_operands(jaxpr):
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      yield eqn.invars[0]
    for sub in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from _dot_operands(sub)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
  ("spec", "x_spec", "collective"),
  [(P("x", None), P(), "none"), (P(None, "x"), P(None, "x"), "all-reduce")],
)
def test_sharded_equals_unsharded(spec, x_spec, collective):
  """XLA's own product: eight devices, W cut along O and along K; packed bytes never travel."""
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  w = packed(3, "nvfp4", 64, 256)
  x = jax.random.normal(jax.random.key(4), (4, 256))

  def place(a, spec):
    return jax.device_put(a, NamedSharding(mesh, spec))

  args = (place(x, x_spec), place(w[0], spec), place(w[1], spec), place(w[2], P()))
  f = jax.jit(functools.partial(fp4_matmul, implementation="xla"))
  expected = product(x, *w, implementation="xla")
  np.testing.assert_allclose(f(*args), expected, rtol=1e-5, atol=1e-4)
  text = f.lower(*args).compile().as_text()
  found = [c for c in ("all-gather", "all-to-all", "collective-permute", "all-reduce") if c in text]
  assert found == ([] if collective == "none" else [collective])


def test_the_choice_is_logged_once(caplog):
  api._choose.cache_clear()
  api._say.cache_clear()
  w = packed(0, "nvfp4", 4, 32)
  with caplog.at_level(logging.INFO, logger="absl"):
    for _ in range(2):
      fp4_matmul(jnp.ones((2, 32)), *w)
  lines = [r.getMessage() for r in caplog.records if "fp4_matmul" in r.getMessage()]
  name = "xla" if cpu.why_no_library() else "cpu"
  assert len([line for line in lines if f"'{name}' on cpu (first" in line]) == 1


# --- error messages


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"implementation": "cuda"}, "unknown implementation; got 'cuda'.*reference, xla, cpu"),
    ({"activations": "int8"}, "activations must be one of none, fp4; got 'int8'"),
    ({"rotation": 24}, "power of two that divides in=32; got 24"),
    ({"rotation": 64}, "power of two that divides in=32; got 64"),
    ({"x": jnp.ones((2, 48))}, "x must have 32 columns .*got \\(2, 48\\)"),
    ({"x": jnp.ones((2, 32), jnp.float16)}, "float32 or bfloat16; got float16"),
    ({"scale": jnp.ones((4, 3), jnp.float8_e4m3fn)}, "in / 16\\].*got \\(4, 3\\)"),
    ({"scale": jnp.ones((4, 2), jnp.uint8)}, "in / 32\\].*got \\(4, 2\\)"),
    ({"scale": jnp.ones((4, 2))}, "got float32"),
    ({"layer": 0}, "one matrix, or a stack .*layer=0"),
    ({"act_scale": jnp.float32(1)}, "act_scale needs activations='fp4'"),
  ],
)
def test_errors_name_rule_and_numbers(change, message):
  codes, scale, tensor_scale = packed(0, "nvfp4", 4, 32)
  arguments = {"x": jnp.ones((2, 32)), "codes": codes, "scale": scale, "tensor_scale": tensor_scale}
  with pytest.raises(ValueError, match=message):
    fp4_matmul(**(arguments | change))


def test_a_kernel_that_cannot_run_here_says_why():
  with pytest.raises(NotImplementedError, match="'triton' cannot run here: it needs an NVIDIA GPU"):
    fp4_matmul(jnp.ones((2, 32)), *packed(0, "nvfp4", 4, 32), implementation="triton")


def test_a_stack_needs_a_layer_in_range():
  w = packed(0, "nvfp4", 4, 32, (3,))
  with pytest.raises(ValueError, match="or use jax.vmap"):
    fp4_matmul(jnp.ones((2, 32)), *w)
  with pytest.raises(ValueError, match=r"layer must be in \[0, 3\); got 3"):
    fp4_matmul(jnp.ones((2, 32)), *w, layer=3)
