"""The speed suites on tiny models and matrices: what rows they give, not what they measure."""

import sys

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
