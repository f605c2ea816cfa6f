"""Questions with answers from a local JSONL or Parquet file, offline, row by row with its number.

A field map says which columns hold the prompt, the target and (optionally) the id; a template turns
(prompt, target) into messages and the gold answer. Readers for the data sets of QeRL are below.
Prompts that are too long are cut later, by tokens, keeping the last ones.

Source of prompts and column names: arXiv 2510.11696 App. E; NVlabs/QeRL e8c6e79 utils/data.py. The
wording of the prompts is ours.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxlab import errors
from jaxlab.eval import records

Messages = tuple[dict[str, str], ...]
Template = Callable[[Any, str], tuple[Messages, str]]

BATCH_ROWS = 1024  # Parquet rows in memory at a time
BIGMATH_CHARS = 1024  # [QeRL code: longer problems are left out]

TAGS_SYSTEM = (
  "You solve problems by reasoning step by step. Write your reasoning between <think> and "
  "</think>, then only the final result between <answer> and </answer>."
)
HASH_REQUEST = (
  "Reason step by step between <think> and </think>, then finish with a last line of the form "
  "#### number."
)
DAPO_REQUEST = (
  "Solve the problem step by step. The last line of your response must be of the form "
  "Answer: <result>."
)


def plain(prompt: Any, target: str) -> tuple[Messages, str]:
  """The prompt as one user turn (or as it is, when it is a list of messages)."""
  return _messages(prompt), target


def gsm8k_tags_template(prompt: Any, target: str) -> tuple[Messages, str]:
  """System text asking for tags, then the question; gold is the part after `####`."""
  return (_turn("system", TAGS_SYSTEM), *_messages(prompt)), _after_hash(target)


def gsm8k_hash_template(prompt: Any, target: str) -> tuple[Messages, str]:
  """The question and the request for `#### number` in one user turn."""
  return _messages(f"{prompt}\n{HASH_REQUEST}"), _after_hash(target)


def bigmath_template(prompt: Any, target: str) -> tuple[Messages, str]:
  """The same system text as `gsm8k_tags_template`; the gold answer is a formula."""
  return (_turn("system", TAGS_SYSTEM), *_messages(prompt)), target.strip()


def dapo_template(prompt: Any, target: str) -> tuple[Messages, str]:
  """The data set's own messages; a bare problem gets the request for a last line `Answer: ...`."""
  if isinstance(prompt, str):
    prompt = f"{DAPO_REQUEST}\n\n{prompt}"
  return _messages(prompt), target.strip()


def gsm8k_items(path: str, style: str = "tags", split: str = "train") -> list[records.Item]:
  """`openai/gsm8k` (question, answer); style "tags" or "hash", as the reward that goes with it."""
  templates = {"tags": gsm8k_tags_template, "hash": gsm8k_hash_template}
  if style not in templates:
    raise ValueError(f"gsm8k_items: style must be tags or hash; got {style!r}.")
  fields = {"prompt": "question", "target": "answer"}
  return read_items(path, fields, task="gsm8k", split=split, template=templates[style])


def bigmath_items(path: str, split: str = "train") -> list[records.Item]:
  """`open-r1/Big-Math-RL-Verified-Processed` (prompt, solution) up to 1,024 characters."""
  return read_items(
    path,
    {"prompt": "prompt", "target": "solution"},
    task="bigmath",
    split=split,
    template=bigmath_template,
    max_chars=BIGMATH_CHARS,
  )


def dapo_items(path: str, split: str = "train") -> list[records.Item]:
  """`open-r1/DAPO-Math-17k-Processed` (source_prompt messages, solution)."""
  fields = {"prompt": "source_prompt", "target": "solution"}
  return read_items(path, fields, task="dapo", split=split, template=dapo_template)


def miromind_items(path: str, split: str = "train") -> list[records.Item]:
  """`miromind-ai/MiroMind-M1-RL-62K` (problem, clean_answer) with the prompt of DAPO."""
  fields = {"prompt": "problem", "target": "clean_answer"}
  return read_items(path, fields, task="miromind", split=split, template=dapo_template)


def read_items(
  path: str | os.PathLike[str],
  fields: Mapping[str, str],
  *,
  task: str,
  split: str = "train",
  template: Template = plain,
  max_chars: int | None = None,
) -> list[records.Item]:
  """Items of a `.jsonl` or `.parquet` file, in its order.

  Args:
    path: the file; nothing is downloaded.
    fields: {"prompt": column, "target": column} and optionally "id"; without one the id is a hash
      of task and content.
    template: (prompt, target) -> (messages, gold answer).
    max_chars: leave out rows whose prompt is longer.
  Raises: CorruptFile with the row number for a row that is no JSON object; ValueError for a missing
    field (with the fields there are), a prompt or target of the wrong type, or no rows at all.
  """
  if set(fields) - {"id"} != {"prompt", "target"}:
    raise ValueError(
      "read_items: fields must map prompt and target (and optionally id) to columns; got "
      f"{dict(fields)}."
    )
  items: dict[str, records.Item] = {}
  for number, row in _rows(pathlib.Path(path)):
    values = {name: _field(path, number, row, column) for name, column in fields.items()}
    if max_chars is not None and len(str(values["prompt"])) > max_chars:
      continue
    try:
      messages, target = template(values["prompt"], _text(values["target"]))
      item_id = _new_id(items, task, values, target)
      item = records.Item(id=item_id, task=task, split=split, messages=messages, target=target)
    except ValueError as error:
      raise ValueError(f"read_items: {path}, row {number}: {error}") from error
    items[item_id] = item
  if not items:
    kept = "" if max_chars is None else f" of at most {max_chars} characters"
    raise ValueError(
      f"read_items: the file must hold at least one row{kept}; got none in {path}. Check the path."
    )
  return list(items.values())


def _new_id(items: Mapping[str, Any], task: str, values: Mapping[str, Any], target: str) -> str:
  """The row's own id, which must be new, else a hash of its content; copies get a count."""
  if "id" in values:
    if (own := str(values["id"])) in items:
      raise ValueError(f"ids must differ; got {own!r} twice. Map another column, or none.")
    return own
  content = records.content_id(task, [values["prompt"], target])
  copies = itertools.chain([content], (f"{content}-{k}" for k in itertools.count(2)))
  return next(new for new in copies if new not in items)


def _rows(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  if not path.is_file():
    raise ValueError(f"read_items: the data file must exist; got {path}. Check the path.")
  if path.suffix == ".parquet":
    return _parquet_rows(path)
  if path.suffix in (".jsonl", ".json"):
    return json_rows(path)
  raise ValueError(f"read_items: the data file must be .jsonl or .parquet; got {path}.")


def json_rows(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Rows counted from 1, as an editor counts lines; blank lines are skipped."""
  with path.open("rb") as lines:
    for number, line in enumerate(lines, 1):
      if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
      if not line.strip():
        continue
      try:
        row = json.loads(line.decode("utf-8"))
      except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise errors.CorruptFile(
          path, f"row {number}", f"a row must be JSON in UTF-8, got {error}", "Fix that row."
        ) from error
      if not isinstance(row, dict):
        raise errors.CorruptFile(
          path,
          f"row {number}",
          f"a row must be a JSON object, got {type(row).__name__}",
          "Write one {...} a line.",
        )
      yield number, row


def _parquet_rows(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  import pyarrow as pa
  import pyarrow.parquet as pq

  try:
    with pq.ParquetFile(path) as file:
      number = 0
      for batch in file.iter_batches(batch_size=BATCH_ROWS):
        for row in batch.to_pylist():
          number += 1
          yield number, row
  except (pa.ArrowException, OSError) as error:
    raise errors.CorruptFile(
      path, "file", f"must be a readable Parquet file, got {error}"
    ) from error


def _field(path: str | os.PathLike[str], number: int, row: Mapping[str, Any], column: str) -> Any:
  if row.get(column) is not None:
    return row[column]
  state = "is null" if column in row else "is missing"
  raise ValueError(
    f"read_items: {path}, row {number}: field {column!r} {state}; got the fields "
    f"{', '.join(sorted(map(str, row)))}. Map the right column in `fields`."
  )


def _text(value: Any) -> str:
  if isinstance(value, bool) or not isinstance(value, (str, int, float)):
    raise ValueError(f"the target must be text or a number; got {type(value).__name__}.")
  return str(value)


def _messages(prompt: Any) -> Messages:
  if isinstance(prompt, str):
    return (_turn("user", prompt),)
  if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt):
    raise ValueError(f"the prompt must be text or a list of messages; got {type(prompt).__name__}.")
  return tuple(_turn(str(m.get("role")), str(m.get("content", ""))) for m in prompt)


def _turn(role: str, content: str) -> dict[str, str]:
  return {"role": role, "content": content}


def _after_hash(target: str) -> str:
  _, mark, gold = target.rpartition("####")
  if not mark:
    raise ValueError(
      f"a GSM8K answer must end in '#### number'; got {target[-40:]!r}. Use template=plain for "
      "bare answers."
    )
  return gold.strip()
