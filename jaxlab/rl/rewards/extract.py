"""Finding the answer in a completion, and writing a number in one way only.

Every function takes time linear in the text: a model that repeats `<think></think><answer>` for
thousands of tokens makes the obvious regular expressions run for hours.
"""

import re

UNIT_WORDS = (
  "cents? centimeters? cm days? degrees? dollars? edges? feet foot gallons? grams? gm hours? "
  "inch(?:es)? integers? kg kilograms? kilometers? km lbs? liters? litres? meals? meters? miles? "
  "minutes? mm months? mph multiples? ounces? percent points? pounds? seconds? square students? "
  "times units? ways weeks? yards? years?"
).split()
UNITS = "|".join(UNIT_WORDS)
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
NUMBER = rf"(?:{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"

_NUMBER_WITH_UNIT = re.compile(rf"([-+]?)\s*({NUMBER})\s*%?\s*(?:(?:{UNITS})\b\s*)*", re.IGNORECASE)
_THINK_THEN_ANSWER = re.compile(r"</think>\s*<answer>")
_HASH = re.compile(r"#### (-?[0-9.,]+)")
_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def answer_tag(text: str) -> str:
  """The text after the last `<answer>` up to the next `</answer>`, stripped; without a tag, all.

  Ask `has_answer_tag` first: a text without a tag is no answer.
  """
  return text.rsplit("<answer>", 1)[-1].split("</answer>", 1)[0].strip()


def has_answer_tag(text: str) -> bool:
  return "<answer>" in text


def has_think_and_answer(text: str) -> bool:
  """True if `<think>..</think>`, optional whitespace, `<answer>..</answer>` occurs somewhere."""
  start = text.find("<think>")
  if start < 0:
    return False
  middle = _THINK_THEN_ANSWER.search(text, start + len("<think>"))
  return middle is not None and text.find("</answer>", middle.end()) >= 0


def has_thought(text: str) -> bool:
  """True if a `<think>..</think>` with more than whitespace between the tags exists."""
  start, end = text.find("<think>"), text.rfind("</think>")
  return start >= 0 and bool(text[start + len("<think>") : end].strip()) and end > start


def hash_answer(text: str) -> str | None:
  """The number after the last `#### ` (the space counts), commas deleted; None without one."""
  found = _HASH.findall(text)
  return found[-1].replace(",", "") if found else None


def last_boxed(text: str) -> str | None:
  r"""The content of the last `\boxed{...}` whose braces balance; None without one."""
  opened: list[tuple[int, bool]] = []  # (where the content starts, is it a box)
  best: tuple[int, int] | None = None
  for match in _BRACE.finditer(text):
    token = match.group()
    if token in (r"\{", r"\}"):  # literal braces of a set
      continue
    if token != "}":
      opened.append((match.end(), token != "{"))
    elif opened:
      start, boxed = opened.pop()
      if boxed and (best is None or start > best[0]):
        best = start, match.start()
  return None if best is None else text[best[0] : best[1]]


def canonical(text: str) -> str:
  r"""One spelling for one number: `$1,080.00`, `1080.`, `+1080 dollars` -> `1080`.

  Dollar signs, thousands commas, a trailing dot, trailing zeros, a percent sign and unit words are
  dropped. What is no number comes back stripped of dollars and the final dot, spaces collapsed.
  """
  text = " ".join(text.replace(r"\$", " ").replace("$", " ").split())
  text = text.removesuffix(".").strip()
  match = _NUMBER_WITH_UNIT.fullmatch(text)
  if match is None:
    return text
  sign, digits = match.groups()
  whole, _, fraction = digits.replace(",", "").partition(".")
  whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
  number = f"{whole}.{fraction}" if fraction else whole
  return f"-{number}" if sign == "-" and number != "0" else number
