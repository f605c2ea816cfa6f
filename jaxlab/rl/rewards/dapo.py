r"""The DAPO reward: the last `Answer: ...` line of the completion against the gold answer.

Both sides are normalised: the part after the last `=` stays; articles, unit words, `\text`,
`\boxed`, `$`, `\overline`, spaces and thousands commas go; `\frac12` gets its braces. By default
numbers then compare as numbers (`18.` = `18`, `0.5` = `\frac12`); `strict=True` compares strings.

Source: arXiv 2503.14476; conventions of volcengine/verl b178a3c utils/reward_score/math_dapo.py.
"""

import re

from jaxlab.eval.records import Item, Response
from jaxlab.rl.rewards import math

TAIL_CHARS = 300  # [VERL]: an answer stands at the end; a longer look would find quotations

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_ARTICLE = re.compile(r"\b(?:an?|the)\s+", re.IGNORECASE)
_MATHS = re.compile(r"\$([^$]*)\$")


def answer_line(text: str) -> str | None:
  """The rest of the line after the last `Answer:` (any case) of the last 300 characters."""
  found = _ANSWER.findall(text[-TAIL_CHARS:])
  return found[-1].strip() if found else None


def normalise_answer(answer: str) -> str:
  """`The area is $A = 12$ square cm` -> `12`."""
  answer = answer.replace(r"\$", "")
  inside = _MATHS.search(answer)
  answer = (inside.group(1) if inside else answer).rsplit("=", 1)[-1]
  return math.normalise(_ARTICLE.sub("", answer))


def dapo(
  item: Item, response: Response, *, strict: bool = False, wrong: float = 0.0
) -> dict[str, float | None]:
  """{"accuracy": 1 or `wrong`}; the authors' own code uses wrong=-1, QeRL 0."""
  if response.text is None or item.target is None:
    return {"accuracy": None}
  line = answer_line(response.text)
  if line is None:
    return {"accuracy": wrong}
  if strict:
    right = normalise_answer(line) == normalise_answer(item.target)
  else:
    # Markdown stars around the word Answer end up in the line.
    found, gold = (normalise_answer(x.strip("* ")) for x in (line, item.target))
    right = bool(math.math_equal(found, gold))
  return {"accuracy": 1.0 if right else wrong}
