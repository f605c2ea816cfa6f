"""A whole model in another weight format: what recipes bind as `quantize.format`."""

from typing import Any

from jaxlab.quant import fp4


def quantize(
  params: Any,
  format: str = "nvfp4",  # [paper QeRL: NVFP4 weights]
  rule: str = "even",  # [ours: smallest one-shot error of the MXFP4 rules]
  activations: str = "none",  # [paper QeRL: W4A16]
) -> Any:
  """Every linear kernel of the layers in `format`: "nvfp4", "mxfp4", "nf4", or "bf16" (kept dense).

  See `fp4.quantize_params` for what is fused, skipped and refused.
  """
  return fp4.quantize_params(params, format, rule=rule, activations=activations)
