"""Equations of `policy_gradient.py`: arrays in, arrays out. Its docstring has the legend.

  rho_t = exp(clip(delta_t, -20, 20))                                    importance_ratio
  l_t   = w_t * -min(rho_t A, clip(rho_t, 1 - e_lo, 1 + e_hi) A)         clipped_loss
          + beta KL_t                                                    kl_estimate
  w_t   = f(pi_old / mu), no gradient                                    correction_weight
  loss  = sum of l m over a denominator the variant names                aggregate

Sources: GRPO arXiv 2402.03300, DAPO arXiv 2503.14476, Dr. GRPO arXiv 2503.20783, GSPO arXiv
2507.18071; conventions of huggingface/trl f2cd577 [TRL] and volcengine/verl b178a3c [VERL].
Dims: B sequences, T completion tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlab.objectives.weighted import Weighted

LOG_RATIO_LIMIT = 20.0  # [VERL]: exp(20) is 4.9e8, far past any clip, far from overflow


def importance_ratio(
  log_ratio_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], *, sequence: bool = False
) -> Float[Array, "B T"]:
  """exp of the clamped log ratio; `sequence` (GSPO) averages the log ratio over each row first."""
  log_ratio_BT = jnp.where(mask_BT, log_ratio_BT, 0.0)
  if sequence:
    mean_B1 = log_ratio_BT.sum(1, keepdims=True) / jnp.maximum(mask_BT.sum(1, keepdims=True), 1)
    log_ratio_BT = jnp.broadcast_to(mean_B1, log_ratio_BT.shape)
  return jnp.exp(jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_loss(
  ratio_BT: Float[Array, "B T"],
  advantage_B: Float[Array, "B"],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float | None = None,
) -> Float[Array, "B T"]:
  """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), PPO's bound with two sides.

  `dual_clip` c bounds the loss of a negative advantage by -c A, so that a token which became far
  more likely cannot dominate (arXiv 1912.09729).
  """
  advantage_B1 = advantage_B[:, None]
  clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
  loss_BT = -jnp.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
  if dual_clip is None:
    return loss_BT
  return jnp.where(advantage_B1 < 0, jnp.minimum(loss_BT, -dual_clip * advantage_B1), loss_BT)


def kl_estimate(
  logp_BT: Float[Array, "B T"],
  logp_ref_BT: Float[Array, "B T"],
  *,
  kind: str = "k3",
  log_clamp: float | None = None,
  value_clamp: float | None = None,
) -> Float[Array, "B T"]:
  """Per-token KL(pi || ref) from samples of pi, with d = log ref - log pi.

  k1 = -d; k2 = d^2/2; k3 = e^d - d - 1; "k3+" has the value of k3 and the gradient of k2, whose
  expectation is the true gradient of the KL [VERL]. Clamps have zero gradient where they bind.
  """
  d_BT = logp_ref_BT - logp_BT
  if log_clamp is not None:
    d_BT = jnp.clip(d_BT, -log_clamp, log_clamp)
  k2_BT = 0.5 * d_BT * d_BT
  k3_BT = jnp.expm1(d_BT) - d_BT
  straight_BT = k2_BT + jax.lax.stop_gradient(k3_BT - k2_BT)
  value_BT = {"k1": -d_BT, "k2": k2_BT, "k3": k3_BT, "k3+": straight_BT}[kind]
  return value_BT if value_clamp is None else jnp.clip(value_BT, -value_clamp, value_clamp)


def correction_weight(
  log_weight_BT: Float[Array, "B T"],
  mask_BT: Bool[Array, "B T"],
  *,
  mode: str,
  cap: float,
  cap_low: float = 0.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Importance weight of tokens sampled by mu for a loss written under pi_old, stop-gradient.

  Args:
    log_weight_BT: log pi_old - log mu.
    mode: "token_*" weighs each token, "sequence_*" each row by exp of the sum over its tokens;
      "*_truncate" takes min(w, cap), "*_mask" drops weights outside [cap_low, cap] (the denominator
      of the loss keeps counting them); "none" and "bypass" weigh 1.
  Returns: (weight_BT, raw_BT), the second before the cap, per token for "none" and "bypass".
  """
  log_weight_BT = jax.lax.stop_gradient(jnp.where(mask_BT, log_weight_BT, 0.0))
  if mode.startswith("sequence"):
    sum_B1 = log_weight_BT.sum(1, keepdims=True)
    log_weight_BT = jnp.broadcast_to(sum_B1, log_weight_BT.shape)
  raw_BT = jnp.exp(jnp.clip(log_weight_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
  if mode.endswith("truncate"):
    return jnp.minimum(raw_BT, cap), raw_BT
  if mode.endswith("mask"):
    return jnp.where((raw_BT >= cap_low) & (raw_BT <= cap), raw_BT, 0.0), raw_BT
  return jnp.ones_like(raw_BT), raw_BT


def aggregate(
  loss_BT: Float[Array, "B T"],
  mask_BT: Bool[Array, "B T"],
  valid_B: Bool[Array, "B"],
  *,
  loss: str,
  max_tokens: int | None = None,
) -> Weighted:
  """Total and denominator of one micro-batch; the sums over micro-batches give the variant exactly.

  dapo: sum l m over all tokens of the optimiser batch. grpo, gspo: mean over sequences of the mean
  over tokens, an empty row counting as 0 [TRL]. bnpo: the ratio of this micro-batch with weight 1,
  averaged over micro-batches. dr_grpo: sum l m over N * max_tokens.
  """
  loss_BT = jnp.where(mask_BT, loss_BT, 0.0)
  tokens_B = mask_BT.sum(1).astype(jnp.float32)
  rows = valid_B.sum().astype(jnp.float32)
  if loss == "dapo":
    return Weighted(loss_BT.sum(), tokens_B.sum())
  if loss == "bnpo":
    # Rows that only fill the batch are no micro-batch.
    return Weighted(loss_BT.sum() / jnp.maximum(tokens_B.sum(), 1.0), jnp.minimum(rows, 1.0))
  if loss == "dr_grpo":
    return Weighted(loss_BT.sum(), rows * max_tokens)
  return Weighted((loss_BT.sum(1) / jnp.maximum(tokens_B, 1.0)).sum(), rows)


def mismatch_metrics(
  log_weight_BT: Float[Array, "B T"],
  raw_BT: Float[Array, "B T"],
  mask_BT: Bool[Array, "B T"],
  cap: float,
) -> dict[str, Weighted]:
  """How far the sampler was from the trainer: log_weight = log pi_old - log mu.

  mismatch/abs_dlogp: mean |log_weight|. mismatch/k3: estimate of KL(mu || pi_old), >= 0.
  mismatch/ess: effective share of the samples, (sum w)^2 / (n sum w^2) of the uncapped weights in
  (0, 1], per micro-batch and then averaged by tokens. mismatch/capped: share of weights above cap.
  """
  d_BT = jnp.where(mask_BT, log_weight_BT, 0.0)
  d_BT = jnp.clip(d_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  w_BT = jnp.where(mask_BT, raw_BT, 0.0)
  w_BT = w_BT / jnp.maximum(w_BT.max(), 1e-30)  # squares of exp(20) summed would lose float32
  tokens = mask_BT.sum().astype(jnp.float32)
  ess = w_BT.sum() ** 2 / jnp.maximum((w_BT * w_BT).sum(), 1e-30)
  return {
    "mismatch/abs_dlogp": token_mean(jnp.abs(d_BT), mask_BT),
    "mismatch/k3": token_mean(jnp.expm1(d_BT) - d_BT, mask_BT),
    "mismatch/ess": Weighted(jnp.where(tokens > 0, ess, 0.0), tokens),
    "mismatch/capped": token_mean(raw_BT > cap, mask_BT),
  }


def token_mean(
  x_BT: Float[Array, "B T"] | Bool[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Weighted:
  """Mean over the tokens of the mask; what lies outside may be anything, NaN included."""
  total = jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0).sum()
  return Weighted(total, mask_BT.sum().astype(jnp.float32))
