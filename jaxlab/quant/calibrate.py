"""What calibration sees: rows of tokens, and the statistics of every input of a block's linears.

  H = 2/N sum x^T x over the rotated, not yet rounded inputs, N counted in sequences
  amax = max |x|, whose running value gives the tensor scale of NVFP4 activations in the same pass
Source: arXiv 2509.23202 and its code, as in the specification §3.2-3.3.
Dims: N sequences, B of them at once, T tokens, D width, I inputs of a linear.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxlab.nn import pytree
from jaxlab.quant import blocks
from pallas_kernels.fp4_gemm import codec

PyTree = Any
MULTIPLIER = 1.0 / (codec.E2M1_MAX * codec.E4M3_MAX)  # amax times this is a tensor scale


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Which text, and how much of it is read.

  paths: files with one document, or one a row (.jsonl); None for Wikipedia passages of the packaged
    BoolQ (250,000 tokens; fetched once), in a part that is kept from evaluation.
  field: the text of a .jsonl row.
  join: documents are joined by their end token and cut every `length` tokens. Without it each row
    is a random window of one document, and documents shorter than that are left out.
  """

  paths: tuple[str, ...] | None = None
  field: str = "text"  # [ours: the usual name]
  sequences: int = 128  # N [code FP-Quant README; the default of its command line is 1024]
  length: int = 2048  # T [code FP-Quant]
  join: bool = False  # [code FP-Quant: windows of one document]
  seed: int = 42  # [code FP-Quant]

  def __post_init__(self):
    for name in ("sequences", "length"):
      if getattr(self, name) < 1:
        raise ValueError(f"Calibration.{name}: must be at least 1; got {getattr(self, name)}.")


def rows(
  documents: Sequence[Sequence[int]], config: Calibration, end_id: int
) -> Int[np.ndarray, "N T"]:
  """The calibration set, chosen from documents (token ids) by `config.seed`.

  Raises: ValueError if the text is too short.
  """
  random = np.random.default_rng(config.seed)
  if config.join:
    stream = np.concatenate([np.asarray([*ids, end_id], np.int32) for ids in documents])
    found = len(stream) // config.length
    if found < config.sequences:
      raise ValueError(
        f"Calibration.sequences: the text must fill them; got {config.sequences} of "
        f"{config.length} tokens and a text of {len(stream)} tokens. Give more text, or take fewer."
      )
    chosen = random.permutation(found)[: config.sequences]
    return stream[: found * config.length].reshape(found, config.length)[chosen]
  long = [ids for ids in documents if len(ids) >= config.length]
  if not long:
    longest = max(map(len, documents), default=0)
    raise ValueError(
      f"Calibration.length: a document must have that many tokens; got {config.length}, and "
      f"{len(documents)} documents of at most {longest}. Take less, or Calibration.join = True."
    )
  rounds = -(-config.sequences // len(long))  # all documents, before any gives a second window
  order = np.concatenate([random.permutation(len(long)) for _ in range(rounds)])
  order = order[: config.sequences]
  starts = [random.integers(len(long[i]) - config.length + 1) for i in order]
  windows = [long[i][s : s + config.length] for i, s in zip(order, starts, strict=True)]
  return np.asarray(windows, np.int32)


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What happens to the inputs of a block's linears, and what is noted of them.

  sites: from `blocks.find_sites`. rotation: size, 0 for none; the kernels are rotated already.
  rounding: the format of W4A4 activations, None for W4A16. hessian: whether H is needed.
  """

  sites: tuple[blocks.Site, ...]
  rotation: int = 0
  rounding: str | None = None
  hessian: bool = True


@pytree.pytree()
class Statistics:
  """What was seen of one site's inputs."""

  hessian_II: Float32[Array, "I I"] | None
  sequences: Float32[Array, ""]
  amax: Float32[Array, ""]
  magnitude_I: Float32[Array, "I"]  # mean |x|


def nothing_seen(how: Inputs, layer: PyTree) -> dict[str, Statistics]:
  """The statistics of each site, named by its first linear, before the first batch."""
  dense = blocks.kernels(layer)
  found = {}
  for first, *_ in how.sites:
    inputs = dense[first].shape[0]
    hessian_II = jnp.zeros((inputs, inputs)) if how.hessian else None
    found[first] = Statistics(hessian_II, jnp.float32(0), jnp.float32(0), jnp.zeros(inputs))
  return found


@functools.partial(
  jax.jit, static_argnames=("module", "index", "how"), donate_argnames=("statistics",)
)
def observe(
  module: Any,
  index: int,
  how: Inputs,
  layer: PyTree,
  x_BTD: Float[Array, "B T D"],
  statistics: dict[str, Statistics],
) -> dict[str, Statistics]:
  """The statistics with one more batch x_BTD of the inputs of block `index`.

  Args:
    layer: of dense kernels, rotated as `how` says.
  """
  new = {}

  def see(linear, x):
    site = _site_of(how, linear)
    x = codec.rotate(x, how.rotation)
    if linear == site[0]:
      new[linear] = update(statistics[linear], x)
    return _rounded(how, x, new[site[0]].amax * MULTIPLIER)

  blocks.run(module, index, blocks.watch(layer, see), x_BTD)
  return new


@functools.partial(jax.jit, static_argnames=("module", "index", "how"))
def forward(
  module: Any,
  index: int,
  how: Inputs,
  layer: PyTree,
  x_BTD: Float[Array, "B T D"],
  act_scale: dict[str, Float32[Array, ""] | None],
) -> Float[Array, "B T D"]:
  """The outputs of block `index`, with rounding scales that are fixed.

  Args:
    act_scale: multiplier of each site's rounded inputs, by its first linear; None takes it from
      each token, as does every MXFP4 input.
  """

  def see(linear, x):
    site = _site_of(how, linear)
    return _rounded(how, codec.rotate(x, how.rotation), act_scale[site[0]])

  return blocks.run(module, index, blocks.watch(layer, see), x_BTD)


def update(seen: Statistics, x: Float[Array, "B T I"]) -> Statistics:
  """Running means over sequences: H n/(n+b) + 2/(n+b) X^T X with n+b, and so on; float32 sums."""
  batch = x.shape[0]
  rows_MI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
  total = seen.sequences + batch
  old, new = seen.sequences / total, batch / total
  hessian_II = seen.hessian_II
  if hessian_II is not None:
    gram_II = jnp.matmul(rows_MI.T, rows_MI, precision=jax.lax.Precision.HIGHEST)
    hessian_II = hessian_II * old + gram_II * (2.0 / total)
  size_MI = jnp.abs(rows_MI)
  magnitude_I = seen.magnitude_I * old + size_MI.mean(0) * new
  return Statistics(hessian_II, total, jnp.maximum(seen.amax, size_MI.max()), magnitude_I)


def _site_of(how, linear):
  return next(site for site in how.sites if linear in site)


def _rounded(how, x, act_scale):
  if how.rounding is None:
    return x
  return codec.fake_quantize(x, how.rounding, act_scale if how.rounding == "nvfp4" else None)
