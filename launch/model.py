"""What verbs that run a model share: loading it if it fits into memory, and a progress line."""

import dataclasses
import time
from collections.abc import Callable

import tqdm
from absl import logging

import jaxlab
from jaxlab.io import peft
from jaxlab.train import budget
from pallas_kernels import target

SECONDS_BETWEEN_LINES = 10.0


def required(path: str | None) -> str:
  """The value of --model. Raises: ValueError if it was not given."""
  if not path:
    raise ValueError("--model: must be given: a model folder, a .gguf file, or 'demo'. See --help.")
  return path


def load(
  path: str, *, work: budget.Work, adapter: str | None = None, dtype: str | None = None
) -> jaxlab.LM:
  """The model of --model with the adapter of --adapter, after its memory budget was logged.

  Raises: ValueError if the model is not there, or cannot fit into memory.
  """
  budget.check_model(path, work)
  lm = jaxlab.load(path, dtype=dtype)
  if adapter:
    lm = dataclasses.replace(lm, params=peft.load_adapter(adapter, lm.params))
  return lm


def decoding(sequences: int, new_tokens: int, longest_prompt: int) -> budget.Work:
  """The work of decoding; two characters of a prompt are counted as a token."""
  return budget.Work(
    dtype_bytes=budget.default_dtype_bytes(),
    rollout_sequences=sequences,
    rollout_tokens=new_tokens + longest_prompt // 2,
    unpacked_copy=target.current_target().platform == "cpu",
  )


def progress(unit: str) -> Callable[[int, int], None]:
  """A function of (done, total): a bar on a terminal, a line every few seconds elsewhere."""
  shown = {"bar": None, "start": time.monotonic(), "last": time.monotonic(), "first": 0}

  def show(done: int, total: int) -> None:
    if shown["bar"] is None:
      shown["bar"] = tqdm.tqdm(total=total, initial=done, unit=unit, disable=None, leave=False)
      shown["first"] = done
      return
    bar, now = shown["bar"], time.monotonic()
    bar.update(done - bar.n)
    if done == total:
      bar.close()
    if bar.disable and (done == total or now - shown["last"] >= SECONDS_BETWEEN_LINES):
      shown["last"] = now
      rate = max(done - shown["first"], 1e-9) / max(now - shown["start"], 1e-9)
      left = (total - done) / rate
      logging.info("%d/%d %s, %.3g a second, %.0f s left", done, total, unit, rate, left)

  return show
