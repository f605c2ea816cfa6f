"""Runs one RL recipe in several arms and seeds, and compares them.

Every arm and seed is a run of `launch.rl` in its own folder. report.md and result.json say which of
the criteria of the small QeRL experiment held, with the numbers. Rerunning the command resumes.

python -m launch.arms --gin_file=configs/qerl/tiny_arms.gin"""

from jaxlab.rl import arms
from jaxlab.train import signals
from launch import common, registry

FLAGS = common.define_flags()


def main(run: common.Run) -> dict:
  """Builds the arms from gin and runs them; returns the figures of result.json."""
  comparison = registry.get("ArmsConfig")()
  data = registry.get("RLData")()
  run.start()
  with signals.Interrupt() as stop:
    return arms.run(
      comparison, data, workdir=run.workdir, seed=run.seed,
      config_text=registry.operative_config(), stop=stop,
    )  # fmt: skip


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab arms`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
