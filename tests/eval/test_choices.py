"""Multiple choice: likelihoods against float64 of each text alone; rows and figures by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.eval import choices, records

LOGP = 1e-4  # nats, sums of a few tokens in float32 against float64
CONFIG = choices.ChoicesConfig(slots=48, batch_size=2)


def item(name: str, prompt: str, options: list[str], target: str) -> records.Item:
  meta = {"choices": options}
  return records.Item(id=name, task="t", split="s", prompt=prompt, target=target, meta=meta)


ITEMS = [
  item("a", "the cat sat on", ["the mat", "a hat", "it"], "a hat"),
  item("b", "Question: where?\nAnswer:", ["here", "there and back again"], "here"),
  item("c", "one", ["two", "three"], "three"),
]


def logprob_alone(lm, prompt: str, choice: str) -> float:
  """Sum of log p of the choice's tokens in "prompt choice", float64, nothing else in the row."""
  context = [1, *lm.tokenizer.encode(prompt)]  # bos
  ids = [1, *lm.tokenizer.encode(f"{prompt} {choice}")]
  assert ids[: len(context)] == context
  logits = lm.module.apply({"params": lm.params}, jnp.asarray([ids + [0] * (40 - len(ids))]))
  x = np.asarray(logits, np.float64)[0]
  x = x - x.max(-1, keepdims=True)
  logp = x - np.log(np.exp(x).sum(-1, keepdims=True))
  return sum(logp[i - 1, ids[i]] for i in range(len(context), len(ids)))


def test_choices_score_as_if_each_stood_alone(lm):
  found = choices.choice_logprobs(lm, ITEMS, CONFIG)
  assert list(found) == ["a", "b", "c"]
  for one in ITEMS:
    expected = [logprob_alone(lm, one.prompt, c) for c in one.meta["choices"]]
    np.testing.assert_allclose(found[one.id], expected, atol=LOGP)


def test_neither_row_nor_neighbour_matters_and_there_is_one_program(lm):
  together = choices.choice_logprobs(lm, ITEMS, CONFIG)
  before = choices._logprobs._cache_size()
  alone = choices.choice_logprobs(lm, ITEMS[1:2], CONFIG)
  assert choices._logprobs._cache_size() == before
  np.testing.assert_allclose(alone["b"], together["b"], atol=LOGP)


def test_rows_by_hand():
  """Two questions in one row of 10 slots, a third that no longer fits in a second."""
  question = choices.Question
  rows = choices.pack(
    [question("a", (5, 6), ((7,), (8, 9))), question("b", (1,), ((2,), (3,))),
     question("c", (4, 4, 4), ((5,), (6,)))], 10,
  )  # fmt: skip
  assert rows.tokens_RS.tolist() == [[5, 6, 7, 8, 9, 4, 4, 4, 5, 6], [1, 2, 3] + [0] * 7]
  assert rows.positions_RS.tolist() == [[0, 1, 2, 2, 3, 0, 1, 2, 3, 3], [0, 1, 1] + [-1] * 7]
  assert rows.until_RS.tolist() == [[5, 5, 3, 5, 5, 10, 10, 10, 9, 10], [3, 2, 3] + [0] * 7]
  scored = rows.owner_RQ >= 0
  assert rows.source_RQ[scored].tolist() == [1, 1, 3, 7, 7, 0, 0]
  assert rows.target_RQ[scored].tolist() == [2, 3, 4, 8, 9, 1, 2]
  assert rows.owner_RQ[scored].tolist() == [0, 1, 1, 4, 5, 2, 3]


def test_a_long_answer_is_not_wrong_for_its_length():
  """-9 nats over 10 characters beats -4 over 4; unnormalised, the short one would win."""
  one = item("a", "x", ["four", "ten letter"], "ten letter")
  assert choices.correctness([one], {"a": [-4.0, -9.0]}) == {"a": 1.0}
  assert choices.correctness([one], {"a": [-3.0, -9.0]}) == {"a": 0.0}


def test_what_cannot_be_scored_is_refused(lm):
  bare = dataclasses.replace(ITEMS[0], meta={})
  with pytest.raises(ValueError, match="none of them empty; got .. in 'a'"):
    choices.choice_logprobs(lm, [bare], CONFIG)
  blank = dataclasses.replace(ITEMS[0], meta={"choices": ["a", ""]})
  with pytest.raises(ValueError, match="none of them empty; got .'a', ''. in 'a'"):
    choices.choice_logprobs(lm, [blank], CONFIG)
  with pytest.raises(ValueError, match="needs at least one item; got none"):
    choices.choice_logprobs(lm, [], CONFIG)
  with pytest.raises(ValueError, match="slots: must hold the longest question"):
    choices.choice_logprobs(lm, ITEMS, choices.ChoicesConfig(slots=4))
  with pytest.raises(ValueError, match="slots must be >= 2"):
    choices.ChoicesConfig(slots=1)
