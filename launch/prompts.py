"""Prompts from a flag, a file, a pipe or a terminal. A prompt is a text or a list of messages."""

import json
import pathlib
import sys
from collections.abc import Sequence

from jaxlab.decode import text
from jaxlab.eval import records


def read(prompt: str | None, path: str | None) -> list[text.Prompt] | None:
  """What the flags and standard input ask; None asks for a chat.

  Raises: ValueError for both flags, a missing or empty file, or a row without a prompt.
  """
  if prompt is not None and path is not None:
    raise ValueError("--prompt: cannot go with --prompts_file. Give one of them.")
  if path is not None:
    return _from_file(pathlib.Path(path))
  if prompt is None and sys.stdin.isatty():
    return None
  prompt = sys.stdin.read().strip() if prompt is None else prompt
  if not prompt:
    raise ValueError("--prompt: must not be empty. Give a text, a --prompts_file, or a terminal.")
  return [prompt]


def _from_file(path: pathlib.Path) -> list[text.Prompt]:
  if not path.is_file():
    raise ValueError(f"--prompts_file: the file must exist; got {path}. Check the path.")
  lines = path.read_text(encoding="utf-8").splitlines()
  rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
  if not rows:
    raise ValueError(f"--prompts_file: must hold at least one prompt; got none in {path}.")
  if path.suffix != ".jsonl":
    return [line for _, line in rows]
  return [_from_row(path, number, line) for number, line in rows]


def _from_row(path: pathlib.Path, number: int, line: str) -> text.Prompt:
  try:
    row = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"--prompts_file: {path}, row {number}: must be JSON, got {error}.") from None
  prompt = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
  is_chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
  if not isinstance(prompt, str) and not is_chat:
    fields = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
    raise ValueError(
      f"--prompts_file: {path}, row {number}: needs a field 'prompt' or 'messages'; got {fields}."
    )
  if is_chat:
    try:
      as_items([prompt], as_messages=True)
    except ValueError as error:
      raise ValueError(f"--prompts_file: {path}, row {number}: {error}") from None
  return prompt


def num_characters(prompt: text.Prompt) -> int:
  """Length of a prompt's text."""
  return len(prompt) if isinstance(prompt, str) else sum(len(m["content"]) for m in prompt)


def as_items(asked: Sequence[text.Prompt], *, as_messages: bool) -> list[records.Item]:
  """Items to be answered; texts become a user's message if `as_messages`."""

  def item(index: int, prompt: text.Prompt) -> records.Item:
    if isinstance(prompt, str) and as_messages:
      prompt = [{"role": "user", "content": prompt}]
    is_text = isinstance(prompt, str)
    return records.Item(
      f"prompt/{index}", "generate", "user",
      messages=() if is_text else tuple(prompt), prompt=prompt if is_text else None,
    )  # fmt: skip

  return [item(index, prompt) for index, prompt in enumerate(asked)]


def of_item(item: records.Item) -> text.Prompt:
  """The prompt of an item: its text, or its messages."""
  return list(item.messages) if item.prompt is None else item.prompt
