"""The tensors of one FP4 linear in each checkpoint layout. No files and no JSON here.

For a linear X with weight [out, in]; codes hold two columns a byte, the even one in the low nibble,
and block scales are row-major. Element = value(code) * block scale, divided or multiplied by the
tensor scale:

|          | compressed-tensors         | ModelOpt             | FP-Quant                       |
|----------|----------------------------|----------------------|--------------------------------|
| codes u8 | X.weight_packed            | X.weight             | X.qweight                      |
| blocks   | X.weight_scale (e4m3, u8)  | X.weight_scale (e4m3)| X.scales (u8, also of e4m3)    |
| tensor   | X.weight_global_scale [1] /| X.weight_scale_2 [] *| X.weight_global_scale [1] /    |
| acts     | X.input_global_scale [1] / | X.input_scale [] *   | X.act_global_scale [1] /       |
| rotation | transform_config (JSON)    | none                 | X.forward_hadamard_matrix bf16 |

compressed-tensors has no tensor scale for MXFP4, ModelOpt no MXFP4. FP-Quant's `abs_max` MXFP4
stores codes of 3 x / 2^E, so its tensor scales are 3. gpt-oss experts are in `fp4_experts.py`.
Dims: O out, I in, H = I / 2, k = I / block, g rotation.
Sources: neuralmagic/compressed-tensors (compressors, quant_scheme.py), NVIDIA/Model-Optimizer,
IST-DASLab/FP-Quant (inference_lib), arXiv 2509.23202.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlab import errors
from jaxlab.io import fp4_pseudo
from jaxlab.nn import weights
from pallas_kernels.fp4_gemm import codec

PARTS = {
  "compressed_tensors": {
    "codes": "weight_packed",
    "scale": "weight_scale",
    "tensor_scale": "weight_global_scale",
    "act_scale": "input_global_scale",
  },
  "modelopt": {
    "codes": "weight",
    "scale": "weight_scale",
    "tensor_scale": "weight_scale_2",
    "act_scale": "input_scale",
  },
  "fp_quant": {
    "codes": "qweight",
    "scale": "scales",
    "tensor_scale": "weight_global_scale",
    "act_scale": "act_global_scale",
    "rotation": "forward_hadamard_matrix",
    "backward": "backward_hadamard_matrix",
  },
}
PSEUDO = "dqweight"  # FP-Quant: bfloat16 values in place of codes and block scales
ROTATION_SIZES = {"nvfp4": (16, 32, 64, 128), "mxfp4": (32, 64, 128)}  # that FP-Quant has
METHOD_SCALE = {"abs_max": 3.0, "quest": 1.0}  # FP-Quant's constant of MXFP4 activations
MAX_SKEW = 0.05  # of R R^T from the identity
BF16, F32, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), ml_dtypes.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Scheme:
  """How one linear is stored.

  Attributes:
    layout: a key of PARTS.
    format: "nvfp4" or "mxfp4".
    activations: "none" or "fp4".
    static_acts: the activations' tensor scale is stored.
    rotation: compressed_tensors: size of the block Hadamard on the inputs, or 0; fp_quant: size of
      the stored matrix.
    method: fp_quant: how it rounds MXFP4 activations, "abs_max" or "quest".
    transform: fp_quant: what the stored matrix is: "hadamard", "identity" or "gsr".
    pseudo: fp_quant: values are stored in place of codes.
  """

  layout: str
  format: str
  activations: str = "none"
  static_acts: bool = False
  rotation: int = 0
  method: str = "abs_max"
  transform: str = "hadamard"
  pseudo: bool = False


class Packed(NamedTuple):
  """`weights.FP4Array` of host arrays, which may be views of a mapped file; the same fields."""

  codes: np.ndarray
  scale: np.ndarray
  tensor_scale: np.ndarray
  act_scale: np.ndarray | None
  rotation_matrix: np.ndarray | None
  format: str
  activations: str
  rotation: int
  scale_is_divisor: bool

  @property
  def arrays(self) -> dict[str, np.ndarray]:
    """The parts that are there, by field."""
    return {
      name: value
      for name, value in zip(self._fields[:5], self[:5], strict=True)
      if value is not None
    }

  @property
  def kind(self) -> tuple:
    """What layers must share to be stacked in one leaf."""
    return (*self[5:], self.act_scale is not None, self.rotation_matrix is not None)


def to_leaf(packed: Packed) -> weights.FP4Array:
  """The leaf on the default device. Copies: a view of a mapped file would change when it does."""
  arrays = {name: jnp.array(value) for name, value in packed.arrays.items()}
  static = dict(zip(Packed._fields[5:], packed[5:], strict=True))
  return weights.FP4Array(**arrays, **static)


def parts(scheme: Scheme) -> dict[str, str]:
  """{part: suffix of its tensor} of one linear."""
  found = dict(PARTS[scheme.layout])
  if scheme.layout != "fp_quant":
    if scheme.format == "mxfp4":
      del found["tensor_scale"]
    if scheme.format == "mxfp4" or not scheme.static_acts:
      del found["act_scale"]
  if scheme.pseudo:
    found["codes"] = PSEUDO
    del found["scale"]
  return found


# --- reading


def read(
  tensors: Mapping[str, np.ndarray], scheme: Scheme, module: str, file: str = "checkpoint"
) -> Packed:
  """One linear from its tensors, bytes as they are.

  Args:
    tensors: {suffix: array} with the suffixes of `parts`; "backward" may be missing.
    module: name of the linear, for errors.
    file: named in errors.
  Raises: CorruptFile if a tensor is missing, has another dtype or shape, or a scale is not usable
    (not finite, negative, or zero over codes that are not); ValueError for a tensor too many.
  """
  names = parts(scheme)
  damage = lambda part, rule: errors.CorruptFile(file, f"{module}.{names[part]}", rule)
  if extra := sorted(set(tensors) - set(names.values())):
    raise ValueError(
      f"fp4_layouts.read: a linear in layout {scheme.layout} has {', '.join(names.values())}; got "
      f"also {extra} for {module}. Correct config.json."
    )
  for part, name in names.items():
    if name not in tensors and part != "backward":
      raise damage(part, "the tensor must be there; it is missing")
  found = {part: tensors[name] for part, name in names.items() if name in tensors}
  tensor_scale = _read_scalar(found, "tensor_scale", damage)
  if scheme.pseudo:
    _check_dtype(found["codes"], (BF16, F32), "codes", damage)
    codes, scale = fp4_pseudo.recover(
      found["codes"], scheme.format, tensor_scale, lambda rule: damage("codes", rule)
    )
  else:
    codes, scale = found["codes"], _as_stored(found["scale"], scheme)
    check_codes(codes, scale, scheme.format, damage)
  rotation, matrix = _rotation(found, scheme, codes, damage)
  return Packed(
    codes,
    scale,
    tensor_scale,
    _act_scale(found, scheme, damage),
    matrix,
    scheme.format,
    scheme.activations,
    rotation,
    scheme.layout != "modelopt",
  )


def check_codes(codes: np.ndarray, scale: np.ndarray, format: str, damage: Any) -> None:
  """Dtypes, shapes and values of codes and block scales, with any leading axes.

  Args:
    damage: (part, rule) -> the exception to raise.
  """
  block = codec.BLOCK[format]
  if codes.dtype != np.uint8 or codes.ndim < 2 or codes.shape[-1] * 2 % block:
    raise damage(
      "codes",
      f"must be uint8 [out, in/2], in a multiple of {block}; got {codes.dtype} {codes.shape}",
    )
  shape = (*codes.shape[:-1], codes.shape[-1] * 2 // block)
  dtype = np.dtype(E4M3 if format == "nvfp4" else np.uint8)
  if scale.dtype != dtype or scale.shape != shape:
    raise damage(
      "scale", f"must be {dtype} {shape} for codes {codes.shape}; got {scale.dtype} {scale.shape}"
    )
  byte = scale.view(np.uint8)
  unusable = byte >= 0x7F if format == "nvfp4" else byte == 0xFF
  if unusable.any():
    what = "NaN or negative" if format == "nvfp4" else "NaN"
    raise damage("scale", f"{int(unusable.sum())} block scales are {what}")
  zero = np.argwhere(byte == 0) if format == "nvfp4" else np.empty((0, 1), np.int64)
  if len(zero):
    # Some writers give an all-zero block a zero scale; over real codes it would erase them.
    blocks = codes.reshape(*shape, block // 2)[tuple(zero.T)]
    if erased := int(((blocks & 0x77) != 0).any(-1).sum()):
      raise damage("scale", f"{erased} block scales are zero over codes that are not")


def _as_stored(scale: np.ndarray, scheme: Scheme) -> np.ndarray:
  """Scale bytes under the dtype of their meaning: some writers store e4m3 as u8, E8M0 as itself."""
  if scheme.layout == "fp_quant" and scheme.format == "nvfp4" and scale.dtype == np.uint8:
    return scale.view(E4M3)
  if scheme.format == "mxfp4" and scale.dtype == np.dtype(ml_dtypes.float8_e8m0fnu):
    return scale.view(np.uint8)
  return scale


def _read_scalar(found, part, damage) -> np.ndarray:
  """A tensor scale as f32 []; 1 where the layout has none."""
  if part not in found:
    return np.ones((), np.float32)
  _check_dtype(found[part], (F32, BF16), part, damage)
  if found[part].size != 1:
    raise damage(part, f"must be float32 [1]; got {found[part].dtype} {found[part].shape}")
  value = np.asarray(found[part]).reshape(()).astype(np.float32)
  if not (np.isfinite(value) and value > 0):
    raise damage(part, f"the scale must be finite and positive; got {value}")
  return value


def _check_dtype(tensor, dtypes, part, damage):
  if tensor.dtype not in dtypes:
    wanted = " or ".join(str(d) for d in dtypes)
    raise damage(part, f"must be {wanted}; got {tensor.dtype} {tensor.shape}")


def _act_scale(found, scheme: Scheme, damage) -> np.ndarray | None:
  if "act_scale" not in found:
    return None
  value = _read_scalar(found, "act_scale", damage)
  if scheme.format == "nvfp4":
    return value
  # Our MXFP4 activations need no constant (rule `even`); another one would mean another product.
  wanted = METHOD_SCALE[scheme.method]
  if value != wanted:
    raise damage("act_scale", f"must be {wanted:g} for mxfp4 {scheme.method}; got {value:g}")
  return None


def _rotation(found, scheme: Scheme, codes, damage) -> tuple[int, np.ndarray | None]:
  """(size, the stored matrix if it is not ours)."""
  columns = 2 * codes.shape[-1]
  if scheme.layout != "fp_quant":
    size = scheme.rotation
    if size and (size & (size - 1) or columns % size):
      raise damage("codes", f"a Hadamard of {size} does not fit {columns} inputs")
    return size, None
  matrix = found["rotation"]
  _check_dtype(matrix, (BF16, F32), "rotation", damage)
  size = matrix.shape[0] if matrix.ndim else 0
  if matrix.shape != (size, size) or not size or columns % size:
    raise damage(
      "rotation", f"must be square and divide {columns} inputs; got shape {matrix.shape}"
    )
  if size != scheme.rotation:
    raise damage(
      "rotation", f"must have the size that config.json says, {scheme.rotation}; got {matrix.shape}"
    )
  value = matrix.astype(np.float32)
  if not np.isfinite(value).all():
    raise damage("rotation", "must be finite")
  # Weights were multiplied with it, inputs will be: products stay what they were only if R R^T = I.
  # bfloat16 leaves that a hundredth off.
  if not np.abs(value @ value.T - np.eye(size)).max() < MAX_SKEW:
    raise damage("rotation", "must be orthonormal (its rows of length 1, at right angles)")
  return recognise(matrix)


def recognise(matrix: np.ndarray) -> tuple[int, np.ndarray | None]:
  """(rotation, matrix) of a leaf for a stored matrix: a size alone where it is our Hadamard, 0 for
  the identity, else its size and itself."""
  size = matrix.shape[0]
  if np.array_equal(matrix, np.eye(size, dtype=matrix.dtype)):
    return 0, None
  # 1e-6: exact in bfloat16; in float32 other ways to compute 1 / sqrt(size) differ in the last bit.
  value = matrix.astype(np.float32)
  ours = hadamard(size, matrix.dtype).astype(np.float32) if not size & (size - 1) else None
  if ours is not None and np.allclose(value, ours, rtol=1e-6, atol=0):
    return size, None
  return size, matrix


def hadamard(size: int, dtype: Any = BF16) -> np.ndarray:
  """Sylvester's matrix / sqrt(size), rounded to `dtype` as FP-Quant stores it."""
  return (hadamard_signs(size).astype(np.float64) / math.sqrt(size)).astype(dtype)


def hadamard_signs(size: int) -> np.ndarray:
  """Sylvester's matrix of +1 and -1, float32, as compressed-tensors stores it."""
  signs = np.ones((1, 1), np.float32)
  while len(signs) < size:
    signs = np.block([[signs, signs], [signs, -signs]])
  return signs


# --- writing


def scheme_of_leaf(
  w: Any,
  layout: str,
  *,
  method: str = "abs_max",
  group_size: int | None = None,
  pseudo: bool = False,
  module: str = "the kernel",
) -> Scheme:
  """How a leaf is stored in a layout.

  Args:
    w: an `FP4Array` of arrays or shapes, or a `Packed`.
    method, group_size, pseudo: fp_quant: of MXFP4 activations; of the identity that is written for
      an unrotated leaf, None for its block; values in place of codes.
  Raises: ValueError for what the layout has no place for.
  """

  def refuse(rule, way_out):
    return ValueError(f"save: {module} as {layout}: {rule}. {way_out}")

  if layout not in PARTS:
    raise ValueError(f"save: unknown layout {layout!r}. Use one of {', '.join(PARTS)}.")
  static = w.act_scale is not None
  if layout == "modelopt":
    if w.format != "nvfp4" or w.rotation:
      raise refuse(
        f"it holds nvfp4 without rotation; got {w.format}, rotation {w.rotation}",
        "Use compressed_tensors or fp_quant.",
      )
    if w.activations == "fp4" and not static:
      raise refuse(
        "W4A4 needs a static scale of the activations (input_scale); got None",
        "Calibrate it, or quantise with activations='none'.",
      )
  if layout == "compressed_tensors" and w.rotation_matrix is not None:
    raise refuse("its transforms are Hadamard matrices; got another matrix", "Use fp_quant.")
  if layout != "fp_quant":
    return Scheme(layout, w.format, w.activations, static, w.rotation)
  if w.activations != "fp4":
    raise refuse(
      "its programs always round activations to FP4; got activations 'none'",
      "Use compressed_tensors, or quantise with activations='fp4'.",
    )
  if w.format == "nvfp4" and not static:
    raise refuse(
      "it needs a static scale of the activations (act_global_scale); got None", "Calibrate it."
    )
  size = w.rotation or group_size or codec.BLOCK[w.format]
  if size not in ROTATION_SIZES[w.format]:
    raise refuse(
      f"rotations of {w.format} are {ROTATION_SIZES[w.format]}; got {size}", "Use another size."
    )
  transform = "identity" if not w.rotation else "gsr" if w.rotation_matrix is not None else ""
  return Scheme(layout, w.format, "fp4", True, size, method, transform or "hadamard", pseudo)


def part_shape(w: Any, scheme: Scheme, part: str) -> tuple[tuple[int, ...], np.dtype]:
  """Shape and dtype of a tensor that `part` is stored as."""
  if part == "codes":
    *lead, half = w.codes.shape
    return ((*lead, 2 * half), BF16) if scheme.pseudo else (w.codes.shape, np.dtype(np.uint8))
  if part == "scale":
    e4m3 = w.format == "nvfp4" and scheme.layout != "fp_quant"
    return w.scale.shape, np.dtype(E4M3 if e4m3 else np.uint8)
  if part in ("rotation", "backward"):
    return (scheme.rotation,) * 2, BF16
  return () if scheme.layout == "modelopt" else (1,), F32


def make_part(w: Any, scheme: Scheme, part: str) -> np.ndarray:
  """The tensor of one part; `w` as for `scheme_of_leaf`, with values.

  Raises: ValueError for codes of MXFP4 with a tensor scale where the layout has none.
  """
  shape, dtype = part_shape(w, scheme, part)
  if part == "codes":
    _require_no_tensor_scale(w, scheme)
    return fp4_pseudo.values(w) if scheme.pseudo else np.asarray(w.codes)
  if part == "scale":
    return np.asarray(w.scale).view(dtype)
  if part in ("rotation", "backward"):
    return _rotation_matrix(w, scheme.rotation)
  if part == "act_scale" and w.format == "mxfp4":
    return np.full(shape, METHOD_SCALE[scheme.method], dtype)
  value = np.asarray(getattr(w, part), np.float32).reshape(shape)
  same = w.scale_is_divisor == (scheme.layout != "modelopt")
  return value if same else np.asarray(np.float32(1) / value)  # a scalar, of an array of rank 0


def write(module: str, w: Any, scheme: Scheme) -> dict[str, np.ndarray]:
  """All tensors of one linear, {name: array}.

  Raises: ValueError if w is a stack.
  """
  if w.codes.ndim != 2:
    raise ValueError(
      f"save: {module} must be one matrix; got a stack {w.codes.shape}. Write a layer at a time."
    )
  return {
    f"{module}.{suffix}": make_part(w, scheme, part) for part, suffix in parts(scheme).items()
  }


def _require_no_tensor_scale(w, scheme):
  value = float(np.asarray(w.tensor_scale))
  if scheme.layout == "compressed_tensors" and w.format == "mxfp4" and value != 1:
    raise ValueError(
      f"save: compressed_tensors mxfp4 has no tensor scale; got {value:g} (codes of 3 x / 2^E, the "
      "rule fp43). Write fp_quant, or quantise with the rule 'even'."
    )


def _rotation_matrix(w, size: int) -> np.ndarray:
  if w.rotation_matrix is not None:
    return np.asarray(w.rotation_matrix).astype(BF16)
  return hadamard(size) if w.rotation else np.eye(size, dtype=BF16)
