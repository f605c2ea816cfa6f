"""The Triton kernels: their instructions executed in NumPy, their sums in interpret mode.

Oracle 8 of arXiv 2509.23202 (specs/mr_gptq.md §10). What real compilers make of them is in
test_fp4_triton_aot.py.
"""

import dataclasses
import re

import hypothesis as hp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, triton, triton_decode

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")
FORMATS = ("nvfp4", "mxfp4")
H100 = target.gpu(target.TARGETS["h100"])
# |error| of a float32 sum of K products in any order, relative to the sum of magnitudes [oracle 8].
F32_BOUND = 1e-5
BF16_HALF_ULP = 2.0**-8


# --- the decoding instructions


def halves(word):
  """[2, n] uint16 of [n] uint32: low and high."""
  return np.stack([word & 0xFFFF, word >> 16]).astype(np.uint16)


def fma_bf16x2(a, b, c):
  """PTX: both halves, subnormals kept, one rounding (here exact, so none)."""
  to_f32 = lambda w: halves(w).view(ml_dtypes.bfloat16).astype(np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    result = to_f32(a) * to_f32(b) + to_f32(c)
  low, high = result.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
  return low | high << 16


def prmt(a, b, selector):
  """PTX: byte i of the result is the byte of b:a that nibble i of the selector names."""
  every = [(source >> (8 * n)) & 0xFF for source in (a, b) for n in range(4)]
  chosen = [every[(int(selector[0]) >> (4 * n)) & 7] for n in range(4)]
  return sum(byte << np.uint32(8 * n) for n, byte in enumerate(chosen)).astype(np.uint32)


INSTRUCTIONS = {
  "mov.b32": lambda a: a,
  "and.b32": np.bitwise_and,
  "or.b32": np.bitwise_or,
  "shl.b32": np.left_shift,
  "shr.b32": np.right_shift,
  "add.u32": np.add,
  "mul.lo.u32": np.multiply,
  "prmt.b32": prmt,
  "fma.rn.bf16x2": fma_bf16x2,
}


def execute(asm, **registers):
  """Runs PTX on arrays of uint32; `registers` by the numbers after the dollar signs."""
  state = {name.replace("_", "$"): value for name, value in registers.items()}
  n = len(next(iter(state.values())))
  for line in asm.strip().removeprefix("{").removesuffix("}").split(";"):
    words = line.split(None, 1)
    if not words or words[0] == ".reg":
      continue
    to, *operands = re.split(r",\s*", words[1].strip())
    values = [
      state[o] if o in state else np.full(n, int(o, 0), np.uint32) for o in operands
    ]  # fmt: skip
    state[to] = INSTRUCTIONS[words[0]](*values)
  return state


def bf16_pair(low, high):
  low, high = (
    np.asarray(v, ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for v in (low, high)
  )
  return low | high << 16


def values_of(nibbles):
  return np.asarray(nibbles, np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def as_f64(word):
  return halves(word).view(ml_dtypes.bfloat16).astype(np.float64)


def test_instructions_of_scales_are_exact_for_all_bytes():
  """E4M3 by ml_dtypes; NaN stays NaN, negative scales stay negative, subnormals are kept."""
  bytes_ = np.arange(256, dtype=np.uint32)
  word = bytes_ | ((bytes_ + 85) % 256) << 8 | ((bytes_ + 170) % 256) << 16 | bytes_[::-1] << 24
  state = execute(triton_decode.FACTORS_ASM, _2=word)
  found = np.concatenate([as_f64(state["$0"]), as_f64(state["$1"])])
  each = np.stack([(word >> (8 * n)) & 0xFF for n in range(4)]).astype(np.uint8)
  np.testing.assert_array_equal(found, each.view(ml_dtypes.float8_e4m3fn).astype(float) * 2.0**119)


def factors_of(format):
  """Every finite scale and what codes are multiplied by; sums are multiplied by UNIT."""
  if format == "nvfp4":
    scale = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return scale, (scale * 2.0**119).astype(ml_dtypes.bfloat16)
  scale = 2.0 ** (np.arange(1, 252, dtype=np.float64) - 127)  # 6 times more is no bfloat16
  return scale, scale.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("place", range(8))
def test_instructions_of_planes_are_exact(format, place):
  """All codes with all scales; the other nibbles of the words are noise."""
  scale, factor = factors_of(format)
  code, index = map(np.ravel, np.meshgrid(np.arange(16), np.arange(len(scale))))
  other = np.roll(code, 7)
  noise = np.random.default_rng(place).integers(0, 2**32, (2, len(code)), np.uint32)
  keep = np.uint32(0xFFFFFFFF ^ (15 << (4 * place)))
  words = (noise & keep) | np.stack([code, other]).astype(np.uint32) << np.uint32(4 * place)
  pair = bf16_pair(factor[index], factor[index[::-1]])
  state = execute(triton_decode.plane_asm(place, format), _1=words[0], _2=words[1], _3=pair)
  expected = np.stack([values_of(code) * scale[index], values_of(other) * scale[index[::-1]]])
  found = as_f64(state["$0"]) * triton_decode.UNIT[format]
  tiny = np.abs(expected) < 2.0**-126  # of the subnormal numbers bfloat16 has every second to none
  np.testing.assert_array_equal(found[~tiny], expected[~tiny])
  assert (np.signbit(found) == np.signbit(expected)).all()  # of zeros, too


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("place", range(4))
def test_instructions_of_pairs_are_exact(format, place):
  scale, factor = factors_of(format)
  code, index = map(np.ravel, np.meshgrid(np.arange(256), np.arange(0, len(scale), 5)))
  low, high = (code & 15).astype(np.uint32), (code >> 4).astype(np.uint32)
  mask = np.uint32((15 << (4 * place)) * 0x10001 ^ 0xFFFFFFFF)
  noise = np.random.default_rng(place).integers(0, 2**32, len(code), np.uint32) & mask
  word = noise | low << np.uint32(4 * place) | high << np.uint32(4 * place + 16)
  twice = bf16_pair(factor[index], factor[index])
  state = execute(triton_decode.pair_asm(place, format), _1=word, _2=twice)
  expected = np.stack([values_of(low), values_of(high)]) * scale[index]
  found = as_f64(state["$0"]) * triton_decode.UNIT[format]
  tiny = np.abs(expected) < 2.0**-126
  np.testing.assert_array_equal(found[~tiny], expected[~tiny])


# --- the kernels, interpreted


def packed(rng, format, out, features, stack=(), exact=True):
  """Random codes, with a block of maxima, of zeros and of negative zeros."""
  codes = rng.integers(0, 256, (*stack, out, features // 2), np.uint8)
  block = codec.BLOCK[format]
  shape = (*stack, out, features // block)
  codes[..., 0, : block // 2], codes[..., -1, : block // 2] = 0x77, 0x80
  codes[..., out // 2, : block // 2] = 0
  if format == "nvfp4":
    scale = rng.choice([0.5, 1, 2], shape) if exact else rng.uniform(0.01, 448, shape)
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
  else:
    scale = rng.integers(*((126, 129) if exact else (110, 140)), shape, np.uint8)
  tensor_scale = rng.choice([0.25, 1, 8], stack) if exact else rng.uniform(1e-3, 1e-2, stack)
  return tuple(map(jnp.asarray, (codes, scale, tensor_scale.astype(np.float32))))


def dense_f64(codes, scale, tensor_scale):
  """[*stack, O, K] decoded by ml_dtypes and NumPy alone."""
  codes = np.asarray(codes)
  values = values_of(np.stack([codes & 15, codes >> 4], -1)).reshape(*codes.shape[:-1], -1)
  if scale.dtype == jnp.uint8:
    scale = 2.0 ** (np.asarray(scale, np.float64) - 127)
  scale = np.asarray(scale, np.float64).repeat(values.shape[-1] // scale.shape[-1], -1)
  return values * scale * np.asarray(tensor_scale, np.float64)[..., None, None]


def run(product, x, w, layer):
  return jax.jit(lambda *a: product(*a, interpret=True))(x, *w, layer)


def check(format, rows, out, features, layers, dtype, exact=True):
  rng = np.random.default_rng(rows + out)
  w = packed(rng, format, out, features, () if layers is None else (layers,), exact)
  layer = None if layers is None else jnp.int32(layers - 1)
  w_OK = dense_f64(*w) if layers is None else dense_f64(*w)[layers - 1]
  for product, matrix in ((triton.forward, w_OK.T), (triton.backward, w_OK)):
    shape = (rows, matrix.shape[0])
    x = rng.integers(-4, 5, shape).astype(np.float32) if exact else rng.normal(size=shape)
    x = jnp.asarray(x, dtype)
    y = run(product, x, w, layer)
    assert y.dtype == dtype and y.shape == (rows, matrix.shape[1])
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if exact:  # sums are multiples of 1/4 below 2^22: exact whatever their order
      np.testing.assert_array_equal(y, np.asarray(x @ matrix).astype(dtype).astype(np.float64))
    else:
      bound = F32_BOUND * (np.abs(x) @ np.abs(matrix))
      bound += BF16_HALF_ULP * np.abs(x @ matrix) if dtype == jnp.bfloat16 else 0
      assert (np.abs(y - x @ matrix) <= bound).all()


# One row; parts; rows and features that are no multiples of a tile; one block.
SHAPES = [("nvfp4", 1, 70, 1088, 3), ("mxfp4", 3, 100, 32, None), ("mxfp4", 65, 200, 288, 2)]
MORE = [(1, 64, 256, None), (17, 130, 96, 2), (40, 136, 8192, None), (200, 264, 352, 1)]


@pytest.mark.parametrize("format, rows, out, features, layers", SHAPES)
def test_sums_of_integers_are_exact(format, rows, out, features, layers):
  check(format, rows, out, features, layers, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows, out, features, layers", MORE)
def test_sums_of_more_integers_are_exact(format, rows, out, features, layers, dtype):
  check(format, rows, out, features, layers, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [target.Gpu((10, 0), 148), target.Gpu((8, 0), 108)])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows, out, features, layers", [(65, 200, 288, 2), MORE[-1]])
def test_sums_of_integers_with_the_tiles_of_other_gpus(
  format, rows, out, features, layers, gpu, monkeypatch
):
  monkeypatch.setattr(target, "gpu", lambda _: gpu)
  check(format, rows, out, features, layers, jnp.bfloat16)


@pytest.mark.parametrize("rows, dtype", [(12, jnp.float32), (3, jnp.bfloat16)])
def test_error_of_random_sums(rows, dtype):
  check("nvfp4", rows, 72, 320, 2, dtype, exact=False)


def test_scales_that_are_no_numbers_or_negative_are_not_hidden():
  codes, scale, tensor_scale = packed(np.random.default_rng(0), "nvfp4", 8, 64)
  bytes_ = np.array(scale).view(np.uint8)
  bytes_[2, 1], bytes_[5] = 0x7F, bytes_[5] | 0x80
  w = (codes, jnp.asarray(bytes_.view(ml_dtypes.float8_e4m3fn)), tensor_scale)
  y = np.asarray(run(triton.forward, jnp.ones((1, 64), jnp.bfloat16), w, None), np.float64)
  expected = dense_f64(*w).sum(-1)
  assert np.isnan(y[0, 2]) and np.isnan(expected[2])
  np.testing.assert_array_equal(np.delete(y[0], 2), np.delete(expected, 2))


@pytest.mark.parametrize("layer, nearest", [(7, 1), (-1, 0)])
def test_a_layer_beyond_the_stack_is_clamped(layer, nearest):
  w = packed(np.random.default_rng(1), "mxfp4", 16, 64, (2,))
  x = jnp.ones((2, 64), jnp.float32)  # whose sums are scaled outside of the kernel
  y, expected = (run(triton.forward, x, w, jnp.int32(n)) for n in (layer, nearest))
  np.testing.assert_array_equal(y, expected)


@pytest.mark.slow
def test_vmap_over_experts():
  rng = np.random.default_rng(2)
  w = packed(rng, "nvfp4", 40, 64, (3,))
  x = jnp.asarray(rng.integers(-4, 5, (3, 5, 64)), jnp.bfloat16)
  experts = jax.vmap(lambda x, *w: triton.forward(x, *w, None, interpret=True))
  y = np.asarray(jax.jit(experts)(x, *w), np.float64)
  exact = np.einsum("emk,eok->emo", np.asarray(x, np.float64), dense_f64(*w))
  np.testing.assert_array_equal(y, exact.astype(ml_dtypes.bfloat16).astype(np.float64))


finite = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-100)


@hp.given(st.lists(finite, min_size=16, max_size=16))  # one shape is compiled once
@hp.settings(max_examples=50)
def test_three_pieces_are_a_float32(values):
  x = np.asarray(values, np.float32)[None]
  pieces = np.asarray(triton.split_float32(jnp.asarray(x)), np.float64)
  assert pieces.shape == (3, x.shape[1])
  np.testing.assert_array_equal(pieces.sum(0), x[0].astype(np.float64))


def test_infinity_is_one_piece():
  pieces = np.asarray(triton.split_float32(jnp.asarray([[np.inf, -np.inf]])), np.float32)
  np.testing.assert_array_equal(pieces.sum(0), [np.inf, -np.inf])


# --- rules


@pytest.mark.parametrize("rows", [1, 8, 32, 33, 64, 65, 129, 4096])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_are_what_triton_takes(rows, format, transposed):
  """Powers of two, blocks that fill words, 16 of each side of a product, work for all."""
  for gpu in {g.capability: g for g in target.GPUS.values()}.values():
    for shape in ((28, 18944, 1792), (3584, 9472), (96, 48)):
      sizes = triton.default_block_sizes(rows, shape, format, transposed, gpu)
      for size in dataclasses.astuple(sizes)[:3]:
        assert size & (size - 1) == 0
      assert sizes.words % triton_decode.WORDS[format] == 0
      assert sizes.rows >= 16 and sizes.features >= 16 and sizes.words >= 8
      assert not (sizes.planes and transposed)
      steps = shape[-2] // sizes.features if transposed else shape[-1] // 4 // sizes.words
      assert 1 <= sizes.parts <= max(1, steps // 4)
  few = triton.default_block_sizes(1, (3584, 9472), "nvfp4", False, H100)
  assert 56 * few.parts >= 4 * H100.multiprocessors  # the down projection of 7B at one row
  assert triton.default_block_sizes(4096, (3584, 9472), "nvfp4", False, H100).parts == 1


@pytest.mark.parametrize(
  "device, reason",
  [
    (target.TARGETS["v6e"], "needs an NVIDIA GPU; this is TPU v6 lite"),
    (target.Target("cuda", "NVIDIA Z1"), "capability of NVIDIA Z1 is not in"),
    (target.Target("cuda", "Tesla T4"), "capability 8.0; Tesla T4 has 7.5"),
    (target.TARGETS["b200"], None),
    (target.Target("cuda", "NVIDIA A100-SXM4-40GB"), None),
  ],
)
def test_why_not(device, reason):
  found = triton.why_not(1, jnp.bfloat16, (4, 64, 64), "nvfp4", device)
  assert found is None if reason is None else reason in found


def test_why_not_for_an_address_that_overflows():
  h100 = target.TARGETS["h100"]
  shape = (2**7, 2**14, 2**14)  # 2^35 codes, 2^32 bytes of NVFP4 scales
  assert "between 2 and 4 GiB of block scales" in triton.why_not(
    1, jnp.bfloat16, shape, "nvfp4", h100
  )
  assert triton.why_not(1, jnp.bfloat16, (2**6, 2**13, 2**14), "nvfp4", h100) is None


@pytest.mark.parametrize("product", [triton.forward, triton.backward])
@pytest.mark.parametrize("rows", [1, 40])
def test_lowers_for_cuda_on_any_host(product, rows):
  spec = jax.ShapeDtypeStruct
  w = (spec((3, 200, 48), jnp.uint8), spec((3, 200, 6), jnp.float8_e4m3fn), spec((3,), jnp.float32))
  x = spec((rows, 96 if product is triton.forward else 200), jnp.bfloat16)
  with target.use_target("h100"):
    traced = jax.jit(product).trace(x, *w, spec((), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("__gpu$xla.gpu.triton") == 1
