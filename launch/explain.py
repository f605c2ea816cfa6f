"""Sentences for a user who mistyped: the nearest name, and what is wrong with a line of gin."""

import difflib
import re
import tokenize
from typing import Any


def nearest(word: Any, known: list[str]) -> str:
  """A sentence after a blank: the nearest name, else the few there are, else nothing."""
  near = difflib.get_close_matches(str(word), known, 1, 0.6)
  if near:
    return f" Did you mean {near[0]}?"
  return f" Known: {', '.join(known)}." if 0 < len(known) <= 12 else ""


def syntax_error(error: Exception, text: str) -> tuple[int, str]:
  """The line that gin or the tokenizer cannot read, and what to write instead."""
  word = re.search(r"Failed to parse token '(.*)'", str(error))
  if word:
    python = {"true": "True", "false": "False", "none": "None", "null": "None"}
    advice = python.get(word[1].lower()) or f"'{word[1]}', with quotes, if it is text"
    return error.lineno, f"a value must be Python; got {word[1]}. Write {advice}."
  if opened := unclosed_mark(text):
    return opened[0], f"{opened[1]} is opened and never closed."
  if isinstance(error, tokenize.TokenError):
    return error.args[1][0], f"{error.args[0]}."
  rule = error.msg.splitlines()[0].strip().rstrip(".")
  return error.lineno, f"{rule}; got {(error.text or '').strip()!r}."


def unclosed_mark(text: str) -> tuple[int, str] | None:
  """The innermost bracket, or the triple quote, that is still open at the end: line and mark."""
  opened = []
  lines = iter(text.splitlines(keepends=True))
  try:
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
      if token.string in ("(", "[", "{"):
        opened.append((token.start[0], token.string))
      elif token.string in (")", "]", "}") and opened:
        opened.pop()
      elif token.string in ("'", '"'):  # how Python 3.11 reports an open quote
        return token.start[0], token.string
  except tokenize.TokenError as error:
    if "string" in error.args[0]:
      return error.args[1][0], "a quote"
  except SyntaxError:  # indentation: not about brackets
    return None
  return opened[-1] if opened else None
