"""Keeps secrets out of logs, configs, results and tracebacks: known values and known shapes."""

import logging
import os
import re
from collections.abc import Mapping

SHAPES = re.compile(r"hf_\w{8,}|\bsk-[\w-]{8,}|(?<=Bearer )[^\s\"',]+", re.ASCII)
SECRET_NAMES = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
SHORTEST = 8  # a shorter value would blank ordinary words


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
  """`text` without the values of secret environment variables and without token-like words."""
  for name, value in environment.items():
    if len(value) >= SHORTEST and SECRET_NAMES.search(name):
      text = text.replace(value, "[redacted]")
  return SHAPES.sub("[redacted]", text)


class Formatter(logging.Formatter):
  """Plain lines with the time of day; the whole record, traceback included, is redacted."""

  def __init__(self):
    super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

  def format(self, record: logging.LogRecord) -> str:
    return redact(super().format(record))
