"""Plans the recipes that the documentation talks about and writes docs/plan_table.md.

`make plan-table` runs it. Each row is one run of launch.plan, whose figures are cached by content.
"""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

from jaxlab.parallel import advise

RUNS, TABLE = pathlib.Path("runs/plan_table"), pathlib.Path("docs/plan_table.md")
SEVEN, THIRTY_TWO = "configs/qerl/qwen2p5_7b_gsm8k.gin", "configs/qerl/qwen2p5_32b_1x80gb.gin"
FOURTEEN = "RLConfig.model='Qwen/Qwen2.5-14B-Instruct'"


class Row(NamedTuple):
  """One plan: what the table calls it, and what launch.plan is given."""

  name: str
  gin_file: str
  target: str
  bindings: tuple[str, ...] = ()


def rows() -> list[Row]:
  """Every row of the table, in its order."""
  models = (("7B", SEVEN, ()), ("14B", SEVEN, (FOURTEEN,)), ("32B", THIRTY_TWO, ()))
  found = [
    Row(f"QeRL {size} {format}", gin_file, target, (*bindings, f"quantize.format='{format}'"))
    for target in ("h100x1", "h200x1")
    for size, gin_file, bindings in models
    for format in ("nvfp4", "bf16")
  ]
  ettin = "configs/ettin/decoder_1b_pretrain.gin"
  # 256 chips hold the whole batch at once, 18 rows each.
  wide = ("TrainConfig.micro_rows=None", "TrainConfig.chunk_tokens=1048576")
  full = "configs/train/qwen2p5_32b_full.gin"
  return found + [
    Row("Ettin 1B pre-training", ettin, "v5e:4x4"),
    Row("Ettin 1B pre-training", ettin, "v6e:16x16", wide),
    Row("32B full fine-tune", full, "v5p:8x8x8"),
  ]


def plan(row: Row) -> dict:
  """Runs launch.plan for a row; returns its plan.json."""
  workdir = RUNS / f"{row.name} {row.target}".replace(" ", "_").replace(":", "_")
  command = [
    sys.executable, "-m", "launch.plan", f"--gin_file={row.gin_file}", f"--target={row.target}",
    f"--workdir={workdir}", "--budget=6", *(f"--gin_bindings={text}" for text in row.bindings),
  ]  # fmt: skip
  subprocess.run(command, check=True)
  return json.loads((workdir / "plan.json").read_text(encoding="utf-8"))


def lines(row: Row, found: dict) -> list[str]:
  """The table's lines for a row: one a program of a step."""
  verdict = "yes" if found["fits"] else "**no**"
  mesh = " x ".join(f"{axis} {n}" for axis, n in found["mesh"].items() if n > 1) or "1"
  remedy = advise.describe(found["remedies"][0]["changes"]) if found["remedies"] else ""
  out = []
  for program in (p for p in found["programs"] if p["runs"]):
    peak, formula = program["peak_bytes"], program["formula_bytes"]
    off = "" if formula is None else f"{formula / 1e9:.1f} ({(peak / formula - 1) * 100:+.0f} %)"
    out.append(
      f"| {row.name} | {row.target} | {mesh} | {program['name']} | {peak / 1e9:.1f} | {off} | "
      f"{program['seconds'] * program['runs']:.3g} | {program['bound']} | {verdict} | {remedy} |"
    )
    verdict = remedy = ""
  return out


def main() -> None:
  """Plans all rows; writes the table."""
  head = (
    "recipe", "target", "mesh", "program", "peak GB", "by formula", "s a step, at least", "bound",
    "fits", "else",
  )  # fmt: skip
  text = [
    "Made by `make plan-table`: the figures are the compilers', a device each.", "",
    f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}",
  ]  # fmt: skip
  for row in rows():
    text += lines(row, plan(row))
    TABLE.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
