"""AdamW with global-norm clipping, and weight decay chosen by path; Optax does the work.

Source: arXiv 1711.05101; the defaults are those of QeRL's scripts. Dims: none.
"""

from collections.abc import Callable

import jax
import optax


def adamw(
  lr: float | optax.Schedule,
  *,
  b1: float = 0.9,  # [code NVlabs/QeRL scripts]
  b2: float = 0.99,  # [code NVlabs/QeRL scripts]
  eps: float = 1e-8,  # [code NVlabs/QeRL scripts]
  weight_decay: float = 0.1,  # [code NVlabs/QeRL scripts]
  clip_norm: float | None = None,  # [ours: clip only when asked; QeRL's scripts use 0.2]
  decays: Callable[[str], bool] | None = None,  # [ours: `decays_by_default`]
) -> optax.GradientTransformation:
  """theta <- theta - lr_t * (m_hat / (sqrt(v_hat) + eps) + weight_decay * theta).

  Everything but the clipping is elementwise, and the choice of decayed leaves is by path, so
  stacked and unstacked layers get the same update.

  Args:
    lr: a rate or a function of the update count (`schedules`).
    b1, b2: decay of the first and second moment, in [0, 1).
    eps: added outside the root.
    weight_decay: times lr; 0 for Adam.
    clip_norm: largest global norm of the gradient that goes in, > 0; None for no clipping.
    decays: whether the array at a path decays; None for `decays_by_default`.
  Raises: ValueError for values out of range.
  """
  if not (0 <= b1 < 1 and 0 <= b2 < 1 and eps > 0 and weight_decay >= 0):
    raise ValueError(
      "adamw: must have b1, b2 in [0, 1), eps > 0, weight_decay >= 0; got "
      f"{b1=}, {b2=}, {eps=}, {weight_decay=}."
    )
  if clip_norm is not None and clip_norm <= 0:
    raise ValueError(f"adamw: clip_norm must be > 0, or None for no clipping; got {clip_norm}.")
  decays = decays or decays_by_default

  def mask(trainable: dict[str, jax.Array]) -> dict[str, bool]:
    return {path: decays(path) for path in trainable}

  inner = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)
  return inner if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), inner)


def decays_by_default(path: str) -> bool:
  """No decay on biases and norm gains; kernels, embeddings and the a and b of an adapter decay.

  The rule of transformers' Trainer, by name instead of by rank: stacked norms are matrices.
  """
  last = path.rsplit("/", 1)[-1]
  return last != "bias" and not last.endswith("norm")
