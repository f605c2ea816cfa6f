"""Writes a model, or its adapters, for other programs.

hf      a folder that transformers and vLLM load, with receipt.json and verify.py
merged  the same with adapters merged into dense weights (onto the quantised base)
peft    the adapters alone, as a PEFT folder

python -m launch.export --model=runs/rl/model --format=merged --output=DIR"""

import dataclasses

from absl import flags

import jaxlab
from jaxlab import lm as language_model
from jaxlab import lora
from jaxlab.io import peft
from jaxlab.nn import weights
from launch import common

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("adapter", None, "PEFT folder to attach to the model first.", FLAGS)
flags.DEFINE_enum("format", "hf", ["hf", "merged", "peft"], "What to write; see above.", FLAGS)
flags.DEFINE_string("output", None, "Folder to write; new or empty.", FLAGS)


def main(run: common.Run) -> dict:
  """Loads, attaches, merges where asked, writes."""
  for name in ("model", "output"):
    if not run.flags[name].value:
      raise ValueError(f"--{name}: must be given. See --help.")
  output, kind = run.flags.output, run.flags.format
  lm = jaxlab.load(run.flags.model)
  params = lm.params
  if run.flags.adapter:
    params = peft.load_adapter(run.flags.adapter, params)
  run.start()
  if kind == "peft":
    peft.save_adapter(params, lora.config_of(params), output, base=run.flags.model)
  else:
    if kind == "merged":
      params = weights.densify(lora.merge_adapters(params), params["embed"].dtype)
    language_model.export(dataclasses.replace(lm, params=params), output)
  print(f"Wrote {output} ({kind}).")
  return {"model": run.flags.model, "format": kind, "output": output}


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab export`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
