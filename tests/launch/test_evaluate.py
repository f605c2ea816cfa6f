"""`launch.evaluate`: accuracy, comparison, perplexity; resumed runs; mistakes in one line."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import jaxlab
from jaxlab.decode import sampling
from jaxlab.eval import accuracy, perplexity, records
from jaxlab.quant import model as quant
from jaxlab.train import budget
from launch import common
from tests.decode import tiny
from tests.launch import verbs

TASK = (
  "AccuracyConfig.items=@read_items()", "AccuracyConfig.rewards=(@exact_match,)",
  "read_items.fields={'prompt': 'question', 'target': 'answer'}", "read_items.task='toy'",
  "SamplingConfig.max_new_tokens=6", "AccuracyConfig.batch_size=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory, model):
  """Ten questions; the model's own greedy answer is right for the first four."""
  lm = jaxlab.load(model)
  asked = [f"hat {i}" for i in range(10)]
  config = sampling.SamplingConfig(max_new_tokens=6, temperature=0.0)
  said = lm.generate([[{"role": "user", "content": q}] for q in asked], config).texts
  answers = [text.strip() if i < 4 else "-" for i, text in enumerate(said)]
  rows = [{"question": q, "answer": a} for q, a in zip(asked, answers, strict=True)]
  path = tmp_path_factory.mktemp("data") / "questions.jsonl"
  path.write_text("\n".join(map(json.dumps, rows)))
  return path


def words(workdir, model, path, *bindings, flags=()):
  task = [*TASK, f"read_items.path='{path}'", *bindings]
  return [
    f"--workdir={workdir}", f"--model={model}", *flags, *(f"--gin_bindings={b}" for b in task)
  ]  # fmt: skip


@pytest.fixture
def call(capsys, workdir, model, questions):
  def call(*bindings, path=questions, model=model, workdir=workdir, flags=()):
    return verbs.call("evaluate", words(workdir, model, path, *bindings, flags=flags), capsys)

  return call


# --- accuracy


def test_greedy_and_sampled_accuracy(call, workdir):
  done = call("AccuracyConfig.samples=2")
  assert done.code == 0, done.err
  found = verbs.result(workdir)
  assert found["accuracy"]["value"] == 0.4 and found["accuracy"]["n"] == 10
  assert found["sampled_accuracy"]["n"] == 20 and found["sampled_pass_at_k"]["n"] == 10
  assert found["unmeasured"] == 0 and 0 <= found["truncated"] <= 1
  assert "greedy: accuracy 40.0 % (95 %: 16.8 to 68.7, n = 10)" in done.out
  scores = verbs.rows(workdir / "greedy" / accuracy.SCORES)
  assert [row["stats"]["exact"] for row in scores] == [1.0] * 4 + [0.0] * 6
  assert len(verbs.rows(workdir / "sampled" / accuracy.RESPONSES)) == 20


def test_a_rerun_goes_on_and_another_model_is_refused(call, workdir, tmp_path, model):
  assert call().code == 0
  first = verbs.result(workdir)
  path = workdir / "greedy" / accuracy.RESPONSES
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:5]) + lines[5][:40])
  assert call().code == 0
  again = verbs.result(workdir)
  timing = ("seconds",)
  assert {k: v for k, v in again.items() if k not in timing} == {
    k: v for k, v in first.items() if k not in timing
  }
  lm = jaxlab.load(model)
  jaxlab.save(dataclasses.replace(lm, params=quant.quantize(lm.params)), tmp_path / "packed")
  error = call(model=tmp_path / "packed").error
  assert "holds 10 answers of another model, or to other items or settings." in error


def test_a_packaged_task(capsys, workdir, model):
  bindings = [
    "AccuracyConfig.items=@largest_of_five()", "AccuracyConfig.rewards=(@exact_match,)",
    "largest_of_five.n=3", "largest_of_five.chatml=False", "SamplingConfig.max_new_tokens=4",
  ]  # fmt: skip
  words = [f"--workdir={workdir}", f"--model={model}", *(f"--gin_bindings={b}" for b in bindings)]
  done = verbs.call("evaluate", words, capsys)
  # The toy tokenizer spells every digit: the two examples alone are longer than its context.
  assert "but the context holds 128. Shorten the prompt" in done.error


def test_a_comparison_is_paired(call, workdir, tmp_path, questions):
  assert call(workdir=tmp_path / "a").code == 0
  rows = [json.loads(line) for line in questions.read_text().splitlines()]
  ids = [records.content_id("toy", [r["question"], r["answer"]]) for r in rows]
  folder = tmp_path / "b" / "greedy"
  folder.mkdir(parents=True)
  right = [0.0, 0.0, 0.0, 1.0] + [0.0] * 6
  scores = [
    records.Score(i, 0, "exact_match:exact", {"exact": x}) for i, x in zip(ids, right, strict=True)
  ]
  (folder / accuracy.SCORES).write_text("".join(records.to_json(s) + "\n" for s in scores))
  done = call(flags=[f"--compare={tmp_path / 'b'}"])
  assert done.code == 0, done.err
  found = verbs.result(workdir)
  assert (found["wins"], found["losses"], found["p_value"]) == (3, 0, 0.25)
  assert found["difference"]["value"] == pytest.approx(0.3) and found["items_needed"] > 10
  assert "+30.0 points" in done.out and "items would show it" in done.out


def test_a_comparison_with_nothing_is_refused_before_the_work(call, tmp_path):
  done = call(flags=[f"--compare={tmp_path}"])
  assert "has no scores.jsonl" in done.error and "load:" not in done.err


# --- perplexity


def test_perplexity_of_a_file(capsys, workdir, model, tmp_path):
  path = tmp_path / "text.txt"
  path.write_text("the cat sat on the mat 2024 times. " * 9)
  done = verbs.call("evaluate", [
    f"--workdir={workdir}", f"--model={model}", f"--perplexity={path}",
    "--gin_bindings=PerplexityConfig.window=16",
  ], capsys)  # fmt: skip
  assert done.code == 0, done.err
  config = perplexity.PerplexityConfig(window=16)
  expected = perplexity.perplexity(jaxlab.load(model), [path.read_text()], config)
  found = verbs.result(workdir)
  assert found["perplexity"]["value"] == pytest.approx(expected.value, rel=1e-5)
  assert found["perplexity"]["ci_low"] < found["perplexity"]["value"]
  assert found["window"] == 16 and found["windows"] == expected.windows
  assert f"perplexity {expected.value:.4g} (95 %: " in done.out


# --- mistakes: one line, exit code 2


@pytest.mark.parametrize(
  "content, message",
  [
    ("", "read_items: the file must hold at least one row; got none in"),
    ('{"question": "a", "answer": "b"}\n{"question": "a"}', "row 2: field 'answer' is missing"),
    ('{"question": "a", "answer": "b"}\n{"question', "row 2: a row must be JSON in UTF-8"),
    (None, "read_items: the data file must exist"),
  ],
)
def test_data_that_cannot_be_used(call, tmp_path, content, message):
  path = tmp_path / "x.jsonl"
  if content is not None:
    path.write_text(content)
  assert message in call(path=path).error


@pytest.mark.parametrize(
  "bindings, message",
  [
    (["AccuracyConfig.sample=3"], "Did you mean samples?"),
    (["AccuracyConfig.samples='3'"], "AccuracyConfig.samples must be int; got '3'."),
    (["AccuracyConfig.rewards=(@exact_mach,)"], "Did you mean exact_match?"),
    (["AccuracyConfig.rewards=()"], "AccuracyConfig.rewards: there is no reward."),
    (["PerplexityConfig.window=16"], "PerplexityConfig.window has no effect"),
    (["read_items.task=%gin.REQUIRED"], "read_items.task must be set."),
  ],
)
def test_mistyped_settings(call, bindings, message):
  assert message in call(*bindings).error


def test_without_a_task_the_missing_setting_is_named(capsys, workdir, model):
  done = verbs.call("evaluate", [f"--workdir={workdir}", f"--model={model}"], capsys)
  assert "AccuracyConfig.items must be set. Set it in a gin file or by --gin_bindings" in done.error


def test_missing_model_long_prompt_and_little_memory(call, tmp_path, monkeypatch):
  assert "'none' does not exist" in call(model="none").error
  path = tmp_path / "long.jsonl"
  path.write_text(json.dumps({"question": "a" * 900, "answer": "b"}))
  assert "but the context holds 128" in call(path=path, workdir=tmp_path / "other").error
  monkeypatch.setattr(budget, "available_bytes", lambda: 100_000)
  assert call(workdir=tmp_path / "third").error.startswith("not enough memory: weights ")


# --- kill -9


@pytest.mark.soak
def test_a_killed_evaluation_ends_with_the_same_figures(workdir, model, questions, tmp_path):
  def start(folder):
    settings = ("AccuracyConfig.samples=3", "AccuracyConfig.batch_size=3")
    line = words(folder, model, questions, *settings)
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT)}
    command = [sys.executable, "-m", "launch.evaluate", *line]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)

  whole = start(tmp_path / "whole")
  assert whole.wait() == 0, whole.stderr.read().decode()
  seconds = verbs.result(tmp_path / "whole")["seconds"]
  chance = random.Random(0)
  for _ in range(6):
    process = start(workdir)
    time.sleep(chance.random() * seconds * 1.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
  assert start(workdir).wait() == 0
  assert _figures(workdir) == _figures(tmp_path / "whole")


def _figures(folder):
  own = ("seconds", "command")
  return {k: v for k, v in verbs.result(folder).items() if k not in own}
