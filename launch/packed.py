"""Writing a quantised model: in which layout, where, and what is said of it."""

import os
import pathlib
from typing import Any

from absl import flags

import jaxlab
from jaxlab import lm as language_model
from jaxlab.data import assets
from jaxlab.io import export, fp4_layouts, huggingface, names, orbax
from jaxlab.nn import weights
from jaxlab.quant import report
from pallas_kernels.fp4_gemm import codec

OWN = "jaxlab"  # the layout that holds everything
DEFAULT = "compressed_tensors"


def define_flags(values: flags.FlagValues) -> None:
  """--output and --output_format."""
  flags.DEFINE_string("output", None, "Folder to write; new or empty.", values)
  layouts = [*fp4_layouts.PARTS, OWN]
  flags.DEFINE_enum("output_format", None, layouts, f"Layout; {DEFAULT} for FP4.", values)


def new_folder(output: str | None, *, replaces: str | None = None) -> pathlib.Path:
  """The folder to write, refused before the work rather than after it.

  Args:
    replaces: name of a file; a folder that has it may be there.
  """
  if not output:
    raise ValueError("--output: must be given: the folder to write. See --help.")
  path = pathlib.Path(output)
  used = path.exists() and (not path.is_dir() or any(path.iterdir()))
  if used and not (replaces and (path / replaces).is_file()):
    raise ValueError(f"--output: must be new or empty; got {output}. Choose another folder.")
  there = next(parent for parent in path.absolute().parents if parent.exists())
  if not (there.is_dir() and os.access(there, os.W_OK)):
    raise ValueError(
      f"--output: must be where a folder can be written; got {output}, and {there} does not take "
      "one. Choose another."
    )
  return path


def layout_of(asked: str | None, format: str) -> str:
  """The layout to write a format in. Raises: ValueError if it has no place for it."""
  if format in codec.BLOCK:
    return asked or DEFAULT
  if asked not in (None, OWN):
    raise ValueError(
      f"--output_format: {asked} holds nvfp4 and mxfp4; got {format}. Use --output_format={OWN}."
    )
  return OWN


def require_place(params: Any, layout: str, rule: str) -> None:
  """Raises ValueError, before the work, for what a layout cannot hold.

  Args:
    params: the quantised parameters, or their shapes.
    rule: of the block scales, which shapes do not tell.
  """
  if layout == OWN:
    return
  if layout == "compressed_tensors" and rule == "fp43":
    raise ValueError(
      f"--output_format: {layout} mxfp4 has no tensor scale; got the rule fp43, which needs one. "
      "Use --output_format=fp_quant, or the rule 'even'."
    )
  for path, w in weights.leaf_paths(params).items():
    if isinstance(w, weights.FP4Array):
      fp4_layouts.scheme_of_leaf(w, layout, module=path)
    elif weights.is_leaf(w):
      raise ValueError(
        f"--output_format: {layout} holds dense and FP4 weights; got {type(w).__name__} at {path}. "
        f"Use --output_format={OWN}, or leave the head dense."
      )


def write(lm: jaxlab.LM, output: pathlib.Path, layout: str) -> dict[str, Any]:
  """Writes the model, says so, and returns sizes; a decoder in the default layout has a receipt."""
  if layout == OWN:
    with export.new_folder(output) as part:
      jaxlab.save(lm, part)
  elif layout == DEFAULT and lm.module.config.causal:
    language_model.export(lm, output)
  else:
    huggingface.save_pretrained(lm, output, layout=layout)
  format, sizes = report.format_of(lm.params), report.sizes(lm.params)
  print(
    f"Wrote {output}: {format}, {layout}{_read_by(layout)}.\n"
    f"Linears {sizes['weight_bytes_bf16'] / 1e6:.1f} MB -> {sizes['weight_bytes'] / 1e6:.1f} MB, "
    f"{sizes['bits_per_weight']:.2f} bits a weight."
  )
  return {"format": format, "layout": layout} | sizes


def _read_by(layout: str) -> str:
  return " (a checkpoint of our own: other programs do not read it)" if layout == OWN else ""


def stored_dtype(path: str) -> str | None:
  """The dtype of the model's dense tensors: twice its size would buy nothing. None: as `load`."""
  found = assets.model_path(path)
  if orbax.is_checkpoint(found / language_model.PARAMS) or not found.exists():
    return None
  return huggingface.load_source(found).dtypes.get(names.HUGGING_FACE["embed"])


def folder_bytes(path: str) -> int:
  """Bytes of the weights of a Hugging Face folder; 0 for anything else."""
  folder = assets.model_path(path)
  if not folder.is_dir() or orbax.is_checkpoint(folder / language_model.PARAMS):
    return 0
  return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
