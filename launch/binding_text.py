"""A line of a gin file, where it came from, and how it is spelt in messages and records."""

import ast
import dataclasses
import pathlib
import re
from typing import Any

from launch import explain

PACKAGED = pathlib.Path(__file__).resolve().parent.parent  # holds configs/, installed or cloned
MACRO = "gin.macro"  # what gin calls `NAME = value` and `%NAME`


@dataclasses.dataclass(frozen=True)
class Binding:
  """One line of a gin file: scope/name.arg = value, or a macro when name is gin.macro."""

  scope: str
  name: str
  arg: str
  value: Any
  where: str  # "file:line", or the flag it came from

  @property
  def subject(self) -> str:
    """What a reference to it says: the object's name, or the macro with its %."""
    return f"%{self.scope}" if self.name == MACRO else self.name

  @property
  def text(self) -> str:
    if self.name == MACRO:
      return self.scope
    return f"{self.scope}/{self.name}.{self.arg}".removeprefix("/")


def find_gin_file(path: str, beside: pathlib.Path | None = None) -> pathlib.Path:
  """The gin file meant by `path`: from here, beside the including file, or packaged with us.

  Raises: ValueError with the nearest packaged file.
  """
  roots = [pathlib.Path(), *([beside] if beside else []), PACKAGED]
  for root in roots:
    if (root / path).is_file():
      return root / path
  packaged = [str(p.relative_to(PACKAGED)) for p in (PACKAGED / "configs").rglob("*.gin")]
  raise ValueError(f"--gin_file: no such file {path!r}.{explain.nearest(path, packaged)}")


def must_be_set(text: str) -> str:
  """The sentence for an argument, scope/name.arg, that nothing has set."""
  return f'{text} must be set. Set it in a gin file or by --gin_bindings="{text} = ...".'


def with_places(message: str, bound: dict[str, Binding]) -> str:
  """Adds where the arguments that `message` names were bound."""
  places = [f"{a} from {b.where}" for a, b in bound.items() if re.search(rf"\b{a}\b", message)]
  return f"{message} ({'; '.join(places)})" if places else message


class Verbatim(str):
  """Text that prints as itself inside a container."""

  def __repr__(self) -> str:
    return str(self)


def is_literal(value: Any) -> bool:
  """Whether gin could read back `repr(value)`."""
  try:
    return ast.literal_eval(repr(value)) == value
  except (ValueError, SyntaxError):
    return False
