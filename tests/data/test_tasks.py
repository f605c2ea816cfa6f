"""The packaged tasks: exact prompts, right answers, splits that never meet."""

import math
import re

import pytest

from jaxlab.data import tasks
from jaxlab.eval import records

ALL = (tasks.largest_of_five, tasks.letter_count, tasks.gcd, tasks.two_digit_sum)


def question(item):
  return item.messages[-1]["content"]


def test_the_demo_prompt_is_the_measured_one():
  item = tasks.largest_of_five(1, split="test", seed=3)[0]
  numbers = re.findall(r"\d+", question(item))
  a, b, c, d, e = numbers
  assert item.prompt == (
    "<|im_start|>user\nLargest of 54, 52, 86, 14, 79?<|im_end|>\n"
    "<|im_start|>assistant\n86<|im_end|>\n"
    "<|im_start|>user\nLargest of 14, 48, 42, 18, 82?<|im_end|>\n"
    "<|im_start|>assistant\n82<|im_end|>\n"
    f"<|im_start|>user\nLargest of {a}, {b}, {c}, {d}, {e}?<|im_end|>\n<|im_start|>assistant\n"
  )
  assert item.target == max(numbers)
  assert len(set(numbers)) == 5
  assert [m["role"] for m in item.messages] == ["user", "assistant"] * 2 + ["user"]
  assert tasks.largest_of_five(1, chatml=False)[0].prompt is None


def test_answers():
  for item in tasks.gcd(20):
    a, b = map(int, re.findall(r"\d+", question(item)))
    assert int(item.target) == math.gcd(a, b)
  for item in tasks.two_digit_sum(20):
    a, b = map(int, re.findall(r"\d+", question(item)))
    assert int(item.target) == a + b
  counts = []
  for item in tasks.letter_count(50):
    letter, word = re.search(r"letter (\w) in (\w+)\?", question(item)).groups()
    assert int(item.target) == word.count(letter)
    counts.append(int(item.target))
  assert {0, 1, 2} <= set(counts)
  for task in (tasks.LARGEST_OF_FIVE, tasks.LETTER_COUNT, tasks.GCD, tasks.TWO_DIGIT_SUM):
    for asked, answer in task.examples:  # the examples teach the truth
      numbers = list(map(int, re.findall(r"\d+", asked)))
      expected = {
        "largest_of_five": lambda n: max(n),
        "gcd": lambda n: math.gcd(*n),
        "two_digit_sum": sum,
        "letter_count": lambda _, q=asked: q.split()[-1].count(q.split()[6]),
      }[task.name](numbers)
      assert int(answer) == expected


@pytest.mark.parametrize("make", ALL)
def test_splits_are_disjoint_for_any_seeds_and_items_distinct(make):
  train = [item for seed in range(3) for item in make(150, split="train", seed=seed)]
  test = [item for seed in range(3) for item in make(60, split="test", seed=seed)]
  assert not {question(i) for i in train} & {question(i) for i in test}
  one = make(60, split="test")
  assert len({item.id for item in one}) == 60
  shown = {m["content"] for m in one[0].messages[:-1]}
  assert not shown & {question(i) for i in train + test}


@pytest.mark.parametrize("make", ALL)
def test_items_are_a_function_of_seed_and_index(make):
  assert make(12, seed=1) == make(12, seed=1)
  assert make(12, seed=1)[:5] == make(5, seed=1)
  assert make(12, seed=1) != make(12, seed=2)
  item = make(1)[0]
  assert records.from_json(records.Item, records.to_json(item)) == item


def test_questions_never_change():
  """A change here changes every published number: bump the task's name instead."""
  assert question(tasks.largest_of_five(1, split="test")[0]) == "Largest of 34, 97, 36, 44, 55?"
  assert (
    question(tasks.largest_of_five(3, split="train", seed=7)[2]) == "Largest of 51, 42, 49, 21, 85?"
  )


def test_reasoning_gym():
  pytest.importorskip("reasoning_gym", reason="reasoning-gym is optional")
  items = tasks.reasoning_gym_items("gcd", 4, seed=1)
  assert items == tasks.reasoning_gym_items("gcd", 4, seed=1)
  assert all(int(item.target) >= 1 for item in items)
  assert records.from_json(records.Item, records.to_json(items[0])) == items[0]
  with pytest.raises(ValueError, match="task of reasoning-gym; got 'gcdd'"):
    tasks.reasoning_gym_items("gcdd", 1)


def test_errors():
  with pytest.raises(ValueError, match="train, test; got 'dev'"):
    tasks.largest_of_five(1, split="dev")
  tiny = tasks.Task("tiny", (), lambda rng: (str(rng.randint(0, 30)), "0"))
  with pytest.raises(ValueError, match="tiny has about .* questions in split 'train'; got n=100"):
    tasks.task_items(tiny, 100)
