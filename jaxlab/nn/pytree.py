"""Frozen dataclasses that are pytrees, with readable key paths."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(*, static: Sequence[str] = ()) -> Callable[[type[T]], type[T]]:
  """Class decorator: a frozen dataclass whose fields are children, but for the `static` ones.

  As `jax.tree_util.register_dataclass`, except that rebuilding skips `__init__`: a tree of shapes,
  shardings or axis numbers is built through the same class, and under the annotation checks of the
  test suite its fields would be refused.
  """

  def wrap(cls: type[T]) -> type[T]:
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = tuple(f.name for f in dataclasses.fields(cls) if f.name not in static)

    def flatten(x):
      return tuple(getattr(x, n) for n in names), tuple(getattr(x, n) for n in static)

    def flatten_with_keys(x):
      keyed = tuple((jax.tree_util.GetAttrKey(n), getattr(x, n)) for n in names)
      return keyed, tuple(getattr(x, n) for n in static)

    def unflatten(aux, children):
      x = object.__new__(cls)
      x.__dict__.update(zip(names, children, strict=True))
      x.__dict__.update(zip(static, aux, strict=True))
      return x

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls

  return wrap
