"""MR-GPTQ: FP4 weights by GPTQ on block-rotated weights, with scales fitted to the format.

Block by block, on inputs that come from the quantised blocks before:
  1. W' = W rotated, one rotation a site; the block runs with W', not rounded, and with rounded
     inputs if they are to be (W4A4): Hessians and the scales of the inputs are taken.
  2. Scales are fitted to W' and stay; GPTQ rounds every linear of the block from these Hessians.
  3. The block runs again with its new weights: the inputs of the next one.
Source: arXiv 2509.23202 and its code, as in the specification §3. Dims: N sequences of T tokens, B
at once, D width, I in, O out of all linears of a site, k blocks of the inputs.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from jaxlab.nn import stack, weights
from jaxlab.quant import awq as input_scales
from jaxlab.quant import blocks, calibrate, formats, hadamard, resume, site
from jaxlab.quant import gptq as solvers
from jaxlab.quant import scales as scale_rules
from pallas_kernels.fp4_gemm import codec

PyTree = Any
SOLVERS = ("rtn", "gptq")
ACTIVATIONS = ("none", "fp4")
ROWS = "rows"  # the one mesh axis: outputs of a solve, sequences of a forward pass


@dataclasses.dataclass(frozen=True)
class MRGPTQConfig:
  """How a model is quantised; the presets below are the named combinations.

  Fields:
    format: "nvfp4" or "mxfp4". activations: "none" (W4A16) or "fp4" (W4A4).
    rotation: size of the block Hadamard; 0 for none, None for the largest power of two up to 128
      that divides the inputs of every linear.
    solver: "gptq", or "rtn" (rounding to nearest).
    order: "activation" or "default", see `gptq.factorise`.
    scales: the rule and search of block scales.
    importance: the search weighs the errors of an input by its mean square (diag H).
    fuse: linears that share inputs share a tensor scale, as vLLM wants (nvfp4).
    damp: of the Hessian's diagonal, relative to its mean.
    block: inputs whose errors travel together; no matter for results.
    awq: scales inputs before all else, see `awq`.
    batch: sequences in one forward pass.
  """

  format: str = "nvfp4"  # [paper: NVFP4 and MXFP4]
  activations: str = "none"  # [ours: every device has W4A16]
  rotation: int | None = None
  solver: str = "gptq"  # [paper]
  order: str = "activation"  # [paper: static act-order]
  scales: scale_rules.ScaleConfig = scale_rules.ScaleConfig(search="mse")  # [paper: mse observer]
  importance: bool = False  # [ours]
  fuse: bool = True  # [ours: vLLM multiplies them as one matrix]
  damp: float = 0.01  # [code FP-Quant --rel_damp]
  block: int = 128  # [code FP-Quant]
  awq: bool = False  # [paper: no]
  batch: int = 4  # [ours: 8192 tokens of the usual length]

  def __post_init__(self):
    known = {"solver": SOLVERS, "order": solvers.ORDERS, "activations": ACTIVATIONS}
    for name, values in known.items():
      if getattr(self, name) not in values:
        raise ValueError(
          f"MRGPTQConfig.{name}: must be one of {', '.join(values)}; got {getattr(self, name)!r}."
        )
    scale_rules.require_config("MRGPTQConfig", self.format, self.scales)
    for name in ("damp", "block", "batch"):
      if getattr(self, name) <= 0:
        raise ValueError(f"MRGPTQConfig.{name}: must be positive; got {getattr(self, name)}.")
    if self.importance and self.solver == "rtn":
      raise ValueError(
        "MRGPTQConfig.importance: needs the Hessians of solver='gptq'; got solver='rtn'."
      )


def rtn(format: str = "nvfp4", activations: str = "none") -> MRGPTQConfig:
  """Rounding to nearest, scales by the largest magnitudes."""
  scales = scale_rules.ScaleConfig()
  return MRGPTQConfig(format, activations, rotation=0, solver="rtn", scales=scales)


def rtn_hadamard(format: str = "nvfp4", activations: str = "none") -> MRGPTQConfig:
  """`rtn` of rotated weights and inputs."""
  return dataclasses.replace(rtn(format, activations), rotation=None)


def gptq(format: str = "nvfp4", activations: str = "none") -> MRGPTQConfig:
  """Plain GPTQ: no rotation, no order, scales by the largest magnitudes."""
  return dataclasses.replace(rtn(format, activations), solver="gptq", order="default")


def mr_gptq(format: str = "nvfp4", activations: str = "none") -> MRGPTQConfig:
  """The recipe: rotation, activation order, searched scales."""
  return MRGPTQConfig(format, activations)


@dataclasses.dataclass(frozen=True)
class PTQConfig:
  """What `launch.quantize` does beyond rounding: a method, and the text that it looks at."""

  method: MRGPTQConfig = MRGPTQConfig()  # [paper: the recipe]
  calibration: calibrate.Calibration | None = calibrate.Calibration()  # [code FP-Quant]


def quantize_model(
  lm: Any,
  config: MRGPTQConfig,
  sequences_NT: Int[np.ndarray, "N T"] | None = None,
  *,
  workdir: str | os.PathLike[str] | None = None,
  on_block: Callable[[int, int], None] = lambda done, total: None,
  devices: Sequence[Any] | None = None,
) -> tuple[Any, list[dict[str, Any]]]:
  """A model with every linear of its layers in FP4.

  Args:
    lm: a `jaxlab.LM` of dense kernels, stacked or a list; its result has the same form.
    sequences_NT: tokens to calibrate on. None suits solver "rtn" without AWQ only; the scales of
      NVFP4 activations then come from each token, not from a static one.
    workdir: keeps every finished block there, and takes up those of an interrupted run.
    on_block: called with (blocks done, blocks in all).
    devices: share the outputs of a solve and the sequences of a pass; default all local ones.
  Returns: (the model, a row for each linear: its layer and name, the relative error of its weights
    and, with GPTQ, of its outputs on the text (`output_error`, and `output_error_rtn` of rounding
    to nearest), scales, damping used and raised, inputs that were never seen, AWQ's ratio).
  Raises: ValueError for a kernel that is not dense or does not suit format or rotation (by name),
    missing or too long sequences, a workdir of another run, or a Hessian that cannot be factored.
  """
  job = _prepare(lm, config, sequences_NT, devices)
  layers = lm.params["layers"]
  depth = stack.num_layers(layers)
  kept = None
  if workdir is not None:
    kept = resume.Blocks(workdir, resume.settings(lm.params, config, sequences_NT))
  hidden = _embed(job, lm, sequences_NT) if job.reads_text else []
  done, rows = [], []
  on_block(0, depth)
  for i in range(depth):
    layer = layers[i] if isinstance(layers, list) else jax.tree.map(lambda x: x[i], layers)  # noqa: B023
    found = kept.read(i) if kept else None
    if found is None:
      found = quantize_block(job, i, layer, hidden)
      if kept:
        kept.write(i, *found)
    packed, report = found
    done.append(packed)
    rows += report
    if hidden and i + 1 < depth:
      hidden = _advance(job, i, packed, hidden)
    on_block(i + 1, depth)
  params = lm.params | {"layers": jax.tree.map(jnp.asarray, done)}
  params = params if isinstance(layers, list) else stack.restack(params)
  return dataclasses.replace(lm, params=params), rows


def leaf_like(lm: Any, config: MRGPTQConfig, *, static: bool) -> weights.FP4Array:
  """The kind of leaf that a model's linears will be, as shapes of a small one: which layouts can
  hold it is known before any work.

  Args:
    static: whether there is a text, from which NVFP4 activations take a static scale.
  """
  rotation = _rotation(_widths(lm.module, _one_layer(lm.params["layers"]), config), config)
  has_scale = static and config.activations == "fp4" and config.format == "nvfp4"

  def make():
    w_OI = jnp.zeros((1, hadamard.MAX_SIZE))
    fitted = scale_rules.fit(w_OI, config.format, scale_rules.ScaleConfig())
    return weights.FP4Array(
      scale_rules.encode(w_OI, config.format, fitted), fitted.scale, fitted.tensor_scale,
      fitted.tensor_scale if has_scale else None,
      format=config.format, activations=config.activations, rotation=rotation,
    )  # fmt: skip

  return jax.eval_shape(make)


class Job(NamedTuple):
  """What all blocks share."""

  config: MRGPTQConfig
  module: Any
  inputs: calibrate.Inputs
  first_alike: list[int]
  reads_text: bool
  mesh: jax.sharding.Mesh

  def place(self, tree: PyTree, axis: int | None = None) -> PyTree:
    """Arrays on all devices: copies, or split along `axis` where they divide it."""

    def put(x):
      split = axis is not None and x.shape[axis] % self.mesh.size == 0
      spec = PartitionSpec(*[None] * axis, ROWS) if split else PartitionSpec()
      return jax.device_put(x, NamedSharding(self.mesh, spec))

    return jax.tree.map(put, tree)


def _prepare(lm, config, sequences_NT, devices) -> Job:
  """Refuses what cannot work, before any work."""
  layer = _one_layer(lm.params["layers"])
  widths = _widths(lm.module, layer, config)
  rotation = _rotation(widths, config)
  static = config.activations == "fp4" and config.format == "nvfp4"
  needs_text = config.solver == "gptq" or config.awq
  if sequences_NT is None and needs_text:
    raise ValueError(
      "quantize_model: GPTQ and AWQ need calibration sequences; got none. Give token rows [N, T], "
      "or use solver='rtn' without awq."
    )
  if sequences_NT is not None:
    _check_sequences(sequences_NT, lm.module.config)
  if config.awq:
    input_scales.require_decoder(lm.module)
  rounding = config.format if config.activations == "fp4" else None
  inputs = calibrate.Inputs(tuple(widths), rotation, rounding, config.solver == "gptq")
  devices = jax.local_devices() if devices is None else list(devices)
  reads_text = sequences_NT is not None and (needs_text or static)
  mesh = jax.sharding.Mesh(np.asarray(devices), (ROWS,))
  alike = blocks.first_alike(lm.module, layer) if reads_text else []
  return Job(config, lm.module, inputs, alike, reads_text, mesh)


def _one_layer(layers: PyTree) -> PyTree:
  """The first layer, as shapes."""
  return jax.eval_shape(lambda x: stack.unstack({"layers": x})["layers"][0], layers)


def _rotation(widths: dict[blocks.Site, int], config: MRGPTQConfig) -> int:
  by_name = {"/".join(names): width for names, width in widths.items()}
  return hadamard.choose_size(by_name, config.rotation)


def _widths(module, layer, config) -> dict[blocks.Site, int]:
  """{site: its inputs}, of dense kernels that the format's block divides."""
  block = codec.BLOCK[config.format]
  for name, w in blocks.kernels(layer).items():
    if weights.is_leaf(w):
      raise ValueError(
        f"quantize_model: kernels must be dense; got {type(w).__name__} at {name}. Quantise a "
        "dense checkpoint, or merge its adapters first."
      )
    if w.shape[0] % block:
      raise ValueError(
        f"quantize_model: inputs must be a multiple of {config.format}'s block of {block}; got "
        f"{w.shape[0]} at {name}. Use the other format, or fp4.quantize_params with skip."
      )
  dense = blocks.kernels(layer)
  return {names: dense[names[0]].shape[0] for names in blocks.find_sites(module, layer)}


def _check_sequences(sequences_NT, config):
  if len(sequences_NT) == 0 or sequences_NT.shape[1] > config.max_positions:
    raise ValueError(
      f"quantize_model: calibration needs sequences of at most {config.max_positions} tokens; got "
      f"{sequences_NT.shape}. Change Calibration.length."
    )
  if sequences_NT.min() < 0 or sequences_NT.max() >= config.vocab_size:
    raise ValueError(
      f"quantize_model: tokens must be in [0, {config.vocab_size}); got {sequences_NT.min()} to "
      f"{sequences_NT.max()}. Use the model's own tokenizer."
    )


# --- passes over the text; hidden states stay on the host


def _embed(job: Job, lm: Any, sequences_NT) -> list[np.ndarray]:
  params, size = {"params": lm.params}, job.config.batch
  batches = [jnp.asarray(sequences_NT[i : i + size]) for i in range(0, len(sequences_NT), size)]
  return [np.asarray(job.module.apply(params, tokens, method="embed")) for tokens in batches]


def _observe(job: Job, index: int, inputs: calibrate.Inputs, layer: PyTree, hidden):
  """Statistics of every site of the dense `layer` on all batches."""
  seen = job.place(calibrate.nothing_seen(inputs, layer))
  for x_BTD in hidden:
    x_BTD = job.place(x_BTD, axis=0)
    seen = calibrate.observe(job.module, job.first_alike[index], inputs, layer, x_BTD, seen)
  return seen


def _advance(job: Job, index: int, packed: PyTree, hidden: list[np.ndarray]) -> list[np.ndarray]:
  """The outputs of a quantised block on all batches."""
  packed = job.place(packed)
  kernels = blocks.kernels(packed)
  act_scale = {first: kernels[first].act_multiplier for first, *_ in job.inputs.sites}
  dtype = hidden[0].dtype
  rotated = {name: _rotated_dense(w).astype(dtype) for name, w in kernels.items()}
  layer = blocks.replace_kernels(packed, rotated)
  run = functools.partial(calibrate.forward, job.module, job.first_alike[index], job.inputs, layer)
  return [np.asarray(run(job.place(x_BTD, axis=0), act_scale)) for x_BTD in hidden]


def _rotated_dense(w: weights.FP4Array) -> Float32[Array, "I O"]:
  """What a rotated input is multiplied with."""
  return codec.decode(w.codes, w.scale, w.multiplier, jnp.float32).T


# --- one block


def quantize_block(
  job: Job, index: int, layer: PyTree, hidden: list[np.ndarray]
) -> tuple[PyTree, list[dict[str, Any]]]:
  """(the layer with packed kernels, rows of the report), on the host."""
  for name, w in blocks.kernels(layer).items():
    formats.require_finite(f"quantize_model: layer {index}, {name}", w)
  layer, notes = job.place(layer), {}
  if job.config.awq:
    seen = _observe(job, index, calibrate.Inputs(job.inputs.sites), layer, hidden)
    rounding = PlainRounding(job.config, job.inputs.rotation)
    layer, notes = input_scales.fold(layer, seen, job.module.config, rounding)
  dense = blocks.kernels(layer)
  rotated = {name: _rotate(w, job.inputs.rotation) for name, w in dense.items()}
  seen = {}
  if hidden:
    as_run = {name: w.astype(dense[name].dtype) for name, w in rotated.items()}
    seen = _observe(job, index, job.inputs, blocks.replace_kernels(layer, as_run), hidden)
  packed, rows = {}, []
  for names in job.inputs.sites:
    kernels, statistics = {n: rotated[n] for n in names}, seen.get(names[0])
    found, facts = site.quantize(kernels, statistics, job.config, job.inputs.rotation, job.place)
    packed |= found
    note = {"awq_ratio": notes[names[0]]} if names[0] in notes else {}
    rows += [{"layer": index, "linear": n} | facts[n] | note for n in names]
  return jax.device_get(blocks.replace_kernels(layer, packed)), rows


@functools.partial(jax.jit, static_argnames="size")
def _rotate(w_IO, size):
  return hadamard.rotate_kernel(w_IO.astype(jnp.float32), size)


@dataclasses.dataclass(frozen=True)
class PlainRounding:
  """Kernels of a site -> the same, rounded to nearest where they are rotated and turned back."""

  config: MRGPTQConfig
  rotation: int

  def __call__(self, kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    turn = lambda w_IO: hadamard.rotate_kernel(w_IO, self.rotation)
    return tuple(map(turn, site.nearest(list(map(turn, kernels)), self.config)))
