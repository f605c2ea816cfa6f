"""One owner of SIGTERM and SIGINT: a loop finishes its step and saves, all else just leaves."""

import os
import signal
import sys

from absl import logging


class Interrupt:
  """What the signals of a run mean.

      with run.interrupt as interrupt:         # from here on a signal waits for the step to end
        fit(..., should_stop=interrupt.requested)

  Outside the block the first signal leaves at once, with 128 + its number. Inside it sets `signal`,
  which the loop reads between steps; leaving the block then ends the process with the same code.
  A second signal always leaves at once, also in a long step.
  """

  SIGNALS = (signal.SIGTERM, signal.SIGINT)

  def __init__(self):
    self.signal: int | None = None
    self._in_steps = False
    self._before = {}

  def install(self) -> None:
    """Takes the signals over; `restore` gives them back. Main thread only."""
    self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

  def restore(self) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def requested(self) -> bool:
    """Whether to stop after this step."""
    return self.signal is not None

  def __enter__(self) -> "Interrupt":
    self._in_steps = True
    return self

  def __exit__(self, kind, error, traceback) -> None:
    self._in_steps = False
    if error is None and self.signal is not None:
      sys.exit(128 + self.signal)

  def _handle(self, number: int, frame) -> None:
    name = signal.Signals(number).name
    if self.signal is not None:
      os._exit(128 + number)
    self.signal = number
    if not self._in_steps:
      logging.info("%s: leaving.", name)
      sys.exit(128 + number)
    logging.info("%s: stopping after this step; once more leaves at once.", name)
