"""Writes a model with 4-bit weights.

Rounded to nearest: quantize.format = 'nvfp4', 'mxfp4', 'nf4' or 'bf16'. Calibrated on a text, block
by block: PTQConfig.method = @mr_gptq() (or @gptq(), @rtn_hadamard(), @rtn(), @MRGPTQConfig()); the
same command takes up what an interrupted run had finished.
--output_format: compressed_tensors, modelopt and fp_quant are folders that other programs load,
jaxlab is a checkpoint of our own, which holds everything.

python -m launch.quantize --gin_file=configs/mr_gptq/smollm2_cpu.gin --model=demo --output=DIR"""

import pathlib
import resource
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags, logging

from jaxlab.io import stream
from jaxlab.models import causal_lm, zoo
from jaxlab.quant import by_group, fp4, report
from jaxlab.quant import scales as scale_rules
from jaxlab.train import budget
from launch import calibrated, common, model, packed, registry

STREAM_ABOVE = 4e9  # bytes of a folder that is read matrix by matrix, never as a whole

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
packed.define_flags(FLAGS)


def main(run: common.Run) -> dict:
  """Loads, quantises, writes; returns sizes and errors."""
  output, path = packed.new_folder(run.flags.output), model.required(run.flags.model)
  quantize = calibrated.quantize if registry.mentions(calibrated.ROOT) else _round
  # In host memory, which is larger; what takes time is placed on other devices by name.
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    figures = quantize(run, path, output)
  peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  print(f"Peak of host memory: {peak / 1e9:.2f} GB.")
  return {"model": path, "output": output, "peak_host_bytes": peak} | figures


def _round(run: common.Run, path: str, output: pathlib.Path) -> dict:
  """To nearest, group by group, or matrix by matrix for what is large."""
  quantize = registry.get("quantize")
  layout = packed.layout_of(run.flags.output_format, registry.setting("quantize", "format"))
  run.start()
  if layout != packed.OWN and packed.folder_bytes(path) > STREAM_ABOVE:
    return _stream(path, output, layout)
  dtype, shapes = packed.stored_dtype(path), _shapes(quantize, path)
  packed.require_place(shapes, layout, registry.setting("quantize", "rule"))
  work = _work(shapes, dtype)
  # No name here may hold the dense model while its layers are replaced.
  lm, errors = by_group.quantize_by_group(
    model.load(path, work=work, dtype=dtype), quantize, model.progress("groups")
  )
  return packed.write(lm, output, layout) | by_group.summary(errors)


def _stream(path: str, output: pathlib.Path, layout: str) -> dict:
  """A large folder: the peak is one shard of the output and one matrix."""
  names = ("format", "rule", "search", "activations", "head")
  format, rule, search, activations, head = (registry.setting("quantize", n) for n in names)
  if head != "none":
    raise ValueError(f"quantize.head: {layout} keeps the head dense; got {head!r}. Leave it out.")
  config, errors = scale_rules.ScaleConfig(rule=rule, search=search), []
  packed.require_place({}, layout, rule)

  def one(w_IO, amax):
    amax = amax if format == "nvfp4" else None
    leaf = fp4.quantize(w_IO, format, scales=config, tensor_amax=amax, activations=activations)
    if not isinstance(w_IO, jax.core.Tracer):
      errors.append(float(report.relative_error(w_IO, leaf)))
    return leaf

  logging.info("%s: matrix by matrix (above %.0f GB)", path, STREAM_ABOVE / 1e9)
  sizes = stream.quantize_folder(path, output, one, layout, model.progress("blocks"))
  print(
    f"Wrote {output}: {format}, {layout}.\n{sizes.matrices} matrices, "
    f"{sizes.bytes_before / 1e9:.2f} GB -> {sizes.bytes_after / 1e9:.2f} GB."
  )
  figures = {"relative_error_mean": sum(errors) / len(errors), "relative_error_max": max(errors)}
  return {"format": format, "layout": layout} | figures | sizes._asdict()


def _shapes(quantize: Callable, path: str) -> Any:
  """The quantised model, in shapes: they tell whether the format suits it."""
  config, _ = budget.describe_checkpoint(path)
  return jax.eval_shape(quantize, zoo.param_shapes(causal_lm.CausalLM(config)))


def _work(shapes: Any, dtype: str | None) -> budget.Work:
  """Both models are in memory for a while."""
  return budget.Work(
    dtype_bytes=jnp.dtype(dtype).itemsize if dtype else budget.default_dtype_bytes(),
    other_bytes=fp4.weight_bytes(shapes)["linears"],
  )


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab quantize`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
