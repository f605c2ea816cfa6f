"""Group-relative advantages, on the host in float64. Dims: P prompts, G samples of a prompt.

With mean and std over the G samples of one prompt (std unbiased, ddof = 1):

  group: A = (R - mean) / (std + eps)                       GRPO, DAPO
  batch: A = (R - mean) / (std of the whole batch + eps)    [TRL scale_rewards="batch"]
  none:  A = R - mean                                       Dr. GRPO
  rloo:  A = R - mean of the other samples                  leave one out

A reward that is NaN was not measured: it enters no mean, and its advantage is 0. A group whose
rewards are all equal teaches nothing: its advantages are exactly 0, whatever rounding says.

Sources: GRPO arXiv 2402.03300, Dr. GRPO arXiv 2503.20783, RLOO arXiv 2402.14740; huggingface/trl
f2cd577 [TRL].
"""

import numpy as np
from jaxtyping import Bool, Float, Float32

SCALES = ("group", "batch", "none", "rloo")


def group_advantage(
  rewards_PG: Float[np.ndarray, "P G"],
  *,
  scale: str = "group",  # [GRPO, TRL]
  eps: float = 1e-4,  # [QeRL code, TRL]; 1e-6 in [TX, VERL]
) -> Float32[np.ndarray, "P G"]:
  """Advantages of P groups of G samples, float32.

  Raises: ValueError for a group of one (every advantage would be 0 and nothing would be learnt), an
    unknown scale, or an infinite reward.
  """
  _check(rewards_PG, scale)
  rewards_PG = rewards_PG.astype(np.float64)
  measured_PG = ~np.isnan(rewards_PG)
  count_P1 = measured_PG.sum(1, keepdims=True)
  mean_P1 = np.nansum(rewards_PG, 1, keepdims=True) / np.maximum(count_P1, 1)
  centred_PG = np.where(measured_PG, rewards_PG - mean_P1, 0.0)
  if scale == "group":
    advantage_PG = centred_PG / (_std(centred_PG, count_P1) + eps)
  elif scale == "batch":
    advantage_PG = centred_PG / (_batch_std(rewards_PG) + eps)
  elif scale == "rloo":
    advantage_PG = centred_PG * count_P1 / np.maximum(count_P1 - 1, 1)
  else:
    advantage_PG = centred_PG
  advantage_PG = np.where(has_variance(rewards_PG)[:, None], advantage_PG, 0.0)
  return advantage_PG.astype(np.float32)


def has_variance(rewards_PG: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
  """True for the groups with two different measured rewards: the only ones with a gradient.

  `1 - has_variance(r).mean()` is the zero-variance fraction to watch; under .3 of usable groups,
  choose another task.
  """
  lowest_P = np.where(np.isnan(rewards_PG), np.inf, rewards_PG).min(1)
  highest_P = np.where(np.isnan(rewards_PG), -np.inf, rewards_PG).max(1)
  return highest_P > lowest_P


def _std(centred_PG: np.ndarray, count_P1: np.ndarray) -> np.ndarray:
  return np.sqrt((centred_PG**2).sum(1, keepdims=True) / np.maximum(count_P1 - 1, 1))


def _batch_std(rewards_PG: np.ndarray) -> float:
  values = rewards_PG[~np.isnan(rewards_PG)]
  return float(values.std(ddof=1)) if values.size > 1 else 0.0


def _check(rewards_PG: np.ndarray, scale: str):
  if scale not in SCALES:
    raise ValueError(f"group_advantage: scale must be one of {', '.join(SCALES)}; got {scale!r}.")
  prompts, group = rewards_PG.shape
  if group < 2:
    raise ValueError(
      f"group_advantage: a group needs at least 2 samples to compare; got {group} for each of "
      f"{prompts} prompts. Raise the number of samples a prompt."
    )
  if np.isinf(rewards_PG).any():
    prompt, sample = np.argwhere(np.isinf(rewards_PG))[0]
    raise ValueError(
      f"group_advantage: rewards must be finite or NaN (not measured); got "
      f"{rewards_PG[prompt, sample]} for prompt {prompt}, sample {sample}."
    )
