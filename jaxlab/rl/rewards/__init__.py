"""Rewards: `(Item, Response) -> {part: float | None}`; None is "not measured", never 0."""

from jaxlab.eval.records import Reward, score_all
from jaxlab.rl.rewards.combine import weighted_sum
from jaxlab.rl.rewards.dapo import dapo
from jaxlab.rl.rewards.gsm8k import gsm8k_hash, gsm8k_tags
from jaxlab.rl.rewards.math import bigmath, math_equal
from jaxlab.rl.rewards.overlong import overlong
from jaxlab.rl.rewards.tasks import exact_match, reasoning_gym_score

__all__ = [
  "Reward",
  "bigmath",
  "dapo",
  "exact_match",
  "gsm8k_hash",
  "gsm8k_tags",
  "math_equal",
  "overlong",
  "reasoning_gym_score",
  "score_all",
  "weighted_sum",
]
