"""Rewards for GSM8K in the two styles of QeRL.

`gsm8k_tags` goes with a system prompt that asks for `<think>` and `<answer>` tags; the released
code has that prompt commented out while the tag rewards are active, so its model is never told.
Both sides of a comparison are made canonical ("1,000" = "1000", "18." = "18", "$18.00" = "18");
`strict=True` compares the strings as the released code does, for parity runs.

Source: arXiv 2510.11696 App. E; NVlabs/QeRL e8c6e79 utils/rewards.py.
"""

from jaxlab.eval.records import Item, Response
from jaxlab.rl.rewards import extract

EXACT = 2.0  # [QeRL code: tags]
FORMAT = 0.2  # [QeRL code]


def gold_answer(target: str) -> str:
  """The part of a GSM8K solution after `####`, stripped; a bare answer is its own gold."""
  return target.rsplit("####", 1)[-1].strip()


def gsm8k_tags(item: Item, response: Response, *, strict: bool = False) -> dict[str, float | None]:
  """{"exact": 2 or 0, "format": 0.2 or 0}; an answer without `<answer>` never matches."""
  if response.text is None or item.target is None:
    return {"exact": None, "format": None}
  gold, found = gold_answer(item.target), extract.answer_tag(response.text)
  if not strict:
    gold, found = extract.canonical(gold), extract.canonical(found)
  right = extract.has_answer_tag(response.text) and found == gold
  formatted = extract.has_think_and_answer(response.text)
  return {"exact": EXACT if right else 0.0, "format": FORMAT if formatted else 0.0}


def gsm8k_hash(item: Item, response: Response, *, strict: bool = False) -> dict[str, float | None]:
  """{"exact": 1 or 0, "format": 0.2 or 0}: the number after the last `#### `, a non-empty thought.

  strict keeps a bug of the released code: the commas of the gold answer stay, those found go.
  """
  if response.text is None or item.target is None:
    return {"exact": None, "format": None}
  gold, found = gold_answer(item.target), extract.hash_answer(response.text)
  if found is not None and not strict:
    gold, found = extract.canonical(gold), extract.canonical(found)
  formatted = extract.has_thought(response.text)
  return {"exact": float(found == gold), "format": FORMAT if formatted else 0.0}
