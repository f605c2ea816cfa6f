"""A model as a folder that transformers and vLLM load: named tensors, config, tokenizer.

Everything is taken from the source where it says the same (dtypes, shards, index, config, tokenizer
files), and written by us where it does not.
"""

import contextlib
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxlab.io import files, fp4_checkpoints, fp4_configs, fp4_layouts, fp4_transforms, names
from jaxlab.io import safetensors as st
from jaxlab.io import tokenizer as tokenizers
from jaxlab.io.fp4_layouts import Scheme
from jaxlab.nn import stack, weights

PyTree = Any
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
  "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
  "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MAX_SHARD_BYTES = 5_000_000_000  # transformers' own limit


@contextlib.contextmanager
def new_folder(
  folder: str | os.PathLike[str], *, replaces: str | None = None
) -> Iterator[pathlib.Path]:
  """A temporary neighbour of `folder`, renamed to it at the end and removed on an error.

  Args:
    folder: new or empty.
    replaces: name of a file; a folder that has it may also be there, and is replaced.
  """
  folder = pathlib.Path(folder)
  used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
  if used and not (replaces and (folder / replaces).is_file()):
    raise ValueError(f"save: {str(folder)!r} must be new or empty. Choose another folder.")
  folder.parent.mkdir(parents=True, exist_ok=True)
  old = files.temporary_name(folder).with_suffix(".old")
  try:
    with files.temporary_folder(folder) as part:
      yield part
      if used:
        os.replace(folder, old)  # a kill between these two lines leaves neither: absent, not half
      os.replace(part, folder)
  except OSError as error:
    raise files.named(error, folder) from None
  finally:
    shutil.rmtree(old, ignore_errors=True)


def write_folder(
  lm: Any,
  folder: pathlib.Path,
  *,
  dtype: jax.typing.DTypeLike | None = None,
  layout: str | None = None,
) -> None:
  """Weights, config and tokenizer into an existing folder; see `huggingface.save_pretrained`."""
  source = lm.source
  template = names.huggingface(lm.config.get("model_type"))
  stored = _stored_quantization(lm)
  linears = packed_linears(lm.params, template, layout, stored)
  tensors = export_tensors(lm.params, source.dtypes, dtype, template, linears)
  config = _with_quantization(lm, linears, _dense_linears(lm.params, template), stored, folder)
  tensors |= _transforms(lm, config, linears, layout)
  tensors |= _carried(source, tensors, linears, stored)
  warn_of_readers(linears)
  same = source.weight_map is not None and source.weight_map.keys() == tensors.keys()
  st.write_sharded(
    folder,
    tensors,
    max_shard_bytes=MAX_SHARD_BYTES,
    weight_map=source.weight_map if same else None,
    metadata=source.metadata if same else st.PT_METADATA,
  )
  if same:
    _keep_index(source.path, folder)
  write_config(_with_dtype(config, dtype), source.path, folder)
  write_tokenizer(lm.tokenizer, source.path, folder)


def _stored_quantization(lm: Any) -> fp4_configs.Quantization | None:
  """What the source's JSON says of its FP4 linears; None for what this library does not read."""
  try:
    return fp4_configs.of_folder(lm.source.path, lm.config)
  except ValueError:  # such as a GPTQ folder that was densified elsewhere: nothing of it is kept
    return None


def source_layout(lm: Any) -> str | None:
  """The layout of the FP4 linears that a model came from, None where it was dense or other."""
  stored = _stored_quantization(lm)
  return stored.layout if stored else None


def packed_linears(
  params: PyTree,
  template: Mapping[str, str],
  layout: str | None,
  stored: fp4_configs.Quantization | None,
) -> dict[str, tuple[Scheme, int]]:
  """{module: (how it is written, inputs)} of the FP4 kernels.

  Args:
    layout: None for that of `stored`, else compressed_tensors.
  """
  layout = layout or (stored.layout if stored else "compressed_tensors")
  return {
    _module(template, path, layer): (
      fp4_checkpoints.scheme_to_write(_module(template, path, layer), like, layout, stored),
      like.shape[0],
    )
    for path, layer, like, _ in per_layer(params)
    if isinstance(like, weights.FP4Array)
  }


def _dense_linears(params: PyTree, template: Mapping[str, str]) -> dict[str, int]:
  """{module: inputs} of the dense kernels."""
  return {
    _module(template, path, layer): like.shape[0]
    for path, layer, like, _ in per_layer(params)
    if names.is_transposed(path) and not isinstance(like, weights.FP4Array)
  }


def _module(template: Mapping[str, str], path: str, layer: int | None) -> str:
  name, _, _ = names.split_part(names.tensor_name(template, path, layer))
  return name.removesuffix(".weight")


def export_tensors(
  params: PyTree,
  dtypes: Mapping[str, str],
  dtype: jax.typing.DTypeLike | None = None,
  template: Mapping[str, str] = names.HUGGING_FACE,
  linears: Mapping[str, tuple[Scheme, int]] | None = None,
) -> dict[str, st.TensorSpec]:
  """{Hugging Face name: tensor to be made}; nothing is computed yet.

  Args:
    dtypes: {tensor name: dtype name} of dense tensors; names that it lacks take the embedding's
      entry, else the parameter's own dtype.
    dtype: overrides `dtypes`.
    template: names of the parameters, from `names.huggingface`.
    linears: from `packed_linears`, needed for FP4 kernels.
  """
  fallback = dtypes.get(template["embed"])
  tensors: dict[str, st.TensorSpec] = {}
  for path, layer, like, take in per_layer(params):
    name = names.tensor_name(template, path, layer)
    tensor, _, count = names.split_part(name)
    if isinstance(like, weights.FP4Array) and count == 1:
      module = name.removesuffix(".weight")
      tensors |= _fp4_specs(module, like, take, linears[module][0])
    elif weights.is_leaf(like):
      raise ValueError(
        f"save: {path} must be dense{'' if count > 1 else ' or FP4'}; got {type(like).__name__}. "
        "Use lora.merge_adapters or peft.save_adapter for adapters, weights.densify for the rest."
      )
    else:
      kind = np.dtype(dtype or dtypes.get(tensor, fallback) or like.dtype)
      tensors[name] = _dense_spec(name, like.shape, kind, take, names.is_transposed(path))
  return _fuse(tensors)


def _transforms(
  lm: Any,
  config: Mapping[str, Any],
  linears: Mapping[str, tuple[Scheme, int]],
  layout: str | None,
) -> dict[str, st.TensorSpec]:
  """Matrices of the rotations that `config` names; where it is the source's, those that the source
  lacks, and only for a layout that was asked for: else the source is repeated."""
  written = config.get(fp4_configs.KEY)
  kept = written == lm.config.get(fp4_configs.KEY)
  if not linears or (kept and layout is None):
    return {}
  rotations = fp4_configs.parse(written).rotations
  if kept:
    rotations = fp4_transforms.missing(lm.source.dtypes, rotations)
  inputs = {module: width for module, (_, width) in linears.items()}
  return fp4_transforms.matrices(rotations, inputs)


def warn_of_readers(linears: Mapping[str, tuple[Scheme, int]]) -> None:
  """Says what readers of compressed-tensors folders do not do, where a model needs it."""
  schemes = {scheme for scheme, _ in linears.values() if scheme.layout == "compressed_tensors"}
  if any(scheme.rotation for scheme in schemes):
    logging.warning(
      "The inputs of linears are rotated (transform_config). vLLM rotates them; transformers does "
      "not (5.24), and answers with noise until that is added: verify.py shows how."
    )
  if any(s.format == "nvfp4" and s.activations == "fp4" and not s.static_acts for s in schemes):
    logging.warning(
      "NVFP4 activations have no static scale (input_global_scale). vLLM needs one, transformers "
      "makes one of the inputs. Calibrate for vLLM: PTQConfig.calibration."
    )


def _carried(
  source: Any,
  tensors: Mapping[str, Any],
  linears: Mapping[str, tuple[Scheme, int]],
  stored: fp4_configs.Quantization | None,
) -> dict[str, st.TensorSpec]:
  """Tensors of the source that no parameter holds, for an export in its own layout."""
  layouts = {scheme.layout for scheme, _ in linears.values()}
  lacking = source.dtypes.keys() - tensors.keys()
  if stored is None or layouts != {stored.layout} or not lacking:
    return {}
  if not any(source.path.glob("*.safetensors")):  # a checkpoint of our own: it holds parameters
    return {}
  folder = st.SafetensorsFolder(source.path)
  return {
    name: st.TensorSpec(*folder.shape_dtype(name), functools.partial(folder.read, name))
    for name in lacking
    if name in folder and fp4_checkpoints.is_carried(folder, name, linears, stored)
  }


def _fuse(tensors: Mapping[str, st.TensorSpec]) -> dict[str, st.TensorSpec]:
  """The same tensors, with the parts of each fused one put together."""
  parts: dict[str, dict[int, st.TensorSpec]] = {}
  for name, spec in tensors.items():
    tensor, index, _ = names.split_part(name)
    parts.setdefault(tensor, {})[index] = spec
  return {
    tensor: _joined([found[i] for i in sorted(found)]) if len(found) > 1 else found[0]
    for tensor, found in parts.items()
  }


def _joined(specs: list[st.TensorSpec]) -> st.TensorSpec:
  shape = (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])
  return st.TensorSpec(
    shape, specs[0].dtype, lambda: np.concatenate([spec.make() for spec in specs])
  )


def per_layer(params: PyTree) -> Iterator[tuple[str, int | None, Any, Callable[[], Any]]]:
  """(stacked path, layer, kernel of shapes, kernel when called) of each tensor, either layout."""
  for path, leaf in weights.leaf_paths(params).items():
    if stack.stack_axes(path):
      like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), leaf)
      for i in range(stack.num_layers(params["layers"])):
        yield path, i, like, lambda leaf=leaf, i=i: jax.tree.map(lambda x: weights.take(x, i), leaf)
    else:
      like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), leaf)
      yield *split_path(path), like, lambda leaf=leaf: leaf


def split_path(path: str) -> tuple[str, int | None]:
  """('layers/q/kernel', 3) for 'layers/3/q/kernel'; (path, None) for any other path."""
  first, _, rest = path.partition("/")
  layer, _, rest = rest.partition("/")
  if first == "layers" and layer.isdigit():
    return f"layers/{rest}", int(layer)
  return path, None


def _dense_spec(
  name: str, shape: tuple[int, ...], dtype: np.dtype, take: Callable[[], Any], transposed: bool
) -> st.TensorSpec:
  def make() -> np.ndarray:
    value = np.asarray(take())
    with np.errstate(over="ignore"):  # reported below, by name
      stored = (value.T if transposed else value).astype(dtype)
    if dtype == np.float16 and np.isinf(stored).any() and not np.isinf(value).any():
      raise ValueError(
        f"save: {name} reaches {np.abs(value).max():g}, beyond float16. Write bfloat16 or float32."
      )
    return stored

  return st.TensorSpec(shape[::-1] if transposed else shape, dtype, make)


def _fp4_specs(
  module: str, like: weights.FP4Array, take: Callable[[], Any], scheme: Scheme
) -> dict[str, st.TensorSpec]:
  return {
    f"{module}.{suffix}": st.TensorSpec(
      *fp4_layouts.part_shape(like, scheme, part),
      lambda part=part: fp4_layouts.make_part(take(), scheme, part),
    )
    for part, suffix in fp4_layouts.parts(scheme).items()
  }


def _with_quantization(
  lm: Any,
  linears: Mapping[str, tuple[Scheme, int]],
  dense: Mapping[str, int],
  stored: fp4_configs.Quantization | None,
  folder: pathlib.Path,
) -> dict[str, Any]:
  """`lm.config` with the quantisation that is written; ModelOpt's own file beside it."""
  config = dict(lm.config)
  before = config.pop(fp4_configs.KEY, None)
  if not linears:
    return config
  beside = _source_file(lm.source.path, fp4_configs.MODELOPT_FILE)
  if before is None and stored is not None and stored.says(linears, dense):
    _copy(beside, folder / fp4_configs.MODELOPT_FILE)
    return config
  config[fp4_configs.KEY] = written = fp4_configs.describe(linears, dense, before)
  if written != before:
    fp4_configs.write_beside(written, folder)
    config = as_bfloat16(config)
  elif beside is not None:
    _copy(beside, folder / fp4_configs.MODELOPT_FILE)
  return config


def _with_dtype(config: dict[str, Any], dtype: jax.typing.DTypeLike | None) -> dict[str, Any]:
  return config if dtype is None else config | {_dtype_key(config): str(np.dtype(dtype))}


def as_bfloat16(config: dict[str, Any]) -> dict[str, Any]:
  """The config of a model whose linears become FP4, which a float32 one cannot keep: readers decode
  them to bfloat16, and fail to multiply that with float32. Tensors stay what they are."""
  key = _dtype_key(config)
  return config | {key: "bfloat16"} if config.get(key) in (None, "float32") else config


def _dtype_key(config: Mapping[str, Any]) -> str:
  return "torch_dtype" if "torch_dtype" in config else "dtype"


def _source_file(source: pathlib.Path, name: str) -> pathlib.Path | None:
  return files.member(source, name) if source.is_dir() else None


def _keep_index(source: pathlib.Path, folder: pathlib.Path) -> None:
  """The source's own index where it says the same: other writers lay it out differently."""
  theirs, ours = _source_file(source, st.INDEX), folder / st.INDEX
  if theirs is None or not ours.exists():
    return
  before, now = files.read_json_object(theirs), files.read_json_object(ours)
  size = lambda index: (index.get("metadata") or {}).get("total_size")
  if before.get("weight_map") == now["weight_map"] and size(before) == size(now):
    _copy(theirs, ours)


def write_config(config: Mapping[str, Any], source: pathlib.Path, folder: pathlib.Path) -> None:
  """config.json, byte for byte the source's where it says the same; generation_config.json."""
  theirs = _source_file(source, CONFIG)
  if theirs is not None and files.read_json_object(theirs) == config:
    _copy(theirs, folder / CONFIG)
  else:
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
  if generation := _source_file(source, GENERATION):
    _copy(generation, folder / GENERATION)


def write_tokenizer(
  tokenizer: tokenizers.Tokenizer | None, source: pathlib.Path, folder: pathlib.Path
) -> None:
  """The source's tokenizer files, or new ones where it has none (GGUF)."""
  for name in TOKENIZER_FILES:
    if theirs := _source_file(source, name):
      _copy(theirs, folder / name)
  if tokenizer is not None and _source_file(source, "tokenizer.json") is None:
    tokenizer.save(folder)


def _copy(theirs: pathlib.Path, ours: pathlib.Path) -> None:
  ours.write_bytes(theirs.read_bytes())  # also where both are one file
