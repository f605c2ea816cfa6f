"""A whole experiment from a model folder to its figures, and the same again without the work."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab.data import tasks
from jaxlab.decode import autoregressive, sampling
from jaxlab.io import peft
from jaxlab.nn import weights
from jaxlab.quant import model as quant
from jaxlab.rl import config as rl_config
from jaxlab.rl import experiment, report, rewards
from jaxlab.train import metrics, signals
from tests.rl import tiny

CONFIG = tiny.config(steps=3, max_prompt_tokens=64, mask_truncated=False)


def run(model_folder, workdir, **changes):
  data = {
    "train": tasks.two_digit_sum(20), "test": tasks.two_digit_sum(5, split="test"),
    "rewards": (rewards.exact_match, tiny.even_digits),
  }  # fmt: skip
  return experiment.run(
    jaxlab.load(model_folder), rl_config.RLData(**data | changes), CONFIG, quant.quantize,
    workdir=workdir, seed=0, config_text="name = 'tiny'\n", stop=signals.Interrupt(),
  )  # fmt: skip


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
  """(figures, workdir) of a run."""
  workdir = tmp_path_factory.mktemp("experiment")
  return run(model_folder, workdir), workdir


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_figures_of_a_run(finished):
  figures, _ = finished
  for name in ("accuracy_before", "accuracy_after"):
    estimate = figures[name]
    assert estimate["n"] == 5 and 0 <= estimate["ci_low"] <= estimate["value"]
    assert estimate["value"] <= estimate["ci_high"] <= 1
  layers, width, kv, mlp = 2, 64, 32, 64
  linears = layers * (2 * width * width + 2 * width * kv + 3 * width * mlp)
  assert figures["weight_bytes_bf16"] == 2 * linears
  # 4 bits, an 8-bit scale for 16 weights, and a float32 for each matrix.
  assert figures["weight_bytes_fp4"] == linears * 4.5 / 8 + 7 * layers * 4
  rest = figures["model_bytes_bf16"] - figures["weight_bytes_bf16"]
  assert figures["model_bytes_fp4"] - figures["weight_bytes_fp4"] == rest > 0
  assert figures["rollout_tokens_per_s"] > 0 and figures["train_tokens_per_s"] > 0
  assert {"reward_first", "reward_last", "entropy_rollout_first", "entropy_rollout_last"} <= set(
    figures
  )
  json.dumps(figures)


def test_what_a_run_leaves_behind(finished):
  _, workdir = finished
  assert [line["step"] for line in metrics.read(workdir)] == [1, 2, 3]
  held_out = lines(workdir / "held_out.jsonl")
  assert [row["target"] for row in held_out] == [
    item.target for item in tasks.two_digit_sum(5, split="test")
  ]
  assert all(set(row) == {"question", "target", "before", "after"} for row in held_out)
  samples = lines(workdir / "samples.jsonl")
  assert len(samples) == report.TABLE_ROWS and {row["step"] for row in samples} == {1}
  assert {p.stem for p in (workdir / "plots").glob("*.png")} >= {"reward", "entropy", "noise"}
  assert list((workdir / "tensorboard").iterdir())


def test_the_adapter_is_the_policy_that_was_scored(finished, model_folder):
  """Loaded onto the same quantised base, the PEFT folder gives the answers held_out.jsonl shows."""
  _, workdir = finished
  lm = jaxlab.load(model_folder)
  params = peft.load_adapter(workdir / "adapter", quant.quantize(lm.params))
  assert any(
    float(jnp.abs(w.b).max()) > 0
    for w in weights.leaf_paths(params).values()
    if isinstance(w, weights.LoRA)
  )
  greedy = sampling.SamplingConfig(max_new_tokens=6, temperature=0.0)
  sampler = autoregressive.Sampler(lm.module, greedy, lm.tokenizer.eos_ids, lm.tokenizer.pad_id)
  prompts = [lm.tokenizer.encode(i.prompt) for i in tasks.two_digit_sum(5, split="test")]
  out = sampler(params, prompts, jax.random.key(0))
  texts = [lm.tokenizer.decode(out.ids(row)) for row in range(5)]
  assert texts == [row["after"] for row in lines(workdir / "held_out.jsonl")]


def test_the_same_command_again_does_no_work(finished, model_folder, monkeypatch):
  figures, workdir = finished
  before = (workdir / "metrics.jsonl").read_bytes()

  def refuse(*args, **kwargs):
    raise AssertionError("nothing is left to sample")

  monkeypatch.setattr(autoregressive.Sampler, "__call__", refuse)
  again = run(model_folder, workdir)
  assert again == figures
  assert (workdir / "metrics.jsonl").read_bytes() == before


def test_a_run_without_held_out_items_has_no_accuracy(finished, model_folder, workdir):
  figures, _ = finished
  bare = run(model_folder, workdir, test=())
  assert not [name for name in bare if name.startswith("accuracy")]
  assert bare["reward_last"] == figures["reward_last"]  # the held-out items change nothing
  assert not (workdir / "held_out.jsonl").exists()


def test_a_signal_before_training_leaves_at_once(model_folder, workdir):
  stop = signals.Interrupt()
  stop.signum = 15
  data = rl_config.RLData(train=tasks.two_digit_sum(5), rewards=(rewards.exact_match,))
  with pytest.raises(signals.Interrupted):
    experiment.run(
      jaxlab.load(model_folder), data, CONFIG, quant.quantize, workdir=workdir, seed=0,
      config_text="", stop=stop,
    )  # fmt: skip
  assert not (workdir / "checkpoints").exists()


def test_speed_and_curves_by_hand():
  rows = [
    {"rollout_tokens": 10, "rollout_seconds": 9.0, "seconds": 20.0, "loss": 0.0, "reward": 0.0},
    {"rollout_tokens": 10, "rollout_seconds": 1.0, "seconds": 3.0, "loss": 0.0, "reward": 1.0},
    {"rollout_tokens": 10, "rollout_seconds": 1.0, "seconds": 1.5, "reward": float("nan")},
    {"rollout_tokens": 30, "rollout_seconds": 2.0, "seconds": 4.0, "loss": 0.0, "reward": 2.0},
  ]
  for row in rows:
    row["entropy_rollout"] = 1.0
  # The first step compiles; a step without an update counts in no update's speed.
  assert report.speed(rows) == {"rollout_tokens_per_s": 10.0, "train_tokens_per_s": 10.0}
  curve = report.curve(rows)
  assert curve["reward_first"] == 0.0 and curve["reward_last"] == pytest.approx(np.mean([0, 1, 2]))
