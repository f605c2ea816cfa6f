"""What a run writes about itself: metrics.jsonl, TensorBoard events, progress, no secrets.

`metrics.jsonl` is append-only, one JSON object a step with the full precision of every number, and
is cut back to the restored step on resume, so that it reads as if nothing had happened.
"""

import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import tensorboardX
import tqdm
from absl import logging

from jaxlab.parallel import mesh as meshes

FILE = "metrics.jsonl"


class MetricsLog:
  """The metrics of one workdir; only process 0 writes.

  Args:
    workdir: the folder; made if absent.
    restored_step: lines of later steps are removed, and a torn last line.
  """

  def __init__(self, workdir: str | os.PathLike[str], *, restored_step: int = 0):
    self._file = self._events = None
    if not meshes.leads():
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / FILE
    _cut(path, restored_step)
    self._file = path.open("a", encoding="utf-8")
    self._events = tensorboardX.SummaryWriter(
      str(workdir / "tensorboard"), purge_step=restored_step + 1
    )

  def __enter__(self) -> "MetricsLog":
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def write(self, step: int, values: Mapping[str, Any], rows: Iterable[int | str] = ()) -> None:
    """Adds the line of a step and flushes it.

    Args:
      step: the number of finished steps, counted from 1.
      values: {name: int, float or scalar array}; NaN and infinities become the strings "nan",
        "inf", "-inf" (JSON has no others), which `float` reads.
      rows: ids of the data rows of this step; left out when empty.
    """
    if self._file is None:
      return
    numbers = {name: _number(value) for name, value in values.items()}
    line = {"step": step, **{name: _json(value) for name, value in numbers.items()}}
    rows = list(rows)
    self._file.write(json.dumps(line | ({"rows": rows} if rows else {}), allow_nan=False) + "\n")
    self._file.flush()
    for name, value in numbers.items():
      if math.isfinite(value):
        self._events.add_scalar(name, value, step)

  def sync(self) -> None:
    """Puts the lines so far on the disk, before a checkpoint that counts on them."""
    if self._file is not None:
      os.fsync(self._file.fileno())

  def close(self) -> None:
    if self._file is not None:
      self._file.close()
      self._events.close()


def read(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of `metrics.jsonl`, oldest first, without a torn last one."""
  path = pathlib.Path(workdir) / FILE
  return [line for line, _ in _lines(path)] if path.exists() else []


def _lines(path):
  """(object, offset of its end) for each whole line, up to the first that is not."""
  end = 0
  with path.open("rb") as f:
    for raw in f:
      end += len(raw)
      try:
        line = json.loads(raw)
        line["step"]
      except (ValueError, KeyError, TypeError):
        return
      if not raw.endswith(b"\n"):
        return
      yield line, end


def _cut(path, restored_step):
  if not path.exists():
    return
  keep = 0
  for line, end in _lines(path):
    if line["step"] > restored_step:
      break
    keep = end
  if keep < path.stat().st_size:
    os.truncate(path, keep)
    logging.info("Cut %s back to step %d.", path, restored_step)


def _number(value):
  value = value.item() if hasattr(value, "item") else value
  return value if isinstance(value, int | float) else float(value)


def _json(value):
  return value if math.isfinite(value) else str(value)


class Progress:
  """A bar with rate and time left on a terminal, one plain line every few seconds elsewhere.

  Args:
    total: steps in all.
    done: steps already done.
    seconds: between two plain lines.
  """

  def __init__(self, total: int, done: int = 0, *, seconds: float = 10.0):
    silent = None if meshes.leads() else True  # None: only where stderr is no terminal
    self._bar = tqdm.tqdm(total=total, initial=done, unit="step", disable=silent)
    self._plain = self._bar.disable and silent is None
    self._total, self._first, self._seconds = total, done, seconds
    self._start = self._last = time.monotonic()

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *error: object) -> None:
    self._bar.close()

  def update(self, done: int, values: Mapping[str, Any]) -> None:
    """One more step is done; shows its loss and reward, if it has them."""
    shown = {k: f"{float(values[k]):.4g}" for k in ("loss", "reward") if k in values}
    if not self._bar.disable:
      self._bar.set_postfix(shown, refresh=False)
      self._bar.update(1)
    now = time.monotonic()
    if self._plain and (now - self._last >= self._seconds or done == self._total):
      self._last = now
      rate = (done - self._first) / max(now - self._start, 1e-9)
      text = " ".join(f"{k} {v}" for k, v in shown.items())
      left = (self._total - done) / rate
      logging.info("step %d/%d %s %.3g steps/s %.0f s left", done, self._total, text, rate, left)
