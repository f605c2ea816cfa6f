"""The weight seam: what a kernel may be, and how it multiplies.

A kernel leaf is a dense `jax.Array [*stack, in, out]` or one of the registered pytrees below; they
nest (`LoRA` over `FP4Array` is QeRL). Models call `matmul` and never ask what a leaf is;
quantisers, adapters, optimisers and checkpoints see an ordinary pytree. Packed codes keep the
row-major `[*stack, out, in/2]` order of the checkpoints, so that no second layout ever exists.

Dims: M flattened rows, I in, O out, R rank; `*stack` is `[L]` for stacked layers or empty.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int8, UInt8

from jaxlab.nn import pytree
from pallas_kernels.fp4_gemm import api as fp4_gemm
from pallas_kernels.fp4_gemm import codec
from pallas_kernels.int8_head import api as int8_head

PyTree = Any


@pytree.pytree(static=("format", "activations", "rotation", "scale_is_divisor"))
class FP4Array:
  """A kernel in NVFP4 or MXFP4.

  Invariants: `codes.shape[-1] * 2 == scale.shape[-1] * block`, block 16 (`nvfp4`, e4m3 scale) or 32
  (`mxfp4`, E8M0 exponent byte); element = e2m1(code) * scale * s, where s is `tensor_scale`, or its
  reciprocal when `scale_is_divisor` (scales are kept as read from the checkpoint). `act_scale`,
  a divisor or multiplier likewise, is the static scale of "fp4" activations, for NVFP4 only.
  Each `rotation` columns of x are multiplied by the `rotation_matrix`, else by Hadamard's, first.
  """

  codes: UInt8[Array, "*stack O I_half"]
  scale: Array  # float8_e4m3fn [*stack, O, I/16] or uint8 [*stack, O, I/32]
  tensor_scale: Float32[Array, "*stack"]
  act_scale: Float32[Array, "*stack"] | None = None
  rotation_matrix: Float[Array, "*stack g g"] | None = None  # a checkpoint's own, if not Hadamard
  format: str = "nvfp4"
  activations: str = "none"  # "fp4" fake-quantises the other operand (W4A4)
  rotation: int = 0  # size of the block rotation applied to the activations; 0 for none
  scale_is_divisor: bool = True

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dense kernel, [*stack, in, out]."""
    *stack, o, half = self.codes.shape
    return (*stack, 2 * half, o)

  @property
  def multiplier(self) -> Float32[Array, "*stack"]:
    """What the products are multiplied by: s."""
    return 1.0 / self.tensor_scale if self.scale_is_divisor else self.tensor_scale

  @property
  def act_multiplier(self) -> Float32[Array, "*stack"] | None:
    """The static scale of the other operand as a multiplier; None takes it from each row."""
    if self.act_scale is None or not self.scale_is_divisor:
      return self.act_scale
    return 1.0 / self.act_scale


@pytree.pytree()
class NF4Array:
  """A kernel in NF4, blocks of 64 along in, block maxima stored as 8-bit affine (QLoRA's double
  quantisation): element = NF4[code] * (scale * scale_step + scale_min)."""

  codes: UInt8[Array, "*stack O I_half"]
  scale: UInt8[Array, "*stack O I_block"]
  scale_step: Float32[Array, "*stack"]
  scale_min: Float32[Array, "*stack"]

  @property
  def shape(self) -> tuple[int, ...]:
    *stack, o, half = self.codes.shape
    return (*stack, 2 * half, o)


@pytree.pytree()
class Int8Array:
  """A kernel in int8 with scales along in: element = codes * scale. For heads, also tied ones: an
  embedding [V, D] is the kernel [D, V] of the head."""

  codes: Int8[Array, "*stack O I"]
  scale: Float32[Array, "*stack O k"]  # I / k columns share one

  @property
  def shape(self) -> tuple[int, ...]:
    *stack, o, i = self.codes.shape
    return (*stack, i, o)


@pytree.pytree(static=("scale",))
class LoRA:
  """A low-rank adapter over any kernel: x @ base + scale * (x @ a) @ b (arXiv 2106.09685 eq. 3).

  `a` and `b` are float32 masters, cast to x's dtype in the product; `scale` = alpha / rank is
  static, because a traced scalar has no layer axis to scan over.
  """

  base: Any
  a: Float[Array, "*stack I R"]
  b: Float[Array, "*stack R O"]
  scale: float = 1.0

  @property
  def shape(self) -> tuple[int, ...]:
    return self.base.shape


@pytree.pytree()
class LowRank:
  """A kernel factored as down @ up."""

  down: Float[Array, "*stack I R"]
  up: Float[Array, "*stack R O"]

  @property
  def shape(self) -> tuple[int, ...]:
    return (*self.down.shape[:-1], self.up.shape[-1])


@pytree.pytree()
class At:
  """Layer `index` of a stacked packed leaf. The kernel receives the whole stack and the index, so
  that no layer's codes are copied out at every decoded token."""

  leaf: Any
  index: Int[Array, ""]


@pytree.pytree(static=("split",))
class Sharded:
  """An FP4 kernel, or `At` one of a stack, that lies on a mesh: what a custom kernel must be told,
  and XLA finds by itself. Made around the layers of a running model, never stored."""

  leaf: Any
  split: fp4_gemm.Split


PACKED = (FP4Array, NF4Array, Int8Array)
LEAVES = (*PACKED, LoRA, LowRank, At, Sharded)


def is_leaf(x: Any) -> bool:
  """True for kernel leaf types: the `is_leaf` of tree functions that see kernels as one thing."""
  return isinstance(x, LEAVES)


def is_packed(x: Any) -> bool:
  return isinstance(x, PACKED)


def matmul(x: Float[Array, "*rows I"], w: Any) -> Float[Array, "*rows O"]:
  """x @ w for any kernel without a stack axis (or `At` one layer of a stack), in x's dtype.

  Raises: TypeError for a type that is no kernel.
  """
  match w:
    case LoRA():
      z_MR = _rows(x) @ w.a.astype(x.dtype)
      return matmul(x, w.base) + _adapter(z_MR, w, x.shape[:-1])
    case FP4Array() | At(leaf=FP4Array()) | Sharded():
      (y,) = _fp4(x, [w])
      return y
    case Int8Array():
      return int8_head.int8_head(x, w.codes, w.scale).astype(x.dtype)
    case NF4Array():
      return x @ jnp.swapaxes(_nf4_dense(w, x.dtype), -1, -2)
    case At(leaf=NF4Array()):
      return matmul(x, jax.tree.map(lambda leaf: take(leaf, w.index), w.leaf))
    case LowRank():
      return (x @ w.down.astype(x.dtype)) @ w.up.astype(x.dtype)
    case jax.Array():
      return x @ w.astype(x.dtype)
    case _:
      raise TypeError(
        f"matmul: the kernel must be an array or a leaf of weights.py; got {type(w)}."
      )


def matmul_many(x: Float[Array, "*rows I"], ws: Sequence[Any]) -> tuple[Float[Array, "..."], ...]:
  """`matmul` of one input with several kernels (q/k/v, gate/up).

  Adapters share one thin product x @ [a1 a2 ...] (arXiv 2510.11696 Table 9: from rank 16 to 64 they
  cost 9-12 % of the decode throughput); packed bases one rotation and one rounding of x.
  """
  bases = [w.base if isinstance(w, LoRA) else w for w in ws]
  ys = _fp4(x, bases) if _share_input(bases) else tuple(matmul(x, base) for base in bases)
  if not all(isinstance(w, LoRA) for w in ws):
    thin = [_rows(x) @ w.a.astype(x.dtype) if isinstance(w, LoRA) else None for w in ws]
  else:
    ranks = [w.a.shape[-1] for w in ws]
    down = _rows(x) @ jnp.concatenate([w.a.astype(x.dtype) for w in ws], axis=-1)
    thin = jnp.split(down, [sum(ranks[: i + 1]) for i in range(len(ranks) - 1)], axis=-1)
  return tuple(
    y if z_MR is None else y + _adapter(z_MR, w, x.shape[:-1])
    for y, w, z_MR in zip(ys, ws, thin, strict=True)
  )


def _rows(x: Float[Array, "*rows I"]) -> Float[Array, "M I"]:
  """Rows in one axis: the gradient of an adapter's b contracts over them, eight times slower on a
  CPU over two axes."""
  return x.reshape(-1, x.shape[-1])


def _adapter(z_MR: Float[Array, "M R"], w: LoRA, rows: tuple[int, ...]) -> Float[Array, "*rows O"]:
  return ((z_MR @ w.b.astype(z_MR.dtype)) * w.scale).reshape(*rows, w.b.shape[-1])


def broadcast_bias(
  bias_O: Float[Array, "O"], y: Float[Array, "*rows O"]
) -> Float[Array, "*ones O"]:
  """The bias with y's rank and dtype (rank promotion is an error in our tests)."""
  return bias_O.astype(y.dtype).reshape((1,) * (y.ndim - 1) + bias_O.shape)


def _fp4_of(w: Any) -> tuple[FP4Array | None, Any, fp4_gemm.Split | None]:
  """(kernel, index into its stack, its split) of what may be an FP4 kernel."""
  w, split = (w.leaf, w.split) if isinstance(w, Sharded) else (w, None)
  w, index = (w.leaf, w.index) if isinstance(w, At) else (w, None)
  return (w if isinstance(w, FP4Array) else None), index, split


def _share_input(ws: Sequence[Any]) -> bool:
  """True if what happens to x is the same for all; static scales cannot be compared."""
  kernels = [_fp4_of(w)[0] for w in ws]
  if any(w is None or w.act_scale is not None or w.rotation_matrix is not None for w in kernels):
    return False
  return len({(w.format, w.activations, w.rotation) for w in kernels}) == 1


def _fp4(x, ws: Sequence[Any]):
  """Products with FP4 kernels that share what happens to x; one may have any options."""
  found = [_fp4_of(w) for w in ws]
  w, layer, _ = found[0]
  matrix = w.rotation_matrix
  if matrix is not None:
    x = codec.rotate_by(x, matrix if layer is None else take(matrix, layer))
  return fp4_gemm.fp4_matmul_many(
    x,
    [(w.codes, w.scale, w.multiplier) for w, _, _ in found],
    layer=layer,
    activations=w.activations,
    act_scale=w.act_multiplier,
    rotation=w.rotation if matrix is None else 0,
    split=[split for _, _, split in found],
  )


def _nf4_dense(w: NF4Array, dtype) -> Float[Array, "*stack O I"]:
  step, low = (s[..., None, None] for s in (w.scale_step, w.scale_min))
  return codec.nf4_decode(w.codes, w.scale.astype(jnp.float32) * step + low, dtype)


def take(x: Array, index) -> Array:
  """Entry `index` (may be traced) of the leading axis."""
  return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def dense(w: Any, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "*stack I O"]:
  """The kernel as one array [*stack, in, out]; adapters are merged onto the *decoded* base.

  The rotation of an FP4 kernel is undone, so that x @ dense(w) equals matmul(x, w), but for what
  "fp4" activations round off.
  """
  match w:
    case LoRA():
      update = jnp.matmul(w.a.astype(jnp.float32), w.b.astype(jnp.float32)) * w.scale
      return (dense(w.base, jnp.float32) + update).astype(dtype)
    case FP4Array():
      w_OI = codec.decode(w.codes, w.scale, w.multiplier, jnp.float32)
      if w.rotation_matrix is not None:
        w_OI = codec.rotate_by(w_OI, jnp.swapaxes(w.rotation_matrix, -1, -2))
        return jnp.swapaxes(w_OI, -1, -2).astype(dtype)
      return codec.unrotate(jnp.swapaxes(w_OI, -1, -2), w.rotation).astype(dtype)
    case Int8Array():
      w_OI = codec.scale_blocks(w.codes.astype(jnp.float32), w.scale)
      return jnp.swapaxes(w_OI, -1, -2).astype(dtype)
    case NF4Array():
      return jnp.swapaxes(_nf4_dense(w, dtype), -1, -2)
    case LowRank():
      return (w.down.astype(jnp.float32) @ w.up.astype(jnp.float32)).astype(dtype)
    case _:
      return w.astype(dtype)


def densify(params: PyTree, dtype: jax.typing.DTypeLike = jnp.float32) -> PyTree:
  """Unpacks every FP4 and NF4 kernel, also below an adapter (which stays an adapter).

  For hosts with memory to spare (on a CPU a packed product takes 1.2 to 1.8 times a dense one in
  float32, see pallas_kernels/fp4_gemm/README.md); a caller does this openly, by a logged rule,
  never inside a step.
  """

  def unpack(w):
    return dense(w, dtype) if is_packed(w) else w

  return jax.tree.map(unpack, params, is_leaf=is_packed)


def path_str(path: tuple) -> str:
  """'layers/q/kernel/a' for a key path; the only spelling of paths in the library."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_paths(params: PyTree) -> dict[str, Any]:
  """{path: kernel or array}; a packed leaf or an adapter is one entry."""
  flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
  return {path_str(path): leaf for path, leaf in flat}


def map_leaves(fn: Callable[[str, Any], Any], params: PyTree) -> PyTree:
  """`fn(path, kernel)` over every kernel leaf: how quantisers, adapters and edits walk a model."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: fn(path_str(path), leaf), params, is_leaf=is_leaf
  )


def partition(params: PyTree, is_trainable: Callable[[str], bool]) -> tuple[dict[str, Any], PyTree]:
  """Splits params by the path of each array or shape, e.g. 'layers/q/kernel/a' or
  'layers/attn_norm'.

  Returns: (trainable, frozen): `trainable` is a flat {path: array}; `frozen` is params with None at
    those places. `merge` puts them together again.
  Raises: ValueError if nothing is trainable.
  """
  flat, treedef = jax.tree_util.tree_flatten_with_path(params)
  trainable = {path_str(p): x for p, x in flat if is_trainable(path_str(p))}
  if not trainable:
    raise ValueError(
      f"partition: some parameter must train; got a predicate that refuses all {len(flat)}. "
      "Attach LoRA, or choose other paths."
    )
  rest = [None if path_str(p) in trainable else x for p, x in flat]
  return trainable, jax.tree.unflatten(treedef, rest)


def merge(trainable: dict[str, Any], frozen: PyTree) -> PyTree:
  """The inverse of `partition`; pure and free, to be called inside the jitted step."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(frozen, is_leaf=lambda x: x is None)
  missing = trainable.keys() - {path_str(p) for p, x in flat if x is None}
  if missing:
    raise ValueError(
      "merge: trainable must be of the same partition as frozen; got no free place for "
      f"{sorted(missing)[:3]}. Partition again."
    )
  leaves = [trainable.get(path_str(p)) if x is None else x for p, x in flat]
  return jax.tree.unflatten(treedef, leaves)


def map_stack(fn: Callable[[Any], Any], w: Any, stack_axes: int) -> Any:
  """Applies a per-layer function to each entry of the stack, one at a time (bounded memory)."""
  for _ in range(stack_axes):
    fn = functools.partial(jax.lax.map, fn)
  return fn(w)
