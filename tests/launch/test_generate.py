"""`launch.generate`: prompts from a flag, a file, a pipe, a terminal; mistakes in one line."""

import builtins
import io
import json
import os
import sys

import pytest

import jaxlab
from jaxlab import lora
from jaxlab.decode import sampling, text
from jaxlab.io import peft
from jaxlab.train import budget
from tests.decode import tiny
from tests.launch import verbs

SHORT = "--gin_bindings=SamplingConfig.max_new_tokens=8"
GREEDY = "--gin_bindings=SamplingConfig.temperature=0.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lm(model):
  return jaxlab.load(model)


@pytest.fixture
def call(capsys, workdir, model):
  def call(*words, model=model):
    first = [f"--workdir={workdir}", SHORT, f"--model={model}"]
    return verbs.call("generate", [*first, *words], capsys)

  return call


def greedy(lm, prompt) -> str:
  config = sampling.SamplingConfig(max_new_tokens=8, temperature=0.0)
  return lm.generate([prompt], config).texts[0]


# --- where prompts come from


def test_a_prompt_is_asked_through_the_template_and_raw_is_continued(call, lm, workdir):
  asked = greedy(lm, [{"role": "user", "content": "hat"}])
  done = call("--prompt=hat", GREEDY)
  assert (done.code, done.out) == (0, asked + "\n"), done.err
  (row,) = verbs.rows(workdir / "generations.jsonl")
  assert row["text"] == asked and row["prompt"] == [{"role": "user", "content": "hat"}]
  assert row["sample"] == 0 and row["tokens"] <= 8 and row["logprob"] < 0
  result = verbs.result(workdir)
  assert (result["prompts"], result["answers"], result["new_tokens"]) == (1, 1, row["tokens"])
  done = call("--prompt=hat", GREEDY, "--raw")
  assert done.out == greedy(lm, "hat") + "\n", "with the tokenizer's bos in front"


def test_a_file_of_prompts_with_samples(call, workdir, tmp_path):
  file = tmp_path / "prompts.jsonl"
  messages = [{"role": "user", "content": "hat"}]
  file.write_text("\n".join(map(json.dumps, [{"prompt": "the cat"}, {"messages": messages}])))
  done = call(f"--prompts_file={file}", "--samples=2")
  assert done.code == 0, done.err
  rows = verbs.rows(workdir / "generations.jsonl")
  assert [row["sample"] for row in rows] == [0, 1, 0, 1]
  conversation = [{"role": "user", "content": "the cat"}]
  assert [row["prompt"] for row in rows[1:3]] == [conversation, messages]
  assert done.out == "\n---\n".join(row["text"] for row in rows) + "\n"
  assert len({row["text"] for row in rows}) == 4


def test_a_rerun_says_the_same_without_asking_again(call, workdir, monkeypatch):
  first = call("--prompt=hat")
  monkeypatch.setattr(text, "complete", lambda *_, **__: pytest.fail("asked again"))
  again = call("--prompt=hat")
  assert again.out == first.out and again.code == 0
  assert len(verbs.rows(workdir / "responses.jsonl")) == 1


def test_plain_lines_and_a_pipe(call, monkeypatch, tmp_path, workdir):
  file = tmp_path / "prompts.txt"
  file.write_text("the cat\n\n  \nhat\n")
  assert call(f"--prompts_file={file}").code == 0
  rows = verbs.rows(workdir / "generations.jsonl")
  assert [row["prompt"][0]["content"] for row in rows] == ["the cat", "hat"]
  monkeypatch.setattr(sys, "stdin", io.StringIO("hat\n"))
  assert call().code == 0
  (row,) = verbs.rows(workdir / "generations.jsonl")
  assert row["prompt"][0]["content"] == "hat"


def test_a_terminal_gets_a_chat(call, lm, monkeypatch, workdir):
  said = iter(["hat", "a" * 900, "/new", "hat", ""])
  monkeypatch.setattr(sys, "stdin", os.fdopen(os.open(os.devnull, os.O_RDONLY)))
  monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
  monkeypatch.setattr(builtins, "input", lambda mark: next(said))
  done = call(GREEDY)
  assert done.code == 0, done.err
  answer = greedy(lm, [{"role": "user", "content": "hat"}])
  assert done.out.count(answer + "\n") == 2, "the same again, once all is forgotten"
  assert "but the context holds 128. Shorten" in done.out and "Or type /new." in done.out
  assert [row["text"] for row in verbs.rows(workdir / "generations.jsonl")] == [answer] * 2
  assert verbs.result(workdir)["turns"] == 2


def test_an_adapter_changes_what_is_said(call, lm, tmp_path):
  import jax

  config = lora.LoRAConfig(rank=4, train_norms=False)
  params = lora.attach(lm.params, config, jax.random.key(0))
  loud = jax.tree_util.tree_map_with_path(
    lambda path, x: x + 0.3 if getattr(path[-1], "name", "") == "b" else x, params
  )
  peft.save_adapter(loud, config, tmp_path / "adapter", base="x")
  plain = call("--prompt=hat", GREEDY).out
  adapted = call("--prompt=hat", GREEDY, f"--adapter={tmp_path / 'adapter'}")
  assert adapted.code == 0, adapted.err
  assert adapted.out != plain


# --- mistakes: one line, exit code 2


def test_a_missing_model(call):
  done = call("--prompt=a", model="no/such/folder")
  assert done.error.startswith("load: 'no/such/folder' does not exist. Give a model folder")


def test_an_unknown_architecture(call, tmp_path):
  folder = tiny.write_model(tmp_path / "other")
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
  done = call("--prompt=a", model=folder)
  assert done.error == (
    "config.json: model_type = 'mamba' is not supported; jaxlab has one of llama, qwen2, qwen3."
  )


def test_a_truncated_shard(call, tmp_path):
  folder = tiny.write_model(tmp_path / "cut")
  (file,) = folder.glob("*.safetensors")
  file.write_bytes(file.read_bytes()[:-100])
  assert file.name in call("--prompt=a", model=folder).error


@pytest.mark.parametrize(
  "words, message",
  [
    (["--gin_bindings=SamplingConfig.temperatures=1.0"], "Did you mean temperature?"),
    (["--gin_bindings=SamplingConfig.top_k='all'"], "SamplingConfig.top_k must be int; got 'all'."),
    (["--gin_bindings=SamplingConfig.top_p=2.0"], "SamplingConfig.top_p: out of range; got 2.0."),
    (["--gin_bindings=quantize.format='nf4'"], "quantize.format has no effect"),
    (["--gin_bindings=a/SamplingConfig.top_k=3"], "a/SamplingConfig.top_k has no effect"),
    (["--gin_file=configs/generate/greedi.gin"], "Did you mean configs/generate/greedy.gin?"),
    (["--sample=3"], "Did you mean: samples"),
    (["--samples=0"], "0 is not a positive integer"),
    (["--prompts_file=x"], "--prompt: cannot go with --prompts_file."),
  ],
)
def test_mistyped_settings(call, words, message):
  assert message in call("--prompt=a", *words).error


def test_a_prompt_longer_than_the_context(call):
  assert "but the context holds 128. Shorten the prompt" in call(f"--prompt={'a' * 900}").error


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("a.txt", None, "--prompts_file: the file must exist"),
    ("a.txt", "\n \n", "must hold at least one prompt; got none"),
    ("a.jsonl", '{"prompt": "a"}\n{"text": "b"}',
     "row 2: needs a field 'prompt' or 'messages'; got text."),
    ("a.jsonl", '{"messages": [{"role": "boss"}]}', "row 1: Item: a message is a role"),
    ("a.jsonl", '{"prompt": "a"}\n{"pro', "row 2: must be JSON"),
  ],
)  # fmt: skip
def test_files_of_prompts_that_cannot_be_read(call, tmp_path, name, content, message):
  file = tmp_path / name
  if content is not None:
    file.write_text(content)
  assert message in call(f"--prompts_file={file}").error


def test_no_prompt_at_all(call, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO(""))
  assert "--prompt: must not be empty" in call().error


def test_a_model_without_tokenizer(call, tmp_path):
  folder = tiny.write_model(tmp_path / "mute", with_tokenizer=False)
  assert "has no tokenizer.json" in call("--prompt=a", model=folder).error


def test_too_little_memory(call, monkeypatch):
  monkeypatch.setattr(budget, "available_bytes", lambda: 100_000)
  error = call("--prompt=a").error
  assert error.startswith("not enough memory: weights ") and "there is 0.10 MB." in error


def test_a_workdir_may_be_used_again_with_other_settings(call):
  """Answers are kept by what was asked, so nothing is mixed up."""
  assert call("--prompt=a").code == 0
  assert call("--prompt=a", GREEDY).code == 0
  assert call("--prompt=a", GREEDY).code == 0
