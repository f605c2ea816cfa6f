"""Hugging Face folders (and GGUF files) to parameters and back.

Import streams one tensor at a time into stacked buffers [L, in, out]. Export writes the names,
dtypes and shards of the source again, so that an unchanged model comes out byte-equal. NVFP4
kernels are read and written as compressed-tensors.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from absl import logging

from jaxlab.io import assemble, export, files, fp4_checkpoints, gguf, gguf_model, names
from jaxlab.io import safetensors as st
from jaxlab.io import tokenizer as tokenizers
from jaxlab.nn import weights

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
  Returns: nested dicts; compressed-tensors NVFP4 linears are `weights.FP4Array`.
  Raises: ValueError for a missing, unexpected or misshapen tensor or an unsupported quantisation;
    CorruptFile for damaged files.
  """
  if is_gguf(path):
    return gguf_model.load_params(gguf.read_gguf(path), module, dtype, place=place)
  folder = st.SafetensorsFolder(_folder(path))
  config = load_config(path)
  _check_quantization(config)
  template = names.huggingface(config.get("model_type"))
  shapes = assemble.parameter_shapes(module)
  packed = _packed_paths(folder, shapes, template, module.config.num_layers)
  expected = _expected_names(shapes, packed, template, module.config.num_layers)
  found = dict.fromkeys(folder.names())
  source = str(path)
  assemble.check_names(expected, found, source, tied=module.config.tie_embeddings)
  dense = {p: s for p, s in shapes.items() if p not in packed}
  params = assemble.fill(
    dense, template, names.parts_of(folder.read), dtype=dtype, place=place, source=source
  )
  for p in packed:
    assemble.insert(params, p, place(p, _load_fp4(folder, p, template, shapes[p])))
  return params


def _folder(path: str | os.PathLike[str]) -> pathlib.Path:
  path = pathlib.Path(path)
  if not path.is_dir():
    raise ValueError(
      f"load: {str(path)!r} is no model folder and no .gguf file. Check the path; 'demo' is the "
      "packaged model."
    )
  return path


def _check_quantization(config: Mapping[str, Any]) -> None:
  if quantization := config.get("quantization_config"):
    fp4_checkpoints.parse_quantization_config(quantization)


def _packed_paths(
  folder: st.SafetensorsFolder, shapes: assemble.Shapes, template: Template, num_layers: int
) -> list[str]:
  """Kernels that the folder holds as FP4, in every layer."""
  there = set(folder.names())
  packed = []
  for path in shapes:
    if not path.endswith("/kernel"):
      continue
    layers = range(num_layers) if names.is_stacked(path) else (None,)
    linears = [_linear_name(template, path, i) for i in layers]
    has = [f"{linear}.{fp4_checkpoints.PACKED}" in there for linear in linears]
    if any(has) and not all(has):
      dense, fp4 = linears[has.index(False)], linears[has.index(True)]
      raise ValueError(
        f"load: {folder.path}: {dense} is dense, but {fp4} is FP4. "
        "The layers of one linear must all be packed, or none."
      )
    if any(has):
      packed.append(path)
  return packed


def _linear_name(template: Template, path: str, layer: int | None) -> str:
  """'model.layers.3.self_attn.q_proj'."""
  return names.tensor_name(template, path, layer).removesuffix(".weight")


def _expected_names(
  shapes: assemble.Shapes, packed: list[str], template: Template, num_layers: int
) -> dict[str, Any]:
  parts = (fp4_checkpoints.PACKED, fp4_checkpoints.SCALE, fp4_checkpoints.GLOBAL_SCALE)
  expected = {}
  for name, place in names.expand(shapes, template, num_layers).items():
    if place[0] in packed:
      linear = name.removesuffix(".weight")
      expected |= {f"{linear}.{part}": place for part in parts}
    else:
      expected[name] = place
  return expected


def _load_fp4(
  folder: st.SafetensorsFolder, path: str, template: Template, shape: tuple[int, ...]
) -> weights.FP4Array:
  """One kernel, stacked where `path` is, on the default device."""
  *axes, features_in, features_out = shape
  codes = assemble.aligned_empty((*axes, features_out, features_in // 2), np.uint8)
  scale = assemble.aligned_empty(
    (*axes, features_out, features_in // fp4_checkpoints.BLOCK), ml_dtypes.float8_e4m3fn
  )
  divisor = assemble.aligned_empty(tuple(axes), np.float32)
  for index in np.ndindex(*axes):
    linear = _linear_name(template, path, *(index or (None,)))
    parts = (fp4_checkpoints.PACKED, fp4_checkpoints.SCALE, fp4_checkpoints.GLOBAL_SCALE)
    tensors = {f"{linear}.{part}": folder.read(f"{linear}.{part}") for part in parts}
    leaf = fp4_checkpoints.from_compressed_tensors(tensors, str(folder.path))
    name = f"{linear}.{fp4_checkpoints.PACKED}"
    assemble.check_shape(name, leaf.codes.shape, codes[index].shape, str(folder.path))
    codes[index], scale[index], divisor[index] = leaf.codes, leaf.scale, leaf.tensor_scale
    for tensor in tensors.values():
      assemble.release(tensor)
  parts = map(jax.device_put, (codes, scale, divisor))
  return weights.FP4Array(*parts, format="nvfp4", scale_is_divisor=True)


def save_pretrained(
  lm: Any, folder: str | os.PathLike[str], *, dtype: jax.typing.DTypeLike | None = None
) -> None:
  """Writes a folder that transformers loads; it appears complete or not at all.

  A model that was loaded and not changed comes out byte-equal (names, dtypes, shards, config,
  tokenizer files). NVFP4 kernels are written as compressed-tensors `nvfp4-pack-quantized`.

  Args:
    lm: a `jaxlab.LM`: params, config, tokenizer, source.
    folder: must not exist, or be empty.
    dtype: of dense tensors; None repeats the source's (float32 for what a GGUF file holds in
      blocks), or keeps the parameters' own.
  Raises: ValueError for adapters, or kernels that the layout cannot hold.
  """
  with export.new_folder(folder) as part:
    export.write_folder(lm, part, dtype=dtype)
