r"""Packaged tasks with a verifiable answer: questions without end, made from a seed.

Every task renders as two example turns and a question. The example turns do most of the formatting
for a small instruct model: keep them the same before and after training. An item is a function of
(task, split, seed, index); whether a question belongs to train or test is decided by a hash of the
question alone, so the splits stay disjoint for any seeds. Score with `rl.rewards.exact_match`.

`largest_of_five` is the demo: SmolLM2-135M-Instruct at 4 bits goes from 12.5 % to over 90 % greedy
accuracy in forty updates. Marks to beat: a random pick 20 %, the largest first digit with ties at
random 87.6 %.
"""

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

from jaxlab.eval import records

SPLITS = ("train", "test")
TEST_SHARE = 10  # one question in ten is held out
MISSES = 10_000  # draws without a new question before a task counts as exhausted

WORDS = (
  "apple arrow balloon banana basket blossom bottle bridge butter cabbage candle carrot castle "
  "cheese cherry coffee cotton dinner dragon eleven engine errand fellow feather finger follow "
  "forest garden giraffe grammar guitar hammer harbour hello insect island jacket jelly kettle "
  "kitchen ladder lemon letter little mammal marble meadow mirror muffin mushroom narrow needle "
  "noodle office onion orange paddle pepper pillow planet pocket pretty puppet rabbit raccoon "
  "ribbon river rocket saddle school season settle shadow silver spring squirrel stellar street "
  "summer teacher tennis terrace thunder tomorrow tunnel umbrella vanilla village violin waffle "
  "window winter wonder yellow zipper"
).split()


@dataclasses.dataclass(frozen=True)
class Task:
  """A generator of (question, answer), with solved examples. `draw` may use only its `random`."""

  name: str
  examples: tuple[tuple[str, str], ...]
  draw: Callable[[random.Random], tuple[str, str]]


def _largest_of_five(rng: random.Random) -> tuple[str, str]:
  numbers = rng.sample(range(10, 100), 5)
  return f"Largest of {', '.join(map(str, numbers))}?", str(max(numbers))


def _letter_count(rng: random.Random) -> tuple[str, str]:
  word = rng.choice(WORDS)
  # Half of the letters are drawn from the word: counts above zero would be rare otherwise.
  letter = rng.choice(word if rng.random() < 0.5 else "abcdefghijklmnopqrstuvwxyz")
  return f"How many times is the letter {letter} in {word}?", str(word.count(letter))


def _gcd(rng: random.Random) -> tuple[str, str]:
  factor = rng.randint(2, 12)
  a, b = factor * rng.randint(1, 12), factor * rng.randint(1, 12)
  return f"Greatest common divisor of {a} and {b}?", str(math.gcd(a, b))


def _two_digit_sum(rng: random.Random) -> tuple[str, str]:
  a, b = rng.randint(10, 99), rng.randint(10, 99)
  return f"{a} + {b}?", str(a + b)


LARGEST_OF_FIVE = Task(
  "largest_of_five",
  (("Largest of 54, 52, 86, 14, 79?", "86"), ("Largest of 14, 48, 42, 18, 82?", "82")),
  _largest_of_five,
)
LETTER_COUNT = Task(
  "letter_count",
  (
    ("How many times is the letter s in glasses?", "3"),
    ("How many times is the letter t in parrot?", "1"),
  ),
  _letter_count,
)
GCD = Task(
  "gcd",
  (("Greatest common divisor of 150 and 100?", "50"), ("Greatest common divisor of 9 and 7?", "1")),
  _gcd,
)
TWO_DIGIT_SUM = Task("two_digit_sum", (("8 + 31?", "39"), ("57 + 6?", "63")), _two_digit_sum)


def task_items(
  task: Task, n: int, *, split: str = "train", seed: int = 0, chatml: bool = True
) -> list[records.Item]:
  """The first n distinct questions of a split; a longer list starts with the shorter one.

  Args:
    chatml: also give the prompt as ChatML text without a system message, which is what a template
      that adds its own system message would not produce. False leaves it to the chat template.
  Raises: ValueError for an unknown split, or when the task has fewer than n questions.
  """
  if split not in SPLITS:
    raise ValueError(f"task_items: split must be one of {', '.join(SPLITS)}; got {split!r}.")
  items: dict[str, records.Item] = {}
  index, misses = 0, 0
  while len(items) < n:
    question, answer = _draw(task, index, split, seed)
    index += 1
    if question in items:
      misses += 1
      if misses > MISSES:
        raise ValueError(
          f"task_items: {task.name} has about {len(items)} questions in split {split!r}; got "
          f"n={n}. Ask for fewer."
        )
      continue
    misses = 0
    items[question] = _item(task, question, answer, split, chatml)
  return list(items.values())


def largest_of_five(
  n: int, split: str = "train", seed: int = 0, chatml: bool = True
) -> list[records.Item]:
  """The largest of five distinct two-digit numbers: the demo task."""
  return task_items(LARGEST_OF_FIVE, n, split=split, seed=seed, chatml=chatml)


def letter_count(
  n: int, split: str = "train", seed: int = 0, chatml: bool = True
) -> list[records.Item]:
  """How often a letter occurs in a word."""
  return task_items(LETTER_COUNT, n, split=split, seed=seed, chatml=chatml)


def gcd(n: int, split: str = "train", seed: int = 0, chatml: bool = True) -> list[records.Item]:
  """The greatest common divisor of two numbers up to 144."""
  return task_items(GCD, n, split=split, seed=seed, chatml=chatml)


def two_digit_sum(
  n: int, split: str = "train", seed: int = 0, chatml: bool = True
) -> list[records.Item]:
  """The sum of two two-digit numbers (too hard for the demo model)."""
  return task_items(TWO_DIGIT_SUM, n, split=split, seed=seed, chatml=chatml)


def render_chatml(messages: tuple[dict[str, str], ...]) -> str:
  """Messages as ChatML, no system message added, open for the assistant's answer."""
  turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
  return "".join(turns) + "<|im_start|>assistant\n"


def reasoning_gym_items(name: str, n: int, seed: int = 0) -> list[records.Item]:
  """n items of a task of the package reasoning-gym; score with `rl.rewards.reasoning_gym_score`.

  Train and test are different seeds: the package has no split, and small tasks repeat themselves.
  Raises: ValueError for an unknown task, or when the package is missing.
  """
  dataset = reasoning_gym_dataset(name, n, seed)
  task = f"reasoning_gym/{name}"
  return [
    records.Item(
      id=f"{task}/{seed}-{index}",
      task=task,
      split="generated",
      messages=({"role": "user", "content": dataset[index]["question"]},),
      target=dataset[index]["answer"],
      meta={"reasoning_gym": {"name": name, "seed": seed, "size": n, "index": index}},
    )
    for index in range(n)
  ]


def reasoning_gym_dataset(name: str, size: int, seed: int) -> Any:
  """The package's own data set, whose `score_answer` verifies an answer."""
  try:
    import reasoning_gym
  except ModuleNotFoundError as error:
    raise ValueError(
      "reasoning_gym_items: needs the package reasoning-gym; it is not installed. "
      "pip install reasoning-gym, or use a packaged task."
    ) from error
  known = reasoning_gym.factory.DATASETS
  if name not in known:
    raise ValueError(
      f"reasoning_gym_items: name must be a task of reasoning-gym; got {name!r}. "
      f"Some are {', '.join(sorted(known)[:8])} ..."
    )
  return reasoning_gym.create_dataset(name, size=size, seed=seed)


def _draw(task: Task, index: int, split: str, seed: int) -> tuple[str, str]:
  """Draws until a question falls into the split; a function of (task, split, seed, index)."""
  start = hashlib.sha256(f"{task.name}/{split}/{seed}/{index}".encode()).digest()
  rng = random.Random(int.from_bytes(start[:8], "big"))
  shown = {question for question, _ in task.examples}
  while True:
    question, answer = task.draw(rng)
    if _split_of(question) == split and question not in shown:
      return question, answer


def _split_of(question: str) -> str:
  digest = hashlib.sha256(question.encode()).digest()
  return "test" if int.from_bytes(digest[:8], "big") % TEST_SHARE == 0 else "train"


def _item(task: Task, question: str, answer: str, split: str, chatml: bool) -> records.Item:
  turns = [turn for example in task.examples for turn in zip(("user", "assistant"), example)]
  messages = tuple({"role": r, "content": c} for r, c in [*turns, ("user", question)])
  return records.Item(
    id=records.content_id(task.name, question),
    task=task.name,
    split=split,
    messages=messages,
    prompt=render_chatml(messages) if chatml else None,
    target=answer,
  )
