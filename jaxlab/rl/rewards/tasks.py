"""Rewards of the packaged tasks in `jaxlab.data.tasks`."""

import functools
from typing import Any

from jaxlab.eval.records import Item, Response


def exact_match(item: Item, response: Response) -> dict[str, float | None]:
  """{"exact": 1 or 0}: the stripped answer is the target; a final dot is allowed."""
  if response.text is None or item.target is None:
    return {"exact": None}
  answer = response.text.strip()
  return {"exact": float(item.target in (answer, answer.removesuffix(".").rstrip()))}


def reasoning_gym_score(item: Item, response: Response) -> dict[str, float | None]:
  """{"score": 0..1}: the task's own verifier, for items of `data.tasks.reasoning_gym_items`.

  The text after the last `<answer>` counts, the whole stripped text without a tag.
  Raises: ValueError for an item of another kind, or without the package reasoning-gym.
  """
  made = item.meta.get("reasoning_gym")
  if made is None:
    raise ValueError(
      f"reasoning_gym_score: items must come from reasoning_gym_items; got {item.id!r}. "
      "Use exact_match for the other tasks."
    )
  if response.text is None:
    return {"score": None}
  dataset = _dataset(made["name"], made["seed"], made["size"])
  answer = response.text.rsplit("<answer>", 1)[-1].split("</answer>", 1)[0].strip()
  return {"score": float(dataset.score_answer(answer, dataset[made["index"]]))}


@functools.lru_cache(maxsize=8)
def _dataset(name: str, seed: int, size: int) -> Any:
  # Verifiers want the entry as generated, which need not fit into JSON: make it again.
  from jaxlab.data import tasks

  return tasks.reasoning_gym_dataset(name, size, seed)
