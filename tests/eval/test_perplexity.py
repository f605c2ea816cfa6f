"""Perplexity against float64 softmax, transformers, worked numbers; windows and files by hand."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxlab
from jaxlab import errors
from jaxlab.eval import perplexity, statistics
from jaxlab.models import causal_lm
from jaxlab.quant import model as quant
from tests.decode import tiny
from tests.models import tiny as tiny_models

NLL = 1e-5  # nats a token, float32 against float64
CONFIG = perplexity.PerplexityConfig(window=10, batch_size=3)


def documents(lengths=(33, 10, 1, 12), seed=0) -> list[list[int]]:
  random = np.random.default_rng(seed)
  return [random.integers(0, 400, n).tolist() for n in lengths]


def nll_by_hand(lm, texts, window) -> list[list[float]]:
  """-log p in float64 of full logits, window by window."""
  forward = jax.jit(lambda tokens: lm.module.apply({"params": lm.params}, tokens))
  found = []
  for ids in texts:
    for start in range(0, len(ids), window):
      row = ids[start : start + window]
      if len(row) > 1:
        padded = jnp.asarray([row + [0] * (window - len(row))])
        x = np.asarray(forward(padded))[0].astype(np.float64)
        log_z = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
        found.append([log_z[i] - x[i, row[i + 1]] for i in range(len(row) - 1)])
  return found


# --- windows


def test_windows_do_not_overlap_and_keep_the_rest():
  found = perplexity.windows([[1, 2, 3, 4, 5], [6], [7, 8, 9, 10]], 3)
  assert found.tokens_WT.tolist() == [[1, 2, 3], [4, 5, 0], [7, 8, 9]], "one predicts nothing"
  assert found.length_W.tolist() == [3, 2, 3] and found.document_WT[:, 0].tolist() == [0, 0, 2]
  assert found.clusters().tolist() == [0, 0, 0, 2, 2] and found.documents() == 2


def test_windows_stop_at_max_tokens():
  found = perplexity.windows([[1, 2, 3], [4, 5, 6], [7, 8]], 4, max_tokens=5)
  assert found.tokens_WT.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
  assert found.length_W.tolist() == [3, 2]


TEXTS = ["the cat", "sat", "on the mat and on the hat"]


def test_joined_windows_are_whole_windows_of_one_text(lm):
  """As WikiText-2 is read: one text, cut every T tokens, the rest left out."""
  whole = [1, *lm.tokenizer.encode("\n\n".join(TEXTS))]  # one bos, before all
  found = perplexity.joined_windows(lm.tokenizer, TEXTS, 4)
  assert found.tokens_WT.ravel().tolist() == whole[: len(whole) // 4 * 4]
  assert (found.length_W == 4).all()
  with pytest.raises(ValueError, match=f"must fill one window of 999 tokens; got {len(whole)}"):
    perplexity.joined_windows(lm.tokenizer, TEXTS, 999)
  short = perplexity.joined_windows(lm.tokenizer, TEXTS, 4, max_tokens=9)
  assert short.tokens_WT.shape == (2, 4)


def test_joined_tokens_know_their_document(lm):
  """Each document's characters, counted by hand from the text that its tokens spell."""
  found = perplexity.joined_windows(lm.tokenizer, TEXTS, 1)
  spelt = ["", "", ""]
  tokens, documents = found.tokens_WT[:, 0].tolist(), found.document_WT[:, 0].tolist()
  for token, document in zip(tokens, documents, strict=True):
    spelt[document] += lm.tokenizer.decode([token])
  assert [x.strip() for x in spelt] == TEXTS


def test_documents_of_joined_windows_are_their_clusters(lm):
  """Three documents in one window, whose last token belongs to the third alone."""
  length = len(lm.tokenizer.encode("\n\n".join(TEXTS))) + 1
  found = perplexity.joined_windows(lm.tokenizer, TEXTS, length)
  assert found.documents() == 3 and set(found.clusters().tolist()) == {0, 1, 2}


def test_paragraphs_may_be_told_from_documents(lm):
  """WikiText's rows are no documents: with windows as units the interval is that of windows."""
  rows = ["the cat sat on the mat", "one hat", "here but there and there"] * 4
  by_window = dataclasses.replace(CONFIG, protocol="joined", unit="window")
  ids = [1, *lm.tokenizer.encode("\n\n".join(rows))]
  expected = nll_by_hand(lm, [ids[: len(ids) // 10 * 10]], 10)
  found = perplexity.perplexity(lm, rows, by_window)
  assert found.nll.se == pytest.approx(_cr1(expected), rel=1e-3)
  assert perplexity.read_windows(lm, rows, by_window).unit == "window"
  by_row = perplexity.perplexity(lm, rows, dataclasses.replace(by_window, unit="document"))
  assert by_row.nll.value == found.nll.value and by_row.nll.se != found.nll.se
  ids = documents()
  apart = dataclasses.replace(CONFIG, unit="window")
  several = perplexity.perplexity_of_ids(lm.module, lm.params, ids, apart).nll
  assert several.se == pytest.approx(_cr1(nll_by_hand(lm, ids, 10)), rel=1e-3)


def test_a_joined_text_is_measured_over_its_windows_targets(lm):
  config = dataclasses.replace(CONFIG, window=5, protocol="joined")
  ids = [1, *lm.tokenizer.encode("\n\n".join(TEXTS))]
  ids = ids[: len(ids) // 5 * 5]
  expected = np.concatenate(nll_by_hand(lm, [ids], 5))
  found = perplexity.perplexity(lm, TEXTS, config)
  assert found.nll.n == len(ids) // 5 * 4
  assert found.nll.value == pytest.approx(expected.mean(), abs=NLL)


def test_nats_lost_is_the_paired_mean_with_documents_as_clusters():
  text = perplexity.windows([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 3)
  base = np.array([1, 2, 3, 4, 5, 6], np.float32)
  lost = np.array([0.5, 0.5, -0.25, 0.0, 1.0, 0.25])
  found = perplexity.nats_lost((base + lost).astype(np.float32), base, text)
  assert found.value == pytest.approx(lost.mean()) and found.n == 6
  assert found.se == pytest.approx(_cr1([lost[:2], lost[2:4], lost[4:]]))
  assert found.ci_high - found.value == pytest.approx(stats.t.ppf(0.975, 2) * found.se)


def test_activations_in_fp4_stay_rounded(lm):
  """The unpacked kernel alone would give the figure of W4A16."""
  texts = documents((10, 7))
  rounded = quant.quantize(lm.params, "mxfp4", activations="fp4")
  expected = np.concatenate(nll_by_hand(dataclasses.replace(lm, params=rounded), texts, 10))
  found = perplexity.perplexity_of_ids(lm.module, rounded, texts, CONFIG).nll.value
  plain = quant.quantize(lm.params, "mxfp4")
  other = perplexity.perplexity_of_ids(lm.module, plain, texts, CONFIG).nll.value
  assert found == pytest.approx(expected.mean(), abs=10 * NLL)
  assert abs(found - other) > 100 * NLL


@pytest.mark.parametrize("texts", [[], [[]], [[1], [2]]])
def test_nothing_to_predict_is_refused(texts):
  with pytest.raises(ValueError, match="needs a text of at least two tokens"):
    perplexity.windows(texts, 4)


# --- numbers


def test_the_mean_is_that_of_float64_softmax(lm):
  texts = documents()
  expected = nll_by_hand(lm, texts, 10)
  found = perplexity.perplexity_of_ids(lm.module, lm.params, texts, CONFIG)
  flat = np.concatenate(expected)
  assert found.nll.n == len(flat) == 9 * 3 + 2 + 9 + 9 + 1 and found.windows == 7
  assert found.nll.value == pytest.approx(flat.mean(), abs=NLL)
  assert found.value == pytest.approx(math.exp(flat.mean()), rel=1e-4)
  assert found.documents == 3, "one has a single token"


def test_neither_batch_nor_padding_matters_and_there_is_one_program(lm):
  texts = documents()
  before = perplexity.window_nll._cache_size()
  whole = perplexity.perplexity_of_ids(lm.module, lm.params, texts, CONFIG)
  perplexity.perplexity_of_ids(lm.module, lm.params, texts[:1], CONFIG)
  assert perplexity.window_nll._cache_size() <= before + 1
  one = dataclasses.replace(CONFIG, batch_size=1)
  alone = perplexity.perplexity_of_ids(lm.module, lm.params, texts, one)
  assert alone.nll.value == pytest.approx(whole.nll.value, abs=1e-6)


def test_the_interval_is_clustered_by_document_else_by_window(lm):
  texts = documents()
  per_window = nll_by_hand(lm, texts, 10)
  several = perplexity.perplexity_of_ids(lm.module, lm.params, texts, CONFIG).nll
  by_document = [per_window[:4], per_window[4:5], per_window[5:]]
  assert several.se == pytest.approx(_cr1([sum(w, []) for w in by_document]), rel=1e-3)
  single = perplexity.perplexity_of_ids(lm.module, lm.params, texts[:1], CONFIG).nll
  assert single.se == pytest.approx(_cr1(per_window[:4]), rel=1e-3)
  half = stats.t.ppf(0.975, 3) * single.se
  assert single.ci_high - single.value == pytest.approx(half, rel=1e-6)


def _cr1(groups) -> float:
  values = np.concatenate(groups)
  sums = [np.sum(np.asarray(g) - values.mean()) for g in groups]
  return math.sqrt(len(groups) / (len(groups) - 1) * np.sum(np.square(sums))) / len(values)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(lm):
  flat = lm.params | {"embed": jnp.zeros_like(lm.params["embed"])}
  found = perplexity.perplexity_of_ids(lm.module, flat, documents(), CONFIG)
  assert found.value == pytest.approx(400, rel=1e-5)
  figures = found.as_dict()
  assert figures["perplexity"]["n"] == figures["nll_per_token"]["n"] == found.nll.n


def test_figures_of_a_worked_example():
  """nll 10, 3, 20 over 5, 3, 8 tokens: perplexity 7.865609 (evaluation core, oracle 6)."""
  nll = statistics.Estimate(33 / 16, None, None, 16, None, "cr1")
  found = perplexity.Perplexity(nll, 1, 1).as_dict()
  assert found["perplexity"]["value"] == pytest.approx(7.865609, abs=1e-6)
  assert found["perplexity"]["ci_low"] is None


def test_a_packed_model_is_measured_as_it_multiplies(lm):
  packed = dataclasses.replace(lm, params=quant.quantize(lm.params))
  expected = np.concatenate(nll_by_hand(packed, documents(), 10)).mean()
  found = perplexity.perplexity_of_ids(lm.module, packed.params, documents(), CONFIG)
  assert found.nll.value == pytest.approx(expected, abs=10 * NLL)


@pytest.mark.usefixtures("full_compilation")
def test_logits_of_all_tokens_never_exist_at_once():
  vocab, length = 20_000, 2048
  module = causal_lm.CausalLM(
    causal_lm.CausalLMConfig(vocab, 16, 1, 2, 2, 8, 16, max_positions=length)
  )
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  compiled = perplexity.window_nll.lower(module, shapes, spec(2, length), spec(2)).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * length * vocab * 4 * 0.7


@pytest.mark.parity
def test_the_loss_is_that_of_transformers(tmp_path):
  import torch

  config = tiny_models.config("llama")
  tiny_models.write_folder(tmp_path, config)
  ours, theirs = jaxlab.load(tmp_path), tiny_models.torch_model(config)
  ids = tiny_models.tokens(3, 20)
  with torch.no_grad():
    batch = torch.tensor(ids, dtype=torch.long)
    expected = theirs(batch, labels=batch).loss.item()
  whole = perplexity.PerplexityConfig(window=20, batch_size=3)
  found = perplexity.perplexity_of_ids(ours.module, ours.params, ids.tolist(), whole)
  assert found.nll.value == pytest.approx(expected, abs=1e-4)


# --- a model and its text


def test_a_text_is_read_through_the_tokenizer(lm):
  texts = ["the cat sat on the mat 2024 times " * 4]
  found = perplexity.perplexity(lm, texts, CONFIG)
  ids = [1, *lm.tokenizer.encode(texts[0])]
  expected = perplexity.perplexity_of_ids(lm.module, lm.params, [ids], CONFIG)
  assert found == expected


def test_a_window_beyond_the_context_and_a_mute_model_are_refused(lm, tmp_path):
  with pytest.raises(ValueError, match="window: must fit the context of 128 tokens; got 129"):
    perplexity.perplexity(lm, ["a"], dataclasses.replace(CONFIG, window=129))
  mute = jaxlab.load(tiny.write_model(tmp_path, with_tokenizer=False))
  with pytest.raises(ValueError, match="has no tokenizer.json"):
    perplexity.perplexity(mute, ["a"], CONFIG)


@pytest.mark.parametrize("field", ["window", "max_tokens", "batch_size"])
def test_sizes_below_their_least_are_refused(field):
  with pytest.raises(ValueError, match=rf"PerplexityConfig.{field}: must be at least"):
    dataclasses.replace(CONFIG, **{field: 0})


# --- files


def test_a_text_file_is_one_document_and_jsonl_one_a_row(tmp_path):
  (tmp_path / "a.txt").write_text("one\ntwo\n")
  assert perplexity.read_documents(str(tmp_path / "a.txt")) == ["one\ntwo\n"]
  rows = [{"body": "one"}, {"body": "zwei ü"}]
  (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
  assert perplexity.read_documents(str(tmp_path / "a.jsonl"), "body") == ["one", "zwei ü"]


@pytest.mark.parametrize(
  "content, kind, message",
  [
    (None, ValueError, "the file must exist"),
    (b"", ValueError, "must hold text; got none"),
    (b'{"text": "a"}\n{"body": "b"}', ValueError, "row 2: field 'text' must be a text; got body."),
    (b'{"text": 3}', ValueError, "row 1: field 'text' must be a text; got text."),
    (b"[1]", ValueError, "row 1: field 'text' must be a text; got list."),
    (b'{"text": "a"}\n{"text"', errors.CorruptFile, "row 2: a row must be JSON"),
    (b'{"text": "\xff"}', errors.CorruptFile, "row 1: text must be UTF-8"),
  ],
)
def test_files_that_cannot_be_read(tmp_path, content, kind, message):
  path = tmp_path / "x.jsonl"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(kind, match=message):
    perplexity.read_documents(str(path))
