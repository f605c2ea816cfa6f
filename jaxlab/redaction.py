"""Keeps secrets out of logs, configs, results and tracebacks: known values and known shapes."""

import logging
import os
import re
from collections.abc import Mapping

REDACTED = "[redacted]"
SECRET_NAME = re.compile(
  r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|KEY$", re.IGNORECASE
)
SECRET_SHAPE = re.compile(  # a token of Hugging Face has 34 letters and digits; names are shorter
  r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{8,}|(?<=\bBearer )[^\s\"',]+", re.IGNORECASE
)
MIN_SECRET_CHARS = 8  # shorter values ("true", a number) are settings, and would eat ordinary text


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
  """Replaces secrets: values of the environment's TOKEN/KEY/... variables, and known shapes."""
  for name, value in environment.items():
    if SECRET_NAME.search(name) and len(value) >= MIN_SECRET_CHARS:
      text = text.replace(value, REDACTED)
  return SECRET_SHAPE.sub(REDACTED, text)


class Formatter(logging.Formatter):
  """Plain lines with the time of day; the whole record, traceback included, is redacted."""

  def __init__(self):
    super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

  def format(self, record: logging.LogRecord) -> str:
    return redact(super().format(record))
