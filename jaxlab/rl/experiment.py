"""One RL run from a loaded model to its figures: quantise, score, train, score, export, plot."""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jaxlab import lm as lm_lib
from jaxlab import lora
from jaxlab.eval import accuracy, generation
from jaxlab.io import files, peft
from jaxlab.nn import weights
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from jaxlab.quant import report as quant_report
from jaxlab.rl import base, loop, report
from jaxlab.rl import config as rl_config
from jaxlab.train import flight_recorder, signals
from jaxlab.train import metrics as metrics_log

PyTree = Any
EVAL_ROWS = 50  # held-out items decoded together


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

  Held-out answers are kept in `before/` and `after/`, so that a resumed run answers none twice. The
  trained adapters are written as a PEFT folder `adapter/`. Of several processes, which all run the
  same program, one writes files and has all the figures.
  """
  workdir = pathlib.Path(workdir)
  start = time.monotonic()
  lm = base.quantized(lm, quantize, config.mesh)
  sizes = _sizes(lm.params)
  logging.info(
    "quantised in %.1f s: linears %.1f MB -> %.1f MB.", time.monotonic() - start,
    sizes["weight_bytes_bf16"] / 1e6, sizes["weight_bytes_fp4"] / 1e6,
  )  # fmt: skip
  trainer = loop.prepare(lm, data, config, seed)
  stop.raise_if_set()
  scores = {}
  if data.test:
    scores["before"] = _score(trainer, trainer.lm.params, workdir / "before", "before", stop)
  table = report.SampleTable(workdir, trainer.source.seen) if meshes.leads() else None
  params = trainer.run(workdir, config_text=config_text, on_round=table, stop=stop)
  _save_adapter(params, config.lora, workdir / "adapter", lm.path)
  if data.test:
    scores["after"] = _score(trainer, params, workdir / "after", "after", stop)
  if not meshes.leads():
    return sizes
  rows = metrics_log.read(workdir)
  report.plot_run(rows, workdir / "plots")
  return {
    **(_gain(workdir, data, scores) if data.test else {}),
    **sizes, **report.speed(rows), **report.curve(rows),
  }  # fmt: skip


def replay(
  lm: lm_lib.LM,
  data: rl_config.RLData,
  config: rl_config.RLConfig,
  quantize: Callable[[PyTree], PyTree],
  *,
  path: str | os.PathLike[str],
  seed: int,
) -> dict[str, Any]:
  """Runs the update that a `flight/STEP` folder of this recipe kept; returns its metrics."""
  trainer = loop.prepare(base.quantized(lm, quantize, config.mesh), data, config, seed)
  _, metrics = flight_recorder.replay(
    path, trainer.train_step, trainer.frozen, trainer.optimizer, trainer.place
  )
  return metrics


def _save_adapter(
  params: PyTree, config: lora.LoRAConfig, folder: pathlib.Path, base_path: str
) -> None:
  """Gathers what was trained from all processes; one writes it."""
  trained, frozen = weights.partition(params, lora.is_trainable(config))
  params = weights.merge(jax.tree.map(jnp.asarray, meshes.to_host(trained)), frozen)
  if meshes.leads():
    peft.save_adapter(params, config, folder, base=base_path)


@contextlib.contextmanager
def _journal(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Where this process keeps an evaluation: `folder`, or a copy of it for the time being.

  What is there already is not asked again, so all processes must start from the same files.
  """
  names = (accuracy.RESPONSES, accuracy.SCORES)
  there = {}
  if meshes.leads():
    there = {name: (folder / name).read_text() for name in names if (folder / name).exists()}
  there = meshes.from_all(there)[0]
  if meshes.leads():
    yield folder
    return
  with tempfile.TemporaryDirectory() as copy:
    for name, lines in there.items():
      (pathlib.Path(copy) / name).write_text(lines)
    yield pathlib.Path(copy)


def evaluation_rows(items: int, placement: rules.Placement | None) -> int:
  """Rows decoded together for so many held-out items: whole ones of every device."""
  rows, shards = min(EVAL_ROWS, items), 1 if placement is None else rules.row_shards(placement.mesh)
  return -(-rows // shards) * shards


def _score(
  trainer: loop.Trainer, params: PyTree, folder: pathlib.Path, when: str, stop: signals.Interrupt
) -> accuracy.Evaluation:
  """Greedy answers to the held-out items, without noise; keeps them in `folder`."""
  trained, _ = weights.partition(params, lora.is_trainable(trainer.config.lora))
  config = dataclasses.replace(trainer.config.sampling, temperature=0.0)
  answerer = generation.Answerer(
    loop.make_sampler(trainer.lm, config),
    trainer.lm.tokenizer,
    trainer.source.serving.params(trained),
    model=generation.fingerprint(params),
    batch_size=evaluation_rows(len(trainer.data.test), trainer.lm.module.placement),
    system_prompt=trainer.data.system_prompt,
  )
  with _journal(folder) as kept:
    found = accuracy.evaluate_items(
      answerer, trainer.data.test, trainer.data.rewards, jax.random.key(0), folder=kept,
      on_batch=lambda done, total: stop.raise_if_set(),
    )  # fmt: skip
  logging.info("%s", accuracy.describe(found.summary["accuracy"], f"accuracy {when} training"))
  return found


def _gain(
  workdir: pathlib.Path, data: rl_config.RLData, scores: dict[str, accuracy.Evaluation]
) -> dict[str, Any]:
  """Both accuracies and their paired difference; writes the answers side by side."""
  before, after = scores["before"], scores["after"]
  rows = [
    {"question": report.question(item), "target": item.target, "before": b.text, "after": a.text}
    for item, b, a in zip(data.test, before.responses, after.responses, strict=True)
  ]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  files.write_atomically(workdir / "held_out.jsonl", lambda f: f.write(lines.encode()))
  report.show_samples(rows[: report.TABLE_ROWS])
  gain = accuracy.compare(workdir / "after", workdir / "before")
  logging.info("gain: %s", accuracy.describe_comparison(gain))
  return {
    "accuracy_before": before.summary["accuracy"],
    "accuracy_after": after.summary["accuracy"],
    "accuracy_gain": gain["difference"],
    "gain_p_value": gain["p_value"],
    "truncated_before": before.summary["truncated"],
    "truncated_after": after.summary["truncated"],
  }


def _sizes(params: PyTree) -> dict[str, int]:
  """Bytes of the linear kernels and of the whole model, beside those of a bfloat16 one."""
  sizes = quant_report.sizes(params)
  return {
    "weight_bytes_bf16": sizes["weight_bytes_bf16"],
    "weight_bytes_fp4": sizes["weight_bytes"],
    "model_bytes_bf16": sizes["model_bytes_bf16"],
    "model_bytes_fp4": sizes["model_bytes"],
  }
