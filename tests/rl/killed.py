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
  recipe: pathlib.Path, workdir: pathlib.Path, phase: str | None = None, rounds: int = 0,
  delay: float = 0.0,
) -> None:  # fmt: skip
  """The launcher's exit code; or SIGKILL, `delay` seconds after a phase has begun.

  That is the first `phase` from the start of this process's `rounds`-th round on. The phase "stop"
  is a rollout that gets SIGTERM instead.
  """
  # What is compiled once is not compiled again: a process is killed in its work, not in XLA.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
  if phase is not None:
    _arm(phase, rounds, delay)
  words = ["rl", f"--gin_file={recipe}", f"--workdir={workdir}"]
  raise SystemExit(common.execute(rl.main, rl.FLAGS, words))


def _arm(phase: str, rounds: int, delay: float) -> None:
  """Has this process end `delay` seconds after `phase` has begun, whatever it is doing then."""
  signum = signal.SIGTERM if phase == "stop" else signal.SIGKILL
  timer = threading.Timer(delay, os.kill, (os.getpid(), signum))
  begun = []

  def at(name: str):
    if name == phase and len(begun) >= rounds and timer.ident is None:
      timer.start()

  def begin(source, index, state):
    begun.append(index)
    at("rollout")
    at("stop")

  def watched(make):
    return lambda *args, **kwargs: _after(lambda *_: at("update"), make(*args, **kwargs))

  _replace(rollout.RolloutSource, "__call__", functools.partial(_after, begin))
  reward = functools.partial(_after, lambda *_: at("reward"))
  _replace(rollout.RolloutSource, "_score_answer", reward)
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
