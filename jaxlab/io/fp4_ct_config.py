"""`quantization_config` of compressed-tensors with FP4 weights: groups, targets, transforms.

A group says how its targets are stored. A target is a class ("Linear"), a module's name, or "re:"
and a pattern; an exact name goes before a pattern, a pattern before a class. `ignore` leaves
modules dense. `transform_config` lists rotations: one at location "input" is applied to
activations, those of weights have been applied before the file was written.
Source: neuralmagic/compressed-tensors, quantization/{quant_config,quant_scheme}.py,
transform/transform_args.py, utils/match.py.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlab.io.fp4_layouts import Scheme

SUPPORTED = (
  "Supported: compressed-tensors nvfp4-pack-quantized and mxfp4-pack-quantized (also mixed), "
  "ModelOpt NVFP4, FP-Quant."
)
FORMATS = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
MIXED = "mixed-precision"
WEIGHTS = {  # what `weights` must say, by format
  "nvfp4": {"strategy": "tensor_group", "group_size": 16},
  "mxfp4": {"strategy": "group", "group_size": 32},
}
SCALE_DTYPE = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}
PRESETS = {  # names that stand for a whole group
  "NVFP4A16": ("nvfp4", "none"), "NVFP4": ("nvfp4", "fp4"),
  "MXFP4A16": ("mxfp4", "none"), "MXFP4": ("mxfp4", "fp4"),
}  # fmt: skip
FULL_WIDTH = -1  # a rotation of all inputs at once
OFFLINE = ("weight_input", "weight_output")
LINEAR = "Linear"  # the class of every module that we know
# A pattern of a stranger's file may take time exponential in a name's length if it repeats a group,
# and polynomial in its open repeats.
MAX_PATTERN_CHARS, MAX_REPEATS = 512, 4
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{\d*,\d*\})")
_REPEAT = re.compile(r"(?<!\\)[*+]|\{\d*,\d*\}")


class Modules(NamedTuple):
  """Modules by targets, but for some."""

  targets: tuple[str, ...]
  ignore: tuple[str, ...] = ()

  def have(self, module: str) -> bool:
    ignored = any(matches(p, module) for p in self.ignore)
    return not ignored and any(matches(p, module) for p in self.targets)


class Rotation(NamedTuple):
  """A Hadamard on the inputs of modules: `name` of its scheme, `size` or FULL_WIDTH."""

  name: str
  modules: Modules
  size: int

  @property
  def tensor(self) -> str:
    """The suffix of its matrix."""
    return f".{self.name}_input.weight"

  def size_for(self, inputs: int) -> int:
    return inputs if self.size == FULL_WIDTH else self.size


class Parsed(NamedTuple):
  rules: tuple[tuple[Modules, Scheme], ...]
  ignore: tuple[str, ...]
  rotations: tuple[Rotation, ...]


def matches(pattern: str, module: str) -> bool:
  """True if a target or an entry of `ignore` means a linear of this name.

  Raises: ValueError for a regular expression that does not compile, or could take for ever.
  """
  if not pattern.startswith("re:"):
    return pattern in (module, LINEAR)
  return _compiled(pattern).match(module) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
  text = pattern.removeprefix("re:")
  repeats = len(_REPEAT.findall(text))
  if len(text) > MAX_PATTERN_CHARS or repeats > MAX_REPEATS or _REPEATED_GROUP.search(text):
    raise ValueError(
      "load: a pattern of quantization_config must have at most "
      f"{MAX_PATTERN_CHARS} characters and {MAX_REPEATS} open repeats, none of a group; got "
      f"{pattern[:80]!r}. Write it more simply."
    )
  try:
    return re.compile(text)
  except (re.error, RecursionError, OverflowError) as error:
    raise ValueError(
      f"load: a pattern of quantization_config must be a regular expression; got {pattern[:80]!r} "
      f"({error})."
    ) from None


def first_match(rules: Sequence[tuple[Modules, Scheme]], module: str) -> Scheme | None:
  """The scheme of a module by its most specific target: a name, a pattern, a class."""

  def rank(target: str) -> int:
    return 0 if target == module else 1 if target.startswith("re:") else 2

  found = [
    (rank(target), order, scheme)
    for order, (modules, scheme) in enumerate(rules)
    if not any(matches(p, module) for p in modules.ignore)
    for target in modules.targets
    if matches(target, module)
  ]
  return min(found, key=lambda f: f[:2])[2] if found else None


def one_of(key: str, value: Any, allowed: Iterable[Any]) -> Any:
  """The value. Raises: ValueError unless it is one of these (JSON may hold a list here)."""
  if not any(value == known and type(value) is type(known) for known in allowed):
    raise unsupported(key, value)
  return value


def unsupported(key: str, value: Any) -> ValueError:
  return ValueError(
    f"quantization_config: {key} is not supported yet; got {str(value)[:200]!r}. {SUPPORTED} "
    "Load the 16-bit checkpoint and run launch.quantize instead."
  )


# --- reading


def parse(config: Mapping[str, Any]) -> Parsed:
  """Raises ValueError naming the key that is not supported, and its value."""
  top = one_of("format", config.get("format"), (*FORMATS, MIXED))
  if config.get("moe_sparsity_config"):
    raise unsupported("moe_sparsity_config", config["moe_sparsity_config"])
  sparsity = config.get("sparsity_config") or {"format": "dense"}
  if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
    raise unsupported("sparsity_config", sparsity)
  groups = config.get("config_groups") or {}
  if not groups or not isinstance(groups, Mapping):
    raise unsupported("config_groups", groups)
  rules = tuple(_group(name, group, top) for name, group in groups.items())
  ignore = texts("ignore", config.get("ignore") or ())
  return Parsed(rules, ignore, _rotations(config.get("transform_config") or {}))


def texts(key: str, value: Any) -> tuple[str, ...]:
  """A list of strings, or one string."""
  value = [value] if isinstance(value, str) else value
  if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
    raise unsupported(key, value)
  return tuple(value)


def _group(name: str, group: Any, top: str) -> tuple[Modules, Scheme]:
  path = f"config_groups.{name}"
  if isinstance(group, list) and name.upper() in PRESETS:
    format, activations = PRESETS[name.upper()]
    scheme = _scheme(format, activations, format == "nvfp4" and activations == "fp4")
    return Modules(texts(path, group)), scheme
  if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
    raise unsupported(path, group)
  if group.get("output_activations") is not None:
    raise unsupported(f"{path}.output_activations", "quantised outputs")
  format = _format(path, group["weights"])
  named = group.get("format") or (top if top != MIXED else None)
  if named is not None:
    one_of(f"{path}.format", named, [n for n, known in FORMATS.items() if known == format])
  activations, static = _activations(f"{path}.input_activations", group, format)
  targets = texts(f"{path}.targets", group.get("targets") or ())
  ignore = texts(f"{path}.ignore", group.get("ignore") or ())
  return Modules(targets, ignore), _scheme(format, activations, static)


def _scheme(format: str, activations: str, static: bool) -> Scheme:
  return Scheme("compressed_tensors", format, activations, static)


def _format(path: str, weights: Mapping[str, Any]) -> str:
  """The FP4 format that a group's `weights` describe."""
  size = weights.get("group_size")
  format = {16: "nvfp4", 32: "mxfp4"}.get(size) if isinstance(size, int) else None
  if format is None:
    raise unsupported(f"{path}.weights.group_size", size)
  wanted = {"num_bits": 4, "type": "float", **WEIGHTS[format]}
  optional = {"symmetric": True, "dynamic": False, "scale_dtype": SCALE_DTYPE[format]}
  _require(f"{path}.weights", weights, wanted, optional)
  if weights.get("actorder") in ("group", "dynamic"):  # "weight", "static" keep the columns' order
    raise unsupported(f"{path}.weights.actorder", weights["actorder"])
  return format


def _require(path, have, wanted, optional):
  for key, value in wanted.items():
    if have.get(key) != value:
      raise unsupported(f"{path}.{key}", have.get(key))
  for key, value in optional.items():
    if have.get(key) not in (None, value):
      raise unsupported(f"{path}.{key}", have[key])


def _activations(path: str, group: Mapping[str, Any], format: str) -> tuple[str, bool]:
  """("none" or "fp4", whether their tensor scale is stored)."""
  acts = group.get("input_activations")
  if acts is None:
    return "none", False
  if not isinstance(acts, Mapping):
    raise unsupported(path, acts)
  wanted = {"num_bits": 4, "type": "float", **WEIGHTS[format]}
  _require(path, acts, wanted, {"symmetric": True, "scale_dtype": SCALE_DTYPE[format]})
  dynamic = acts.get("dynamic")
  if dynamic is True:
    return "fp4", False
  if dynamic == "local" and format == "nvfp4":
    return "fp4", True
  raise unsupported(f"{path}.dynamic", dynamic)


def _rotations(config: Any) -> tuple[Rotation, ...]:
  """What happens to activations at run time."""
  groups = config.get("config_groups") if isinstance(config, Mapping) else config
  if not config:
    return ()
  if not isinstance(groups, Mapping):
    raise unsupported("transform_config", config)
  found = []
  for name, scheme in groups.items():
    path = f"transform_config.config_groups.{name}"
    if not isinstance(scheme, Mapping) or not isinstance(scheme.get("apply"), list):
      raise unsupported(path, scheme)
    for apply in scheme["apply"]:
      if modules := _online(path, scheme, apply):
        found.append(Rotation(name, modules, _size(path, scheme)))
  return tuple(found)


def _online(path: str, scheme: Mapping[str, Any], apply: Any) -> Modules | None:
  """The modules whose inputs one entry of a transform rotates; None for what is in the weights."""
  if not isinstance(apply, Mapping):
    raise unsupported(f"{path}.apply", apply)
  location = apply.get("location")
  if location in OFFLINE:
    return None
  if location != "input":
    raise unsupported(f"{path}.apply.location", location)
  if scheme.get("type") != "hadamard":
    raise unsupported(f"{path}.type", scheme.get("type"))
  if scheme.get("randomize"):
    raise unsupported(f"{path}.randomize", True)
  # `inverse` does not matter: Sylvester's matrix is its own.
  targets = texts(f"{path}.apply.targets", apply.get("targets") or ())
  return Modules(targets, texts(f"{path}.apply.ignore", apply.get("ignore") or ()))


def _size(path: str, scheme: Mapping[str, Any]) -> int:
  size = scheme.get("head_dim")
  if size is None:
    return FULL_WIDTH
  if not isinstance(size, int) or size < 2 or size & (size - 1):
    raise unsupported(f"{path}.head_dim", size)
  return size


# --- writing


def describe(schemes: Mapping[str, Scheme], dense: Sequence[str] = ()) -> dict[str, Any]:
  """The `quantization_config` as transformers and vLLM read it; `dense` is ignored by name.

  One scheme targets "Linear"; of several, each targets its modules by name.
  """
  by_scheme: dict[Scheme, list[str]] = {}
  for module, scheme in schemes.items():
    by_scheme.setdefault(dataclasses.replace(scheme, rotation=0), []).append(module)
  uniform = len(by_scheme) == 1
  groups = {
    f"group_{i}": _group_json(scheme, [LINEAR] if uniform else modules)
    for i, (scheme, modules) in enumerate(by_scheme.items())
  }
  formats = {group["format"] for group in groups.values()}
  config = {
    "quant_method": "compressed-tensors",
    "format": formats.pop() if len(formats) == 1 else MIXED,
    "quantization_status": "compressed",
    "ignore": list(dense),
    "config_groups": groups,
  }
  transforms = _transforms_json(schemes, dense)
  return config | ({"transform_config": {"config_groups": transforms}} if transforms else {})


def _group_json(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
  (name,) = (name for name, format in FORMATS.items() if format == scheme.format)
  numbers = {
    "num_bits": 4,
    "type": "float",
    **WEIGHTS[scheme.format],
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": SCALE_DTYPE[scheme.format],
  }
  acts = numbers | {"dynamic": "local" if scheme.static_acts else True}
  return {
    "targets": targets,
    "format": name,
    "input_activations": acts if scheme.activations == "fp4" else None,
    "output_activations": None,
    "weights": numbers,
  }


def _transforms_json(schemes: Mapping[str, Scheme], dense: Sequence[str]) -> dict[str, Any]:
  by_size: dict[int, list[str]] = {}
  for module, scheme in schemes.items():
    by_size.setdefault(scheme.rotation, []).append(module)
  uniform = len(by_size) == 1
  found = {}
  for size, modules in by_size.items():
    if size == 0:
      continue
    where = {"targets": [LINEAR], "ignore": list(dense)} if uniform else {"targets": modules}
    found[f"hadamard_{size}"] = {
      "type": "hadamard",
      "apply": [
        {**where, "location": "input"},
        {**where, "location": "weight_input", "inverse": True},
      ],
      "head_dim": size,
      "randomize": False,
      "requires_grad": False,
      "precision": "torch.float32",
    }
  return found
