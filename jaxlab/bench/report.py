"""Rows of a benchmark for people: a short table and a plot of the ratios."""

import pathlib
from typing import Any

from jaxlab import plots

COLUMNS = ("what", "batch", "tokens_per_s", "baseline", "ratio_to_transformers", "ratio_low",
           "ratio_high", "tokens_equal", "peak_bytes", "compilations")  # fmt: skip


def short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """The columns of the table; a figure that a row does not have stays empty."""
  return [{name: row.get(name) for name in COLUMNS} for row in rows]


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  """One bar a row: the median ratio with its quartiles; 1 is the baseline."""
  names = [f"{row['what']}\nbatch {row['batch']}" for row in rows]
  middle = [row["ratio_to_transformers"] for row in rows]
  low = [m - row["ratio_low"] for m, row in zip(middle, rows, strict=True)]
  high = [row["ratio_high"] - m for m, row in zip(middle, rows, strict=True)]
  with plots.png(path, width=7.0) as axes:
    axes.bar(names, middle, yerr=(low, high), capsize=4)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylabel("times the baseline's speed")
