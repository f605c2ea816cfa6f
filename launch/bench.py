"""Measures speed as ratios against named baselines, and accuracy as differences from them.

Speed is by interleaved pairs in one process. Writes result.json ({"rows": [...]}), table.md and
plots/. Suites that take long keep what they have measured in WORKDIR: a rerun goes on there.

python -m launch.bench --gin_file=configs/bench/decode.gin --workdir=runs/bench
python -m launch.bench --gin_file=configs/bench/fp4_accuracy.gin"""

import inspect

from jaxlab.bench import report
from launch import common, registry

FLAGS = common.define_flags()


def main(run: common.Run) -> dict:
  """Runs the configured suites; rows are printed as they come."""
  config = registry.get("BenchConfig")()
  run.start(resumes=False)
  rows = []
  for suite in config.suites:
    keeps = "workdir" in inspect.signature(suite).parameters
    rows += suite(workdir=run.workdir) if keeps else suite()
    print(report.tables(rows), flush=True)
  common.write_atomically(run.workdir / "table.md", report.tables(rows, "github") + "\n")
  report.plot(rows, run.workdir / "plots")
  return {"rows": rows}


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab bench`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
