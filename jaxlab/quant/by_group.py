"""Quantises a model in steps that can be shown, and measures each on the way. Dims: L layers.

A group's dense kernels are dropped before the next group is packed, so the peak is the dense model
and one packed group, not both models.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxlab.nn import stack
from jaxlab.quant import report

PyTree = Any
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # members may share a tensor scale


def quantize_by_group(
  lm: Any,
  quantize: Callable[[PyTree], PyTree],
  on_group: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Any, dict[str, Float32[np.ndarray, "L"]]]:
  """`quantize` on the layers of a model, one group of linears at a time.

  Args:
    lm: a `jaxlab.LM` that the caller does not keep: its dense layers go as they are replaced.
    quantize: params -> params, such as `jaxlab.quant.model.quantize`.
    on_group: called with (groups done, groups in all).
  Returns: (the quantised model, {linear: relative error of each layer}).
  """
  rest = dict(stack.restack(lm.params))
  layers, errors = dict(rest.pop("layers")), {}
  lm = dataclasses.replace(lm, params=None)
  on_group(0, len(GROUPS))
  for done, group in enumerate(GROUPS, 1):
    # The head and all else go once, with the last group: `quantize` may change them too.
    outside = rest if done == len(GROUPS) else {}
    packed = dict(quantize(outside | {"layers": {name: layers[name] for name in group}}))
    for name, after in packed.pop("layers").items():
      errors[name] = report.relative_error(layers[name]["kernel"], after["kernel"])
      layers[name] = after
    rest |= packed
    on_group(done, len(GROUPS))
  return dataclasses.replace(lm, params=rest | {"layers": layers}), errors


def summary(errors: Mapping[str, Float32[np.ndarray, "L"]]) -> dict[str, Any]:
  """Mean and largest relative error, where that is, and a row for each layer."""
  names = list(errors)
  table = np.stack([errors[name] for name in names])  # linears x layers
  worst = np.unravel_index(table.argmax(), table.shape)
  return {
    "relative_error_mean": table.mean(),
    "relative_error_max": table.max(),
    "worst_kernel": f"layers/{worst[1]}/{names[worst[0]]}",
    "rows": [
      {"layer": i, "relative_error_mean": row.mean(), "relative_error_max": row.max()}
      for i, row in enumerate(table.T)
    ],
  }
