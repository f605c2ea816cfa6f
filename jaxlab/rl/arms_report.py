"""A comparison of arms for a reader: a table in Markdown and two plots. Dims: none."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tabulate

from jaxlab import plots
from jaxlab.io import files

COLUMNS = {
  "entropy_start": "entropy, step 0",
  "entropy_early": "entropy, first fifth",
  "reward_early": "reward, first fifth",
  "reward_run": "reward, whole run",
  "accuracy_before": "greedy before",
  "accuracy_after": "greedy after",
}
FIGURES = {"reward": "reward", "entropy": "entropy_rollout"}


def write(
  workdir: pathlib.Path,
  rows: Sequence[Mapping[str, Any]],
  mismatch: Mapping[float, float],
  criteria: Sequence[Any],
) -> None:
  """`report.md`: the criteria as found, and mean and standard deviation of every arm's runs."""
  claims = [[c.name.replace("_", " "), "yes" if c.held else "NO", c.found] for c in criteria]
  noise = [[f"{sigma:g}", f"{gap:.3e}"] for sigma, gap in sorted(mismatch.items())]
  runs = len({row["seed"] for row in rows})
  sections = [
    f"# {len({row['arm'] for row in rows})} arms, {runs} seeds",
    _table(claims, ["criterion", "held", "found"]),
    f"Mean and standard deviation over {runs} seeds; entropies in nats a token, held-out accuracy:",
    _table(_arm_rows(rows), ["arm", *COLUMNS.values()]),
    "Gap between sampler and trainer, mean of |log mu - log pi_old|, by the scale of the noise:",
    _table(noise, ["sigma", "gap (nats)"]),
  ]
  text = "\n\n".join(sections) + "\n"
  files.write_atomically(workdir / "report.md", lambda f: f.write(text.encode()))


def _table(rows: list[list[str]], headers: list[str]) -> str:
  return tabulate.tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _arm_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  out = []
  for arm in dict.fromkeys(row["arm"] for row in rows):
    values = {name: [row[name] for row in rows if row["arm"] == arm] for name in COLUMNS}
    out.append([arm, *(f"{np.mean(x):.4f} ± {_std(x):.4f}" for x in values.values())])
  return out


def _std(x: Sequence[float]) -> float:
  return float(np.std(x, ddof=1)) if len(x) > 1 else 0.0


def plot(curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], folder: pathlib.Path) -> None:
  """`arms_reward.png` and `arms_entropy.png`: the mean over the seeds, and their range.

  Args:
    curves: {arm: the lines of metrics.jsonl of each of its runs}.
  """
  for name, column in FIGURES.items():
    with plots.png(folder / f"arms_{name}.png") as axes:
      for arm, runs in curves.items():
        table = np.asarray([[float(row[column]) for row in run] for run in runs])
        steps = [row["step"] for row in runs[0]]
        (line,) = axes.plot(steps, table.mean(0), label=arm)
        axes.fill_between(steps, table.min(0), table.max(0), color=line.get_color(), alpha=0.2)
      axes.set_xlabel("step")
      axes.set_title(name)
      axes.legend()
