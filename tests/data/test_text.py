"""Text as rows: worked by hand, the order against grain's rules, and what is wrong with a file."""

import json

import numpy as np
import pytest

from jaxlab.data import text
from jaxlab.io import tokenizer as tokenizers
from jaxlab.train import tiny

TOKENIZER = tiny.byte_tokenizer()
EOS = 256


def ids(string: str) -> list[int]:
  return TOKENIZER.encode(string)


def write(path, *rows) -> str:
  path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return str(path)


def test_documents_are_joined_by_the_end_token_and_cut(tmp_path):
  lines = write(tmp_path / "b.jsonl", {"text": "abc"}, {"text": ""}, {"text": "de"})
  (tmp_path / "a.txt").write_text("xyz")
  rows_NT = text.read_rows(text.TextData((lines, str(tmp_path / "*.txt"))), TOKENIZER, 4)
  # Eleven tokens: the last three are left out.
  whole = [*ids("abc"), EOS, *ids("de"), EOS, *ids("xyz"), EOS]
  assert rows_NT.tolist() == [whole[:4], whole[4:8]] and rows_NT.dtype == np.int32


def test_a_field_of_another_name_and_special_tokens_as_text(tmp_path):
  path = write(tmp_path / "a.jsonl", {"body": "<eos>"}, {"body": "é"})
  [row] = text.read_rows(text.TextData((path,), field="body"), TOKENIZER, 9)
  assert row.tolist() == [*ids("<"), *ids("eos"), *ids(">"), EOS, *ids("é"), EOS]


def test_the_library_of_python_is_text():
  rows_NT = text.read_rows(text.TextData(text.standard_library()), TOKENIZER, 1024)
  assert len(rows_NT) > 2000 and 0 <= rows_NT.min() and rows_NT.max() == EOS


def test_every_pass_has_every_row_once_in_a_new_order():
  rows_NT = np.arange(10, dtype=np.int32)[:, None]
  order = np.concatenate([text.batches(rows_NT, 4, seed=1)[i] for i in range(10)]).reshape(4, 10)
  assert all(sorted(epoch) == list(range(10)) for epoch in order.tolist())
  assert len({tuple(epoch) for epoch in order.tolist()}) == 4
  again, other = (text.batches(rows_NT, 4, seed=seed)[7] for seed in (1, 2))
  np.testing.assert_array_equal(again, text.batches(rows_NT, 4, seed=1)[7])
  assert again.tolist() != other.tolist()


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_of_a_batch_are_the_batch(parts):
  rows_NT = np.arange(20, dtype=np.int32)[:, None]
  whole, part = text.batches(rows_NT, 6, seed=-5), text.batches(rows_NT, 6 // parts, seed=-5)
  for i in (0, 3, 50):  # within the first pass, over its end, far beyond
    got = np.concatenate([part[i * parts + s] for s in range(parts)])
    np.testing.assert_array_equal(got, whole[i])


@pytest.mark.parametrize(
  "name, content, words",
  [
    ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', ["jsonl, row 2", "got the fields txt"]),
    ("a.jsonl", b'{"text": 3}\n', ["row 1: field 'text' must be a text"]),
    ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', ["a.jsonl: row 3: a row must be JSON"]),
    ("a.jsonl", b"[1]\n", ["row 1: a row must be a JSON object, got list"]),
    ("a.jsonl", b'{"text": "\\ud800"}\n', ["a.jsonl, row 1", "UTF-8 can hold"]),
    ("a.txt", b"one\ntwo\n\xff\n", ["a.txt: row 3: text must be UTF-8"]),
    ("a.txt", b"short", ["must fill at least one row of 16 tokens; got 6 tokens in 1 documents"]),
    ("a.txt", b"", ["got 0 tokens in 0 documents"]),
  ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, name, content, words):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError) as error:
    text.read_rows(text.TextData((str(tmp_path / name),)), TOKENIZER, 16)
  message = str(error.value)
  assert all(word in message for word in words) and "\n" not in message, message


def test_files_and_end_tokens_that_are_missing(tmp_path):
  for path in ("no.txt", "no*.jsonl"):
    with pytest.raises(ValueError, match="the file must exist; got .*no"):
      text.read_rows(text.TextData((str(tmp_path / path),)), TOKENIZER, 4)
  with pytest.raises(ValueError, match="must name at least one file"):
    text.TextData(())
  endless = tokenizers.Tokenizer(TOKENIZER.backend, {}, (), 0, None, {})
  with pytest.raises(ValueError, match="must have an end token"):
    text.read_rows(text.TextData(("any",)), endless, 4)
