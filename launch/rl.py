"""Tunes a quantised model by group-relative RL with adapters (QeRL).

Quantises the base, samples groups of answers, scores them, trains LoRA adapters and norm gains, and
scores held-out items before and after. Rerunning the same command resumes.

python -m launch.rl --gin_file=configs/demo/qerl.gin --workdir=runs/demo"""

from jaxlab.rl import base, experiment
from jaxlab.train import signals
from launch import common, registry

FLAGS = common.define_flags()


def main(run: common.Run) -> dict:
  """Builds the run from gin, trains, and returns the figures of result.json."""
  config = registry.get("RLConfig")()
  data = registry.get("RLData")()
  quantize = registry.get("quantize")
  run.start()
  with signals.Interrupt() as stop:
    lm = base.load(config.model_path(run.workdir), quantize, config)
    return experiment.run(
      lm,
      data,
      config,
      quantize,
      workdir=run.workdir,
      seed=run.seed,
      config_text=registry.operative_config(),
      stop=stop,
    )


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab rl`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
