"""Rows of a benchmark for people: short tables, a plot of the ratios and one of the losses."""

import pathlib
from typing import Any

import tabulate

from jaxlab import plots

Row = dict[str, Any]
SPEED = ("what", "shape", "format", "head", "batch", "tokens_per_s", "baseline",
         "ratio_to_transformers", "ratio_low", "ratio_high", "ratio_to_f32", "ratio_to_f32_low",
         "ratio_to_f32_high", "ratio_to_llama_cpp", "ratio_to_llama_cpp_low",
         "ratio_to_llama_cpp_high", "ratio_to_dense", "ratio_to_dense_low", "ratio_to_dense_high",
         "perplexity", "perplexity_f32", "tokens_equal", "peak_bytes", "compilations")  # fmt: skip
# What a bar shows, and where its quartiles are.
BARS = {"ratio_to_transformers": "ratio", "ratio_to_f32": "ratio_to_f32",
        "ratio_to_dense": "ratio_to_dense"}  # fmt: skip
ACCURACY = ("what", "task", "format", "method", "activations", "n", "perplexity",
            "perplexity_ratio", "nats_lost", "nats_lost_ci_low", "nats_lost_ci_high", "recovered",
            "recovered_ci_low", "recovered_ci_high",
            "similarity_kept", "similarity_error", "accuracy", "accuracy_lost",
            "accuracy_lost_ci_low", "accuracy_lost_ci_high")  # fmt: skip


def tables(rows: list[Row], style: str = "simple") -> str:
  """A table for speeds and one for each kind of accuracy, of the columns that its rows have."""
  kinds: dict[str, list[Row]] = {}
  for row in rows:
    kinds.setdefault("speed" if _is_speed(row) else row["what"], []).append(row)
  made = []
  for kind, group in kinds.items():
    columns = SPEED if kind == "speed" else ACCURACY
    there = [name for name in columns if any(row.get(name) is not None for row in group)]
    short = [{name: row.get(name) for name in there} for row in group]
    made.append(tabulate.tabulate(short, headers="keys", floatfmt=".4g", tablefmt=style))
  return "\n\n".join(made)


def plot(rows: list[Row], folder: pathlib.Path) -> None:
  """Draws what there are rows for: `ratios.png` of speeds, `nats_lost.png` of quantised models."""
  speeds = [row for row in rows if any(name in row for name in BARS)]
  losses = [row for row in rows if row.get("nats_lost") is not None]
  if speeds:
    _ratios(speeds, folder / "ratios.png")
  if losses:
    _losses(losses, folder / "nats_lost.png")


def _is_speed(row: Row) -> bool:
  return any(name.startswith("ratio") for name in row)


def _ratios(rows: list[Row], path: pathlib.Path) -> None:
  """One bar a row: the median ratio with its quartiles; 1 is the baseline."""
  parts = ("what", "shape", "format", "head")
  names = ["\n".join(str(row[p]) for p in parts if p in row) + f"\n{row['batch']}" for row in rows]
  bars = [next(name for name in BARS if name in row) for row in rows]
  middle = [row[bar] for row, bar in zip(rows, bars, strict=True)]
  low = [row[bar] - row[f"{BARS[bar]}_low"] for row, bar in zip(rows, bars, strict=True)]
  high = [row[f"{BARS[bar]}_high"] - row[bar] for row, bar in zip(rows, bars, strict=True)]
  with plots.png(path, width=max(7.0, 0.9 * len(rows))) as axes:
    axes.bar(names, middle, yerr=(low, high), capsize=4)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylabel("times the baseline's speed")


def _losses(rows: list[Row], path: pathlib.Path) -> None:
  """One bar a quantised model: nats lost a token, with the interval; 0 is the model as it was."""
  names = [f"{row['format']} {row['activations']}\n{row['method']}" for row in rows]
  lost = [row["nats_lost"] for row in rows]
  bounds = ("nats_lost_ci_low", "nats_lost_ci_high")
  errors = [[abs((row[b] or m) - m) for row, m in zip(rows, lost, strict=True)] for b in bounds]
  with plots.png(path, width=max(7.0, 0.9 * len(rows))) as axes:
    axes.bar(names, lost, yerr=errors, capsize=4)
    axes.tick_params(axis="x", labelrotation=60)
    axes.set_ylabel("nats a token lost")
