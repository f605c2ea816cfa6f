"""Quantises a Hugging Face folder matrix by matrix, without loading the model.

Source shards are mapped and their pages given back; a matrix is quantised as soon as the largest
magnitude of its fused set (q/k/v, gate/up) is known, and waits in host memory until its shard of
the output is full. So the peak is one output shard, one matrix in float32 with the quantiser's
temporaries, and whatever tensor is being copied: never the model. Dims: I in, O out.
"""

import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxlab.io import (
  assemble,
  export,
  files,
  fp4_configs,
  fp4_fuse,
  fp4_layouts,
  fp4_transforms,
  names,
)
from jaxlab.io import safetensors as st
from jaxlab.models import zoo
from jaxlab.nn import weights

# (kernel [in, out] in the folder's dtype, largest magnitude of its fused set) -> the packed kernel
QuantizeMatrix = Callable[[Float[Array, "I O"], Float32[Array, ""]], weights.FP4Array]
MAX_SHARD_BYTES = 1 << 30


class Sizes(NamedTuple):
  """What was done: matrices packed, bytes of all tensors before and after."""

  matrices: int
  bytes_before: int
  bytes_after: int


def quantize_folder(
  source: str | os.PathLike[str],
  output: str | os.PathLike[str],
  quantize_matrix: QuantizeMatrix,
  layout: str = "compressed_tensors",
  on_block: Callable[[int, int], None] = lambda done, total: None,
  *,
  max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Sizes:
  """Writes the folder with every linear of its layers packed; complete or absent.

  Args:
    source: a dense folder of one of the families of `zoo.FAMILIES`.
    output: new or empty.
    quantize_matrix: traceable, and without a state: `lambda w, amax: fp4.quantize(w, "nvfp4",
      tensor_amax=amax)`, or one that ignores amax for MXFP4.
    layout: "compressed_tensors", "modelopt" or "fp_quant".
    on_block: called with (decoder blocks done, blocks in all).
    max_shard_bytes: of the output, held in memory while it fills.
  Raises: ValueError for a folder that is quantised already, that holds no model of ours, whose
    widths the format does not divide, or whose leaves the layout cannot hold, all before any work;
    CorruptFile for damaged files.
  """
  source = pathlib.Path(source)
  if not source.is_dir():
    raise ValueError(f"quantize_folder: {str(source)!r} is no folder. Give a Hugging Face folder.")
  file = files.member(source, export.CONFIG)
  if file is None:
    raise ValueError(f"quantize_folder: {source} has no {export.CONFIG}. Check the path.")
  config = files.read_json_object(file)
  if fp4_configs.of_folder(source, config) is not None:
    raise ValueError(
      f"quantize_folder: {source} is quantised already. Give the dense folder that it came from."
    )
  zoo.causal_lm_config(config)  # refuses what is no decoder of ours
  plan = _plan(st.SafetensorsFolder(source), config, quantize_matrix, layout)
  config[fp4_configs.KEY] = written = fp4_configs.describe(plan.schemes, plan.dense)
  export.warn_of_readers(plan.schemes)
  with export.new_folder(output) as part:
    pairs = itertools.chain(_transforms(plan, written), _tensors(plan, quantize_matrix, on_block))
    paths = st.write_sharded(part, pairs, max_shard_bytes=max_shard_bytes)
    after = sum(path.stat().st_size for path in paths)
    export.write_config(export.as_bfloat16(config), source, part)
    fp4_configs.write_beside(written, part)
    export.write_tokenizer(None, source, part)
  before = sum(plan.folder.raw(name).nbytes for name in plan.folder.names())
  return Sizes(len(plan.schemes), before, after)


class _Plan(NamedTuple):
  folder: st.SafetensorsFolder
  before: tuple[str, ...]  # tensors outside layers, by name: embedding and head, then the rest
  layers: tuple[Mapping[str, str], ...]  # {linear or path: tensor name} of each decoder block
  schemes: Mapping[str, tuple[fp4_layouts.Scheme, int]]  # by module, with its inputs
  dense: Mapping[str, int]


def _plan(folder, config, quantize_matrix: QuantizeMatrix, layout: str) -> _Plan:
  """Names, and how each linear will be stored; shapes only, nothing is computed."""
  module = zoo.from_config(config)
  template = names.huggingface(config.get("model_type"))
  shapes = assemble.parameter_shapes(module)
  depth = module.config.num_layers
  where = names.expand(shapes, template, depth)
  found = dict.fromkeys(folder.names())
  assemble.check_names(where, found, str(folder.path), tied=module.config.tie_embeddings)
  layers: list[dict[str, str]] = [{} for _ in range(depth)]
  schemes, dense, likes = {}, {}, {}
  for name, (path, layer) in where.items():
    if layer is None:
      if names.is_transposed(path):
        dense[_module(name)] = shapes[path][-2]
      continue
    layers[layer][path.removeprefix("layers/")] = name
    if names.is_transposed(path):
      shape, dtype = folder.shape_dtype(name)
      assemble.check_shape(name, shape, shapes[path][:0:-1], str(folder.path))
      if (shape, dtype) not in likes:
        likes[shape, dtype] = _like(quantize_matrix, name, shape, dtype)
      scheme = fp4_layouts.scheme_of_leaf(likes[shape, dtype], layout, module=_module(name))
      schemes[_module(name)] = (scheme, shape[1])
  outside = tuple(name for name, (_, layer) in where.items() if layer is None)
  return _Plan(folder, outside, tuple(layers), schemes, dense)


def _like(quantize_matrix, name, shape, dtype) -> weights.FP4Array:
  """The leaf of shapes that a tensor [out, in] will become."""
  if dtype not in assemble.FLOATS:
    raise ValueError(f"quantize_folder: {name} must be a plain float; got {dtype}.")
  kernel = jax.ShapeDtypeStruct(shape[::-1], dtype)
  try:
    return jax.eval_shape(quantize_matrix, kernel, jax.ShapeDtypeStruct((), jnp.float32))
  except ValueError as error:
    raise ValueError(f"quantize_folder: {name}: {error}") from None


def _module(name: str) -> str:
  return name.removesuffix(".weight")


def _tensors(plan: _Plan, quantize_matrix, on_block) -> Iterator[tuple[str, Any]]:
  """(name, tensor) of the output: dense ones to be copied when due, packed ones made."""
  for name in plan.before:
    yield name, _copied(plan.folder, name)
  on_block(0, len(plan.layers))
  for done, layer in enumerate(plan.layers, 1):
    kernels = {p.removesuffix("/kernel"): n for p, n in layer.items() if names.is_transposed(p)}
    for name in layer.values():
      if name not in kernels.values():
        yield name, _copied(plan.folder, name)
    for group in _groups(kernels):
      amax = max(_amax(plan.folder, kernels[linear]) for linear in group)
      for linear in group:
        module = _module(kernels[linear])
        leaf = _quantized(plan.folder, kernels[linear], quantize_matrix, amax)
        yield from fp4_layouts.write(module, leaf, plan.schemes[module][0]).items()
        del leaf
    on_block(done, len(plan.layers))


def _transforms(plan: _Plan, written: dict[str, Any]) -> Iterator[tuple[str, Any]]:
  inputs = {module: width for module, (_, width) in plan.schemes.items()}
  return iter(fp4_transforms.matrices(fp4_configs.parse(written).rotations, inputs).items())


def _groups(kernels: Mapping[str, str]) -> list[tuple[str, ...]]:
  """The linears of a block, those of a fused set together."""
  sets = [tuple(n for n in members if n in kernels) for members in fp4_fuse.SETS]
  fused = {name for members in sets for name in members}
  return [s for s in sets if s] + [(name,) for name in kernels if name not in fused]


def _copied(folder: st.SafetensorsFolder, name: str) -> st.TensorSpec:
  def make() -> np.ndarray:
    mapped = folder.read(name)
    copy = np.array(mapped)
    assemble.release(mapped)
    return copy

  return st.TensorSpec(*folder.shape_dtype(name), make)


def _amax(folder: st.SafetensorsFolder, name: str) -> float:
  mapped = folder.read(name)
  amax = float(_largest(mapped))
  assemble.release(mapped)
  if not np.isfinite(amax):
    raise ValueError(f"quantize_folder: {name} holds NaN or inf. Repair the checkpoint.")
  return amax


@jax.jit
def _largest(x):
  # On a CPU a maximum forgets NaN (jax 0.10.2), so it is looked for.
  return jnp.where(jnp.isfinite(x).all(), jnp.max(jnp.abs(x)).astype(jnp.float32), jnp.nan)


def _quantized(folder, name, quantize_matrix, amax: float) -> weights.FP4Array:
  mapped = folder.read(name)
  leaf = quantize_matrix(jnp.asarray(mapped).T, jnp.float32(amax))
  leaf = jax.block_until_ready(leaf)  # or the pages would be given back while they are read
  assemble.release(mapped)
  return leaf
