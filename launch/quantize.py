"""Writes a model with 4-bit weights, rounded to nearest.

quantize.format = 'nvfp4' writes a compressed-tensors folder that transformers and vLLM load (and
jaxlab); 'mxfp4', 'nf4' and 'bf16' write a checkpoint that only jaxlab loads.

python -m launch.quantize --model=demo --output=DIR --gin_bindings="quantize.format='nvfp4'" """

import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import flags

import jaxlab
from jaxlab import lm as language_model
from jaxlab.data import assets
from jaxlab.io import huggingface, names, orbax
from jaxlab.models import causal_lm, zoo
from jaxlab.quant import by_group, fp4, report
from jaxlab.train import budget
from launch import common, model, registry

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("output", None, "Folder to write; new or empty.", FLAGS)


def main(run: common.Run) -> dict:
  """Loads, quantises group by group, writes; returns sizes and errors."""
  quantize = registry.get("quantize")
  output = _new_folder(run.flags.output)
  path = model.required(run.flags.model)
  run.start()
  # In host memory, which is larger; the work is a pass over the weights, no matter for a GPU.
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    dtype = stored_dtype(path)
    work = _work(quantize, path, dtype)
    # No name here may hold the dense model while its layers are replaced.
    lm, errors = by_group.quantize_by_group(
      model.load(path, work=work, dtype=dtype), quantize, model.progress("groups")
    )
    layout = write(lm, output)
  kind, sizes = report.format_of(lm.params), report.sizes(lm.params)
  print(
    f"Wrote {output}: {kind}, {layout}.\nLinears {sizes['weight_bytes_bf16'] / 1e6:.1f} MB -> "
    f"{sizes['weight_bytes'] / 1e6:.1f} MB, {sizes['bits_per_weight']:.2f} bits a weight."
  )
  figures = {"model": path, "output": output, "format": kind, "layout": layout}
  return figures | sizes | by_group.summary(errors)


def stored_dtype(path: str) -> str | None:
  """The dtype of the model's dense tensors: twice its size would buy nothing. None: as `load`."""
  found = assets.model_path(path)
  if orbax.is_checkpoint(found / language_model.PARAMS) or not found.exists():
    return None
  return huggingface.load_source(found).dtypes.get(names.HUGGING_FACE["embed"])


def write(lm: jaxlab.LM, output: pathlib.Path) -> str:
  """Writes the model in the layout that goes with its format; says which."""
  if report.format_of(lm.params) == "nvfp4":
    language_model.export(lm, output)
    return "compressed-tensors, for transformers, vLLM and jaxlab"
  jaxlab.save(lm, output)
  return "a checkpoint of jaxlab's own: other programs do not read it"


def _new_folder(output: str | None) -> pathlib.Path:
  """The folder to write, refused before the work rather than after it."""
  if not output:
    raise ValueError("--output: must be given: the folder to write. See --help.")
  path = pathlib.Path(output)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(f"--output: must be new or empty; got {output}. Choose another folder.")
  return path


def _work(quantize: Callable, path: str, dtype: str | None) -> budget.Work:
  """Both models are in memory for a while. Shapes alone tell whether the format suits the model."""
  config, _ = budget.describe_checkpoint(path)
  packed = jax.eval_shape(quantize, zoo.param_shapes(causal_lm.CausalLM(config)))
  return budget.Work(
    dtype_bytes=jnp.dtype(dtype).itemsize if dtype else budget.default_dtype_bytes(),
    other_bytes=fp4.weight_bytes(packed)["linears"],
  )


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab quantize`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
