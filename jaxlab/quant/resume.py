"""Finished blocks of a quantisation on disk, each complete or absent: what a killed run keeps."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxlab.io import orbax, seal
from jaxlab.nn import weights

PyTree = Any
FOLDER = "blocks"


class Blocks:
  """A folder of blocks that were quantised with the same settings.

  Raises: ValueError on reading a block of other settings.
  """

  def __init__(self, workdir: str | os.PathLike[str], settings: dict[str, Any]):
    self.root = pathlib.Path(workdir) / FOLDER
    self.settings = json.loads(json.dumps(settings))  # as it comes back from a file

  def read(self, index: int) -> tuple[PyTree, list[dict[str, Any]]] | None:
    """(layer, report) of a finished block, else None."""
    path = self.root / f"{index:05}"
    if not orbax.is_checkpoint(path):
      return None
    layer, meta = orbax.load_params(path)
    if different := seal.differences(meta["settings"], self.settings):
      raise ValueError(
        f"quantize_model: {self.root} holds blocks of another run: {different}. Choose another "
        "workdir, or give the old settings to resume."
      )
    return jax.device_get(layer), meta["report"]

  def write(self, index: int, layer: PyTree, report: list[dict[str, Any]]) -> None:
    self.root.mkdir(parents=True, exist_ok=True)
    meta = {"settings": self.settings, "report": report}
    orbax.save_params(self.root / f"{index:05}", jax.tree.map(jnp.asarray, layer), meta)


def settings(
  params: PyTree, config: Any, sequences_NT: Int[np.ndarray, "N T"] | None
) -> dict[str, Any]:
  """What decides a result: the options, the text, the model's shapes and sums."""
  text = b"" if sequences_NT is None else np.ascontiguousarray(sequences_NT).tobytes()
  model = hashlib.sha256()
  for path, w in weights.leaf_paths(params).items():
    model.update(f"{path} {w.dtype} {w.shape} {_sums(w)}".encode())
  digests = {"text": hashlib.sha256(text).hexdigest(), "model": model.hexdigest()}
  return dataclasses.asdict(config) | digests


def _sums(w: Any) -> tuple[float, float]:
  """Sum and absolute sum: two models of one architecture hardly share them."""
  sums = jax.jit(lambda w: (jnp.sum(w, dtype=jnp.float32), jnp.sum(jnp.abs(w), dtype=jnp.float32)))
  return tuple(map(float, sums(w)))


def remove(workdir: str | os.PathLike[str]) -> None:
  """Takes away the blocks of a run whose result is written."""
  shutil.rmtree(pathlib.Path(workdir) / FOLDER, ignore_errors=True)
