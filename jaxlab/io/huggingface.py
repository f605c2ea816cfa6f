"""Hugging Face folders (and GGUF files) to parameters and back.

Import streams one tensor at a time into stacked buffers [L, in, out]. Export writes the names,
dtypes and shards of the source again, so that an unchanged model comes out byte-equal. FP4 kernels
are read from compressed-tensors, ModelOpt and FP-Quant folders and written as either.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from jaxlab.io import (
  assemble,
  assemble_packed,
  export,
  files,
  fp4_checkpoints,
  fp4_configs,
  gguf,
  gguf_model,
  names,
)
from jaxlab.io import safetensors as st
from jaxlab.io import tokenizer as tokenizers

PyTree = Any
Template = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Source:
  """Where a model came from, and what an export repeats of it.

  path: folder or GGUF file.
  dtypes: {Hugging Face tensor name: name of the dtype to write}.
  weight_map: {tensor name: shard}, None to shard by size.
  metadata: of the safetensors header.
  """

  path: pathlib.Path
  dtypes: Mapping[str, str]
  weight_map: Mapping[str, str] | None = None
  metadata: Mapping[str, str] | None = None


def is_gguf(path: str | os.PathLike[str]) -> bool:
  return pathlib.Path(path).suffix == ".gguf"


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
  """The `config.json` of a folder, or the one that a GGUF file's metadata describe.

  Raises: ValueError if there is none; CorruptFile if it does not parse.
  """
  if is_gguf(path):
    return gguf_model.config(gguf.read_gguf(path))
  folder = _folder(path)
  file = files.member(folder, export.CONFIG)
  if file is None:
    raise ValueError(
      f"load: {folder} has no {export.CONFIG}. A model folder has it beside its .safetensors files."
    )
  config = files.read_json_object(file)
  if "auto_map" in config:
    logging.info("%s: auto_map is ignored; no code of a model folder runs.", folder)
  return config


def load_source(path: str | os.PathLike[str]) -> Source:
  """Reads headers only."""
  path = pathlib.Path(path)
  if is_gguf(path):
    return Source(path, gguf_model.stored_dtypes(gguf.read_gguf(path)))
  folder = st.SafetensorsFolder(path)
  dtypes = {name: str(folder.shape_dtype(name)[1]) for name in folder.names()}
  return Source(path, dtypes, folder.weight_map, folder.metadata or None)


def load_tokenizer(path: str | os.PathLike[str]) -> tokenizers.Tokenizer | None:
  """The tokenizer of a folder or GGUF file; None for a folder without one."""
  if is_gguf(path):
    return tokenizers.Tokenizer.from_gguf(gguf.read_gguf(path))
  return tokenizers.Tokenizer.from_folder(path)


def load_params(
  path: str | os.PathLike[str],
  module: Any,
  dtype: jax.typing.DTypeLike,
  *,
  place: assemble.Place = assemble.to_device,
) -> PyTree:
  """The stacked parameters of `module` from a folder or a GGUF file.

  Host memory: the model plus one tensor (plus one stacked parameter where `place` copies it away).

  Args:
    module: on the model contract, as `config.json` describes it.
    dtype: of dense parameters; packed ones are kept as stored.
    place: (path, kernel of NumPy arrays) -> kernel; default the default device.
  Returns: nested dicts; FP4 linears of every layout of `fp4_layouts` are `weights.FP4Array`. Where
    the layers of one linear differ (mixed precision), "layers" is a list of per-layer dicts.
  Raises: ValueError for a missing, unexpected or misshapen tensor or an unsupported quantisation;
    CorruptFile for damaged files.
  """
  if is_gguf(path):
    return gguf_model.load_params(gguf.read_gguf(path), module, dtype, place=place)
  folder = st.SafetensorsFolder(_folder(path))
  config = load_config(path)
  quantization = fp4_configs.of_folder(folder.path, config)
  template = names.huggingface(config.get("model_type"))
  shapes = assemble.parameter_shapes(module)
  where = names.expand(shapes, template, module.config.num_layers)
  linears = _linears(where, shapes)
  packed = fp4_checkpoints.schemes(folder, quantization, linears)
  _require_whole(packed, template)
  expected = {name: place for name, place in where.items() if _module(name) not in packed}
  for linear, scheme in packed.items():
    own = fp4_checkpoints.tensor_names(folder, linear, scheme)
    expected |= dict.fromkeys(own.values(), where[f"{linear}.weight"])
  found = {
    name: None
    for name in folder.names()
    if name in expected or not fp4_checkpoints.is_carried(folder, name, packed, quantization)
  }
  source = str(path)
  assemble.check_names(expected, found, source, tied=module.config.tie_embeddings)
  return assemble_packed.load(
    shapes,
    template,
    _kinds(folder, packed, where, module.config.num_layers),
    read=names.parts_of(folder.read),
    read_packed=lambda name: fp4_checkpoints.read(folder, _module(name), packed[_module(name)]),
    dtype=dtype,
    place=place,
    source=source,
  )


def _module(name: str) -> str:
  """'model.layers.3.self_attn.q_proj' for the name of its weight."""
  return name.removesuffix(".weight")


def _linears(where: Mapping[str, tuple], shapes: assemble.Shapes) -> dict[str, int]:
  """{module: inputs} of the kernels of a model."""
  return {
    _module(name): shapes[path][-2] for name, (path, _) in where.items() if path.endswith("/kernel")
  }


def _require_whole(packed: Mapping[str, Any], template: Template) -> None:
  """Refuses a packed tensor that holds several kernels of ours."""
  fused = {names.split_part(name)[0] for name in template.values() if "#" in name}
  for linear in packed:
    if re.sub(r"\.\d+\.", ".{}.", linear, count=1) + ".weight" in fused:
      raise ValueError(
        f"load: {linear} is packed and holds several kernels of ours, which is not supported. Load "
        "a dense checkpoint."
      )


def _kinds(folder, packed, where, num_layers: int) -> dict[str, list]:
  """{path: kind of each layer} of the kernels that are packed in some layer."""
  kinds: dict[str, list] = {}
  for linear, scheme in packed.items():
    path, layer = where[f"{linear}.weight"]
    found = kinds.setdefault(path, [None] * (1 if layer is None else num_layers))
    found[layer or 0] = fp4_checkpoints.kind(folder, linear, scheme)
  return kinds


def _folder(path: str | os.PathLike[str]) -> pathlib.Path:
  path = pathlib.Path(path)
  if not path.is_dir():
    raise ValueError(
      f"load: {str(path)!r} is no model folder and no .gguf file. Check the path; 'demo' is the "
      "packaged model."
    )
  return path


def save_pretrained(
  lm: Any,
  folder: str | os.PathLike[str],
  *,
  dtype: jax.typing.DTypeLike | None = None,
  layout: str | None = None,
) -> None:
  """Writes a folder that transformers loads; it appears complete or not at all.

  A model that was loaded and not changed comes out byte-equal (names, dtypes, shards, config,
  tokenizer files).

  Args:
    lm: a `jaxlab.LM`: params, config, tokenizer, source.
    folder: must not exist, or be empty.
    dtype: of dense tensors; None repeats the source's (float32 for what a GGUF file holds in
      blocks), or keeps the parameters' own.
    layout: of FP4 kernels: "compressed_tensors", "modelopt" or "fp_quant"; codes and scales go over
      as they are. None repeats the source's, or is compressed_tensors.
  Raises: ValueError for adapters, or kernels that the layout cannot hold.
  """
  with export.new_folder(folder) as part:
    export.write_folder(lm, part, dtype=dtype, layout=layout)
