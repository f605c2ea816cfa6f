"""The records that evaluation and reinforcement learning share: what was asked, said and scored.

One JSON object a line, with a schema version: a reader refuses a version it does not know instead
of guessing. Ids are stable (the data set's own, else `content_id`), and a score keeps sufficient
statistics, so that any metric can be aggregated again without running the model.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

SCHEMA = 1
ROLES = ("system", "user", "assistant", "tool")
FINISH_REASONS = ("stop", "length", "error", "refused")


@dataclasses.dataclass(frozen=True)
class Item:
  """One question. `messages` go through a chat template; `prompt` is text to be used as it is.

  When both are given `prompt` wins: it is the messages already rendered.
  """

  id: str
  task: str
  split: str
  messages: tuple[dict[str, str], ...] = ()  # {"role", "content"}
  prompt: str | None = None
  target: str | None = None  # None: no reference answer
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)  # JSON values only
  clusters: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> key, for intervals

  def __post_init__(self):
    if not self.id:
      raise ValueError("Item: id must not be empty. Use content_id(task, content).")
    if not self.messages and self.prompt is None:
      raise ValueError(f"Item: needs messages or a prompt; got neither in item {self.id!r}.")
    for message in self.messages:
      if set(message) != {"role", "content"} or message["role"] not in ROLES:
        raise ValueError(
          f"Item: a message is a role ({', '.join(ROLES)}) and a content; got {message!r} in item "
          f"{self.id!r}."
        )


@dataclasses.dataclass(frozen=True)
class Response:
  """One answer. `key` names the request it answers; `text` is None when there was none."""

  key: str
  text: str | None
  token_ids: tuple[int, ...] | None = None  # the stop token included
  logprob: float | None = None  # sum over the tokens, as sampled
  finish: str = "stop"
  usage: dict[str, int] = dataclasses.field(default_factory=dict)  # {"in", "out"} in tokens
  error: str | None = None

  def __post_init__(self):
    if self.finish not in FINISH_REASONS:
      raise ValueError(
        f"Response: finish must be one of {', '.join(FINISH_REASONS)}; got {self.finish!r}."
      )

  @property
  def num_tokens(self) -> int:
    """Tokens of the answer, stop token included. Raises: ValueError if they were not recorded."""
    if self.token_ids is not None:
      return len(self.token_ids)
    if "out" not in self.usage:
      raise ValueError(
        f"Response: num_tokens needs token_ids or usage['out']; got neither in {self.key!r}. "
        "Characters are not tokens."
      )
    return self.usage["out"]


@dataclasses.dataclass(frozen=True)
class Score:
  """Sufficient statistics of one metric for one sample of an item; None is "not measured"."""

  item_id: str
  sample_idx: int
  metric: str
  stats: dict[str, float | None]
  valid: bool = True  # the answer could be read


Reward = Callable[[Item, Response], dict[str, float | None]]
Record = TypeVar("Record", Item, Response, Score)


def score_all(rewards: Sequence[Reward], item: Item, response: Response) -> dict[str, float | None]:
  """The parts of all rewards in one dict, in their order.

  Raises: ValueError if two rewards share a part's name.
  """
  parts: dict[str, float | None] = {}
  for reward in rewards:
    new = reward(item, response)
    if clash := parts.keys() & new.keys():
      raise ValueError(
        f"score_all: parts of rewards need different names; got {', '.join(sorted(clash))} twice."
      )
    parts |= new
  return parts


def content_id(task: str, content: Any) -> str:
  """`task/` and 16 hex digits of the SHA-256 of `content` (any JSON value): the same everywhere."""
  digest = hashlib.sha256(_dumps(content).encode()).hexdigest()
  return f"{task}/{digest[:16]}"


def to_json(record: Item | Response | Score) -> str:
  """One line of canonical JSON: equal records give equal bytes.

  Raises: ValueError if a field holds something JSON cannot (NaN included: write None).
  """
  name = type(record).__name__
  try:
    return _dumps({"schema": SCHEMA, "type": name, **dataclasses.asdict(record)})
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"to_json: {name} must hold JSON values only, NaN and infinity excluded; {error}."
    ) from error


def from_json(kind: type[Record], line: str) -> Record:
  """The record written by `to_json`.

  Raises: ValueError naming the schema version, the type or the fields that do not fit.
  """
  data = json.loads(line)
  if not isinstance(data, dict):
    raise ValueError(f"from_json: a record is a JSON object; got {line[:80]!r}.")
  schema, name = data.pop("schema", None), data.pop("type", None)
  if schema != SCHEMA:
    raise ValueError(
      f"from_json: schema version must be {SCHEMA}; got {schema!r}. Read it with the jaxlab that "
      "wrote it."
    )
  if name != kind.__name__:
    raise ValueError(f"from_json: expected a {kind.__name__}; got type {name!r}.")
  fields = {f.name for f in dataclasses.fields(kind)}
  required = {f.name for f in dataclasses.fields(kind) if _has_no_default(f)}
  if data.keys() - fields or required - data.keys():
    raise ValueError(
      f"from_json: {kind.__name__} has the fields {', '.join(sorted(fields))}; got "
      f"{', '.join(sorted(data))}."
    )
  for field in ("messages", "token_ids"):  # JSON has no tuples
    if isinstance(data.get(field), list):
      data[field] = tuple(data[field])
  return kind(**data)


def _has_no_default(field: dataclasses.Field) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


def _dumps(value: Any) -> str:
  # ASCII escapes keep a lone surrogate writable and U+2028 from looking like the end of a line.
  return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
