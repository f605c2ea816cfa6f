"""Writes a model, or its adapters, for other programs.

  --format=hf      a folder that transformers and vLLM load, with receipt.json and verify.py
  --format=merged  the same with adapters merged into dense weights (onto the quantised base)
  --format=peft    the adapters alone, as a PEFT folder

--output_format=compressed_tensors|modelopt|fp_quant writes FP4 weights in another layout: codes and
scales go over as they are, no dense copy is made, and so no receipt either.

python -m launch.export --model=demo --adapter=runs/demo/adapter --format=merged --output=DIR"""

import dataclasses

from absl import flags, logging

import jaxlab
from jaxlab import lm as language_model
from jaxlab import lora
from jaxlab.data import assets
from jaxlab.io import export, fp4_fuse, fp4_layouts, huggingface, names, orbax, peft
from jaxlab.nn import weights
from jaxlab.train import budget
from launch import common, model, packed

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("adapter", None, "PEFT folder to attach to the model first.", FLAGS)
flags.DEFINE_enum("format", "hf", ["hf", "merged", "peft"], "What to write.", FLAGS)
flags.DEFINE_string("output", None, "Folder to write; new or empty.", FLAGS)
flags.DEFINE_enum(
  "output_format", None, sorted(fp4_layouts.PARTS), "Layout of FP4 weights; the source's.", FLAGS
)
flags.DEFINE_bool(
  "fuse_global_scale", False, "NVFP4: one global scale for q/k/v and for gate/up.", FLAGS
)


def main(run: common.Run) -> dict:
  """Loads, attaches, merges where asked, writes."""
  path, output, kind = model.required(run.flags.model), run.flags.output, run.flags.format
  packed.new_folder(output, replaces=peft.CONFIG if kind == "peft" else None)
  layout = run.flags.output_format
  if layout and kind != "hf":
    raise ValueError(f"--output_format: is for FP4 weights, of --format=hf; got {kind}. Leave it.")
  run.start(resumes=False)
  work = budget.Work(dtype_bytes=budget.default_dtype_bytes())
  dtype = stored_dtype(path) if layout else None
  lm = model.load(path, work=work, adapter=run.flags.adapter, dtype=dtype)
  if kind == "hf" and any(
    isinstance(w, weights.LoRA) for w in weights.leaf_paths(lm.params).values()
  ):
    raise ValueError("--format: hf has no place for adapters. Use merged, or peft.")
  if kind == "peft":
    peft.save_adapter(lm.params, lora.config_of(lm.params), output, base=path)
  elif kind == "merged":
    params = weights.densify(lora.merge_adapters(lm.params), lm.params["embed"].dtype)
    language_model.export(dataclasses.replace(lm, params=params), output)
  else:
    lm = fused(lm) if run.flags.fuse_global_scale else lm
    write(lm, output, layout)
  print(f"Wrote {output} ({layout or kind}).")
  return {"model": path, "format": kind, "output": output, "output_format": layout}


def stored_dtype(path: str) -> str | None:
  """The dtype of the model's dense tensors, None for a checkpoint of our own."""
  found = assets.model_path(path)
  if orbax.is_checkpoint(found / language_model.PARAMS) or not found.exists():
    return None
  return huggingface.load_source(found).dtypes.get(names.HUGGING_FACE["embed"])


def fused(lm: jaxlab.LM) -> jaxlab.LM:
  """The model with equal global scales within q/k/v and gate/up.

  Raises: ValueError if it has no NVFP4 weights.
  """
  leaves = weights.leaf_paths(lm.params).values()
  if not any(isinstance(w, weights.FP4Array) and w.format == "nvfp4" for w in leaves):
    raise ValueError("--fuse_global_scale: the model has no NVFP4 weights. Leave it out.")
  return dataclasses.replace(lm, params=fp4_fuse.fuse_tensor_scales(lm.params))


def write(lm: jaxlab.LM, output: str, layout: str | None) -> None:
  """Writes the folder: with a receipt where transformers loads it on any machine, unless it is
  converted to another layout."""
  leaves = weights.leaf_paths(lm.params).values()
  if unequal := fp4_fuse.unequal(lm.params):
    logging.warning(
      "%d sets of linears that servers multiply as one have different global scales, such as that "
      "of %s; --fuse_global_scale makes them equal", len(unequal), unequal[0],
    )  # fmt: skip
  if layout is None and export.source_layout(lm) in (None, "compressed_tensors"):
    language_model.export(lm, output)
    return
  if layout and not any(isinstance(w, weights.FP4Array) for w in leaves):
    raise ValueError("--output_format: the model has no FP4 weights. Run launch.quantize first.")
  huggingface.save_pretrained(lm, output, layout=layout)


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab export`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
