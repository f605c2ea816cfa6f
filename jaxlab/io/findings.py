"""One line of the doctor's report, and how a mistake becomes one."""

from collections.abc import Callable
from typing import Any, NamedTuple

LEVELS = ("ok", "note", "warning", "broken")


class Finding(NamedTuple):
  """One line of the report."""

  level: str  # of LEVELS
  text: str


def attempt(what: str, make: Callable[[], Any]) -> tuple[Any, Finding | None]:
  """(value, None), or (None, the finding that the user's mistake or the damaged file makes)."""
  try:
    return make(), None
  except ValueError as error:  # CorruptFile is one
    return None, Finding("broken", f"{what}: {' '.join(str(error).split())}")
