"""Accuracy on items with a reward: greedy or sampled, with its interval; two runs compared.

An answer is as right as the first part of its first reward says, between 0 and 1. Scores are kept
one a line, so that figures and comparisons can be computed again without the model.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Array, Key

from jaxlab.decode import sampling
from jaxlab.eval import generation, records, statistics

RESPONSES, SCORES = "responses.jsonl", "scores.jsonl"


@dataclasses.dataclass(frozen=True)
class AccuracyConfig:
  """What is asked, how answers are scored, how often each item is answered."""

  items: Sequence[Any]  # of records.Item
  rewards: Sequence[Any]  # of (Item, Response) -> {part: float | None}; the first one decides
  greedy: bool = True  # one answer without sampling [ours: the figure that does not depend on luck]
  samples: int = 0  # further answers an item, drawn as SamplingConfig says [ours: off, they cost]
  batch_size: int = generation.BATCH  # sequences decoded together [ours: fits a laptop]
  system_prompt: str | None = None  # put before items that have messages and no system message

  def __post_init__(self):
    if not self.items:
      raise ValueError("AccuracyConfig.items: the data set is empty. Give at least one item.")
    if not self.rewards:
      raise ValueError("AccuracyConfig.rewards: there is no reward. Give at least one function.")
    if self.samples < 0 or self.batch_size < 1:
      raise ValueError(
        f"AccuracyConfig: samples must be >= 0 and batch_size >= 1; got {self.samples} and "
        f"{self.batch_size}."
      )
    if not self.greedy and not self.samples:
      raise ValueError("AccuracyConfig: nothing to do; got greedy=False, samples=0. Set one.")

  def arms(self, drawn: sampling.SamplingConfig) -> dict[str, tuple[sampling.SamplingConfig, int]]:
    """{"greedy" and "sampled", as asked for: (how to sample, answers to each item)}."""
    greedy = dataclasses.replace(drawn, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    arms = {"greedy": (greedy, 1)} if self.greedy else {}
    return arms | ({"sampled": (drawn, self.samples)} if self.samples else {})


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One arm of an evaluation: its answers and scores, item-major, and its figures."""

  responses: list[records.Response]
  scores: list[records.Score]
  summary: dict[str, Any]


def evaluate_items(
  answerer: generation.Answerer,
  items: Sequence[records.Item],
  rewards: Sequence[records.Reward],
  key: Key[Array, ""],
  *,
  samples: int = 1,
  folder: str | os.PathLike[str] | None = None,
  on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
  """Answers every item `samples` times and scores the answers.

  Args:
    folder: where responses.jsonl and scores.jsonl are kept; a killed evaluation goes on from them.
    on_batch: called with (answers there, answers wanted).
  Returns: see `summarize` for the figures.
  Raises: ValueError as `Answerer.answer`, or if two rewards share a part's name.
  """
  path = None if folder is None else pathlib.Path(folder)
  responses = answerer.answer(
    items, key, samples=samples, path=path and path / RESPONSES, on_batch=on_batch
  )
  journal = generation.Journal(path and path / SCORES, records.Score)
  mine = [s for s in journal.records if s.metric.rpartition(":")[0] == _names(rewards)]
  there = {(score.item_id, score.sample_idx): score for score in mine}
  new = []
  for number, response in enumerate(responses):
    item, sample = items[number // samples], number % samples
    if (item.id, sample) not in there:
      new.append(_score(item, response, sample, rewards))
  journal.append(new)
  there |= {(score.item_id, score.sample_idx): score for score in new}
  scores = [there[item.id, k] for item in items for k in range(samples)]
  return Evaluation(responses, scores, summarize(responses, scores))


def _score(item, response, sample: int, rewards: Sequence[records.Reward]) -> records.Score:
  stats = records.score_all(rewards, item, response)
  # The first part decides, and JSON objects are written with their keys sorted: keep its name.
  return records.Score(item.id, sample, f"{_names(rewards)}:{next(iter(stats))}", stats)


def _names(rewards: Sequence[records.Reward]) -> str:
  return "+".join(getattr(reward, "func", reward).__name__ for reward in rewards)


def correctness(score: records.Score) -> float | None:
  """How right an answer is, 0 to 1: the deciding part, so that 2 points count as 1 and -1 as 0."""
  value = score.stats[score.metric.rpartition(":")[2]]
  return None if value is None or math.isnan(value) else min(max(float(value), 0.0), 1.0)


def by_item(scores: Sequence[records.Score]) -> dict[str, list[float]]:
  """{item id: correctness of its measured samples}; items without any are left out."""
  found: dict[str, list[float]] = {}
  for score in scores:
    if (value := correctness(score)) is not None:
      found.setdefault(score.item_id, []).append(value)
  return found


def summarize(
  responses: Sequence[records.Response], scores: Sequence[records.Score]
) -> dict[str, Any]:
  """The figures of an arm.

  Returns: accuracy {value, ci_low, ci_high, n}: Wilson's interval for one right-or-wrong answer an
    item, else the mean over answers with the item as the cluster; with several samples also
    `pass_at_k` (any of them right); `items`; `unmeasured` answers, which count nowhere; the share
    `truncated` by the token limit; `tokens_per_answer`.
  Raises: ValueError if nothing could be measured.
  """
  measured = by_item(scores)
  if not measured:
    raise ValueError(
      f"evaluate_items: no answer could be scored; got {len(scores)} without a measured reward. "
      "Check that the items have targets that the reward can read."
    )
  values = [x for row in measured.values() for x in row]
  binary = all(x in (0.0, 1.0) for x in values)
  once = len(values) == len(measured)
  if once and binary:
    estimate = statistics.wilson(int(sum(values)), len(values))
  else:
    clusters = [item for item, row in measured.items() for _ in row]
    estimate = statistics.clustered_mean(values, clusters)
  figures = {"accuracy": estimate.as_dict()}
  if not once and binary:
    passed = [float(max(row)) for row in measured.values()]
    figures["pass_at_k"] = statistics.wilson(int(sum(passed)), len(passed)).as_dict()
  return figures | {
    "items": len({score.item_id for score in scores}),
    "unmeasured": len(scores) - len(values),
    "truncated": sum(r.finish == "length" for r in responses) / len(responses),
    "tokens_per_answer": sum(r.num_tokens for r in responses) / len(responses),
  }


def compare(
  ours: str | os.PathLike[str], theirs: str | os.PathLike[str], *, intersect: bool = False
) -> dict[str, Any]:
  """Two folders of `evaluate_items`, item by item: is the difference more than luck?

  Args:
    intersect: compare the common items when the runs differ, instead of refusing.
  Returns: difference {value, ci_low, ci_high, n} of accuracies (ours - theirs), exact p_value and
    its test, items won and lost, the smallest difference that this many items show with 80 % power,
    and the items needed to show the present one (None when there is none).
  Raises: ValueError if a folder has no scores, or the runs have other items.
  """
  a, b = (by_item(_read_scores(pathlib.Path(folder))) for folder in (ours, theirs))
  found = statistics.paired_difference(a, b, intersect=intersect)
  effect, sd = found.difference.value, found.sd
  known = effect != 0 and sd is not None
  return {
    "difference": found.difference.as_dict(),
    "p_value": found.p_value,
    "test": found.test,
    "wins": found.wins,
    "losses": found.losses,
    "detectable_difference": found.detectable,
    "items_needed": statistics.items_needed(effect, sd) if known else None,
  }


def describe(figures: Mapping[str, Any], name: str = "accuracy") -> str:
  """'accuracy 12.5 % (95 %: 8.6 to 17.8, n = 200)'."""
  value, low, high, n = (figures[k] for k in ("value", "ci_low", "ci_high", "n"))
  interval = "no interval" if low is None else f"95 %: {100 * low:.1f} to {100 * high:.1f}"
  return f"{name} {100 * value:.1f} % ({interval}, n = {n})"


def describe_comparison(found: Mapping[str, Any]) -> str:
  """'-3.0 points (95 %: -6.1 to 0.1, n = 200), p = 0.07 (mcnemar_exact); 4 won, 10 lost; ...'."""
  value, low, high, n = (found["difference"][k] for k in ("value", "ci_low", "ci_high", "n"))
  interval = "no interval" if low is None else f"95 %: {100 * low:.1f} to {100 * high:.1f}"
  line = (
    f"{100 * value:+.1f} points ({interval}, n = {n}), p = {found['p_value']:.2g} "
    f"({found['test']}); {found['wins']} won, {found['losses']} lost"
  )
  needed = found["items_needed"]
  return line + (f"; {needed} items would show it 8 times in 10" if needed else "")


def require_scores(folder: pathlib.Path) -> pathlib.Path:
  """The file of scores in a folder of `evaluate_items`. Raises: ValueError if there is none."""
  path = folder / SCORES
  if not path.is_file():
    raise ValueError(
      f"compare: {folder} has no {SCORES}. Name the workdir of a finished evaluation with the same "
      "kinds of accuracy."
    )
  return path


def _read_scores(folder: pathlib.Path) -> list[records.Score]:
  return generation.read_records(require_scores(folder), records.Score, cut=False)
