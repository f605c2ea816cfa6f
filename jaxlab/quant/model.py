"""A whole model in another weight format: what recipes bind as `quantize.format`."""

from typing import Any

from jaxlab.quant import fp4, int8, scales


def quantize(
  params: Any,
  format: str = "nvfp4",  # [paper QeRL: NVFP4 weights]
  rule: str = "even",  # [ours: smallest one-shot error of the MXFP4 rules]
  activations: str = "none",  # [paper QeRL: W4A16]
  search: str = "none",  # [paper QeRL: absmax scales]
  head: str = "none",  # [paper QeRL: the head stays as it is]
) -> Any:
  """Every linear kernel of the layers in `format`: "nvfp4", "mxfp4", "nf4", or "bf16" (kept dense).

  Args:
    rule, search: of the block scales, see `scales.ScaleConfig`.
    activations: "none" (W4A16) or "fp4" (W4A4).
    head: "int8" also rounds the output head, or the embedding it is tied to, to 8 bits, where
      `params` has one (a part of a model may not).
  See `fp4.quantize_params` for what is fused, skipped and refused.
  """
  if head not in ("none", "int8"):
    raise ValueError(f"quantize: head must be none or int8; got {head!r}.")
  config = scales.ScaleConfig(rule=rule, search=search)
  params = fp4.quantize_params(params, format, scales=config, activations=activations)
  has_head = "head" in params or "embed" in params
  return int8.quantize_head(params) if head == "int8" and has_head else params
