"""x @ W for a packed W on a CPU, in native code: `cpu_src/`, called through `jax.ffi`.

One to five rows of x: codes are decoded in registers, and the way from memory counts, 4.5 bits a
weight instead of 32. Up to `DENSE_ROWS`: a tile of W is decoded at a time. More: it decodes
one matrix and XLA multiplies, as its product of large matrices is the fastest there is. Nothing is
repacked, a layer is read from the stack in place, the work is spread over XLA's own threads, sums
are float32. The instruction set is chosen at run time: AVX-512 (with VNNI for int8), AVX2, or what
the compiler makes of plain code. Dims: M rows, O out, K in, H = K / 2.
"""

import ctypes
import functools
import pathlib
import platform
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8

from pallas_kernels import ffi_build, target
from pallas_kernels.fp4_gemm import codec

SOURCES = pathlib.Path(__file__).parent / "cpu_src"
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
UNITS = (ffi_build.Unit("ffi.cc"), ffi_build.Unit("portable.cc"))
X86_UNITS = (
  ffi_build.Unit("avx2.cc", AVX2),
  ffi_build.Unit("avx512.cc", AVX512),
  ffi_build.Unit("avx512_vnni.cc", (*AVX512, "-mavx512vnni")),
)
# Rows of x beyond which decoding W to memory is worth it, as measured with AVX-512 (README.md).
DENSE_ROWS = {jnp.dtype(jnp.float32): 256, jnp.dtype(jnp.bfloat16): 64}
Packed = tuple[UInt8[Array, "..."], Shaped[Array, "..."], Float32[Array, "..."]]


def why_not(
  rows: int,
  x_dtype: jax.typing.DTypeLike,
  codes_shape: tuple[int, ...],
  format: str,
  device: target.Target,
) -> str | None:
  """None if the product can run on `device`, else one sentence. Compiles the library if need be."""
  del rows
  if device.platform != "cpu":
    return f"it runs on a CPU, not on {device.device_kind}"
  if x_dtype not in (jnp.float32, jnp.bfloat16):
    return f"x must be float32 or bfloat16, not {jnp.dtype(x_dtype)}"
  if len(codes_shape) > 3 or 2 * codes_shape[-1] % codec.BLOCK[format]:
    block = codec.BLOCK[format]
    return f"codes must be [O, H] or [L, O, H], whole blocks of {block}, not {codes_shape}"
  return why_no_library()


def forward(
  x_MK: Float[Array, "M K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None = None,
  *,
  int8: bool = False,
  isa: str = "",
) -> Float[Array, "M O"]:
  """tensor_scale * (x @ W) of one matrix or of entry `layer` of a stack, in x's dtype.

  Args:
    layer: clamped to the stack.
    int8: x is rounded to int8 by blocks of 32 first, as llama.cpp does: faster with AVX2 and for
      several rows (README); costs some accuracy.
    isa: one of `isas()`; "" is the best of them.
  """
  (y_MO,) = forward_many(x_MK, [(codes, scale, tensor_scale)], layer, int8=int8, isa=isa)
  return y_MO


def forward_many(
  x_MK: Float[Array, "M K"],
  packed: Sequence[Packed],
  layer: Int[Array, ""] | None = None,
  *,
  int8: bool = False,
  isa: str = "",
) -> tuple[Float[Array, "..."], ...]:
  """`forward` with several matrices of one format in one call, so that threads meet once."""
  rows = x_MK.shape[0]
  if rows > DENSE_ROWS[x_MK.dtype] and not int8:
    return tuple(
      _dense_product(x_MK, decode(*w, layer, dtype=x_MK.dtype, isa=isa), (1,), w[2], layer)
      for w in packed
    )
  results = [jax.ShapeDtypeStruct((rows, codes.shape[-2]), x_MK.dtype) for codes, _, _ in packed]
  call = jax.ffi.ffi_call(_target("jaxlab_fp4_forward"), results, vmap_method="sequential")
  operands = [part for w in packed for part in w]
  return tuple(call(x_MK, _index(layer), *operands, isa=isa, int8=int8))


def backward(
  dy_MO: Float[Array, "M O"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None = None,
  *,
  isa: str = "",
) -> Float[Array, "M K"]:
  """tensor_scale * (dy @ W^T), in dy's dtype."""
  if dy_MO.shape[0] > DENSE_ROWS[dy_MO.dtype]:
    w_OK = decode(codes, scale, tensor_scale, layer, dtype=dy_MO.dtype, isa=isa)
    return _dense_product(dy_MO, w_OK, (0,), tensor_scale, layer)
  result = jax.ShapeDtypeStruct((dy_MO.shape[0], 2 * codes.shape[-1]), dy_MO.dtype)
  call = jax.ffi.ffi_call(_target("jaxlab_fp4_backward"), result, vmap_method="sequential")
  return call(dy_MO, _index(layer), codes, scale, tensor_scale, isa=isa)


def decode(
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  layer: Int[Array, ""] | None = None,
  *,
  dtype: jax.typing.DTypeLike,
  isa: str = "",
) -> Float[Array, "O K"]:
  """One matrix without its tensor scale: exact in bfloat16 and in float32."""
  result = jax.ShapeDtypeStruct((codes.shape[-2], 2 * codes.shape[-1]), dtype)
  call = jax.ffi.ffi_call(_target("jaxlab_fp4_decode"), result, vmap_method="sequential")
  return call(_index(layer), codes, scale, tensor_scale, isa=isa)


def _dense_product(a, w_OK, w_axes, tensor_scale, layer):
  """The same semantics by XLA: float32 sums, times the tensor scale, in a's dtype."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  dims = (((1,), w_axes), ((), ()))
  sums = jax.lax.dot_general(a, w_OK, dims, precision=exact, preferred_element_type=jnp.float32)
  if layer is not None:
    tensor_scale = jax.lax.dynamic_index_in_dim(tensor_scale, layer, 0, keepdims=False)
  return (sums * tensor_scale).astype(a.dtype)


def int8_head(
  x_MK: Float[Array, "M K"],
  codes_OK: Shaped[Array, "O K"],
  scale_Ok: Float32[Array, "O k"],
  *,
  isa: str = "",
) -> Float32[Array, "M O"]:
  """x @ W for W[k, o] = codes[o, k] * scale, float32 sums; k is K / 32, or 1."""
  result = jax.ShapeDtypeStruct((x_MK.shape[0], codes_OK.shape[0]), jnp.float32)
  call = jax.ffi.ffi_call(_target("jaxlab_int8_head"), result, vmap_method="sequential")
  return call(x_MK, codes_OK, scale_Ok, isa=isa)


def why_no_library() -> str | None:
  """None if there is a native library; it is compiled at the first question."""
  library = _library()
  return library if isinstance(library, str) else None


def isas() -> tuple[str, ...]:
  """The instruction sets that this CPU can run, the best one last."""
  library = _library()
  if isinstance(library, str):
    return ()
  library.jaxlab_isas.restype = ctypes.c_char_p
  return tuple(library.jaxlab_isas().decode().split())


def _index(layer) -> Int[Array, ""]:
  return jnp.int32(0) if layer is None else layer


def _library() -> ctypes.CDLL | str:
  units = UNITS + (X86_UNITS if platform.machine() in ("x86_64", "AMD64") else ())
  return ffi_build.load("jaxlab_cpu", SOURCES, units)


def _target(handler: str) -> str:
  """The registered name of a handler; it tells builds apart, as XLA's cache of programs must."""
  library = _library()
  if isinstance(library, str):
    raise NotImplementedError(f"fp4_matmul: 'cpu' cannot run here: {library}. Pass None.")
  return _register(library.tag, handler)


@functools.cache
def _register(tag: str, handler: str) -> str:
  name = f"{handler}_{tag}"
  pointer = getattr(_library(), handler)
  jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(pointer), platform="cpu")
  return name
