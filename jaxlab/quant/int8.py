"""An output head in int8: 9 bits a weight instead of 16 or 32, for a twentieth of FP4's error.

In a small model the head is most of what a decoded token reads (SmolLM2: 113 MB of 173 MB in
float32, beside FP4 layers). Element = code * scale, blocks of 32 along the width (as llama.cpp's
Q8_0, but with float32 scales), or one scale a row. Dims: D width, V vocabulary, k blocks of D.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlab.nn import weights
from jaxlab.quant import formats

PyTree = Any
BLOCK = 32  # [code llama.cpp ggml-common.h QK8_0]
MAX = 127  # symmetric: -128 stays unused


def quantize(w_VD: Float[Array, "V D"], block: int = BLOCK) -> weights.Int8Array:
  """Rounds to nearest; each block's largest magnitude becomes 127.

  Args:
    w_VD: rows of the embedding, or the head's kernel transposed.
    block: columns that share a scale; D for one scale a row.
  Raises: ValueError if D is not whole blocks, or for entries that are not finite.
  """
  v, d = w_VD.shape
  if d % block:
    raise ValueError(
      f"int8.quantize: block must divide the width; got {block} and {d}. Use block={d}."
    )
  formats.require_finite("int8.quantize", w_VD)
  blocks = w_VD.astype(jnp.float32).reshape(v, d // block, block)
  # The least normal number keeps 127 / scale finite for a block of zeros.
  least = jnp.finfo(jnp.float32).tiny * MAX
  scale = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), least) / MAX
  codes = jnp.clip(jnp.round(blocks / scale[..., None]), -MAX, MAX).astype(jnp.int8)
  return weights.Int8Array(codes.reshape(v, d), scale)


def quantize_head(params: PyTree, block: int = BLOCK) -> PyTree:
  """`params` with the output matrix in int8: the head, or the embedding where they are tied.

  A tied embedding is int8 for the lookup too. Other parameters are the very same arrays.
  Raises: ValueError if it is not a dense array.
  """
  path = "head" if "head" in params else "embed"
  w = params["head"]["kernel"] if path == "head" else params["embed"]
  if weights.is_leaf(w):
    raise ValueError(
      f"quantize_head: {path} must be dense; got {type(w).__name__}. Quantise it once, and before "
      "adapters are attached."
    )
  if path == "embed":
    return params | {"embed": quantize(w, block)}
  return params | {"head": params["head"] | {"kernel": quantize(w.T, block)}}
