"""SIGTERM and SIGINT: finish the step, save, say so, leave; a second signal leaves at once.

One process: a handler that only sets a flag, read between steps. Several (`jax.distributed`):
SIGTERM belongs to JAX's preemption service, which all processes see at the same step through
`CheckpointStore.reached_preemption`; our SIGINT handler sends SIGTERM to its own process.
"""

import os
import signal
import threading
import types

import jax

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
  """A run that stopped because it was told to; launchers leave with `exit_code`.

  Args:
    signum: the signal; None after a preemption that all processes saw.
    step: the last finished step.
    saved: whether that step is in a checkpoint.
  """

  def __init__(self, signum: int | None, step: int, saved: bool):
    super().__init__(signum, step, saved)
    self.signum = signum
    self.step = step
    self.saved = saved

  def __str__(self) -> str:
    why = "a preemption notice" if self.signum is None else signal.Signals(self.signum).name
    what = "saved" if self.saved else "not saved, because it was a bad one"
    return f"Stopped by {why} after step {self.step} ({what}). The same command resumes."

  @property
  def exit_code(self) -> int:
    return 0 if self.signum is None else exit_code(self.signum)


def exit_code(signum: int) -> int:
  """128 + signal, what a shell reports for a process that a signal ended."""
  return 128 + signum


class Interrupt:
  """Context manager whose truth is whether a signal asked this process to stop.

  Launchers enter it before anything slow and hand it to `fit`. Outside of the main thread (where
  Python forbids handlers) it is inert.
  """

  def __init__(self) -> None:
    self.signum: int | None = None
    self._old = {}

  def __enter__(self) -> "Interrupt":
    if threading.current_thread() is threading.main_thread():
      # JAX's preemption service has taken SIGTERM if the processes are already connected.
      mine = SIGNALS[1:] if jax.distributed.is_initialized() else SIGNALS
      self._old = {s: signal.signal(s, self._on_signal) for s in mine}
    return self

  def __exit__(self, *error: object) -> None:
    for signum, handler in self._old.items():
      # If the processes were connected inside, SIGTERM is no longer ours to give back.
      if signum == signal.SIGINT or not jax.distributed.is_initialized():
        signal.signal(signum, handler)

  def __bool__(self) -> bool:
    return self.signum is not None

  def raise_if_set(self, step: int = 0) -> None:
    """For slow verbs without a training loop, between two pieces of their work.

    Raises: Interrupted if a signal came.
    """
    if self:
      raise Interrupted(self.signum, step, saved=False)

  def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
    if self._seen_before(signum):
      signal.signal(signum, signal.SIG_DFL)
      os.kill(os.getpid(), signum)
    elif jax.distributed.is_initialized():
      os.kill(os.getpid(), signal.SIGTERM)

  def _seen_before(self, signum: int) -> bool:
    before, self.signum = self.signum, signum
    return before is not None
