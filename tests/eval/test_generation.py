"""Answers to items: the same whatever the batch, order or restart, and never asked twice."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxlab import errors
from jaxlab.decode import autoregressive, sampling, text
from jaxlab.eval import generation, records
from jaxlab.quant import model as quant

KEY = jax.random.key(5)
CONFIG = sampling.SamplingConfig(max_new_tokens=6)
# Lengths of 6 to 14 tokens: one prompt bucket, so one program.
ITEMS = [
  records.Item(f"item/{i}", "toy", "test", prompt="the cat" + " sat" * i + f" {i}{i * i}")
  for i in range(7)
]


@pytest.fixture(scope="module")
def answerer(lm):
  return generation.Answerer(
    text.make_sampler(lm, CONFIG), lm.tokenizer, lm.params, model="a", batch_size=4
  )


@pytest.fixture(scope="module")
def answers(answerer):
  return answerer.answer(ITEMS, KEY, samples=2)


def without_files(responses):
  return [(r.text, r.token_ids, r.finish, r.usage) for r in responses]


@pytest.fixture
def asked(monkeypatch):
  """Counts the rows that reach the sampler."""
  counts = []
  real = text.complete

  def complete(sampler, tokenizer, params, prompts, key, **options):
    counts.append(len(prompts) * options["samples"])
    return real(sampler, tokenizer, params, prompts, key, **options)

  monkeypatch.setattr(text, "complete", complete)
  return counts


# --- what is answered


def test_answers_are_those_of_each_item_alone(answerer, answers):
  assert len(answers) == 14 and len({r.key for r in answers}) == 14
  one = dataclasses.replace(answerer, batch_size=1)
  for i, k in ((0, 1), (6, 0)):
    out = text.complete(
      one.sampler, one.tokenizer, one.params, [one.tokenizer.encode(ITEMS[i].prompt)], KEY,
      row_ids=[generation.row_id(ITEMS[i].id, k)],
    )  # fmt: skip
    response = answers[2 * i + k]
    assert response.text == out.texts[0]
    assert list(response.token_ids) == out.completions.ids(0)
    assert response.logprob == pytest.approx(float(out.completions.logp_NT.sum()), abs=1e-4)
    assert response.num_tokens == response.usage["out"] == len(response.token_ids)
    assert response.finish == ("stop" if out.completions.stopped_N[0] else "length")


def test_neither_batch_nor_order_changes_an_answer(answerer, answers):
  wider = dataclasses.replace(answerer, batch_size=6)
  shuffled = wider.answer(ITEMS[::-1], KEY, samples=2)
  back = [r for i in range(6, -1, -1) for r in shuffled[2 * i : 2 * i + 2]]
  assert without_files(back) == without_files(answers)
  assert [r.key for r in back] == [r.key for r in answers]


def test_more_samples_keep_the_first_ones(answerer, answers):
  more = dataclasses.replace(answerer, batch_size=6).answer(ITEMS[:2], KEY, samples=3)
  assert without_files(more[:2]) == without_files(answers[:2])


def test_all_batches_share_their_programs(answerer, answers, asked):
  before = autoregressive.prefill._cache_size(), autoregressive.decode._cache_size()
  other = jax.random.key(6)
  answerer.answer(ITEMS[:5], other, samples=2)
  assert asked == [4, 4, 4], "the last batch is filled up"
  assert (autoregressive.prefill._cache_size(), autoregressive.decode._cache_size()) == before


def test_long_prompts_go_first_and_the_common_prefix_is_computed_once(answerer, monkeypatch):
  calls = []

  def complete(sampler, tokenizer, params, prompts, key, *, prefix, samples, row_ids, on_text):
    calls.append((prefix, [len(p) for p in prompts]))
    raise InterruptedError

  monkeypatch.setattr(text, "complete", complete)
  shots = "the cat sat on the mat 2024 times " * 6
  items = [
    records.Item(str(i), "toy", "test", prompt=shots + q)
    for i, q in enumerate(["a", "b" * 30, "c"])
  ]
  with pytest.raises(InterruptedError):
    answerer.answer(items, KEY)
  ((prefix, lengths),) = calls
  shared = len(answerer.tokenizer.encode(shots))
  assert shared - 2 <= prefix <= shared and prefix >= autoregressive.SHARED_PREFIX
  assert lengths == [max(lengths)] * 4, "one long prompt fills its batch"


def test_messages_go_through_the_template_with_the_system_prompt(lm, answerer):
  hello = ({"role": "user", "content": "hi"},)
  own = ({"role": "system", "content": "x"}, *hello)
  items = [records.Item(str(i), "toy", "test", messages=m) for i, m in enumerate((hello, own))]
  items.append(records.Item("2", "toy", "test", prompt="the"))
  ids = dataclasses.replace(answerer, system_prompt="be")._encode(items)
  decode = lambda ids: lm.tokenizer.decode(ids, skip_special_tokens=False)
  assert [decode(x) for x in ids] == [
    "<s>system: be</s><s>user: hi</s>", "<s>system: x</s><s>user: hi</s>", "the"
  ]  # fmt: skip
  with_bos = dataclasses.replace(answerer, add_bos=True)._encode(items)
  assert decode(with_bos[2]) == "<s>the"


# --- files


def test_a_killed_run_goes_on_where_it_was(answerer, answers, tmp_path, asked):
  path = tmp_path / "responses.jsonl"
  answerer.answer(ITEMS, KEY, samples=2, path=path)
  whole = path.read_bytes()
  lines = whole.splitlines(keepends=True)
  for kept in (0, 1, 5, 13, 14):
    torn = lines[kept][:30] if kept < 14 else b""  # a line that the kill cut
    path.write_bytes(b"".join(lines[:kept]) + torn)
    asked.clear()
    reports = []
    report = lambda *progress, reports=reports: reports.append(progress)
    again = answerer.answer(ITEMS, KEY, samples=2, path=path, on_batch=report)
    assert without_files(again) == without_files(answers)
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    items_left = 7 - kept // 2
    assert sum(asked) == -(-2 * items_left // 4) * 4
    assert reports[0] == (kept, 14) and reports[-1] == (14, 14)


def test_answers_of_another_model_are_refused_unless_allowed(answerer, tmp_path):
  path = tmp_path / "responses.jsonl"
  answerer.answer(ITEMS[:1], KEY, path=path)
  other = dataclasses.replace(answerer, model="b")
  with pytest.raises(ValueError, match="holds 1 answers of another model, or to other items"):
    other.answer(ITEMS[:1], KEY, path=path)
  other.answer(ITEMS[:1], KEY, path=path, others_allowed=True)
  assert len(path.read_text().splitlines()) == 2


def test_a_damaged_line_is_named(tmp_path):
  path = tmp_path / "responses.jsonl"
  line = records.to_json(records.Response("k", "t")) + "\n"
  path.write_text(line + line.replace('"schema":1', '"schema":9') + line)
  with pytest.raises(errors.CorruptFile, match="row 2: from_json: schema version must be 1; got 9"):
    generation.Journal(path, records.Response)


def test_a_journal_on_disk_has_whole_lines_at_once(tmp_path):
  journal = generation.Journal(tmp_path / "new" / "x.jsonl", records.Response)
  journal.append([records.Response("a", "1"), records.Response("b", None, error="no")])
  rows = [json.loads(line) for line in journal.path.read_text().splitlines()]
  assert [row["key"] for row in rows] == ["a", "b"]
  assert generation.Journal(journal.path, records.Response).records == journal.records


# --- identity


def test_a_fingerprint_changes_with_any_word_and_with_the_format(lm):
  own = generation.fingerprint(lm.params)
  assert own == generation.fingerprint(jax.tree.map(jnp.array, lm.params))
  changed = lm.params | {"norm": lm.params["norm"].at[3].add(1e-6)}
  packed = quant.quantize(lm.params)
  other_static = jax.tree.map(lambda x: x, packed)
  assert len({own, *map(generation.fingerprint, (changed, packed))}) == 3
  assert generation.fingerprint(packed) == generation.fingerprint(other_static)


def test_without_items_there_is_nothing_to_answer(answerer):
  with pytest.raises(ValueError, match="there is no item; the data set is empty"):
    answerer.answer([], KEY)


def test_a_batch_of_nothing_is_refused(answerer):
  with pytest.raises(ValueError, match="batch_size: must be at least 1; got 0"):
    dataclasses.replace(answerer, batch_size=0)
