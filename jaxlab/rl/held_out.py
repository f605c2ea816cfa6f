"""Held-out accuracy of a policy: greedy, without noise, on fixed batches."""

import dataclasses
import json
from typing import Any, NamedTuple

import jax

from jaxlab.decode import autoregressive
from jaxlab.eval import records, statistics
from jaxlab.nn import stack, weights
from jaxlab.rl import config as rl_config
from jaxlab.rl import rewards, rollout
from pallas_kernels import target

PyTree = Any
ROWS = 50  # of one evaluation program; the last batch is filled up


class Scored(NamedTuple):
  """One held-out item answered."""

  item: records.Item
  text: str
  parts: dict[str, float | None]

  @property
  def correct(self) -> bool:
    """Whether the first part of the first reward, the verifier, is positive."""
    first = next(iter(self.parts.values()))
    return first is not None and first > 0


def score(
  sampler: autoregressive.Sampler,
  params: PyTree,
  prompts: rollout.Prompts,
  data: rl_config.RLData,
  tokenizer: Any,
) -> list[Scored]:
  """Answers every held-out item greedily with `params` and scores the answers."""
  config = dataclasses.replace(sampler.config, temperature=0.0)
  greedy = dataclasses.replace(sampler, config=config, compact=False)
  if target.current_target().platform == "cpu":  # as the rollouts: see rollout.Serving
    params = stack.unstack(weights.densify(params))
  scored = []
  for start in range(0, len(prompts.items), ROWS):
    items = prompts.items[start : start + ROWS]
    ids = list(prompts.ids[start : start + ROWS])
    out = greedy(
      params, ids + [ids[-1]] * (ROWS - len(ids)), jax.random.key(0), prefix=prompts.prefix
    )
    for row, item in enumerate(items):
      tokens, stopped = out.ids(row), bool(out.stopped_N[row])
      text = tokenizer.decode(tokens[:-1] if stopped else tokens)
      response = records.Response(
        key=item.id, text=text, token_ids=tuple(tokens), finish="stop" if stopped else "length"
      )
      scored.append(Scored(item, text, rewards.score_all(data.rewards, item, response)))
  return scored


def accuracy(scored: list[Scored]) -> dict[str, Any]:
  """{value, ci_low, ci_high, n} with Wilson's interval."""
  return statistics.wilson(sum(s.correct for s in scored), len(scored)).as_dict()


def to_json(scored: list[Scored]) -> list[dict[str, Any]]:
  return [{"item": json.loads(records.to_json(s.item)), "text": s.text, "parts": s.parts} for s in scored]


def from_json(rows: list[dict[str, Any]]) -> list[Scored]:
  return [
    Scored(records.from_json(records.Item, json.dumps(r["item"])), r["text"], r["parts"]) for r in rows
  ]
