"""The public FP4 product: checks its arguments, picks an implementation by rule, runs it."""

import functools
import importlib
import itertools
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from absl import logging
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8

from pallas_kernels import target
from pallas_kernels.fp4_gemm import codec, reference
from pallas_kernels.fp4_gemm import split as splits
from pallas_kernels.fp4_gemm.split import Split

# Modules of this folder, imported when one is first asked: Pallas costs half a second. Each has
# why_not, and forward or forward_rows; some backward, for which else XLA's serves, and
# forward_many, for several matrices in one call.
KERNELS = ("cpu", "triton", "cudnn", "mosaic_gpu", "blackwell", "mosaic_tpu")
TAKE_ROWS = ("cudnn", "blackwell")  # FP4 by FP4, in hardware
IMPLEMENTATIONS = ("reference", "xla", *KERNELS)
ROTATES = ("mosaic_tpu",)  # whose forward and backward can rotate x too, up to MAX_ROTATION
# Kernels of `hadamard_quantize`, and their modules: each has why_not and forward.
PRODUCERS = {"triton": "producer_triton", "mosaic_tpu": "producer_tpu"}
# Rows from which XLA's own product, which decodes W once, is expected to win over decoding it in
# every tile of rows; by arithmetic, not measured (README).
TRITON_ROWS = {9: 1024}
TRITON_ROWS_ELSE = 448
CUDNN_ROWS = 128  # it pads to these, and rearranges the scales of W at every call
ACTIVATIONS = ("none", "fp4")
# codes [*stack, O, H], scale [*stack, O, k], tensor_scale [*stack]
Packed = tuple[UInt8[Array, "..."], Shaped[Array, "..."], Float32[Array, "..."]]


def fp4_matmul(
  x: Float[Array, "*lead K"],
  codes: UInt8[Array, "*stack O H"],
  scale: Shaped[Array, "*stack O k"],
  tensor_scale: Float32[Array, "*stack"],
  *,
  layer: Int[Array, ""] | int | None = None,
  activations: str = "none",
  act_scale: Float32[Array, "*stack"] | None = None,
  rotation: int = 0,
  split: Split | None = None,
  implementation: str | None = None,
) -> Float[Array, "*lead O"]:
  """x @ W for W in NVFP4 or MXFP4, with float32 sums.

  Differentiable in x only (dx = dy @ W^T, straight through the rounding of activations); works
  under jit, scan, remat and vmap.

  Args:
    x: float32 or bfloat16.
    codes: two E2M1 codes a byte along K (H = K / 2), even k in the low nibble.
    scale: float8_e4m3fn, one per 16 of K (NVFP4), or uint8 E8M0 exponents, one per 32 (MXFP4).
    tensor_scale: multiplier, applied to the float32 sums (1 / g where a file stores the divisor g).
    layer: index into the stack when there is one stack axis, in [0, L); traced values are clamped.
    activations: "none" (W4A16), or "fp4": x is rounded to the format of W first (W4A4; simulated
      where the device has no FP4 units).
    act_scale: NVFP4 with "fp4": static multiplier for x; None takes it from each row.
    rotation: size of the block Hadamard applied to x first (W must be rotated already); 0 for none.
    split: how W lies on a mesh. Kernels then run on each device's part; XLA's own product needs no
      telling, it is partitioned like a dense one. W is split along O, or along K at multiples of
      the block.
    implementation: None (by rule), or one of IMPLEMENTATIONS.
  Returns: [*lead, O] in x's dtype.
  Raises: ValueError for shapes, dtypes or options that do not fit together; NotImplementedError
    for a forced implementation that cannot run here, with the reason.
  """
  (y,) = fp4_matmul_many(
    x, [(codes, scale, tensor_scale)], layer=layer, activations=activations, act_scale=act_scale,
    rotation=rotation, split=[split], implementation=implementation,
  )  # fmt: skip
  return y


def fp4_matmul_many(
  x: Float[Array, "*lead K"],
  packed: Sequence[Packed],
  *,
  layer: Int[Array, ""] | int | None = None,
  activations: str = "none",
  act_scale: Float32[Array, "*stack"] | None = None,
  rotation: int = 0,
  split: Sequence[Split | None] = (),
  implementation: str | None = None,
) -> tuple[Float[Array, "..."], ...]:
  """`fp4_matmul` of one x with several W of one format: x is rotated and rounded once.

  Args:
    packed: (codes, scale, tensor_scale) of each W.
    split: one for each W, or empty.
  """
  for codes, scale, tensor_scale in packed:
    _check(x, codes, scale, tensor_scale, layer)
    _check_options(x, scale, activations, act_scale, rotation)
  (format,) = {codec.format_of(scale) for _, scale, _ in packed}
  layer = None if layer is None else jnp.asarray(layer, jnp.int32)
  if act_scale is not None and layer is not None:
    act_scale = jax.lax.dynamic_index_in_dim(act_scale, layer, 0, keepdims=False)
  device = target.current_target()
  names = [
    _choose(
      implementation, device, x.size // x.shape[-1], x.dtype, codes.shape, format, activations
    )
    for codes, _, _ in packed
  ]
  rows = None
  if any(name in TAKE_ROWS for name in names):
    fixed = jax.lax.stop_gradient(x)
    rows = hadamard_quantize(fixed, format, rotation=rotation, act_scale=act_scale)
  rotated = codec.rotate(x, rotation)
  if activations == "fp4" and not all(name in TAKE_ROWS for name in names):
    rounded = codec.fake_quantize(rotated, format, act_scale)
  else:
    rounded = rotated
  ys = []
  same = lambda item: item[:2]  # neighbours of one implementation and one split go together
  items = zip(names, split or [None] * len(packed), packed, strict=True)
  for (name, one_split), group in itertools.groupby(items, same):
    ws = tuple(tuple(w) for _, _, w in group)
    with jax.named_scope(f"fp4_matmul:{name}"):  # read by profilers and by `launch.plan`
      if name in TAKE_ROWS:
        ys += [_product_of_rows(name, one_split, rotated, rows, *w, layer) for w in ws]
      elif name == "reference":  # autodiff of plain jnp: the oracle of the gradients too
        ys += [reference.forward(rounded, *w, layer) for w in ws]
      elif activations == "none" and _rotates(name, rotation, one_split, x.shape[-1]):
        ys += _products(name, rotation, one_split, x, ws, layer)
      else:
        ys += _products(name, 0, one_split, rounded, ws, layer)
  return tuple(ys)


def hadamard_quantize(
  x: Float[Array, "*rows K"],
  format: str,
  *,
  rotation: int = 0,
  act_scale: Float32[Array, ""] | None = None,
  implementation: str | None = None,
) -> codec.Rows:
  """x rotated in blocks and rounded to FP4 rows, in one pass where a kernel does it.

  Args:
    format: "nvfp4" or "mxfp4".
    rotation: size of the block Hadamard, 0 for none.
    act_scale: nvfp4 only, a static multiplier; None takes one from each row.
    implementation: None (by rule: the kernel that can run here), "xla", or one of PRODUCERS.
  Raises: ValueError for what does not fit together; NotImplementedError for a forced
    implementation that cannot run here.
  """
  _check_rotation(x.shape[-1], rotation)
  _check_act_scale("fp4", format, act_scale)
  if x.shape[-1] % codec.BLOCK[format]:
    raise ValueError(
      f"hadamard_quantize: x must have a multiple of {codec.BLOCK[format]} columns; got {x.shape}. "
      "Choose the other format, or pad."
    )
  rows, device = x.size // x.shape[-1], target.current_target()
  name = _choose_producer(implementation, device, rows, x.dtype, x.shape[-1], format, rotation)
  with jax.named_scope(f"hadamard_quantize:{name}"):
    if name == "xla":
      return codec.quantize_rows(codec.rotate(x, rotation), format, act_scale)
    flat = _module(PRODUCERS[name]).forward(x.reshape(rows, -1), format, rotation, act_scale)
  return codec.Rows(*(part.reshape(*x.shape[:-1], *part.shape[1:]) for part in flat))


@functools.cache
def _module(name: str) -> ModuleType:
  return importlib.import_module(f"pallas_kernels.fp4_gemm.{name}")


def _rotates(name, rotation, split, features) -> bool:
  """True if the kernel is to rotate x: whole blocks of every device's part."""
  if name not in ROTATES or not rotation:
    return False
  parts = split.mesh.shape[split.in_axis] if split and split.in_axis else 1
  return rotation <= _module(name).MAX_ROTATION and features // parts % rotation == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _products(name, rotation, split, x, ws, layer):
  """rotate(x) @ W for each (codes, scale, tensor_scale) of `ws`."""
  many = getattr(_module(name), "forward_many", None)
  if many is None or split is not None or len(ws) == 1:
    forward = _rotating(_module(name).forward, rotation)
    return [_run(forward, split, name, x, w, layer) for w in ws]
  ys = many(x.reshape(-1, x.shape[-1]), ws, layer)
  return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys]


def _products_forward(name, rotation, split, x, ws, layer):
  return _products(name, rotation, split, x, ws, layer), (ws, layer)


def _products_backward(name, rotation, split, residuals, dys):
  ws, layer = residuals
  each = [_transposed(name, rotation, split, dy, w, layer) for dy, w in zip(dys, ws, strict=True)]
  return sum(each), None, None


_products.defvjp(_products_forward, _products_backward)


def _transposed(name, rotation, split, dy, w, layer):
  if not hasattr(_module(name), "backward"):
    name = "xla"
  backward = _rotating(_module(name).backward, rotation)
  return _run(backward, split, name, dy, w, layer, transposed=True)


def _rotating(product, rotation):
  return functools.partial(product, rotation=rotation) if rotation else product


def _run(product, split, name, x, w, layer, *, transposed=False):
  """XLA's own product takes any leading axes and is partitioned by XLA; kernels take rows."""
  if name == "xla":
    return product(x, *w, layer)

  def flat(x, codes, scale, tensor_scale, layer):
    y = product(x.reshape(-1, x.shape[-1]), codes, scale, tensor_scale, layer)
    return y.reshape(*x.shape[:-1], y.shape[-1])

  if split is None:
    return flat(x, *w, layer)
  return splits.run(flat, split, x, w, layer, transposed=transposed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product_of_rows(name, split, x, rows, codes, scale, tensor_scale, layer):
  """W4A4 in hardware. `x`, of which `rows` were made, is there for its dtype and its gradient."""
  forward = functools.partial(_module(name).forward_rows, dtype=x.dtype)

  def flat(rows, codes, scale, tensor_scale, layer):
    lead = rows.codes.shape[:-1]
    merged = codec.Rows(*(part.reshape(-1, *part.shape[len(lead) :]) for part in rows))
    y = forward(merged, codes, scale, tensor_scale, layer)
    return y.reshape(*lead, y.shape[-1])

  packed = (codes, scale, tensor_scale)
  return (
    flat(rows, *packed, layer) if split is None else splits.run(flat, split, rows, packed, layer)
  )


def _rows_forward(name, split, x, rows, codes, scale, tensor_scale, layer):
  y = _product_of_rows(name, split, x, rows, codes, scale, tensor_scale, layer)
  return y, (codes, scale, tensor_scale, layer)


def _rows_backward(name, split, residuals, dy):
  *w, layer = residuals
  return _transposed(name, 0, split, dy, w, layer), None, None, None, None, None


_product_of_rows.defvjp(_rows_forward, _rows_backward)


@functools.cache
def _choose(asked, device, rows, dtype, shape, format, activations) -> str:
  """The implementation for one product: the first of the device's that can and should run it."""
  if asked not in (None, *IMPLEMENTATIONS):
    raise ValueError(
      f"fp4_matmul: unknown implementation; got {asked!r}. "
      f"Use one of {', '.join(IMPLEMENTATIONS)}, or None."
    )
  refusal = lambda name: _refusal(name, rows, dtype, shape, format, device, activations)
  if asked is not None:
    if reason := refusal(asked):
      raise NotImplementedError(
        f"fp4_matmul: {asked!r} cannot run here: {reason}. Pass None to leave the choice."
      )
    _say(f"fp4_matmul: '{asked}' on {device.device_kind} (as asked)")
    return asked
  for name in candidates(device, rows, activations):
    reason = refusal(name)
    if reason is None:
      _say(f"fp4_matmul: '{name}' on {device.device_kind} (first of its list that can run)")
      return name
    _say(f"fp4_matmul: not '{name}' on {device.device_kind}: {reason}")
  raise AssertionError("'xla' always can")


def _refusal(name, rows, dtype, shape, format, device, activations) -> str | None:
  if name in ("xla", "reference"):
    return None
  if name in TAKE_ROWS and activations != "fp4":
    return "it multiplies FP4 by FP4, and activations are 'none'"
  return _module(name).why_not(rows, dtype, shape, format, device)


def candidates(device: target.Target, rows: int, activations: str) -> tuple[str, ...]:
  """Implementations in the order in which the rule tries them; "xla" ends every list."""
  if device.platform in ("cpu", "tpu"):
    return ("cpu" if device.platform == "cpu" else "mosaic_tpu", "xla")
  found = []
  if device.platform == "cuda":
    if activations == "fp4" and rows >= CUDNN_ROWS:
      found.append("cudnn")
    gpu = target.gpu(device)
    if gpu is not None and rows <= TRITON_ROWS.get(gpu.capability[0], TRITON_ROWS_ELSE):
      found.append("triton")
  return (*found, "xla")


@functools.cache
def _choose_producer(asked, device, rows, dtype, features, format, rotation) -> str:
  if asked not in (None, "xla", *PRODUCERS):
    raise ValueError(
      f"hadamard_quantize: unknown implementation; got {asked!r}. "
      f"Use one of {', '.join(('xla', *PRODUCERS))}, or None."
    )
  refusal = lambda name: _module(PRODUCERS[name]).why_not(
    rows, dtype, features, format, rotation, device
  )
  if asked in PRODUCERS and (reason := refusal(asked)):
    raise NotImplementedError(
      f"hadamard_quantize: {asked!r} cannot run here: {reason}. Pass None to leave the choice."
    )
  if asked is not None:
    return asked
  names = () if device.platform == "cpu" else PRODUCERS  # to import Pallas takes half a second
  return next((name for name in names if refusal(name) is None), "xla")


@functools.cache
def _say(line: str) -> None:
  logging.info("%s", line)


def _check(x, codes, scale, tensor_scale, layer):
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"fp4_matmul: x must be float32 or bfloat16; got {x.dtype}. Cast it.")
  if codes.dtype != jnp.uint8:
    raise ValueError(f"fp4_matmul: codes must be uint8, two a byte; got {codes.dtype}. Pack them.")
  block = codec.BLOCK[codec.format_of(scale)]
  *stack, features, half = codes.shape
  if x.shape[-1] != 2 * half:
    raise ValueError(
      f"fp4_matmul: x must have {2 * half} columns for codes {codes.shape}; got {x.shape}. "
      "Kernels are packed as [out, in / 2]."
    )
  if 2 * half % block or scale.shape != (*stack, features, 2 * half // block):
    raise ValueError(
      f"fp4_matmul: scale must be [*stack, out, in / {block}] for codes {codes.shape}; "
      f"got {scale.shape}. Check the format and that in is a multiple of {block}."
    )
  if tensor_scale.shape != tuple(stack):
    raise ValueError(
      f"fp4_matmul: tensor_scale must have the stack's shape {tuple(stack)}; "
      f"got {tensor_scale.shape}. Give one multiplier a matrix."
    )
  if len(stack) != (layer is not None):
    raise ValueError(
      f"fp4_matmul: codes must be one matrix, or a stack of one axis with a layer; got "
      f"{codes.shape} and layer={layer}. Pass layer, or use jax.vmap."
    )
  if isinstance(layer, int) and not 0 <= layer < stack[0]:
    raise ValueError(f"fp4_matmul: layer must be in [0, {stack[0]}); got {layer}. Count from 0.")


def _check_options(x, scale, activations, act_scale, rotation):
  if activations not in ACTIVATIONS:
    raise ValueError(
      f"fp4_matmul: activations must be one of {', '.join(ACTIVATIONS)}; got {activations!r}. "
      "Use 'none' for W4A16."
    )
  _check_act_scale(activations, codec.format_of(scale), act_scale)
  _check_rotation(x.shape[-1], rotation)


def _check_act_scale(activations, format, act_scale):
  if act_scale is not None and (activations, format) != ("fp4", "nvfp4"):
    raise ValueError(
      f"fp4_matmul: act_scale needs activations='fp4' and nvfp4; got activations={activations!r} "
      f"and {format}. Pass None."
    )


def _check_rotation(features, rotation):
  if rotation and (rotation < 2 or rotation & (rotation - 1) or features % rotation):
    raise ValueError(
      f"fp4_matmul: rotation must be a power of two that divides in={features}; got {rotation}. "
      "Use the size that the weights were rotated with, or 0."
    )
