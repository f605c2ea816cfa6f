"""`launch.rl`: what a user gets wrong is one line and exit code 2, before anything is trained.

That it trains, resumes and leaves on a signal is shown in tests/rl/test_resume.py.
"""

import json
import pathlib

import pytest

from jaxlab.train import budget
from tests.launch import verbs
from tests.rl import killed, tiny

SUMS = [{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run(capsys, tmp_path, workdir, model, monkeypatch):
  """Runs a small recipe with more bindings; asserts that nothing was trained."""
  monkeypatch.chdir(tmp_path)  # relative paths lead nowhere
  recipe = killed.gin(tmp_path, model)

  def run(*bindings: str, folder: pathlib.Path = workdir) -> str:
    words = [f"--gin_file={recipe}", f"--workdir={folder}"]
    done = verbs.call("rl", [*words, *(f"--gin_bindings={b}" for b in bindings)], capsys)
    assert not (folder / "checkpoints").exists() and not (folder / "result.json").exists()
    return done.error

  return run


def questions(tmp_path, rows) -> tuple[str, ...]:
  """Bindings for a file of questions."""
  path = tmp_path / "sums.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  fields = "{'prompt': 'question', 'target': 'answer'}"
  return (
    "RLData.train = @read_items()", f"read_items.path = '{path}'",
    f"read_items.fields = {fields}", "read_items.task = 'sums'",
  )  # fmt: skip


@pytest.mark.parametrize(
  "binding, words",
  [
    # Gin: names, types, bindings that nothing reads.
    ("RLConfig.smaples = 4", ["RLConfig has no argument 'smaples'", "Did you mean samples?"]),
    ("RLConfg.samples = 4", ["nothing is called 'RLConfg'", "Did you mean RLConfig?"]),
    ("RLConfig.samples = 'four'", ["RLConfig.samples must be int; got 'four'"]),
    ("GuardConfig.window = 4", ["nothing is called 'GuardConfig'"]),
    ("LoRAConfig.targets = ('q', 'gates')", ["LoRAConfig: targets must be", "gates"]),
    ("test/two_digit_sum.n = 3", ["test/two_digit_sum.n", "has no effect"]),
    ("PolicyGradientConfig.loss = 'grpo'", ["PolicyGradientConfig.loss", "has no effect"]),
    # Settings that cannot be.
    ("RLConfig.samples = 1", ["a group needs at least 2 answers to compare; got 1"]),
    ("RLConfig.steps = 0", ["RLConfig.steps: must be at least 1; got 0"]),
    ("AQNConfig.stages = 2", ["stages must be >= 3", "got 2"]),
    ("SamplingConfig.temperature = 0.7", ["temperature must be the rollout's; got 1.0 and 0.7"]),
    ("quantize.format = 'nvfp5'", ["unknown format", "nvfp5"]),
    # Models that are not there.
    ("RLConfig.model = 'no/such/model'", ["'no/such/model' does not exist", "'demo'"]),
    ("RLData.rewards = ()", ["RLData.rewards: there is no reward"]),
  ],
)
def test_one_line(run, binding, words):
  error = run(binding)
  for word in words:
    assert word in error, error


def test_data_that_is_empty_or_misses_a_field(run, tmp_path):
  assert "must hold at least one row; got none" in run(*questions(tmp_path, []))
  missing = run(*questions(tmp_path, [*SUMS, {"question": "1+1?"}]))
  assert "answer" in missing and "5" in missing  # the field and the row


def test_a_prompt_longer_than_the_context(run, tmp_path):
  long = {"question": "1+" * 200 + "1?", "answer": "201"}
  error = run(*questions(tmp_path, [*SUMS, long]), "RLConfig.max_prompt_tokens = 1000")
  assert "the context of 256; got a prompt of 410 tokens and 6 new ones" in error


def test_a_model_folder_without_tokenizer(run, tmp_path):
  bare = tiny.write_model(tmp_path / "bare")
  (bare / "tokenizer.json").unlink()
  error = run(f"RLConfig.model = '{bare}'")
  assert f"{bare} has no tokenizer.json" in error


def test_a_truncated_shard(run, tmp_path):
  cut = tiny.write_model(tmp_path / "cut")
  shard = next(cut.glob("*.safetensors"))
  shard.write_bytes(shard.read_bytes()[:-100])
  assert shard.name in run(f"RLConfig.model = '{cut}'")


def test_an_architecture_that_we_do_not_have(run, tmp_path):
  folder = tiny.write_model(tmp_path / "bert")
  config = json.loads((folder / "config.json").read_text()) | {"model_type": "gpt2"}
  (folder / "config.json").write_text(json.dumps(config))
  error = run(f"RLConfig.model = '{folder}'")
  assert "model_type = 'gpt2' is not supported" in error


def test_not_enough_memory(run, monkeypatch):
  monkeypatch.setattr(budget, "available_bytes", lambda: 1_000_000)
  error = run()
  assert "not enough memory" in error and "peak" in error


def test_a_workdir_of_another_config(run, workdir):
  run("RLConfig.model = 'no/such/model'")
  error = run("RLConfig.model = 'no/such/model'", "LoRAConfig.rank = 8")
  assert f"{workdir} holds another run: LoRAConfig.rank was 4, is 8" in error
  # The same settings are not another run: it is the model that is missing.
  assert "does not exist" in run("RLConfig.model = 'no/such/model'")


def test_a_missing_gin_file(capsys, workdir):
  done = verbs.call("rl", ["--gin_file=none.gin", f"--workdir={workdir}"], capsys)
  assert "no such file 'none.gin'" in done.error
