"""Low-rank adapters as leaves: attach, choose what trains, merge. y = x W + (alpha / r) (x A) B.

Source: arXiv 2106.09685 §4.1; defaults of QeRL (arXiv 2510.11696) and its scripts. A and B are
float32 masters whatever the base is: in bfloat16 a step of 1e-5 on |a| = 0.012 rounds to nothing.
Dims: L layers, I in, O out, R rank.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key

from jaxlab.nn import weights

PyTree = Any
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "mlp_norm")
_KERNEL = re.compile(r"layers/(?:(?P<layer>\d+)/)?(?P<target>\w+)/kernel")
_NORM = re.compile(rf"layers/(?:\d+/)?({'|'.join(NORMS)})")
_FACTOR = re.compile(r".*/kernel/[ab]")


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """Which kernels get an adapter, and its size.

  rank: R [code NVlabs/QeRL config default; its paper's main tables].
  alpha: the update is scaled by alpha / rank; None means rank, a scale of 1 [ours: never stated in
    the paper].
  targets: names of linears of a layer, in any order [code NVlabs/QeRL utils/configs.py].
  train_norms: also train the gains before attention and MLP, as full copies [code NVlabs/QeRL
    scripts, --ln True]. The final norm stays frozen.
  """

  rank: int = 32
  alpha: float | int | None = None
  targets: tuple[str, ...] = TARGETS
  train_norms: bool = True

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"LoRAConfig: rank must be at least 1; got {self.rank}. Use 8 to 64.")
    if self.alpha is not None and not self.alpha > 0:
      raise ValueError(f"LoRAConfig: alpha must be > 0; got {self.alpha}. Use the rank, or None.")
    unknown = sorted(set(self.targets) - set(TARGETS))
    if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
      raise ValueError(
        f"LoRAConfig: targets must be distinct names of {', '.join(TARGETS)}; got "
        f"{self.targets}. Remove {unknown or 'repeated names, or name at least one'}."
      )

  @property
  def scale(self) -> float:
    return (self.rank if self.alpha is None else self.alpha) / self.rank


def attach(params: PyTree, config: LoRAConfig, key: Key[Array, ""]) -> PyTree:
  """Wraps the target kernels: A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0, both float32.

  The model's function does not change (B = 0). The base is shared, not copied. Each layer's A comes
  from its own key, so stacked and unstacked models get the same adapters.

  Args:
    params: of a causal LM, stacked or not; any kernel type but an adapter.
  Returns: params with `weights.LoRA` leaves; gains that will train are cast to float32 masters.
  Raises: ValueError if a target is absent or has an adapter already.
  """
  found = set()

  def wrap(path: str, w: Any) -> Any:
    if config.train_norms and _NORM.fullmatch(path):
      return w.astype(jnp.float32)
    match = _KERNEL.fullmatch(path)
    if not match or match["target"] not in config.targets:
      return w
    if isinstance(w, weights.LoRA):
      raise ValueError(f"attach: {path} has an adapter already. Merge or detach it first.")
    found.add(match["target"])
    target_key = jax.random.fold_in(key, TARGETS.index(match["target"]))
    *stack, features_in, features_out = w.shape
    if stack:
      layer_keys = jax.vmap(lambda i: jax.random.fold_in(target_key, i))(jnp.arange(stack[0]))
      a = jax.vmap(lambda k: init_a(k, features_in, config.rank))(layer_keys)
    else:
      a = init_a(jax.random.fold_in(target_key, int(match["layer"])), features_in, config.rank)
    b = jnp.zeros((*stack, config.rank, features_out), jnp.float32)
    return weights.LoRA(w, a, b, config.scale)

  adapted = weights.map_leaves(wrap, params)
  if missing := sorted(set(config.targets) - found):
    raise ValueError(f"attach: the model has no kernels named {missing}. Choose other targets.")
  return adapted


def init_a(key: Key[Array, ""], features_in: int, rank: int) -> Float32[Array, "I R"]:
  """Kaiming-uniform with a = sqrt(5), as PEFT initialises A."""
  bound = features_in**-0.5
  return jax.random.uniform(key, (features_in, rank), jnp.float32, -bound, bound)


def is_trainable(config: LoRAConfig) -> Callable[[str], bool]:
  """The predicate for `weights.partition`: adapter factors, and norm gains if asked for."""

  def trains(path: str) -> bool:
    return bool(_FACTOR.fullmatch(path) or (config.train_norms and _NORM.fullmatch(path)))

  return trains


def config_of(params: PyTree) -> LoRAConfig:
  """The config that describes the adapters of `params`; norms count as trained, for a copy of an
  untrained one changes nothing.

  Raises: ValueError without adapters, or if they differ in rank or scale.
  """
  found = {}
  for path, w in weights.leaf_paths(params).items():
    if isinstance(w, weights.LoRA):
      found[_KERNEL.fullmatch(path)["target"]] = (w.a.shape[-1], w.scale)
  if len(set(found.values())) != 1:
    raise ValueError(
      f"config_of: adapters must be there and share rank and scale; got {found}. "
      "Attach them, or pass a LoRAConfig."
    )
  rank, scale = next(iter(found.values()))
  return LoRAConfig(rank, scale * rank, tuple(t for t in TARGETS if t in found))


def merge_adapters(params: PyTree, dtype: jax.typing.DTypeLike | None = None) -> PyTree:
  """Dense kernels in place of adapters: decoded base + scale * A B; norms and the rest stay.

  A packed base is decoded first: the sum goes onto the quantised weight, which the adapter was
  trained with, not onto the original one. The sum is float32, rounded once.

  Args:
    dtype: of the merged kernels; None takes the base's, or the embedding's over a packed base.
  """

  def merged(path: str, w: Any) -> Any:
    if not isinstance(w, weights.LoRA):
      return w
    packed = weights.is_packed(w.base)
    out = dtype or (params["embed"].dtype if packed else w.base.dtype)
    stack_axes = w.a.ndim - 2
    return weights.map_stack(lambda layer: weights.dense(layer, out), w, stack_axes)

  return weights.map_leaves(merged, params)


def detach(params: PyTree) -> PyTree:
  """The base kernels without adapters. Norm gains stay as trained: their old values are gone."""
  return weights.map_leaves(lambda _, w: w.base if isinstance(w, weights.LoRA) else w, params)
