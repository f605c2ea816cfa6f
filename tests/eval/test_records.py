"""Records survive a round trip, and refuse what they cannot hold."""

import json

import hypothesis as hp
import hypothesis.strategies as st
import pytest

from jaxlab.eval import records

ITEM = records.Item(
  id="gsm8k/7",
  task="gsm8k",
  split="test",
  messages=({"role": "user", "content": "1 + 1? é\u2028"},),
  target="2",
  meta={"level": 3, "nested": {"a": [1, None]}},
  clusters={"template": "t1"},
)
RESPONSE = records.Response(key="k", text="2", token_ids=(50, 2), logprob=-0.25, usage={"out": 2})
SCORE = records.Score("gsm8k/7", 0, "exact", {"correct": 1.0, "format": None}, valid=False)


@pytest.mark.parametrize("record", [ITEM, RESPONSE, SCORE])
def test_round_trip(record):
  line = records.to_json(record)
  assert len(line.splitlines()) == 1
  assert records.from_json(type(record), line) == record
  assert json.loads(line)["schema"] == records.SCHEMA


@hp.given(
  text=st.text(st.characters()),
  logprob=st.floats(allow_nan=False, allow_infinity=False) | st.none(),
)
@hp.settings(max_examples=50, deadline=None, derandomize=True)
def test_round_trip_of_any_text(text, logprob):
  response = records.Response(key="k", text=text, logprob=logprob)
  assert records.from_json(records.Response, records.to_json(response)) == response


def test_ids_depend_on_content_alone():
  assert records.content_id("t", {"a": 1, "b": 2}) == records.content_id("t", {"b": 2, "a": 1})
  assert records.content_id("t", "x") != records.content_id("t", "y")
  # SHA-256 of the three bytes "x", quotes included: the id must never change.
  assert records.content_id("t", "x") == "t/ba2df4903a2c14e8"


def test_tokens_of_a_response():
  assert RESPONSE.num_tokens == 2
  assert records.Response(key="k", text="a", usage={"out": 9}).num_tokens == 9
  with pytest.raises(ValueError, match="Characters are not tokens"):
    _ = records.Response(key="k", text="abc").num_tokens


def changed(record, **fields):
  return json.dumps(json.loads(records.to_json(record)) | fields)


@pytest.mark.parametrize(
  "line, words",
  [
    (changed(ITEM, schema=2), "schema version must be 1; got 2"),
    (changed(RESPONSE), "expected a Item; got type 'Response'"),
    (changed(ITEM, colour="red"), "has the fields .*; got .*colour"),
    (json.dumps({"schema": 1, "type": "Item", "id": "x"}), "has the fields .*; got id"),
    ("[1]", "a record is a JSON object"),
  ],
)
def test_unreadable_lines(line, words):
  with pytest.raises(ValueError, match=words):
    records.from_json(records.Item, line)


def test_bad_records():
  with pytest.raises(ValueError, match="id must not be empty"):
    records.Item(id="", task="t", split="test", prompt="p")
  with pytest.raises(ValueError, match="messages or a prompt; got neither in item 'x'"):
    records.Item(id="x", task="t", split="test")
  with pytest.raises(ValueError, match="a role .* and a content; got {'role': 'robot'"):
    records.Item(id="x", task="t", split="test", messages=({"role": "robot", "content": ""},))
  with pytest.raises(ValueError, match="finish must be one of stop.*got 'eos'"):
    records.Response(key="k", text="", finish="eos")
  with pytest.raises(ValueError, match="JSON values only"):
    records.to_json(records.Score("i", 0, "m", {"x": float("nan")}))
