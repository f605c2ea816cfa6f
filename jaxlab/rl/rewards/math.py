r"""Equality of mathematical answers, and the BigMath reward built on it.

A LaTeX normaliser (spaces, \left, \dfrac, \text, units, degrees, `x =`), then string equality, then
numbers: integers, decimals, fractions, mixed numbers, percentages, compared as exact rationals; two
tuples compare entry by entry. No expression is evaluated, so no answer can cost time. Math-Verify
(symbolic equality) is used only when asked for.

Source: arXiv 2510.11696 App. E (rewards); normaliser in the manner of Hendrycks et al., arXiv
2103.03874, and huggingface/Math-Verify.
"""

import re
from fractions import Fraction

from jaxlab.eval.records import Item, Response
from jaxlab.rl.rewards import extract

ACCURACY = 1.0  # [QeRL code]
FORMAT = 0.2  # [QeRL code]
RELATIVE = Fraction(1, 10**6)  # [ours: six digits, what Math-Verify rounds to by default]
LONGEST_NUMBER = 100  # characters; longer ones compare as strings
LONGEST_ANSWER = 1000  # characters [ours: the longest answer of MATH-500 has 159]

_WRAPPER = re.compile(
  r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|overline|boxed|fbox)\s*\{([^{}]*)\}"
)
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|quad|qquad|displaystyle)(?![A-Za-z])|~")
_DROPPED = re.compile(r"\^\{?\\circ\}?|\\degree|\\(?:ldots|dots)(?![A-Za-z])|\{,\}|[\"$]|\\\$")
_UNITS = re.compile(
  rf"(?<![A-Za-z\\])(?:{extract.UNITS})(?![A-Za-z])(?:\s*\^\{{?[23]\}}?)?", re.IGNORECASE
)
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_SHORT_FRAC = re.compile(r"\\frac\s*([0-9a-zA-Z]|\{[^{}]*\})\s*([0-9a-zA-Z]|\{[^{}]*\})")
_SHORT_SQRT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_ASSIGNMENT = re.compile(r"^\s*[A-Za-z]\s*=(?!=)")
_MIXED = re.compile(r"(?<![0-9])([-+]?[0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_RATIONAL = re.compile(
  r"(?P<sign>[-+]?)(?:"
  r"(?P<whole>[0-9]*)\\frac\{(?P<top>-?NUMBER)\}\{(?P<low>-?NUMBER)\}"
  r"|(?P<over>NUMBER)/(?P<under>NUMBER)"
  r"|(?P<number>NUMBER)"
  r")(?P<percent>\\?%)?".replace("NUMBER", extract.NUMBER)
)


def normalise(latex: str) -> str:
  r"""One spelling for one formula: spacing, wrappers and units go, `\frac12` gets its braces.

  Numbers keep their digits ("18." and "18.0" stay different); only thousands commas go.
  """
  text = _MIXED.sub(r"\1\\frac{\2}{\3}", latex.strip())
  text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
  text = _SPACING.sub(" ", _DROPPED.sub("", text))
  for _ in range(4):  # wrappers nest; four levels are more than any answer has
    text = _WRAPPER.sub(r" \1 ", text)
  text = _ASSIGNMENT.sub("", _UNITS.sub("", text))
  text = _SHORT_FRAC.sub(lambda m: rf"\frac{_braced(m[1])}{_braced(m[2])}", text)
  text = "".join(_SHORT_SQRT.sub(r"\\sqrt{\1}", text).split())
  return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def math_equal(prediction: str, gold: str, *, math_verify: bool = False) -> bool | None:
  r"""True if two answers are the same; None if the gold answer cannot be read.

  `50%` equals 50 and 1/2 (both conventions are in use), but 50% is not 5000%. Numbers agree to six
  digits, integers exactly.

  Raises: ValueError if `math_verify` is asked for and not installed.
  """
  if math_verify:
    return _math_verify_equal(prediction, gold)
  gold = normalise(gold).removesuffix(".")
  if not gold or not _balanced(gold):
    return None
  if len(prediction) > LONGEST_ANSWER:
    return False
  return _equal(normalise(prediction).removesuffix("."), gold)


def bigmath(
  item: Item, response: Response, *, math_verify: bool = False
) -> dict[str, float | None]:
  r"""{"accuracy": 1, 0 or None, "format": 0.2 or 0}: last balanced `\boxed{}`, else the answer tag.

  None means that the gold answer cannot be read: the completion is neither right nor wrong.
  """
  text = response.text
  if text is None or item.target is None:
    return {"accuracy": None, "format": None}
  found = extract.last_boxed(text)
  if found is None and extract.has_answer_tag(text):
    found = extract.answer_tag(text)
  gold = extract.last_boxed(item.target) or item.target
  equal = math_equal(found or "", gold, math_verify=math_verify)
  accuracy = None if equal is None else ACCURACY * equal
  return {"accuracy": accuracy, "format": FORMAT * extract.has_think_and_answer(text)}


def _equal(prediction: str, gold: str) -> bool:
  if prediction == gold:
    return True
  a, b = _rational(prediction), _rational(gold)
  if a is not None and b is not None:
    return _close(a, b)
  parts_a, parts_b = _entries(prediction), _entries(gold)
  if len(parts_b) < 2 or len(parts_a) != len(parts_b):
    return False
  return all(_equal(x, y) for x, y in zip(parts_a, parts_b, strict=True))


def _rational(text: str) -> tuple[Fraction, bool] | None:
  """(value, written as a percentage) of a number; None for anything else."""
  match = _RATIONAL.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
  if match is None:
    return None
  top, low = match["top"] or match["over"] or match["number"], match["low"] or match["under"] or "1"
  top, low = (Fraction(x.replace(",", "").removesuffix(".")) for x in (top, low))
  if low == 0:
    return None
  value = int(match["whole"] or 0) + top / low
  return (-value if match["sign"] == "-" else value), match["percent"] is not None


def _close(a: tuple[Fraction, bool], b: tuple[Fraction, bool]) -> bool:
  (x, x_percent), (y, y_percent) = a, b
  pairs = [(x, y)]
  if x_percent != y_percent:
    pairs.append((x / 100, y) if x_percent else (x, y / 100))
  return any(_same_number(x, y) for x, y in pairs)


def _same_number(x: Fraction, y: Fraction) -> bool:
  if x.denominator == y.denominator == 1:
    return x == y
  return abs(x - y) <= RELATIVE * abs(y)


def _entries(text: str) -> list[str]:
  """Top-level parts of `(a,b)`, `[a,b]` or `a,b`; the brackets are parts of their own."""
  parts, depth, start = [], 0, 0
  bracketed = len(text) > 1 and text[0] in "([" and text[-1] in ")]"
  inner = text[1:-1] if bracketed else text
  for i, c in enumerate(inner):
    depth += (c in "([{") - (c in ")]}")
    if c == "," and depth == 0:
      parts.append(inner[start:i])
      start = i + 1
  if not parts:
    return []
  parts.append(inner[start:])
  return [text[0], *parts, text[-1]] if bracketed else parts


def _braced(text: str) -> str:
  return text if text.startswith("{") else "{" + text + "}"


def _balanced(text: str) -> bool:
  depth = 0
  for c in text.replace(r"\{", "").replace(r"\}", ""):
    depth += (c == "{") - (c == "}")
    if depth < 0:
      return False
  return depth == 0


def _math_verify_equal(prediction: str, gold: str) -> bool | None:
  try:
    import math_verify
  except ModuleNotFoundError as error:
    raise ValueError(
      "math_equal: math_verify=True needs the package math-verify; it is not installed. "
      "pip install math-verify, or use the built-in comparison."
    ) from error
  gold_parsed = math_verify.parse(rf"$\boxed{{{gold.strip().strip('$')}}}$")
  if not gold_parsed:
    return None
  found = math_verify.parse(rf"$\boxed{{{prediction.strip().strip('$')}}}$")
  return bool(math_verify.verify(gold_parsed, found))
