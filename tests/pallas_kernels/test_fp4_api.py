"""What `api` adds to every implementation: FP4 rows, shared inputs, meshes. Dims: O out, K in."""

import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import target
from pallas_kernels.fp4_gemm import api, codec, cpu, fp4_matmul, mosaic_tpu
from pallas_kernels.fp4_gemm import split as splits

LAYERS, O, K = 3, 64, 256


@pytest.fixture
def kernel() -> str:
  if reason := cpu.why_no_library():
    pytest.skip(f"no native library: {reason}")
  return "cpu"


def packed(seed: int, features: int = O):
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 256, (LAYERS, features, K // 2), np.uint8)
  scale = rng.uniform(0.5, 2, (LAYERS, features, K // 16)).astype(ml_dtypes.float8_e4m3fn)
  return jnp.asarray(codes), jnp.asarray(scale), jnp.asarray([0.1, 0.2, 0.3], jnp.float32)


def rows(*lead: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(9).normal(size=(*lead, K)), jnp.float32)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("rotation", [0, 16])
def test_packed_rows_are_the_rounded_rows(format, rotation):
  """What a W4A4 kernel multiplies is what `fake_quantize` simulates, bit for bit."""
  x = rows(2, 5) * jnp.asarray([1.0, 300.0], jnp.float32)[:, None, None]
  got = api.hadamard_quantize(x, format, rotation=rotation)
  expected = codec.fake_quantize(codec.rotate(x, rotation), format)
  np.testing.assert_array_equal(codec.decode_rows(got, jnp.float32), expected)
  assert got.codes.shape == (2, 5, K // 2) and got.scale.shape == (2, 5, K // codec.BLOCK[format])


def test_packed_rows_by_another_program():
  """Codes, scales and multipliers of the rows, by NumPy and ml_dtypes."""
  x = np.asarray(rows(4))
  got = api.hadamard_quantize(jnp.asarray(x), "nvfp4")
  multiplier = np.abs(x).max(-1) / 2688
  blocks = x.reshape(4, -1, 16)
  scale = np.abs(blocks).max(-1) / (6 * multiplier[:, None])
  scale = scale.astype(ml_dtypes.float8_e4m3fn)
  np.testing.assert_array_equal(np.asarray(got.scale), scale)
  unit = blocks / (scale.astype(np.float32) * multiplier[:, None])[..., None]
  codes = unit.astype(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(4, K)
  np.testing.assert_array_equal(codec.unpack_codes(got.codes), codes)


@pytest.mark.parametrize("activations", ["none", "fp4"])
def test_several_products_are_the_single_ones(activations, kernel):
  x, ws = rows(2, 3), [packed(0), packed(1, 32)]
  options = {"layer": jnp.int32(1), "activations": activations, "rotation": 16}

  def loss(x, implementation):
    ys = api.fp4_matmul_many(x, ws, implementation=implementation, **options)
    return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

  grad = jax.value_and_grad(loss, has_aux=True)
  (_, ys), dx = grad(x, kernel)
  (_, expected), expected_dx = grad(x, "reference")
  for y, want in zip(ys, expected, strict=True):
    np.testing.assert_allclose(y, want, atol=1e-5 * float(jnp.abs(want).max()))
  np.testing.assert_allclose(dx, expected_dx, atol=2e-5 * float(jnp.abs(expected_dx).max()))


@pytest.mark.parametrize("in_axis, out_axis", [("tensor", None), (None, "tensor"), (None, None)])
def test_a_kernel_on_a_mesh(in_axis, out_axis, kernel):
  """Forward and backward on eight devices equal one; no device receives another's codes."""
  mesh = jax.make_mesh(
    (1, 2, 4, 1),
    ("data", "fsdp", "tensor", "sequence"),
    axis_types=(jax.sharding.AxisType.Auto,) * 4,
  )
  split = splits.Split(mesh, in_axis, out_axis)
  w, x = packed(2), rows(4, 3)
  matrix = NamedSharding(mesh, P(None, out_axis, in_axis))
  placed = (*(jax.device_put(part, matrix) for part in w[:2]), w[2])

  def loss(x, w, split, implementation):
    y = fp4_matmul(
      x, *w, layer=jnp.int32(2), rotation=16, split=split, implementation=implementation
    )
    return jnp.sum(jnp.sin(y)), y

  grad = jax.value_and_grad(loss, has_aux=True)
  on_mesh = jax.jit(lambda x, w: grad(x, w, split, kernel)).lower(x, placed).compile()
  (_, y), dx = on_mesh(x, placed)
  (_, expected), expected_dx = grad(x, w, None, "reference")
  np.testing.assert_allclose(y, expected, atol=1e-5 * float(jnp.abs(expected).max()))
  np.testing.assert_allclose(dx, expected_dx, atol=2e-5 * float(jnp.abs(expected_dx).max()))
  gathers = [line for line in on_mesh.as_text().splitlines() if "all-gather" in line]
  assert not [line for line in gathers if "u8[" in line or "f8e4m3fn[" in line]


@pytest.fixture
def interpreted_tpu(monkeypatch):
  """A v6e, whose kernel is interpreted here. The list says which rotations it was asked for."""
  asked = []

  def direction(run):
    @functools.wraps(run)
    def call(*args, rotation=0):
      asked.append(rotation)
      return run(*args, rotation=rotation, interpret=pltpu.InterpretParams())

    return call

  kernel = types.SimpleNamespace(
    why_not=mosaic_tpu.why_not, MAX_ROTATION=mosaic_tpu.MAX_ROTATION,
    forward=direction(mosaic_tpu.forward), backward=direction(mosaic_tpu.backward),
  )  # fmt: skip
  real = api._module
  monkeypatch.setattr(api, "_module", lambda name: kernel if name == "mosaic_tpu" else real(name))
  api._choose.cache_clear()
  with target.use_target("v6e"):
    yield asked
  api._choose.cache_clear()


@pytest.mark.parametrize(
  ("activations", "rotation", "in_the_kernel"),
  [("none", 128, 128), ("fp4", 128, 0), ("none", 0, 0)],
)
def test_a_tpu_kernel_rotates_what_it_reads(interpreted_tpu, activations, rotation, in_the_kernel):
  x, ws = rows(2, 3), [packed(0), packed(1, 32)]
  options = {"layer": jnp.int32(1), "activations": activations, "rotation": rotation}

  def loss(x, implementation):
    ys = api.fp4_matmul_many(x, ws, implementation=implementation, **options)
    return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

  grad = jax.value_and_grad(loss, has_aux=True)
  (_, ys), dx = grad(x, None)  # by the rule
  assert interpreted_tpu == [in_the_kernel] * 4  # two products, there and back
  (_, expected), expected_dx = grad(x, "reference")
  for y, want in zip(ys, expected, strict=True):
    np.testing.assert_allclose(y, want, atol=1e-5 * float(jnp.abs(want).max()))
  np.testing.assert_allclose(dx, expected_dx, atol=2e-5 * float(jnp.abs(expected_dx).max()))


def test_a_part_of_a_mesh_that_cuts_a_rotation_is_rotated_outside(interpreted_tpu):
  mesh = jax.sharding.AbstractMesh((1, 1, 4, 1), ("data", "fsdp", "tensor", "sequence"))
  split = splits.Split(mesh, "tensor", None)  # parts of 64 columns
  assert not api._rotates("mosaic_tpu", 128, split, K)
  assert api._rotates("mosaic_tpu", 64, split, K) and api._rotates("mosaic_tpu", 128, None, K)
  assert not api._rotates("mosaic_tpu", 2 * mosaic_tpu.MAX_ROTATION, None, 4096)
  assert not api._rotates("cpu", 64, None, K)


def test_a_forced_implementation_says_why_it_cannot_run():
  with pytest.raises(ValueError, match="unknown implementation; got 'nope'"):
    fp4_matmul(rows(1), *packed(0), layer=0, implementation="nope")
  with pytest.raises(ValueError, match="rotation must be a power of two"):
    api.hadamard_quantize(rows(1), "nvfp4", rotation=3)
