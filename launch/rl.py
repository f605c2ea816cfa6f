"""Tunes a quantised model by group-relative RL with adapters (QeRL).

Quantises the base, samples groups of answers, scores them, trains LoRA adapters and norm gains, and
scores held-out items before and after. Rerunning the same command resumes. --replay runs one update
again that a broken run kept in its flight folder. Several processes (SLURM, GKE, JAX_* variables)
share one mesh, RLConfig.mesh, and one workdir.

python -m launch.rl --gin_file=configs/demo/qerl.gin --workdir=runs/demo"""

import json

from absl import flags

from jaxlab.parallel import mesh
from jaxlab.rl import base, experiment
from jaxlab.train import signals
from launch import common, registry

FLAGS = common.define_flags()
flags.DEFINE_string("replay", None, "A flight/STEP folder: print that update's metrics.", FLAGS)


def main(run: common.Run) -> dict | None:
  """Builds the run from gin, trains, and returns the figures of result.json."""
  config = registry.get("RLConfig")()
  data = registry.get("RLData")()
  quantize = registry.get("quantize")
  run.start()
  with signals.Interrupt() as stop:
    lm = base.load(config.model_path(run.workdir), quantize, config)
    if run.flags.replay:
      path, seed = run.flags.replay, run.seed
      print(json.dumps(experiment.replay(lm, data, config, quantize, path=path, seed=seed)))
      return None
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
  common.run_verb(main, FLAGS, argv, connect=mesh.connect_processes)


if __name__ == "__main__":
  run()
