"""`python -m launch.rl` in a process of its own, which can kill itself at a chosen moment."""

import functools
import os
import pathlib
import signal
import threading

import jax

from jaxlab.io import orbax
from jaxlab.rl import rollout
from jaxlab.train import step as train_steps
from launch import common, rl

PHASES = ("rollout", "reward", "update", "save")
STEPS, SAVE_EVERY = 8, 3


def gin(folder: pathlib.Path, model: pathlib.Path) -> pathlib.Path:
  """A recipe on the packaged sums; the answers' lengths are what the tiny model can learn."""
  path = folder / "killed.gin"
  path.write_text(f"""
RLConfig.model = '{model}'
RLConfig.steps = {STEPS}
RLConfig.save_every = {SAVE_EVERY}
RLConfig.prompts = 4
RLConfig.samples = 4
RLConfig.sequences_per_row = 4
RLConfig.max_prompt_tokens = 64
RLConfig.overlong_buffer = 5
RLConfig.mask_truncated = False
RLConfig.sampling = @SamplingConfig()
RLConfig.lora = @LoRAConfig()
RLConfig.optimizer = @OptimizerConfig()
RLConfig.aqn = @AQNConfig()
RLData.train = @two_digit_sum()
RLData.rewards = (@exact_match,)
two_digit_sum.n = 50
quantize.format = 'nvfp4'
SamplingConfig.max_new_tokens = 6
LoRAConfig.rank = 4
OptimizerConfig.lr = 1e-2
OptimizerConfig.warmup = 2
AQNConfig.stages = 4
AQNConfig.sigma_start = 0.1
""")
  return path


def run(
  recipe: pathlib.Path, workdir: pathlib.Path, phase: str | None = None, step: int = 0,
  delay: float = 0.0,
) -> None:  # fmt: skip
  """The launcher's exit code; or SIGKILL, `delay` seconds after `phase` of `step` has begun.

  The phase "stop" is a rollout that gets SIGTERM instead.
  """
  # What is compiled once is not compiled again: a process is killed in its work, not in XLA.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
  if phase is not None:
    _arm(phase, step, delay)
  words = ["rl", f"--gin_file={recipe}", f"--workdir={workdir}"]
  raise SystemExit(common.execute(rl.main, rl.FLAGS, words))


def _arm(phase: str, step: int, delay: float) -> None:
  """Has this process end in `phase` of `step`, whatever it is doing `delay` seconds later."""
  now = {"step": 0}

  def at(name: str):
    if name == phase and now["step"] == step:
      signum = signal.SIGTERM if phase == "stop" else signal.SIGKILL
      threading.Timer(delay, os.kill, (os.getpid(), signum)).start()

  def begin(source, index, state):
    now["step"] = index + 1
    at("rollout")
    at("stop")

  def watched(make):
    return lambda *args, **kwargs: _after(lambda *_: at("update"), make(*args, **kwargs))

  _replace(rollout.RolloutSource, "__call__", functools.partial(_after, begin))
  _replace(rollout.rewards, "score_all", functools.partial(_after, lambda *_: at("reward")))
  _replace(train_steps, "make_train_step", watched)
  _replace(orbax.CheckpointStore, "save", functools.partial(_after, lambda *_: at("save")))


def _after(note, function):
  """`function`, called after `note` has seen its arguments."""

  def noted(*args, **kwargs):
    note(*args)
    return function(*args, **kwargs)

  return noted


def _replace(owner, name: str, wrap) -> None:
  setattr(owner, name, wrap(getattr(owner, name)))
