"""FP4 linears of a checkpoint folder: what its JSON says against what its tensors say, and leaves.

Layouts of tensors are in `fp4_layouts.py`, their JSON in `fp4_configs.py`.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from absl import logging

from jaxlab.io import fp4_configs, fp4_layouts, fp4_transforms
from jaxlab.io import safetensors as st
from jaxlab.io.fp4_layouts import PARTS, PSEUDO, Packed, Scheme

# Tensors that a server needs and we do not: an export in the same layout repeats them.
CARRIED = re.compile(r".*\.[kv]_scale")
CODES = frozenset(names["codes"] for names in PARTS.values())


def packed_names(folder: st.SafetensorsFolder) -> dict[str, str]:
  """{module: layout} of the linears that have codes, by their tensors alone.

  Of gpt-oss experts the name without `_blocks`.
  """
  found = {}
  for name in folder.names():
    module, _, part = name.rpartition(".")
    if part in ("weight_packed", "qweight", PSEUDO):
      if np.prod(folder.shape_dtype(name)[0]):
        found[module] = "compressed_tensors" if part == "weight_packed" else "fp_quant"
    elif part == "weight" and str(folder.shape_dtype(name)[1]) == "uint8":
      found[module] = "modelopt"
    elif part.endswith("_blocks") and str(folder.shape_dtype(name)[1]) == "uint8":
      found[name.removesuffix("_blocks")] = fp4_configs.GPT_OSS
  return found


def schemes(
  folder: st.SafetensorsFolder,
  quantization: fp4_configs.Quantization | None,
  linears: Mapping[str, int],
) -> dict[str, Scheme]:
  """{module: how it is stored} of the packed ones among `linears`.

  Args:
    linears: {module: inputs}.
  Raises: ValueError where a linear is packed and config.json says it is dense, or the reverse.
  """
  packed = packed_names(folder)
  found = {}
  for module, inputs in linears.items():
    scheme = quantization.scheme_of(module, inputs) if quantization else None
    layout = packed.get(module)
    if scheme is None and layout is not None:
      why = f"the config ({quantization.file}) leaves it dense" if quantization else (
        f"there is no {fp4_configs.KEY} in config.json"
      )  # fmt: skip
      raise ValueError(
        f"load: {folder.path}: {module} is packed ({layout}), but {why}. Fetch the config and the "
        "weights of one model."
      )
    if scheme is not None and layout is None and f"{module}.weight" in folder:
      raise ValueError(
        f"load: {folder.path}: {module} is dense, but {quantization.file} says that it is "
        f"{scheme.format} ({scheme.layout}). Add it to the modules that are left out."
      )
    if scheme is not None:
      found[module] = scheme
  return found


def tensor_names(folder: st.SafetensorsFolder, module: str, scheme: Scheme) -> dict[str, str]:
  """{suffix: tensor name} of one linear; a tensor that may be missing only if it is there."""
  names = {suffix: f"{module}.{suffix}" for suffix in fp4_layouts.parts(scheme).values()}
  optional = PARTS["fp_quant"]["backward"]
  if optional in names and names[optional] not in folder:
    del names[optional]
  return names


def is_carried(
  folder: st.SafetensorsFolder,
  name: str,
  packed: Iterable[str],
  quantization: fp4_configs.Quantization | None,
) -> bool:
  """True for a tensor that no leaf holds: scales of a server's cache, placeholders without data,
  matrices of rotations that `quantization` names.

  Raises: CorruptFile for such a matrix that is no Hadamard.
  """
  module, _, _ = name.rpartition(".")
  empty = not np.prod(folder.shape_dtype(name)[0])
  if CARRIED.fullmatch(name) is not None or (empty and module in packed):
    return True
  rotations = quantization.rotations if quantization else ()
  return fp4_transforms.is_matrix(folder, name, rotations)


def read(folder: st.SafetensorsFolder, module: str, scheme: Scheme) -> Packed:
  """One linear as views of the file.

  Raises: as `fp4_layouts.read`.
  """
  names = tensor_names(folder, module, scheme)
  tensors = {suffix: folder.read(name) for suffix, name in names.items() if name in folder}
  forward, backward = (tensors.get(PARTS["fp_quant"][part]) for part in ("rotation", "backward"))
  if backward is not None and forward is not None and not np.array_equal(forward, backward):
    logging.warning(
      "%s: the matrix of the backward pass differs from the forward one; it is left out", module
    )
  return fp4_layouts.read(tensors, scheme, module, str(folder.path))


def kind(folder: st.SafetensorsFolder, module: str, scheme: Scheme) -> tuple:
  """`Packed.kind` of a linear without reading its codes."""
  rotation, matrix = scheme.rotation, None
  name = f"{module}.{PARTS['fp_quant']['rotation']}"
  if scheme.layout == "fp_quant" and name in folder:
    rotation, matrix = fp4_layouts.recognise(folder.read(name))
  static = scheme.static_acts and scheme.format == "nvfp4"
  divisor = scheme.layout != "modelopt"
  return (scheme.format, scheme.activations, rotation, divisor, static, matrix is not None)


def scheme_to_write(
  module: str, like: Any, layout: str, stored: fp4_configs.Quantization | None
) -> Scheme:
  """How a leaf is stored in `layout`; what the leaf does not tell, as in `stored`.

  Args:
    like: an FP4Array of shapes.
    stored: of the model's source.
  Raises: ValueError for what the layout cannot hold.
  """
  before = None
  if stored is not None and stored.layout == layout == "fp_quant":
    before = stored.scheme_of(module, 2 * like.codes.shape[-1])
  if before is None or before.format != like.format:
    return fp4_layouts.scheme_of_leaf(like, layout, module=module)
  made = fp4_layouts.scheme_of_leaf(
    like, layout, method=before.method, group_size=before.rotation, pseudo=before.pseudo,
    module=module,
  )  # fmt: skip
  return dataclasses.replace(made, transform=before.transform) if like.rotation else made
