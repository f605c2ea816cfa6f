"""The work of a traced program: multiplications and additions of its matrix products."""

import collections
import math

import jax
import jax.extend

MATRIX_OPS = ("dot_general", "conv_general_dilated")
KERNELS = ("pallas_call", "ffi_call")
# Elements that an integer of packed weights holds: two FP4 codes a byte, one int8.
PER_INTEGER = {"uint8": 2, "uint32": 8, "int32": 8, "int8": 1}


def count(jaxpr: jax.extend.core.Jaxpr, trips: float = 1.0) -> dict[str, float]:
  """{dtype of the operands: multiplications and additions of matrix products}, over all devices.

  Loops of known length count by it, others by `trips`, but once within each other; of branches the
  largest counts. A custom kernel that reads packed weights counts as the product that it stands
  for, any other as nothing.
  """
  total = collections.Counter()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in MATRIX_OPS:
      total[str(eqn.invars[0].aval.dtype)] += _matrix_flops(eqn)
      continue
    if eqn.primitive.name in KERNELS:
      total.update(_kernel_flops(eqn))
      continue
    times, within = 1.0, trips
    if eqn.primitive.name == "scan":
      times = eqn.params["length"]
    elif eqn.primitive.name == "while":
      times, within = trips, 1.0
    elif eqn.primitive.name == "shard_map":  # its body is what one device does
      times = eqn.params["mesh"].size
    inner = [count(sub, within) for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
    if eqn.primitive.name == "cond":
      inner = [max(inner, key=lambda found: sum(found.values()))]
    for found in inner:
      for dtype, n in found.items():
        total[dtype] += n * times
  return dict(total)


def _matrix_flops(eqn) -> float:
  out = math.prod(eqn.outvars[0].aval.shape)
  if eqn.primitive.name == "dot_general":
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * out * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
  kernel = eqn.invars[1].aval.shape
  features = eqn.params["dimension_numbers"].rhs_spec[0]
  return 2.0 * out * math.prod(kernel) / kernel[features]


def _kernel_flops(eqn) -> dict[str, float]:
  """2 * outputs * contracted features; W is [*stack, O, packed], and any other axis of a result
  than its last two are partial sums."""
  arrays = [v.aval for v in eqn.invars]
  packed = [a for a in arrays if a.ndim >= 2 and str(a.dtype) in PER_INTEGER]
  rows = [a for a in arrays if a.ndim >= 2 and str(a.dtype) in ("float32", "bfloat16")]
  if not packed or not rows:
    return {}
  elements = lambda a: math.prod(a.shape[-2:]) * PER_INTEGER[str(a.dtype)]
  w = max(packed, key=elements)
  done = 0.0
  for result in (v.aval for v in eqn.outvars):
    contracted = elements(w) / result.shape[-1]
    if len(eqn.outvars) > 1:  # several W with one x: they share the contracted features
      contracted = elements(w) / w.shape[-2]
    done += 2.0 * math.prod(result.shape[-2:]) * contracted
  return {str(rows[0].dtype): done}
