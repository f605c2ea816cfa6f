"""What a person sees of an RL run: a table of answers while it runs, figures and plots after it."""

import json
import pathlib
from typing import Any

import numpy as np
import rich.console
import rich.table

from jaxlab import plots
from jaxlab.eval import records
from jaxlab.io import files
from jaxlab.rl import rollout

TABLE_EVERY = 10  # steps between two tables
TABLE_ROWS = 4
TAIL = 5  # steps that the last figures of a curve are averaged over


class SampleTable:
  """`on_round` of `fit`: keeps sampled answers in `samples.jsonl`, shows a few as a table."""

  def __init__(self, workdir: pathlib.Path, groups: list[rollout.Group]):
    self._path = workdir / "samples.jsonl"
    self._groups = groups  # of the last rollout, filled by the source
    self._console = rich.console.Console(stderr=True)

  def __call__(self, step: int, state: Any, values: dict[str, Any]) -> None:
    del state, values
    if step % TABLE_EVERY and step != 1:
      return
    answers = [(g, i) for g in self._groups for i in range(len(g.answers))]
    shown = [answers[int(i)] for i in np.linspace(0, len(answers) - 1, TABLE_ROWS)]
    rows = [_row(step, group, i) for group, i in shown]
    self._keep(step, rows)
    if self._console.is_terminal:
      show_samples(rows, title=f"step {step}")

  def _keep(self, step: int, rows: list[dict[str, Any]]) -> None:
    """Adds rows; those of this step and later ones go, which a run left that was cut off."""
    lines = self._path.read_text().splitlines() if self._path.exists() else []
    lines = [line for line in lines if json.loads(line)["step"] < step]
    text = "".join(f"{line}\n" for line in (*lines, *map(json.dumps, rows)))
    files.write_atomically(self._path, lambda f: f.write(text.encode()))


def _row(step: int, group: rollout.Group, i: int) -> dict[str, Any]:
  answer = group.answers[i]
  item = answer.item
  reward = None if np.isnan(answer.reward) else round(answer.reward, 3)
  return {
    "step": step, "question": question(item), "answer": answer.response.text, "target": item.target,
    "reward": reward, "advantage": round(float(group.advantage[i]), 3),
  }  # fmt: skip


def question(item: records.Item) -> str:
  """What a person would say was asked: the last turn, or the whole prompt."""
  return item.messages[-1]["content"] if item.messages else item.prompt


def show_samples(rows: list[dict[str, Any]], title: str = "held out") -> None:
  """Prints rows with equal keys as a table on the terminal's error stream."""
  table = rich.table.Table(title=title)
  for name in rows[0]:
    table.add_column(name, overflow="fold")
  for row in rows:
    table.add_row(*map(str, row.values()))
  rich.console.Console(stderr=True).print(table)


def speed(rows: list[dict[str, Any]]) -> dict[str, float]:
  """Median tokens per second of rollouts and of updates (the first step of each is compilation)."""
  rollouts = [r["rollout_tokens"] / r["rollout_seconds"] for r in rows[1:]]
  updates = [
    r["rollout_tokens"] / (r["seconds"] - r["rollout_seconds"]) for r in rows[1:] if "loss" in r
  ]
  return {
    "rollout_tokens_per_s": float(np.median(rollouts)) if rollouts else None,
    "train_tokens_per_s": float(np.median(updates)) if updates else None,
  }


def curve(rows: list[dict[str, Any]]) -> dict[str, float]:
  """First and last values of what a run is judged by, the last ones averaged over a few steps."""
  mean = lambda name, part: float(np.nanmean([r[name] for r in part]))
  out = {}
  for name in ("reward", "entropy_rollout"):
    out |= {f"{name}_first": mean(name, rows[:1]), f"{name}_last": mean(name, rows[-TAIL:])}
  return out


def plot_run(rows: list[dict[str, Any]], folder: pathlib.Path) -> None:
  """One PNG a figure: reward, entropy, noise, mismatch."""

  figures = {
    "reward": ("reward", "zero_variance", "truncated"),
    "entropy": ("entropy_rollout", "entropy"),
    "noise": ("aqn/sigma", "aqn/effective_std"),
    "mismatch": ("mismatch/abs_dlogp", "mismatch/k3", "mismatch/capped"),
    "meter": ("meter/total", "meter/noise", "meter/fp4", "meter/rest"),
  }
  for name, columns in figures.items():
    with plots.png(folder / f"{name}.png") as axes:
      for column in columns:
        points = [(r["step"], r[column]) for r in rows if r.get(column) is not None]
        if points:
          axes.plot(*zip(*points), label=column)
      axes.set_xlabel("step")
      axes.set_title(name)
      if axes.lines:
        axes.legend()
