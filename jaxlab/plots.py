"""PNG figures, drawn without a screen. Dims: none."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def png(path: pathlib.Path, width: float = 6.0) -> Iterator[Any]:
  """The axes of one figure, written to `path` at the end; makes its folder. Width in inches."""
  import matplotlib  # slow to import, and only wanted at the end of a run

  matplotlib.use("Agg")
  from matplotlib import pyplot

  path.parent.mkdir(parents=True, exist_ok=True)
  figure, axes = pyplot.subplots(figsize=(width, 4), layout="constrained")
  try:
    yield axes
    figure.savefig(path, dpi=120)
  finally:
    pyplot.close(figure)
