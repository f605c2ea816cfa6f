"""One RL run from a loaded model to its figures: quantise, score, train, score, export, plot."""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from jaxlab import lm as lm_lib
from jaxlab.eval import statistics
from jaxlab.io import files, peft
from jaxlab.quant import fp4
from jaxlab.rl import config as rl_config
from jaxlab.rl import held_out, loop, report, rollout
from jaxlab.train import metrics as metrics_log
from jaxlab.train import signals

PyTree = Any


def run(
  lm: lm_lib.LM,
  data: rl_config.RLData,
  config: rl_config.RLConfig,
  quantize: Callable[[PyTree], PyTree],
  *,
  workdir: str | os.PathLike[str],
  seed: int,
  config_text: str,
  stop: signals.Interrupt,
) -> dict[str, Any]:
  """Runs, or resumes, a whole experiment in `workdir`; returns the figures of result.json.

  Scores are kept in `before.json`, so that a resumed run does not score the base again. The trained
  adapters are written as a PEFT folder `adapter/`.
  """
  workdir = pathlib.Path(workdir)
  bytes_bf16 = _bytes_as_bf16(lm.params)
  start = time.monotonic()
  lm = dataclasses.replace(lm, params=quantize(lm.params))
  packed = fp4.weight_bytes(lm.params)
  logging.info(
    "quantised in %.1f s: linears %.1f MB -> %.1f MB.", time.monotonic() - start,
    bytes_bf16["linears"] / 1e6, packed["linears"] / 1e6,
  )
  trainer = loop.prepare(lm, data, config, seed)
  stop.raise_if_set()
  test = rollout.tokenize(
    data.test, lm.tokenizer, max_tokens=config.max_prompt_tokens, system_prompt=data.system_prompt
  ) if data.test else None  # fmt: skip
  sampler = trainer.source.sampler
  before = test and _before(
    workdir, lambda: held_out.score(sampler, trainer.lm.params, test, data, lm.tokenizer)
  )
  stop.raise_if_set()
  table = report.SampleTable(workdir, trainer.source.seen)
  params = trainer.run(workdir, config_text=config_text, on_round=table, stop=stop)
  after = test and held_out.score(sampler, params, test, data, lm.tokenizer)
  peft.save_adapter(params, config.lora, workdir / "adapter", base=lm.path)
  rows = metrics_log.read(workdir)
  report.plot_run(rows, workdir / "plots")
  return {
    **(_scores(workdir, before, after) if test else {}),
    "weight_bytes_bf16": bytes_bf16["linears"],
    "weight_bytes_fp4": packed["linears"],
    "model_bytes_bf16": bytes_bf16["total"],
    "model_bytes_fp4": bytes_bf16["total"] - bytes_bf16["linears"] + packed["linears"],
    **report.speed(rows),
    **report.curve(rows),
  }


def _before(workdir: pathlib.Path, score: Callable[[], list[held_out.Scored]]) -> list[held_out.Scored]:
  """The base model's answers, scored once a workdir."""
  path = workdir / "before.json"
  if path.exists():
    return held_out.from_json(json.loads(path.read_text()))
  before = score()
  files.write_atomically(path, lambda f: f.write(json.dumps(held_out.to_json(before)).encode()))
  logging.info("before training: %s", _percent(held_out.accuracy(before)))
  return before


def _scores(workdir: pathlib.Path, before: list[held_out.Scored], after: list[held_out.Scored]):
  """Both accuracies, their paired difference, and a file of answers before and after."""
  pairs = [
    {"question": _question(b.item), "target": b.item.target, "before": b.text, "after": a.text}
    for b, a in zip(before, after, strict=True)
  ]
  lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
  files.write_atomically(workdir / "held_out.jsonl", lambda f: f.write(lines.encode()))
  difference = statistics.paired_difference(
    {s.item.id: float(s.correct) for s in after}, {s.item.id: float(s.correct) for s in before}
  )
  logging.info("after training: %s", _percent(held_out.accuracy(after)))
  return {
    "accuracy_before": held_out.accuracy(before),
    "accuracy_after": held_out.accuracy(after),
    "accuracy_gain": difference.difference.as_dict(),
    "gain_p_value": difference.p_value,
  }


def _question(item) -> str:
  return item.messages[-1]["content"] if item.messages else item.prompt


def _percent(a: dict[str, Any]) -> str:
  value, low, high = (100 * a[k] for k in ("value", "ci_low", "ci_high"))
  return f"{value:.1f} % right (95 %: {low:.1f} to {high:.1f}, n = {a['n']})"


def _bytes_as_bf16(params: PyTree) -> dict[str, int]:
  """Bytes of linears and of the whole model if every array were bfloat16."""
  sizes = fp4.weight_bytes(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), params))
  return sizes
