"""A conversation with a model: messages that grow, answers that stream."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Key

from jaxlab.decode import sampling, text


@dataclasses.dataclass
class Chat:
  """The state of one conversation.

  lm: a `jaxlab.LM` with a tokenizer that has a chat template; its params as `text.serving_params`.
  key: turn t draws its tokens from fold_in(key, t), so a conversation can be repeated.
  """

  lm: Any
  config: sampling.SamplingConfig
  key: Key[Array, ""]
  messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
  turns: int = 0

  def ask(self, question: str, on_text: Callable[[str], None] | None = None) -> str:
    """The model's answer, remembered with the question; `on_text` gets its pieces as they come.

    Raises: ValueError if the conversation has outgrown the context; it is then as before.
    """
    asked = [*self.messages, {"role": "user", "content": question}]
    give = None if on_text is None else lambda row, piece: on_text(piece)
    key = jax.random.fold_in(self.key, self.turns)
    out = text.generate_texts(self.lm, [asked], self.config, key, on_text=give)
    (answer,) = out.texts
    self.messages = [*asked, {"role": "assistant", "content": answer}]
    self.turns += 1
    return answer

  def reset(self) -> None:
    """Forgets what was said."""
    self.messages = []
