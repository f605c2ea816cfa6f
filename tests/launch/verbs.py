"""Runs a verb in this process, as its command line does."""

import importlib
import json
import pathlib
from typing import Any, NamedTuple

from absl import logging
from absl.testing import flagsaver

from launch import common


class Done(NamedTuple):
  """What a verb left behind."""

  code: int
  out: str
  err: str

  @property
  def error(self) -> str:
    """The one error line of exit code 2; no traceback may stand beside it."""
    assert self.code == 2, self.err
    assert "Traceback" not in self.err
    (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def call(verb: str, words: list[str], capsys) -> Done:
  """`python -m launch.VERB WORDS`, and what it wrote."""
  return Done(execute(verb, words), *capsys.readouterr())


def execute(verb: str, words: list[str]) -> int:
  """Its exit code; flags and the log are as they were afterwards."""
  module = importlib.import_module(f"launch.{verb}")
  saved = flagsaver.save_flag_values(module.FLAGS)
  verbosity, handlers = logging.get_verbosity(), list(logging.get_absl_logger().root.handlers)
  try:
    return common.execute(
      module.main, module.FLAGS, [verb, *words], getattr(module, "ARGUMENTS", "")
    )
  finally:
    flagsaver.restore_flag_values(saved, module.FLAGS)
    logging.set_verbosity(verbosity)
    logging.get_absl_logger().root.handlers[:] = handlers


def result(workdir: pathlib.Path) -> dict[str, Any]:
  return json.loads((workdir / "result.json").read_text())


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text().splitlines()]
