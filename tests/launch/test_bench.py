"""The verb: suites in order, their tables and plots; one that asks for the workdir is given it."""

import json

import pytest

from launch import registry
from tests.launch import verbs


def quick_rows():
  return [{"what": "decode", "batch": 1, "ratio_to_transformers": 2.0, "ratio_low": 1.5,
           "ratio_high": 2.5}]  # fmt: skip


def kept_rows(*, workdir):
  """As a suite that resumes: it leaves a file and finds it again."""
  path = workdir / "kept.json"
  times = json.loads(path.read_text()) + 1 if path.exists() else 1
  path.write_text(json.dumps(times))
  labels = {"what": "perplexity", "format": "mxfp4", "method": "rtn", "activations": "fp4"}
  return [labels | {"nats_lost": 0.5, "nats_lost_ci_low": 0.25, "nats_lost_ci_high": times}]


@pytest.fixture
def words(workdir):
  registry.register(quick_rows, kept_rows)
  suites = "--gin_bindings=BenchConfig.suites = (@quick_rows, @kept_rows)"
  return [f"--workdir={workdir}", suites]


def test_rows_tables_and_plots_are_written(words, workdir, capsys):
  done = verbs.call("bench", words, capsys)
  assert done.code == 0, done.err
  assert [row["what"] for row in verbs.result(workdir)["rows"]] == ["decode", "perplexity"]
  assert {p.name for p in (workdir / "plots").iterdir()} == {"ratios.png", "nats_lost.png"}
  speed, loss = (workdir / "table.md").read_text().split("\n\n")
  assert "ratio_low" in speed and "nats_lost_ci_high" in loss and "0.25" in done.out
  verbs.call("bench", words, capsys)
  assert verbs.result(workdir)["rows"][1]["nats_lost_ci_high"] == 2, "the same workdir again"
