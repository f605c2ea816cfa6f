"""A chat in the terminal: questions line by line, answers as they come."""

import json
import pathlib
import sys

import jax

from jaxlab import lm as language_model
from jaxlab.decode import chat, sampling

HELP = "Empty line or Ctrl-D: leave. /new: forget what was said."


def talk(
  lm: language_model.LM, config: sampling.SamplingConfig, seed: int, path: pathlib.Path
) -> int:
  """Chats until an empty line or the end of the input, adding each turn to the file `path`.

  Returns: the number of turns.
  """
  session = chat.Chat(lm, config, jax.random.key(seed))
  print(HELP)
  with path.open("a", encoding="utf-8") as file:
    while (line := ask("> ")) is not None:
      if line == "/new":
        session.reset()
        continue
      try:
        answer = session.ask(line, show)
      except ValueError as error:  # the context is full: said, and the session goes on
        print(f"{error} Or type /new.")
        continue
      show("\n")
      file.write(json.dumps({"prompt": line, "text": answer}, ensure_ascii=False) + "\n")
      file.flush()
  return session.turns


def ask(mark: str) -> str | None:
  """A line from the terminal; None for an empty one or the end."""
  try:
    return input(mark).strip() or None
  except EOFError:
    return None


def show(piece: str) -> str:
  """Text to the terminal at once."""
  sys.stdout.write(piece)
  sys.stdout.flush()
  return piece
