"""What quantising a model did to it: format, bits, and the relative error of every matrix.

Error of a matrix: ||W - W^|| / ||W|| (Frobenius), of W^ as the products see it. Dims: L layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxlab.nn import weights
from jaxlab.quant import fp4


def relative_error(
  before: Float[Array, "*stack I O"], after: weights.FP4Array | weights.NF4Array | Array
) -> Float32[np.ndarray, "*stack"]:
  """The error of each matrix of a stack; 0 for zeros. One matrix in float32 at a time."""
  return np.asarray(_relative_error(before, after))


@jax.jit
def _relative_error(before, after):
  def one(pair):
    w_IO, new_IO = pair[0].astype(jnp.float32), weights.dense(pair[1], jnp.float32)
    largest = jnp.max(jnp.abs(w_IO))
    unit = jnp.where(largest > 0, largest, 1.0)  # squares of huge or tiny weights leave the range
    norm = jnp.linalg.norm(w_IO / unit)
    return jnp.linalg.norm((w_IO - new_IO) / unit) / jnp.where(norm > 0, norm, 1.0)

  return weights.map_stack(one, (before, after), before.ndim - 2)


def formats_of(params: weights.PyTree) -> set[str]:
  """The formats of a model's linears: "nvfp4", "mxfp4", "nf4", or the dtype of dense ones."""

  def format_of_kernel(w) -> str:
    match w.base if isinstance(w, weights.LoRA) else w:
      case weights.FP4Array(format=name):
        return name
      case weights.NF4Array():
        return "nf4"
      case base:
        return str(jax.tree.leaves(base)[0].dtype)

  return {
    format_of_kernel(w)
    for path, w in weights.leaf_paths(params).items()
    if path.startswith("layers/") and path.endswith("/kernel")
  }


def format_of(params: weights.PyTree) -> str:
  """The one format of a model's linears; see `formats_of`.

  Raises: ValueError if there are several.
  """
  found = formats_of(params)
  if len(found) != 1:
    raise ValueError(f"format_of: the linears must share one format; got {sorted(found)}.")
  return found.pop()


def sizes(params: weights.PyTree) -> dict[str, float | int]:
  """Bytes beside those of a bfloat16 model, and bits per quantised weight with their scales.

  Returns: weight_bytes, weight_bytes_bf16 (of the linears), model_bytes, model_bytes_bf16 (what is
    not quantised counts as bfloat16 in both), bits_per_weight.
  """
  linears = fp4.weight_bytes(params)["linears"]
  as_bf16 = lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16)
  bf16 = fp4.weight_bytes(weights.map_leaves(lambda _, w: as_bf16(w), params))
  return {
    "weight_bytes_bf16": bf16["linears"],
    "weight_bytes": linears,
    "model_bytes_bf16": bf16["total"],
    "model_bytes": bf16["total"] - bf16["linears"] + linears,
    "bits_per_weight": 16 * linears / bf16["linears"],
  }
