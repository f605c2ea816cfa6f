"""What a function's or a class's signature says about a value, for the checks of `registry.py`."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class ResultOf:
  """Stands for the value of a call that has not been made yet."""

  target: Callable


def arguments(target: Callable) -> dict[str, inspect.Parameter]:
  """The arguments of a function, or of a class's constructor, that can be given by name."""
  named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  parameters = inspect.signature(target).parameters
  return {name: p for name, p in parameters.items() if p.kind in named}


def required(target: Callable) -> list[str]:
  """The arguments without a default, in order."""
  empty = inspect.Parameter.empty
  return [name for name, p in arguments(target).items() if p.default is empty]


def choices(hint: Any) -> list[str]:
  """The strings that a `Literal` hint allows, or none."""
  if typing.get_origin(hint) is typing.Literal:
    return [str(value) for value in typing.get_args(hint)]
  return []


def describe(hint: Any) -> str:
  """A hint as a user reads it."""
  if choices(hint):
    return " or ".join(repr(value) for value in typing.get_args(hint))
  return inspect.formatannotation(hint).replace("typing.", "").replace("collections.abc.", "")


def fits(value: Any, hint: Any) -> bool:
  """Whether a value from a gin file suits a type hint; a hint that says nothing checkable does.

  Stricter than Python where that catches slips: a bool is not a number, a list is not a tuple. An
  int is a float.
  """
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(fits(value, arg) for arg in args)
  if origin is typing.Annotated:
    return fits(value, args[0])
  if origin is typing.Literal:
    return any(value == arg and type(value) is type(arg) for arg in args)
  kind = type(None) if hint is None else origin or hint
  silent = kind in (Any, inspect.Parameter.empty) or getattr(kind, "_is_protocol", False)
  if silent or not inspect.isclass(kind):
    return True
  if isinstance(value, ResultOf):
    return not inspect.isclass(value.target) or issubclass(value.target, kind)
  if kind in (int, float):
    return isinstance(value, (int, kind)) and not isinstance(value, bool)
  return isinstance(value, kind) and _items_fit(value, kind, args)


def _items_fit(value: Any, kind: type, args: tuple) -> bool:
  """Whether the items of a container suit the arguments of its hint."""
  if not args or isinstance(value, (str, bytes)):
    return True
  if issubclass(kind, tuple) and args[-1] is not Ellipsis:
    return len(value) == len(args) and all(map(fits, value, args))
  if issubclass(kind, Mapping):
    return all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
  if issubclass(kind, Sequence):
    return all(fits(item, args[0]) for item in value)
  return True
