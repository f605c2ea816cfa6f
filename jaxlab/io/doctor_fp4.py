"""What the doctor says of FP4 linears: dialect, bits on disk, and scales the right way up.

A divisor where a multiplier belongs, or the reverse, squares the tensor scale: weights of at most a
few units become 1e5 and more, so the largest weight and the largest activation that the scales
stand for tell.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlab import errors
from jaxlab.io import (
  assemble,
  fp4_checkpoints,
  fp4_configs,
  fp4_experts,
  fp4_layouts,
  fp4_transforms,
)
from jaxlab.io import safetensors as st
from jaxlab.io.findings import Finding, attempt
from jaxlab.io.fp4_layouts import PARTS, Packed
from pallas_kernels.fp4_gemm import codec

MAX_WEIGHT, MIN_WEIGHT = 1e3, 1e-6  # believable largest magnitudes of a linear
MAX_USUAL = 4.0  # and of its median block: powers of two upside down are no larger than 1e3
MAX_ACT, MIN_ACT = 1e5, 1e-3  # and of its inputs
BITS = {"nvfp4": 4.5, "mxfp4": 4.25}
SCALE_2 = PARTS["modelopt"]["tensor_scale"]
FP4_PARTS = {part for names in PARTS.values() for part in names.values()} - {"weight"}
NAMES_OF_SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def dialect(
  folder: st.SafetensorsFolder, config: Mapping[str, Any]
) -> tuple[fp4_configs.Quantization | None, list[Finding]]:
  """What the JSON says of FP4, and whether the tensors agree."""
  stored = config.get(fp4_configs.KEY)
  quantization, problem = attempt(
    fp4_configs.KEY, lambda: fp4_configs.of_folder(folder.path, config)
  )
  packed = fp4_checkpoints.packed_names(folder)
  found = [problem] if problem else []
  layouts = collections.Counter(packed.values())
  if packed and not stored and not quantization and not problem:
    found.append(
      Finding("broken", "config.json: there are packed weights but no quantization_config.")
    )
  if quantization and not packed:
    found.append(
      Finding("broken", "config.json: there is a quantization_config but no packed weight.")
    )
  strange = sorted(
    m for m, layout in packed.items() if quantization and layout != quantization.layout
  )
  alien = [n for n in folder.names() if n.endswith(f".{SCALE_2}")]
  if alien and quantization and quantization.layout != "modelopt":
    found.append(
      Finding(
        "broken",
        f"scales: {alien[0]} is ModelOpt's layout (a multiplier); the "
        f"config says {quantization.layout}.",
      )
    )
  elif strange:
    found.append(
      Finding(
        "broken",
        f"layout: {strange[0]} is stored as {packed[strange[0]]}; the config says "
        f"{quantization.layout}.",
      )
    )
  if packed and not found:
    kinds = ", ".join(f"{n} linears as {layout}" for layout, n in sorted(layouts.items()))
    found.append(
      Finding("note", f"quantised already: {kinds}. To quantise anew, take the dense original.")
    )
  return quantization, found


def for_servers(
  folder: st.SafetensorsFolder, quantization: fp4_configs.Quantization | None
) -> Iterator[Finding]:
  """What readers of compressed-tensors folders need beside what we need."""
  if quantization is None or quantization.layout != "compressed_tensors":
    return
  if quantization.rotations:
    yield Finding("note", "rotation: of inputs (transform_config); transformers (5.24) skips it.")
  for rotation in fp4_transforms.missing(folder.names(), quantization.rotations):
    yield Finding(
      "warning",
      f"rotation: vLLM needs a tensor X{rotation.tensor}, and there is none. launch.export "
      "--output_format=compressed_tensors writes it.",
    )
  schemes = [scheme for _, scheme in quantization.rules]
  if any(s.format == "nvfp4" and s.activations == "fp4" and not s.static_acts for s in schemes):
    yield Finding("note", "activations: vLLM needs a static scale of NVFP4's; there is none.")


def name_of(folder: st.SafetensorsFolder, config: Mapping[str, Any]) -> str:
  """The dialect in words, such as 'compressed-tensors nvfp4-pack-quantized'."""
  if isinstance(stored := config.get(fp4_configs.KEY), Mapping) and stored:
    words = (stored.get(k) for k in ("quant_method", "format", "quant_algo", "forward_dtype"))
    return " ".join(str(word) for word in words if word)
  file = folder.path / fp4_configs.MODELOPT_FILE
  return f"modelopt ({fp4_configs.MODELOPT_FILE})" if file.is_file() else "dense"


def bits(folder: st.SafetensorsFolder) -> Iterator[Finding]:
  """Bits a weight of the packed linears, from headers: codes and block scales."""
  stored: dict[float, list[str]] = {}
  sizes = collections.Counter()
  for module, layout in fp4_checkpoints.packed_names(folder).items():
    if f"{module}.{fp4_layouts.PSEUDO}" in folder:
      continue
    codes, scale = _names(module, layout)
    if scale not in folder:
      continue  # named by `scales`
    block, expected = _format(folder, codes, scale)
    count = int(np.prod(folder.shape_dtype(scale)[0])) * block
    size = folder.raw(codes).nbytes + folder.raw(scale).nbytes
    found = 8 * size / max(count, 1)
    sizes["bits"], sizes["count"] = sizes["bits"] + 8 * size, sizes["count"] + count
    if abs(found - expected) > 0.01:
      stored.setdefault(found, []).append(f"{module} ({expected:g} expected)")
  for found, modules in stored.items():
    yield Finding(
      "broken",
      f"bits: {len(modules)} linears take {found:.2f} bits a weight on disk, such as {modules[0]}: "
      "codes that are not packed two a byte, or scales of other blocks.",
    )
  if sizes["count"] and not stored:
    yield Finding("ok", f"bits: packed linears take {sizes['bits'] / sizes['count']:.2f} a weight")


def _names(module: str, layout: str) -> tuple[str, str]:
  """The tensors of codes and block scales."""
  if layout == fp4_configs.GPT_OSS:
    return f"{module}{fp4_experts.BLOCKS}", f"{module}{fp4_experts.SCALES}"
  return tuple(f"{module}.{PARTS[layout][part]}" for part in ("codes", "scale"))


def _format(folder, codes: str, scale: str) -> tuple[int, float]:
  """(block, bits a weight): E4M3 is NVFP4; of bytes the number tells."""
  (shape, dtype), (of_codes, _) = folder.shape_dtype(scale), folder.shape_dtype(codes)
  wide = np.prod(of_codes) * 2 // max(np.prod(shape), 1) in (32, 64)
  format = "nvfp4" if "e4m3" in str(dtype) or not wide else "mxfp4"
  return codec.BLOCK[format], BITS[format]


def scales(
  folder: st.SafetensorsFolder, quantization: fp4_configs.Quantization | None
) -> Iterator[Finding]:
  """Every packed linear: its tensors there and usable, its scales the right way up."""
  packed = fp4_checkpoints.packed_names(folder)
  if quantization is None or not packed:
    return
  largest, usual, acts, tensor_scales = {}, {}, {}, {}
  for module, layout in packed.items():
    linear, problem = attempt(
      "scales", lambda m=module, k=layout: _read(folder, m, k, quantization)
    )
    if problem:
      yield problem
      return
    multiplier = 1 / linear.tensor_scale if linear.scale_is_divisor else linear.tensor_scale
    blocks = _decoded(linear)
    largest[module] = float(6 * blocks.max() * multiplier)
    usual[module] = float(6 * np.median(blocks) * multiplier)
    if linear.format == "nvfp4" or layout == "fp_quant":
      tensor_scales[module] = float(linear.tensor_scale)
    if linear.act_scale is not None:
      acts[module] = 2688 * float(linear.act_scale) ** (-1 if linear.scale_is_divisor else 1)
    for value in linear.arrays.values():
      assemble.release(value)
  yield _weights_line(largest, quantization.layout, bool(tensor_scales))
  yield from _usual_line(usual)
  yield from _acts_lines(acts, quantization.layout)
  yield from _unequal(tensor_scales)


def _read(folder, module: str, layout: str, quantization) -> Packed:
  if layout == fp4_configs.GPT_OSS:
    names = dict(zip(("codes", "scale"), _names(module, layout), strict=True))
    damage = lambda part, rule: errors.CorruptFile(folder.path, names[part], rule)
    for part, name in names.items():
      if name not in folder:
        raise damage(part, "the tensor must be there; it is missing")
    blocks, scale = (folder.read(name) for name in names.values())
    codes = blocks.reshape(*blocks.shape[:2], -1)
    fp4_layouts.check_codes(codes, scale, "mxfp4", damage)
    one = np.ones((), np.float32)
    return Packed(codes, scale, one, None, None, "mxfp4", "none", 0, True)
  name = f"{module}.{PARTS[layout]['codes']}"
  inputs = 2 * folder.shape_dtype(name)[0][-1] if name in folder else 0
  scheme = quantization.scheme_of(module, inputs)
  if scheme is None:
    raise ValueError(f"{module} is packed, but {quantization.file} leaves it dense.")
  return fp4_checkpoints.read(folder, module, scheme)


def _decoded(linear: Packed) -> np.ndarray:
  """Block scales as float32."""
  if linear.format == "nvfp4":
    return linear.scale.astype(np.float32)
  return np.ldexp(np.float32(1), linear.scale.astype(np.int32) - 127)


def _weights_line(largest: Mapping[str, float], layout: str, scaled: bool) -> Finding:
  high, low = max(largest, key=largest.get), min(largest, key=largest.get)
  kind = "multipliers" if layout == "modelopt" else "divisors" if scaled else "powers of two"
  if largest[high] > MAX_WEIGHT:
    why = (
      "Its global scale is a divisor; ModelOpt stores the multiplier (largest magnitude / 2688)."
      if layout == "modelopt"
      else "Its global scale is a multiplier (ModelOpt's convention), or another scale is missing; "
      f"{layout} stores the divisor."
    )
    return Finding(
      "broken", f"scales: the largest weight of {high} would be {largest[high]:.3g}. {why}"
    )
  if largest[low] < MIN_WEIGHT:
    return Finding(
      "warning", f"scales: the largest weight of {low} would be {largest[low]:.3g}: nearly nothing."
    )
  return Finding(
    "ok", f"scales: {len(largest)} linears, {kind}, largest weight {largest[high]:.3g}"
  )


def _usual_line(usual: Mapping[str, float]) -> Iterator[Finding]:
  high = max(usual, key=usual.get)
  if usual[high] > MAX_USUAL:
    yield Finding(
      "warning",
      f"scales: half of the blocks of {high} would hold weights of {usual[high]:.3g} and more; "
      "upside down?",
    )


def _acts_lines(acts: Mapping[str, float], layout: str) -> Iterator[Finding]:
  if not acts:
    return
  high, low = max(acts, key=acts.get), min(acts, key=acts.get)
  if acts[high] > MAX_ACT or acts[low] < MIN_ACT:
    odd = high if acts[high] > MAX_ACT else low
    part = PARTS[layout]["act_scale"]
    yield Finding(
      "warning",
      f"activations: {part} of {odd} says that its inputs reach {acts[odd]:.3g}; upside down? "
      f"{layout} stores the {'multiplier' if layout == 'modelopt' else 'divisor'}.",
    )
  else:
    yield Finding(
      "ok", f"activations: static scales for inputs up to {acts[low]:.3g} to {acts[high]:.3g}"
    )


def _unequal(tensor_scales: Mapping[str, float]) -> Iterator[Finding]:
  found = []
  for module, scale in tensor_scales.items():
    parent, _, name = module.rpartition(".")
    for first, *others in NAMES_OF_SETS:
      if name == first and any(tensor_scales.get(f"{parent}.{o}", scale) != scale for o in others):
        found.append(module)
  if found:
    yield Finding(
      "warning",
      f"scales: {len(found)} sets of linears that servers multiply as one have different global "
      f"scales, such as that of {found[0]}. launch.export --fuse_global_scale makes them equal.",
    )
