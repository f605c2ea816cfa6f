"""What is handed to cuDNN's block-scaled product. A CPU has no lowering of it: its documented
formula stands in for it here, and the `aot` test compiles the real one for a B200."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, cudnn
from tests.pallas_kernels import compiled_gpu

spec = jax.ShapeDtypeStruct


def documented(a, b, a_scales, b_scales, preferred_element_type):
  """jax.nn.scaled_matmul as its docstring has it, in float64."""
  scaled = lambda x, s: (
    np.asarray(x, np.float64) * np.repeat(np.asarray(s, np.float64), x.shape[-1] // s.shape[-1], -1)
  )
  y = np.einsum("bmk,bnk->bmn", scaled(a, a_scales), scaled(b, b_scales))
  return jnp.asarray(y, preferred_element_type)


def values_of(codes):
  codes = np.asarray(codes)
  nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
  return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


@pytest.mark.parametrize("layer", [None, 2])
def test_operands_and_multipliers(layer, monkeypatch):
  """Exact: scales and multipliers are powers of two, sums of E2M1 products are small."""
  monkeypatch.setattr(jax.nn, "scaled_matmul", documented)
  rng = np.random.default_rng(0)
  stack = () if layer is None else (3,)
  e4m3 = lambda *shape: rng.choice([0.5, 1, 2], shape).astype(ml_dtypes.float8_e4m3fn)
  codes, scale = rng.integers(0, 256, (*stack, 24, 32), np.uint8), e4m3(*stack, 24, 4)
  tensor_scale = rng.choice([0.25, 4], stack).astype(np.float32)
  rows = codec.Rows(
    jnp.asarray(rng.integers(0, 256, (5, 32), np.uint8)),
    jnp.asarray(e4m3(5, 4)),
    jnp.asarray(rng.choice([0.5, 2], 5), jnp.float32),
  )
  index = None if layer is None else jnp.int32(layer)
  y = cudnn.forward_rows(
    rows, *map(jnp.asarray, (codes, scale, tensor_scale)), index, jnp.float32
  )  # fmt: skip
  w = values_of(codes) * scale.astype(np.float64).repeat(16, -1) * tensor_scale[..., None, None]
  x = values_of(rows.codes) * np.asarray(rows.scale, np.float64).repeat(16, -1)
  x = x * np.asarray(rows.multiplier)[:, None]
  assert y.dtype == jnp.float32
  np.testing.assert_array_equal(y, x @ (w if layer is None else w[layer]).T)


def arguments(rows, out, features, stack=()):
  e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
  x = codec.Rows(
    spec((rows, features // 2), jnp.uint8), spec((rows, features // 16), e4m3), spec((rows,), f32)
  )
  w = spec((*stack, out, features // 2), jnp.uint8), spec((*stack, out, features // 16), e4m3)
  return x, *w, spec(stack, f32), *((spec((), jnp.int32),) if stack else ())


def product(rows, codes, scale, tensor_scale, layer=None):
  return cudnn.forward_rows(rows, codes, scale, tensor_scale, layer, jnp.bfloat16)


def test_lowers_for_cuda_on_any_host():
  traced = jax.jit(product).trace(*arguments(8, 256, 128, (2,)))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("__op$block_scaled_dot") == 1
  assert "f4E2M1FN" in text and "f8E4M3FN" in text


@pytest.mark.parametrize(
  "format, device, reason",
  [
    ("nvfp4", target.TARGETS["b200"], None),
    ("mxfp4", target.TARGETS["b200"], "which is nvfp4; got mxfp4"),
    ("nvfp4", target.TARGETS["h100"], "capability 10); this is NVIDIA H100"),
    ("nvfp4", target.Target("cuda", "NVIDIA GeForce RTX 5090"), "this is NVIDIA GeForce RTX 5090"),
    ("nvfp4", target.TARGETS["cpu"], "this is cpu"),
  ],
)
def test_why_not(format, device, reason):
  found = cudnn.why_not(1, jnp.bfloat16, (64, 64), format, device)
  assert found is None if reason is None else reason in found


@pytest.mark.aot
@compiled_gpu.needs_compiler
@pytest.mark.parametrize(
  "rows, out, features, stack",
  [(1, 3584, 3584, ()), (64, 3584, 18944, (4,)), (2048, 27648, 5120, ()), (5, 100, 48, ())],
)
def test_a_b200_multiplies_fp4(rows, out, features, stack, capsys):
  """The call is cuDNN's, on FP4 operands; nothing of W is decoded beside it."""
  program = compiled_gpu.compile_for("b200", product, *arguments(rows, out, features, stack))
  (call,) = (line for line in program.text.splitlines() if "__cudnn$blockScaledDot" in line)
  shapes = [r.instruction.shape for r in program.analysis.results]
  with capsys.disabled():
    print(f"\ncudnn {rows} x {features} -> {out}: {program.temporaries} bytes of temporaries")
  assert " custom-call(" in call and "f32[" in call
  decoded = out * features
  assert not [
    s for s in shapes if s.startswith(("bf16", "f32")) and s.endswith(f"{out},{features}]")
  ]
  sums = 4 * 2 * max(rows, 128) * out
  assert program.temporaries < sums + rows * features + 2 * decoded


@pytest.mark.aot
@compiled_gpu.needs_compiler
def test_an_h100_would_expand_it():
  """That is why the rule refuses it there: XLA decodes both operands."""
  program = compiled_gpu.compile_for("h100", product, *arguments(64, 512, 256))
  assert "__cudnn$blockScaledDot" not in program.text
