"""The speed suites on tiny models and matrices: what rows they give, not what they measure."""

import itertools
import os
import pathlib
import sys
import time
import types

import numpy as np
import pytest

from jaxlab.bench import fp4_decode, fp4_gemm, llama_cpp, report
from tests.decode import tiny


def test_ratios_are_taken_within_rounds():
  ours, theirs = np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0])
  found = fp4_decode.ratio("ratio_to_f32", theirs, ours)
  assert found == {"ratio_to_f32": 2, "ratio_to_f32_low": 2, "ratio_to_f32_high": 2}


def test_sides_run_in_turn():
  said = []
  seconds = fp4_decode.rounds({name: lambda n=name: said.append(n) for name in "ab"}, 7)
  assert said == list("ab" * 8) and [len(s) for s in seconds.values()] == [7, 7]
  with pytest.raises(ValueError, match="at least 7 rounds; got 3"):
    fp4_decode.rounds({}, 3)


def test_without_llama_cpp_the_way_to_it_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "llama_cpp", None)
  with pytest.raises(ValueError, match=r"pip install 'jaxlab\[bench\]'"):
    llama_cpp.require()


@pytest.mark.parametrize("best", [(1, False), (2, True)])
def test_llama_cpp_is_measured_as_it_is_fastest(best, monkeypatch):
  made = []

  class Llama:
    def __init__(self, path, *, n_ctx, n_threads, n_threads_batch, flash_attn, verbose):
      assert (path, n_ctx, n_threads_batch, verbose) == ("model.gguf", 7, n_threads, False)
      self.setup, self.read = (n_threads, flash_attn), True
      made.append(self.setup)

    def reset(self):
      self.read = False

    def generate(self, prompt, *, temp, top_k):
      assert not self.read and (prompt, temp, top_k) == ([5, 6, 7], 0.0, 1)
      time.sleep(0.001 if self.setup == best else 0.05)
      return itertools.count()

  monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=Llama))
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
  monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
  model = llama_cpp.LlamaCpp(pathlib.Path("model.gguf"), (5, 6, 7), 4)
  assert made == [(1, False), (1, True), (2, False), (2, True)]
  assert (model.threads, model.flash_attention) == best
  assert model.decode() == [0, 1, 2, 3] == model.decode()
  assert "OMP_WAIT_POLICY" not in os.environ  # threads that sleep would halve the baseline


def test_decode_rows(tmp_path):
  folder = tiny.write_model(tmp_path / "model", with_tokenizer=False)
  rows = fp4_decode.fp4_decode_rows(
    str(folder), batches=(1, 2), prompt_tokens=4, new_tokens=3, llama_cpp=False
  )
  assert [(row["batch"], row["head"]) for row in rows] == [
    (1, "none"), (1, "int8"), (2, "none"), (2, "int8"),
  ]  # fmt: skip
  assert all(row["ratio_to_f32_low"] <= row["ratio_to_f32"] for row in rows)
  assert not any("ratio_to_llama_cpp" in row for row in rows)
  assert "int8" in report.tables(rows)
  report.plot(rows, tmp_path)
  assert (tmp_path / "ratios.png").stat().st_size > 1000


def test_gemm_rows(tmp_path, monkeypatch):
  monkeypatch.setattr(fp4_gemm, "MOST", 2)
  rows = fp4_gemm.fp4_gemm_rows(((32, 64),), (1, 3), ("nvfp4", "mxfp4"))
  assert [(row["batch"], row["format"], row["shape"]) for row in rows] == [
    (m, format, "32x64") for format in ("nvfp4", "mxfp4") for m in (1, 3)
  ]
  assert {row["dtype"] for row in rows} == {"float32"}
  assert all(row["seconds"] > 0 and row["ratio_to_dense"] > 0 for row in rows)
  assert "ratio_to_dense" in report.tables(rows)
  report.plot(rows, tmp_path)
