"""Accuracy with its interval, kept scores, comparisons: by hand, without a model."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import numpy as np
import pytest
from scipy import stats

from jaxlab.decode import sampling, text
from jaxlab.eval import accuracy, generation, records

KEY = jax.random.key(0)
ITEMS = [records.Item(str(i), "toy", "test", prompt=f"q{i}", target=str(i % 3)) for i in range(8)]


@dataclasses.dataclass(frozen=True)
class Scripted(generation.Answerer):
  """Answers sample k of item i with says(i, k)."""

  says: object = None

  def answer(self, items, key, *, samples=1, path=None, **options):
    journal = generation.Journal(path, records.Response)
    there = {r.key for r in journal.records}
    responses = [
      records.Response(f"{item.id}#{k}", self.says(int(item.id), k), usage={"out": 2})
      for item in items
      for k in range(samples)
    ]
    journal.append([r for r in responses if r.key not in there])
    return responses


def scripted(says) -> Scripted:
  return Scripted(None, None, None, says=says)


def exact(item, response):
  return {"exact": None if response.text is None else float(response.text == item.target)}


def points(item, response, *, right=2.0, wrong=-1.0):
  """Two parts, and points as some data sets give them: the first part decides."""
  return {"z_points": right if response.text == item.target else wrong, "a_format": 0.2}


def first_right(n):
  """Right for the first n items, in every sample."""
  return scripted(lambda i, k: str(i % 3) if i < n else "no")


# --- figures


def test_greedy_accuracy_has_wilsons_interval(tmp_path):
  found = accuracy.evaluate_items(first_right(6), ITEMS, (exact,), KEY, folder=tmp_path)
  figures = found.summary["accuracy"]
  z, n, p = stats.norm.ppf(0.975), 8, 0.75
  centre = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
  assert (figures["value"], figures["n"]) == (0.75, 8)
  assert (figures["ci_low"], figures["ci_high"]) == pytest.approx((centre - half, centre + half))
  rest = {k: found.summary[k] for k in ("items", "unmeasured", "truncated", "tokens_per_answer")}
  assert rest == {"items": 8, "unmeasured": 0, "truncated": 0.0, "tokens_per_answer": 2.0}
  assert "pass_at_k" not in found.summary


def test_sampled_accuracy_takes_the_item_as_the_unit():
  says = scripted(lambda i, k: str(i % 3) if i < 4 and k <= i else "no")
  found = accuracy.evaluate_items(says, ITEMS, (exact,), KEY, samples=4).summary
  right = np.array([1, 2, 3, 4, 0, 0, 0, 0]) / 4
  half = stats.t.ppf(0.975, 7) * right.std(ddof=1) / math.sqrt(8)
  figures = found["accuracy"]
  assert figures["value"] == pytest.approx(right.mean()) and figures["n"] == 32
  assert figures["ci_high"] - figures["value"] == pytest.approx(half)
  assert found["pass_at_k"]["value"] == 0.5 and found["pass_at_k"]["n"] == 8


def test_points_count_between_0_and_1_and_the_first_part_decides():
  reward = functools.partial(points, right=3.0)  # as gin binds it
  found = accuracy.evaluate_items(first_right(2), ITEMS, (reward, exact), KEY)
  assert found.summary["accuracy"]["value"] == 0.25
  assert found.scores[0].metric == "points+exact:z_points"
  assert found.scores[0].stats == {"z_points": 3.0, "a_format": 0.2, "exact": 1.0}
  assert [accuracy.correctness(s) for s in found.scores[1:3]] == [1.0, 0.0]


def test_partial_credit_is_a_mean():
  half = lambda item, response: {"score": 0.5 if int(item.id) % 2 else 0.25}
  figures = accuracy.evaluate_items(first_right(8), ITEMS, (half,), KEY).summary["accuracy"]
  assert figures["value"] == 0.375 and figures["n"] == 8


def test_what_cannot_be_measured_counts_nowhere():
  says = scripted(lambda i, k: None if i == 7 else "0")
  found = accuracy.evaluate_items(says, ITEMS, (exact,), KEY).summary
  assert found["accuracy"]["n"] == 7 and found["unmeasured"] == 1
  mute = scripted(lambda i, k: None)
  with pytest.raises(ValueError, match="no answer could be scored; got 8 without"):
    accuracy.evaluate_items(mute, ITEMS, (exact,), KEY)


def test_rewards_must_not_share_a_part():
  with pytest.raises(ValueError, match="need different names; got exact twice"):
    accuracy.evaluate_items(first_right(1), ITEMS, (exact, exact), KEY)


# --- files


def test_figures_come_back_from_the_scores_alone(tmp_path):
  found = accuracy.evaluate_items(first_right(3), ITEMS, (points,), KEY, samples=2, folder=tmp_path)
  kept = generation.read_records(tmp_path / accuracy.SCORES, records.Score)
  assert kept == found.scores
  assert accuracy.summarize(found.responses, kept) == found.summary


def test_a_rerun_scores_only_what_has_no_score(tmp_path):
  scored = []

  def counting(item, response):
    scored.append(item.id)
    return exact(item, response)

  run = lambda: accuracy.evaluate_items(first_right(5), ITEMS, (counting,), KEY, folder=tmp_path)
  first = run()
  path = tmp_path / accuracy.SCORES
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:3]) + lines[3][:20])
  scored.clear()
  assert run().summary == first.summary and scored == ["3", "4", "5", "6", "7"]
  assert path.read_text().splitlines(keepends=True) == lines
  other = accuracy.evaluate_items(first_right(5), ITEMS, (points,), KEY, folder=tmp_path)
  assert other.scores[0].stats["z_points"] == 2.0, "another reward scores anew"


# --- two runs


def two_runs(folder: pathlib.Path, ours, theirs, **options):
  for name, run in (("a", ours), ("b", theirs)):
    accuracy.evaluate_items(run, ITEMS, (exact,), KEY, folder=folder / name, **options)
  return accuracy.compare(folder / "a", folder / "b")


def test_a_paired_comparison_by_hand(tmp_path):
  ours = scripted(lambda i, k: str(i % 3) if i != 7 else "no")  # right but for item 7
  theirs = scripted(lambda i, k: str(i % 3) if i in (0, 1, 7) else "no")
  found = two_runs(tmp_path, ours, theirs)
  assert (found["wins"], found["losses"], found["test"]) == (5, 1, "mcnemar_exact")
  assert found["p_value"] == pytest.approx(2 * (1 + 6) / 2**6)
  d = np.array([0, 0, 1, 1, 1, 1, 1, -1])
  assert found["difference"]["value"] == 0.5
  half = stats.t.ppf(0.975, 7) * d.std(ddof=1) / math.sqrt(8)
  assert found["difference"]["ci_high"] == pytest.approx(0.5 + half)
  both = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
  assert found["items_needed"] == math.ceil((both * d.std(ddof=1) / 0.5) ** 2)
  line = accuracy.describe_comparison(found)
  assert line.startswith("+50.0 points (95 %: ") and "5 won, 1 lost" in line
  assert f"; {found['items_needed']} items would show it" in line


def test_equal_runs_need_no_number_of_items(tmp_path):
  found = two_runs(tmp_path, first_right(4), first_right(4), samples=2)
  assert found["difference"]["value"] == 0 and found["p_value"] == 1.0
  assert found["items_needed"] is None
  assert "items would show" not in accuracy.describe_comparison(found)


def test_a_run_without_scores_or_with_other_items_is_refused(tmp_path):
  with pytest.raises(ValueError, match="has no scores.jsonl. Name the workdir of a finished"):
    accuracy.compare(tmp_path, tmp_path)
  a, b = tmp_path / "a", tmp_path / "b"
  accuracy.evaluate_items(first_right(4), ITEMS, (exact,), KEY, folder=a)
  accuracy.evaluate_items(first_right(4), ITEMS[:5], (exact,), KEY, folder=b)
  with pytest.raises(ValueError, match="both runs must hold the same items; got 8 and 5"):
    accuracy.compare(a, b)
  assert accuracy.compare(a, b, intersect=True)["difference"]["n"] == 5


def test_a_comparison_leaves_the_other_run_alone(tmp_path):
  two_runs(tmp_path, first_right(4), first_right(2))
  path = tmp_path / "b" / accuracy.SCORES
  path.write_text(path.read_text() + '{"torn')
  before = path.read_text()
  accuracy.compare(tmp_path / "a", tmp_path / "b")
  assert path.read_text() == before


# --- a model, and settings


def test_a_model_is_evaluated_from_end_to_end(lm, tmp_path):
  answerer = generation.Answerer(
    text.make_sampler(lm, sampling.SamplingConfig(max_new_tokens=6, temperature=0.0)),
    lm.tokenizer, lm.params, batch_size=3,
  )  # fmt: skip
  says = answerer.answer(ITEMS, KEY)
  items = [
    dataclasses.replace(item, target=r.text if i < 2 else "-")
    for i, (item, r) in enumerate(zip(ITEMS, says, strict=True))
  ]
  found = accuracy.evaluate_items(answerer, items, (exact,), KEY, folder=tmp_path)
  assert found.summary["accuracy"]["value"] == 0.25
  rows = [json.loads(x) for x in (tmp_path / accuracy.RESPONSES).read_text().splitlines()]
  assert [row["text"] for row in rows] == [r.text for r in says]


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"items": []}, "AccuracyConfig.items: the data set is empty"),
    ({"rewards": ()}, "AccuracyConfig.rewards: there is no reward"),
    ({"greedy": False}, "nothing to do; got greedy=False, samples=0"),
    ({"samples": -1}, "samples must be >= 0"),
    ({"batch_size": 0}, "batch_size >= 1; got 0 and 0"),
  ],
)
def test_settings_that_make_no_sense(changes, message):
  with pytest.raises(ValueError, match=message):
    accuracy.AccuracyConfig(**{"items": ITEMS, "rewards": (exact,)} | changes)
