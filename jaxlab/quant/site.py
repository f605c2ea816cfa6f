"""One site to FP4: linears that share their inputs, their scales, GPTQ, and what it did to them.

Kernels come here rotated, in float32. They share one Hessian and one factorisation: side by side
they are solved as one matrix. Dims: I in, O out of all linears of the site, k blocks of the inputs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float32

from jaxlab.nn import weights
from jaxlab.quant import calibrate, formats, gptq, scales

Kernels = dict[str, Float32[Array, "I _"]]
TINY = 2.0**-100  # the largest magnitude of inputs that are all zero


class Rounded(NamedTuple):
  """Values on the grid, the scales of each linear, and facts about the solve."""

  new_IO: Float32[Array, "I O"]
  nearest_IO: Float32[Array, "I O"]
  fitted: list[scales.Fitted]
  facts: dict[str, Any]


def quantize(
  kernels: Kernels,
  seen: calibrate.Statistics | None,
  config: Any,
  rotation: int,
  place: Callable[..., Any] = lambda x, axis=None: x,
) -> tuple[dict[str, weights.FP4Array], dict[str, dict[str, Any]]]:
  """{linear: packed kernel}, {linear: facts for the report}.

  Args:
    seen: of the site's inputs; None for rounding to nearest with dynamic activation scales.
    config: a `mr_gptq.MRGPTQConfig`.
    rotation: noted in the leaves.
    place: puts an array on the devices, split along `axis`.
  """
  w_IO = place(jnp.concatenate(list(kernels.values()), axis=1), axis=1)
  done = _round(w_IO, tuple(kernels.values()), seen, config, place)
  hessian_II = seen.hessian_II if seen else None
  squares = jax.device_get(_squares(w_IO, done.nearest_IO, done.new_IO, hessian_II))
  act_scale = _act_scale(seen, config)
  # As `fp4.quantize` writes them: a small negative is code 8 there, and 0 once it was rounded.
  source_IO = w_IO if config.solver == "rtn" else done.new_IO
  packed, facts, start = {}, {}, 0
  for (name, w), fitted in zip(kernels.items(), done.fitted, strict=True):
    part = slice(start, start := start + w.shape[1])
    codes, zeroed = _encode(source_IO[:, part], w, config.format, fitted)
    parts = (codes, fitted.scale, fitted.tensor_scale, act_scale)
    packed[name] = weights.FP4Array(
      *parts, format=config.format, activations=config.activations, rotation=rotation
    )
    facts[name] = _errors({k: v[part].sum() for k, v in squares.items()}) | done.facts
    facts[name]["tensor_scale"] = float(fitted.tensor_scale)
    if act_scale is not None:
      facts[name]["act_scale"] = float(act_scale)
    if zeroed:
      facts[name]["zeroed_blocks"] = int(zeroed)
      logging.warning("%s: %d block(s) too small beside the largest are zero now.", name, zeroed)
  return packed, facts


def _act_scale(seen: calibrate.Statistics | None, config: Any) -> Float32[Array, ""] | None:
  """The divisor of static NVFP4 activations, that of the largest magnitude seen."""
  if seen is None or config.activations != "fp4" or config.format != "nvfp4":
    return None
  return 1.0 / (jnp.maximum(seen.amax, TINY) * calibrate.MULTIPLIER)


def nearest(kernels: Sequence[Float32[Array, "I _"]], config: Any) -> list[Float32[Array, "I _"]]:
  """Each kernel rounded to nearest, by the scales that it will have."""
  fitted = _fit(tuple(kernels), None, config.format, config.scales, config.fuse)
  return [_nearest(w, scales.block_units(f).T) for w, f in zip(kernels, fitted, strict=True)]


def _round(w_IO, kernels, seen, config, place) -> Rounded:
  importance_I = jnp.diagonal(seen.hessian_II) if config.importance else None
  fitted = _fit(kernels, importance_I, config.format, config.scales, config.fuse)
  unit_kO = place(jnp.concatenate([scales.block_units(f) for f in fitted]).T, axis=1)
  nearest_IO = _nearest(w_IO, unit_kO)
  if config.solver == "rtn":
    return Rounded(nearest_IO, nearest_IO, fitted, {})
  factor = gptq.factorise(seen.hessian_II, config.damp, config.order)
  facts = {"damp": factor.damp, "damp_retries": factor.retries}
  facts |= {"dead_inputs": int(factor.dead_I.sum())}
  new_IO = gptq.solve(w_IO, unit_kO, factor, block=config.block)
  return Rounded(new_IO, nearest_IO, fitted, facts)


@functools.partial(jax.jit, static_argnames=("format", "config", "fuse"))
def _fit(kernels, importance_I, format, config, fuse):
  ws = [w_IO.T for w_IO in kernels]
  if fuse and format == "nvfp4":
    return scales.fit_fused(ws, format, config, importance_I)
  return [scales.fit(w, format, config, importance_I=importance_I) for w in ws]


@jax.jit
def _nearest(w_IO, unit_kO):
  unit_IO = jnp.repeat(unit_kO, w_IO.shape[0] // unit_kO.shape[0], axis=0)
  return scales.round_to_grid(w_IO, unit_IO)


@functools.partial(jax.jit, static_argnames="format")
def _encode(q_IO, w_IO, format, fitted):
  """Codes, and how many blocks of w are nearest to zero."""
  codes = scales.encode(q_IO.T, format, fitted)
  return codes, formats.vanished(w_IO, scales.block_units(fitted))


@jax.jit
def _squares(w_IO, nearest_IO, new_IO, hessian_II):
  """By output: of its weights and their change; of its values and their changes."""
  found = {"weight": jnp.sum(w_IO**2, axis=0), "change": jnp.sum((new_IO - w_IO) ** 2, axis=0)}
  if hessian_II is not None:
    size = lambda v_IO: gptq.squared_outputs(v_IO, hessian_II)
    found |= {"output": size(w_IO), "before": size(nearest_IO - w_IO), "after": size(new_IO - w_IO)}
  return found


def _errors(squares: dict[str, Any]) -> dict[str, float]:
  """Relative errors (norms): of the weights, and of the outputs on the calibration text, once as
  rounded to nearest and once as solved."""
  share = lambda a, b: float(np.sqrt(squares[a] / squares[b])) if squares[b] > 0 else 0.0
  errors = {"weight_error": share("change", "weight")}
  if "output" in squares:
    errors["output_error_rtn"] = share("before", "output")
    errors["output_error"] = share("after", "output")
  return errors
