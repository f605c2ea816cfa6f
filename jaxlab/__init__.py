"""Efficiency and reasoning methods as composable pure functions in JAX.

`jaxlab.load(path) -> LM`, `jaxlab.save(lm, path)`; the rest lives in the submodules.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["LM", "load", "save"]


def __getattr__(name: str) -> Any:
  """Imports JAX when a model is first asked for: template children and --help start without it."""
  if name in __all__:
    return getattr(importlib.import_module("jaxlab.lm"), name)
  raise AttributeError(f"module 'jaxlab' has no attribute {name!r}")
