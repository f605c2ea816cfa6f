"""Secrets do not leave the process, whatever the way."""

import logging

import pytest

from jaxlab import redaction

CANARIES = {
  "HF_TOKEN": "hf_CanaryCanaryCanary",
  "OPENAI_API_KEY": "sk-canary-9876543210",
  "MY_SECRET": "an ordinary sentence",  # known by the variable's name only
}


@pytest.mark.parametrize(
  "text, want",
  [
    ("token hf_abcdefghijklmnop01.", "token [redacted]."),
    ("Authorization: Bearer abc.def-123", "Authorization: Bearer [redacted]"),
    ("key=sk-proj-0123456789", "key=[redacted]"),
    ("an ordinary sentence", "[redacted]"),
    ("task-specific, disk-based, hf_checkpoint", "task-specific, disk-based, hf_checkpoint"),
    ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=false"),
  ],
)
def test_redact(monkeypatch, text, want):
  for name, value in CANARIES.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("SHORT_KEY", "key")  # too short to be a secret, and would eat this text
  assert redaction.redact(text) == want


def test_a_traceback_is_redacted(monkeypatch):
  for name, value in CANARIES.items():
    monkeypatch.setenv(name, value)
  try:
    raise KeyError("an ordinary sentence")
  except KeyError as error:
    info = (type(error), error, error.__traceback__)
  record = logging.LogRecord("x", logging.ERROR, "f", 1, "with hf_CanaryCanaryCanary", (), info)
  text = redaction.Formatter().format(record)
  assert "with [redacted]" in text and "KeyError: '[redacted]'" in text
