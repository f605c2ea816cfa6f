"""Writes a model with 4-bit weights, rounded to nearest.

quantize.format = 'nvfp4' writes a compressed-tensors folder that transformers and vLLM load (and
jaxlab); 'mxfp4', 'nf4' and 'bf16' write a checkpoint that only jaxlab loads.

python -m launch.quantize --model=demo --output=DIR --gin_bindings="quantize.format='nvfp4'" """

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import jaxlab
from jaxlab import lm as language_model
from jaxlab.models import causal_lm
from jaxlab.nn import stack
from jaxlab.quant import fp4, report
from jaxlab.train import budget
from launch import common, model, registry

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("output", None, "Folder to write; new or empty.", FLAGS)
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # those of one share a tensor scale


def main(run: common.Run) -> dict:
  """Loads, quantises group by group, writes; returns sizes and errors."""
  quantize = registry.get("quantize")
  output = _new_folder(run.flags.output)
  path = model.required(run.flags.model)
  run.start()
  work = _work(quantize, path)
  # No name here may hold the dense model while its layers are replaced.
  lm, errors = quantize_by_group(model.load(path, work=work), quantize)
  kind = report.format_of(lm.params)
  if kind == "nvfp4":
    language_model.export(lm, output)
    layout = "compressed-tensors, for transformers, vLLM and jaxlab"
  else:
    jaxlab.save(lm, output)
    layout = "a checkpoint of jaxlab's own: other programs do not read it"
  sizes = report.sizes(lm.params)
  print(
    f"Wrote {output}: {kind}, {layout}.\nLinears {sizes['weight_bytes_bf16'] / 1e6:.1f} MB -> "
    f"{sizes['weight_bytes'] / 1e6:.1f} MB, {sizes['bits_per_weight']:.2f} bits a weight."
  )
  return {
    "model": path, "output": output, "format": kind, "layout": layout, **sizes,
    **summary(errors),
  }  # fmt: skip


def quantize_by_group(lm: jaxlab.LM, quantize: Callable) -> tuple[jaxlab.LM, dict[str, np.ndarray]]:
  """The model with quantised layers, and {linear: relative error of each layer}; shows progress.

  A group's dense kernels are dropped before the next one is packed.
  """
  params = stack.restack(lm.params)
  layers, errors = dict(params["layers"]), {}
  lm = dataclasses.replace(lm, params=None)
  show = model.progress("groups")
  show(0, len(GROUPS))
  for done, group in enumerate(GROUPS, 1):
    packed = quantize({"layers": {name: layers[name] for name in group}})["layers"]
    for name in group:
      errors[name] = report.relative_error(layers[name]["kernel"], packed[name]["kernel"])
    layers |= packed
    params = params | {"layers": layers}
    show(done, len(GROUPS))
  return dataclasses.replace(lm, params=params), errors


def summary(errors: dict[str, np.ndarray]) -> dict:
  """Mean and largest relative error, where it is, and a row for each layer."""
  names = list(errors)
  table = np.stack([errors[name] for name in names])  # linears x layers
  worst = np.unravel_index(table.argmax(), table.shape)
  return {
    "relative_error_mean": table.mean(),
    "relative_error_max": table.max(),
    "worst_kernel": f"layers/{worst[1]}/{names[worst[0]]}",
    "rows": [
      {"layer": i, "relative_error_mean": row.mean(), "relative_error_max": row.max()}
      for i, row in enumerate(table.T)
    ],
  }


def _new_folder(output: str | None) -> pathlib.Path:
  """The folder to write, refused before the work rather than after it."""
  if not output:
    raise ValueError("--output: must be given: the folder to write. See --help.")
  path = pathlib.Path(output)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(f"--output: must be new or empty; got {output}. Choose another folder.")
  return path


def _work(quantize: Callable, path: str) -> budget.Work:
  """Both models are in memory for a while. Shapes alone tell whether the format suits the model."""
  config, _ = budget.describe_checkpoint(path)
  module = causal_lm.CausalLM(config)
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  packed = jax.eval_shape(quantize, shapes)
  return budget.Work(
    dtype_bytes=budget.default_dtype_bytes(), other_bytes=fp4.weight_bytes(packed)["linears"]
  )


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab quantize`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
