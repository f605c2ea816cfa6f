"""Text files as rows of token ids: documents joined by their end token, cut every T tokens.

This is plain chunking: a row may begin inside a document and hold the end of one and the start of
the next, which see each other. All processes read all files; each makes only the rows it is asked
for. Batch number i is a function of (seed, i) alone, so that a count of batches is all there is to
resume. Dims: N rows in all, B rows of a batch, T tokens of a row.
"""

import dataclasses
import glob
import pathlib
import sysconfig
from collections.abc import Iterator

import grain
import numpy as np
from jaxtyping import Int

from jaxlab import errors
from jaxlab.data import jsonl
from jaxlab.io import tokenizer as tokenizers


@dataclasses.dataclass(frozen=True)
class TextData:
  """Which text; nothing is read until `read_rows`.

  paths: files, or patterns such as 'wiki/*.jsonl'. A .jsonl file holds one document a row, any
    other file is one document.
  field: the text of a .jsonl row [ours: the usual name].
  """

  paths: tuple[str, ...]
  field: str = "text"

  def __post_init__(self):
    if not self.paths:
      raise ValueError("TextData.paths: must name at least one file; got none.")


def standard_library() -> tuple[str, ...]:
  """Python's own modules, the text that every machine has: 4.7 MB of code and prose in 3.11."""
  return (str(pathlib.Path(sysconfig.get_path("stdlib")) / "*.py"),)


def read_rows(
  data: TextData, tokenizer: tokenizers.Tokenizer, tokens: int
) -> Int[np.ndarray, "N T"]:
  """All rows of a text, in its order; the last, shorter one is left out.

  Args:
    tokenizer: special tokens in the text are only text for it.
    tokens: T.
  Raises: ValueError for a missing file or field, a tokenizer without an end token, or text that
    does not fill one row; CorruptFile for what is not UTF-8 or JSON. Both name file and row.
  """
  eos = end_id(tokenizer)
  parts = [np.asarray([*ids, eos], np.int32) for ids in _encoded(data, tokenizer)]
  total = sum(map(len, parts))
  if total < tokens:
    raise ValueError(
      f"read_rows: the text must fill at least one row of {tokens} tokens; got {total} tokens in "
      f"{len(parts)} documents of {', '.join(data.paths)}. Give more text, or shorter rows."
    )
  rows = total // tokens
  return np.concatenate(parts)[: rows * tokens].reshape(rows, tokens)


def batches(rows_NT: Int[np.ndarray, "N T"], size: int, seed: int) -> grain.MapDataset:
  """Batch i, [size, T], of an endless order that is shuffled anew in every pass over the rows.

  Batches of `size` rows are those of `k * size` rows, cut into k: process or shard s of k takes
  number `i * k + s`, and the global batch i is the same for any k.
  """
  source = grain.MapDataset.source(rows_NT)
  return source.shuffle(seed=seed % 2**32).repeat(None).batch(size)


def end_id(tokenizer: tokenizers.Tokenizer) -> int:
  """The token after every document: the tokenizer's eos token, else its first end of an answer,
  else an encoder's sep token.

  Raises: ValueError if it has none.
  """
  named = tokenizer.special_tokens
  eos = named.get("eos_token") or (None if tokenizer.eos_ids else named.get("sep_token"))
  if eos is not None:
    return tokenizer.backend.token_to_id(eos)
  if not tokenizer.eos_ids:
    raise ValueError(
      "read_rows: the tokenizer must have an end token, to put between documents; got none. Name "
      "one in its tokenizer_config.json (eos_token)."
    )
  return tokenizer.eos_ids[0]


def _encoded(data: TextData, tokenizer: tokenizers.Tokenizer) -> Iterator[list[int]]:
  for where, text in _documents(data):
    try:
      ids = tokenizer.encode(text, allow_special=False)
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from None
    if ids:
      yield ids


def _documents(data: TextData) -> Iterator[tuple[str, str]]:
  """(file and row, text) of every document."""
  for path in (file for pattern in data.paths for file in _files(pattern)):
    if path.suffix != ".jsonl":
      yield str(path), _utf8(path)
      continue
    for number, row in jsonl.json_rows(path):
      where = f"{path}, row {number}"
      if not isinstance(row.get(data.field), str):
        raise ValueError(
          f"read_rows: {where}: field {data.field!r} must be a text; got the fields "
          f"{', '.join(sorted(row)) or 'of an empty row'}. Set TextData.field."
        )
      yield where, row[data.field]


def _files(pattern: str) -> list[pathlib.Path]:
  found = [pattern] if pathlib.Path(pattern).is_file() else sorted(glob.glob(pattern))
  files = [path for path in map(pathlib.Path, found) if path.is_file()]
  if not files:
    raise ValueError(f"read_rows: the file must exist; got {pattern}. Check TextData.paths.")
  return files


def _utf8(path: pathlib.Path) -> str:
  raw = path.read_bytes()
  try:
    return raw.decode("utf-8")
  except UnicodeDecodeError as error:
    row = raw[: error.start].count(b"\n") + 1
    raise errors.CorruptFile(
      path, f"row {row}", f"text must be UTF-8, got {error.reason}", "Convert it to UTF-8."
    ) from error
