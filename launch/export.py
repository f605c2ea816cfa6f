"""Writes a model, or its adapters, for other programs.

  --format=hf      a folder that transformers and vLLM load, with receipt.json and verify.py
  --format=merged  the same with adapters merged into dense weights (onto the quantised base)
  --format=peft    the adapters alone, as a PEFT folder

python -m launch.export --model=demo --adapter=runs/demo/adapter --format=merged --output=DIR"""

import dataclasses

from absl import flags

from jaxlab import lm as language_model
from jaxlab import lora
from jaxlab.io import peft
from jaxlab.nn import weights
from jaxlab.train import budget
from launch import common, model

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("adapter", None, "PEFT folder to attach to the model first.", FLAGS)
flags.DEFINE_enum("format", "hf", ["hf", "merged", "peft"], "What to write.", FLAGS)
flags.DEFINE_string("output", None, "Folder to write; new or empty.", FLAGS)


def main(run: common.Run) -> dict:
  """Loads, attaches, merges where asked, writes."""
  path, output, kind = model.required(run.flags.model), run.flags.output, run.flags.format
  if not output:
    raise ValueError("--output: must be given: the folder to write. See --help.")
  run.start(resumes=False)
  work = budget.Work(dtype_bytes=budget.default_dtype_bytes())
  lm = model.load(path, work=work, adapter=run.flags.adapter)
  if kind == "hf" and any(
    isinstance(w, weights.LoRA) for w in weights.leaf_paths(lm.params).values()
  ):
    raise ValueError("--format: hf has no place for adapters. Use merged, or peft.")
  if kind == "peft":
    peft.save_adapter(lm.params, lora.config_of(lm.params), output, base=path)
  else:
    params = lm.params
    if kind == "merged":
      params = weights.densify(lora.merge_adapters(params), params["embed"].dtype)
    language_model.export(dataclasses.replace(lm, params=params), output)
  print(f"Wrote {output} ({kind}).")
  return {"model": path, "format": kind, "output": output}


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab export`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
