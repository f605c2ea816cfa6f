"""Local question files: what is read, and what an error says."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlab import errors
from jaxlab.data import jsonl

FIELDS = {"prompt": "question", "target": "answer"}
ROWS = [
  {"question": "2 * 9?", "answer": "2 * 9 = <<2*9=18>>18\n#### 18", "level": 1},
  {"question": "How many?", "answer": "#### 1,080", "level": 2},
]


def write(path, rows):
  path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
  return path


def test_jsonl_and_parquet_give_the_same_items(tmp_path):
  lines = write(tmp_path / "a.jsonl", ROWS)
  table = tmp_path / "a.parquet"
  pq.write_table(pa.Table.from_pylist(ROWS), table)
  items = jsonl.gsm8k_items(str(lines))
  assert items == jsonl.gsm8k_items(str(table))
  assert [item.target for item in items] == ["18", "1,080"]
  assert items[0].messages[-1] == {"role": "user", "content": "2 * 9?"}
  assert len({item.id for item in items}) == 2


def test_gsm8k_prompts_ask_for_what_the_rewards_look_for(tmp_path):
  path = str(write(tmp_path / "a.jsonl", ROWS))
  tags = jsonl.gsm8k_items(path)[0].messages
  assert tags[0]["role"] == "system"
  for tag in ("<think>", "</think>", "<answer>", "</answer>"):
    assert tag in tags[0]["content"]
  (user,) = jsonl.gsm8k_items(path, style="hash")[0].messages
  assert user["role"] == "user"
  assert "####" in user["content"]
  assert "<think>" in user["content"]
  with pytest.raises(ValueError, match="tags or hash; got 'xml'"):
    jsonl.gsm8k_items(path, style="xml")


def test_maths_data_sets(tmp_path):
  big = [{"prompt": "x?", "solution": " \\frac12 "}, {"prompt": "y" * 1025, "solution": "1"}]
  items = jsonl.bigmath_items(str(write(tmp_path / "big.jsonl", big)))
  assert [item.target for item in items] == ["\\frac12"]
  assert items[0].messages[0]["content"] == jsonl.TAGS_SYSTEM

  messages = [{"role": "user", "content": "Solve. Last line Answer: x"}]
  rows = [{"source_prompt": messages, "solution": "34"}]
  (item,) = jsonl.dapo_items(str(write(tmp_path / "dapo.jsonl", rows)))
  assert item.messages == tuple(messages)

  rows = [{"problem": "1+1", "clean_answer": 2}]
  (item,) = jsonl.miromind_items(str(write(tmp_path / "miro.jsonl", rows)))
  assert item.target == "2"
  assert "Answer:" in item.messages[0]["content"]


def test_dapo_messages_survive_parquet(tmp_path):
  rows = [{"source_prompt": [{"role": "user", "content": "q"}], "solution": "3"}]
  pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
  (item,) = jsonl.dapo_items(str(tmp_path / "d.parquet"))
  assert item.messages == ({"role": "user", "content": "q"},)


def test_ids(tmp_path):
  rows = [{"q": "a", "a": "1", "n": 0}, {"q": "a", "a": "1", "n": 7}]
  path = write(tmp_path / "a.jsonl", rows)
  fields = {"prompt": "q", "target": "a"}
  numbered = jsonl.read_items(path, fields | {"id": "n"}, task="t")
  assert [item.id for item in numbered] == ["0", "7"]
  hashed = jsonl.read_items(path, fields, task="t")
  assert hashed[1].id == hashed[0].id + "-2"  # a copy of a row stays an item of its own
  with pytest.raises(ValueError, match="row 2: ids must differ; got 'a' twice"):
    jsonl.read_items(path, fields | {"id": "q"}, task="t")


def test_a_missing_field_names_file_row_field_and_what_there_is(tmp_path):
  path = write(tmp_path / "a.jsonl", [*ROWS, {"query": "x", "answer": "#### 1"}])
  with pytest.raises(ValueError) as error:
    jsonl.gsm8k_items(str(path))
  for word in ("a.jsonl", "row 3", "'question' is missing", "answer, query"):
    assert word in str(error.value)
  path = write(tmp_path / "b.jsonl", [{"question": None, "answer": "#### 1"}])
  with pytest.raises(ValueError, match="row 1: field 'question' is null; got the fields answer"):
    jsonl.gsm8k_items(str(path))


@pytest.mark.parametrize(
  "line, words",
  [
    (b'{"question": "x", ', "row 2: a row must be JSON"),
    (b"\xff\xfe", "row 2: a row must be JSON in UTF-8"),
    (b"[1, 2]", "row 2: a row must be a JSON object, got list"),
    (b"[" * 200_000, "row 2: a row must be JSON"),
  ],
)
def test_a_bad_row_is_a_corrupt_file_with_its_number(tmp_path, line, words):
  path = tmp_path / "a.jsonl"
  path.write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + line + b"\n")
  with pytest.raises(errors.CorruptFile, match=words) as error:
    jsonl.gsm8k_items(str(path))
  assert "\n" not in str(error.value)


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_counted(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\n\n\n{\n")
  with pytest.raises(errors.CorruptFile, match="row 4"):
    jsonl.gsm8k_items(str(path))


def test_other_errors(tmp_path):
  empty = tmp_path / "e.jsonl"
  empty.write_text("\n")
  with pytest.raises(ValueError, match="at least one row; got none in .*e.jsonl"):
    jsonl.gsm8k_items(str(empty))
  with pytest.raises(ValueError, match="must exist; got nowhere.jsonl"):
    jsonl.gsm8k_items("nowhere.jsonl")
  (tmp_path / "x.csv").write_text("a,b")
  with pytest.raises(ValueError, match="must be .jsonl or .parquet"):
    jsonl.gsm8k_items(str(tmp_path / "x.csv"))
  (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
  with pytest.raises(errors.CorruptFile, match="bad.parquet"):
    jsonl.gsm8k_items(str(tmp_path / "bad.parquet"))
  bare = write(tmp_path / "bare.jsonl", [{"question": "x", "answer": "18"}])
  with pytest.raises(ValueError, match="row 1: a GSM8K answer must end in '#### number'; got '18'"):
    jsonl.gsm8k_items(str(bare))
  with pytest.raises(ValueError, match="row 1: the target must be text or a number; got list"):
    rows = [{"question": "x", "answer": [1]}]
    jsonl.read_items(write(tmp_path / "l.jsonl", rows), FIELDS, task="t")
  with pytest.raises(ValueError, match="fields must map prompt and target"):
    jsonl.read_items(bare, {"prompt": "question"}, task="t")
