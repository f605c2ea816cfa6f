"""Measures speed as ratios against named baselines, by interleaved pairs in one process.

Writes result.json ({"rows": [...]}), table.md and plots/ratios.png.

python -m launch.bench --gin_file=configs/bench/decode.gin --workdir=runs/bench"""

import tabulate

from jaxlab.bench import report
from launch import common, registry

FLAGS = common.define_flags()


def main(run: common.Run) -> dict:
  """Runs the configured suites; rows are printed as they come."""
  config = registry.get("BenchConfig")()
  run.start(resumes=False)
  rows = []
  for suite in config.suites:
    rows += suite()
    print(tabulate.tabulate(report.short(rows), headers="keys", floatfmt=".3g"), flush=True)
  table = tabulate.tabulate(report.short(rows), headers="keys", floatfmt=".3g", tablefmt="github")
  common.write_atomically(run.workdir / "table.md", table + "\n")
  report.plot(rows, run.workdir / "plots" / "ratios.png")
  return {"rows": rows}


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab bench`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
