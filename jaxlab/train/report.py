"""What a training run was, from its metrics.jsonl: figures and a curve. Dims: none."""

import os
import pathlib
from typing import Any

import numpy as np

from jaxlab import plots
from jaxlab.parallel import mesh as meshes
from jaxlab.train import metrics

TAIL = 10  # steps that the last loss is averaged over


def figures(workdir: str | os.PathLike[str], step_tokens: int) -> dict[str, Any]:
  """Headline figures of a finished run; process 0 also plots its curve.

  Args:
    step_tokens: tokens of one step, over all devices.
  Returns: steps, first loss, mean of the last losses, tokens in all and per second (the median
    step; the first one compiles); {} in other processes, which keep no metrics.
  """
  if not meshes.leads():
    return {}
  rows = metrics.read(workdir)
  losses = [float(row["loss"]) for row in rows]
  seconds = [row["seconds"] for row in rows[1:]]
  plot(rows, pathlib.Path(workdir) / "plots" / "loss.png")
  return {
    "steps": len(rows),
    "loss_first": losses[0],
    "loss_last": float(np.mean(losses[-TAIL:])),
    "tokens": len(rows) * step_tokens,
    "tokens_per_s": step_tokens / float(np.median(seconds)) if seconds else None,
  }


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  """The loss of every step as a PNG."""
  with plots.png(path) as axes:
    axes.plot([row["step"] for row in rows], [float(row["loss"]) for row in rows])
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
