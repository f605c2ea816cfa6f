"""The Hadamard matrices that compressed-tensors stores beside linears whose inputs are rotated.

Of each scheme of `transform_config` (and each size) the first linear of the model holds it, as
`X.<scheme>_input.weight`, float32 +1 and -1 (readers divide by sqrt(size)); the others share it.
Here a size says all, but a server reads the matrix: vLLM, where it is missing, takes memory that
nobody wrote.
Source: compressed-tensors transform/{apply,factory/base}.py, vLLM `SharedWeightParameter`.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxlab import errors
from jaxlab.io import assemble, fp4_ct_config, fp4_layouts, names
from jaxlab.io import safetensors as st

_ORDER = [name.rsplit(".", 2)[-2] for name in names.HUGGING_FACE.values()]  # of a block's linears


def matrices(
  rotations: Sequence[fp4_ct_config.Rotation], linears: Mapping[str, int]
) -> dict[str, st.TensorSpec]:
  """{name: matrix} as compressed-tensors saves a model.

  Args:
    linears: {module: inputs} of those that are packed.
  """
  found = {}
  for rotation in rotations:
    rotated = [module for module in linears if rotation.modules.have(module)]
    first: dict[int, str] = {}  # of each size
    for module in sorted(rotated, key=_place):
      first.setdefault(rotation.size_for(linears[module]), module)
    for size, module in first.items():
      make = functools.partial(fp4_layouts.hadamard_signs, size)
      found[module + rotation.tensor] = st.TensorSpec((size, size), np.dtype(np.float32), make)
  return found


def is_matrix(
  folder: st.SafetensorsFolder, name: str, rotations: Sequence[fp4_ct_config.Rotation]
) -> bool:
  """True for the stored matrix of a rotation.

  Raises: CorruptFile if it is another matrix than the one that the rotation means.
  """
  for rotation in rotations:
    module = name.removesuffix(rotation.tensor)
    if module != name and rotation.modules.have(module):
      _check(folder, name, rotation)
      return True
  return False


def missing(
  names_of_tensors: Iterable[str], rotations: Sequence[fp4_ct_config.Rotation]
) -> tuple[fp4_ct_config.Rotation, ...]:
  """The rotations whose matrix is not among the tensors."""
  there = tuple(names_of_tensors)
  return tuple(r for r in rotations if not any(name.endswith(r.tensor) for name in there))


def _check(folder, name: str, rotation: fp4_ct_config.Rotation) -> None:
  shape, dtype = folder.shape_dtype(name)
  size = shape[0] if len(shape) == 2 else 0
  known = size > 0 and not size & (size - 1) and rotation.size in (size, fp4_ct_config.FULL_WIDTH)
  if shape == (size, size) and known and dtype in assemble.FLOATS:
    if np.array_equal(folder.read(name).astype(np.float32), fp4_layouts.hadamard_signs(size)):
      return
  raise errors.CorruptFile(
    folder.path,
    f"tensor {name!r}",
    f"must be Sylvester's Hadamard matrix of +1 and -1, of size {rotation.size}; got another "
    f"{dtype} {shape}",
    "Only plain Hadamard rotations are read.",
  )


def _place(module: str) -> tuple[int, int]:
  """Where a module stands in the model: its block, its turn in it."""
  block = re.search(r"\.(\d+)\.", module)
  last = module.rpartition(".")[2]
  return int(block[1]) if block else 0, _ORDER.index(last) if last in _ORDER else len(_ORDER)
