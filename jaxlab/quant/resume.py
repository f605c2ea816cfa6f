"""Finished blocks of a quantisation on disk, each complete or absent: what a killed run keeps.

A block is one safetensors file; its header holds the settings of the run, the rows of the report,
the types of the leaves, and a checksum of every tensor.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxlab import errors
from jaxlab.io import safetensors, seal
from jaxlab.nn import weights

PyTree = Any
FOLDER, META = "blocks", "block"
AGAIN = "Remove it: the block is then made again."


class Blocks:
  """The blocks of one run, in `workdir/blocks`."""

  def __init__(self, workdir: str | os.PathLike[str], settings: dict[str, Any]):
    self.root = pathlib.Path(workdir) / FOLDER
    self.settings = json.loads(json.dumps(settings))  # as it comes back from a file

  def read(self, index: int) -> tuple[PyTree, list[dict[str, Any]]] | None:
    """(layer of host arrays, report) of a finished block, else None.

    Raises: ValueError for a block of other settings; CorruptFile for a damaged one.
    """
    path = self._path(index)
    if not path.is_file():
      return None
    file = safetensors.SafetensorsFolder(path)
    try:
      meta = seal.unsealed(json.loads(file.metadata[META]))
    except (KeyError, ValueError) as error:
      raise errors.CorruptFile(path, "metadata", str(error), AGAIN) from None
    if different := seal.differences(meta["settings"], self.settings):
      raise ValueError(
        f"quantize_model: {self.root} holds blocks of another run: {different}. Choose another "
        "workdir, or give the old settings to resume."
      )
    arrays = {name: jnp.array(file.read(name)) for name in meta["checksums"]}
    for name, x in arrays.items():
      if _checksum(x) != meta["checksums"][name]:
        raise errors.CorruptFile(path, f"tensor {name!r}", "differs from its checksum", AGAIN)
    return jax.device_get(seal.rebuild(meta["nodes"], arrays)), meta["report"]

  def write(self, index: int, layer: PyTree, report: list[dict[str, Any]]) -> None:
    arrays = {name: np.asarray(x) for name, x in seal.flatten(layer).items()}
    meta = {
      "settings": self.settings,
      "report": report,
      "nodes": seal.describe(layer),
      "checksums": {name: _checksum(x) for name, x in arrays.items()},
    }
    self.root.mkdir(parents=True, exist_ok=True)
    header = {META: json.dumps(seal.sealed(meta))}
    safetensors.write_safetensors(self._path(index), arrays, header)

  def _path(self, index: int) -> pathlib.Path:
    return self.root / f"{index:05}.safetensors"


def settings(
  params: PyTree, config: Any, sequences_NT: Int[np.ndarray, "N T"] | None
) -> dict[str, Any]:
  """What decides a result: the options, the text, the model's shapes and sums."""
  text = b"" if sequences_NT is None else np.ascontiguousarray(sequences_NT).tobytes()
  digests = {"text": hashlib.sha256(text).hexdigest(), "model": fingerprint(params)}
  return dataclasses.asdict(config) | digests


def fingerprint(params: PyTree) -> str:
  """Tells models apart: names, types, shapes and sums of all weights."""
  model = hashlib.sha256()
  for path, w in weights.leaf_paths(params).items():
    model.update(f"{path} {w.dtype} {w.shape} {_sums(w)}".encode())
  return model.hexdigest()


def remove(workdir: str | os.PathLike[str]) -> None:
  """Takes away the blocks of a run whose result is written."""
  shutil.rmtree(pathlib.Path(workdir) / FOLDER, ignore_errors=True)


def _checksum(x: Any) -> int:
  return zlib.crc32(np.ascontiguousarray(x).tobytes())


@jax.jit
def _both_sums(w):
  return jnp.sum(w, dtype=jnp.float32), jnp.sum(jnp.abs(w), dtype=jnp.float32)


def _sums(w: Any) -> tuple[float, float]:
  """Sum and absolute sum: two models of one architecture hardly share them."""
  return tuple(map(float, _both_sums(w)))
