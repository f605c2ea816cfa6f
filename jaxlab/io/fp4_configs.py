"""The JSON of FP4 checkpoints: which linears are packed and how, for each layout; read and written.

  compressed-tensors  config.json quantization_config: see `fp4_ct_config.py`
  ModelOpt            hf_quant_config.json {"quantization": {"quant_algo", "exclude_modules", ..}},
                      or the same in config.json with quant_method "modelopt" and "ignore"
  FP-Quant            config.json quantization_config, quant_method "fp_quant"
  gpt-oss             config.json quantization_config, quant_method "mxfp4": tensors of experts only
Sources: transformers `FPQuantConfig`, vLLM's readers of each, arXiv 2509.23202.
"""

import dataclasses
import fnmatch
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from jaxlab import errors
from jaxlab.io import files, fp4_ct_config
from jaxlab.io.fp4_layouts import METHOD_SCALE, PARTS, ROTATION_SIZES, Scheme

CONFIG, MODELOPT_FILE = "config.json", "hf_quant_config.json"
KEY = "quantization_config"
GPT_OSS = "gpt_oss"
MODELOPT_ALGORITHMS = {"NVFP4": "fp4", "W4A16_NVFP4": "none"}  # -> activations
SUPPORTED = fp4_ct_config.SUPPORTED
# What a server does with its cache is no business of the weights; its scales are kept for exports.
CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


@dataclasses.dataclass(frozen=True)
class Quantization:
  """What a folder's JSON says of its linears.

  Attributes:
    layout: a key of `fp4_layouts.PARTS`, or GPT_OSS.
    rules: ((targets, ignored), scheme) pairs; see `scheme_of`.
    ignore: modules left dense.
    rotations: Hadamards on inputs (compressed_tensors).
    file: that says so.
  """

  layout: str
  rules: tuple[tuple[fp4_ct_config.Modules, Scheme], ...]
  ignore: tuple[str, ...] = ()
  rotations: tuple[fp4_ct_config.Rotation, ...] = ()
  file: str = CONFIG

  def scheme_of(self, module: str, inputs: int) -> Scheme | None:
    """How a linear is stored; None if dense.

    Args:
      module: its name, such as 'model.layers.0.mlp.up_proj'.
      inputs: its width, which a rotation without a size has.
    Raises: ValueError for a dense linear whose inputs would be rotated, or rotated twice.
    """
    scheme = None
    if not any(_ignores(self.layout, pattern, module) for pattern in self.ignore):
      scheme = fp4_ct_config.first_match(self.rules, module)
    rotations = [rotation for rotation in self.rotations if rotation.modules.have(module)]
    if len(rotations) > 1 or (rotations and scheme is None):
      raise ValueError(
        f"load: transform_config rotates the inputs of {module} {len(rotations)} times; supported "
        "is one rotation of a linear in FP4."
      )
    if not rotations:
      return scheme
    return dataclasses.replace(scheme, rotation=rotations[0].size_for(inputs))

  def says(self, linears: Mapping[str, tuple[Scheme, int]], dense: Mapping[str, int]) -> bool:
    """True if this describes just these linears, as for `describe`."""
    if self.layout not in PARTS or any(self.scheme_of(m, inputs) for m, inputs in dense.items()):
      return False
    # How FP-Quant would make new matrices says nothing about those that are stored.
    plain = lambda scheme: scheme and dataclasses.replace(scheme, transform="")
    return all(
      plain(self.scheme_of(m, inputs)) == plain(scheme) for m, (scheme, inputs) in linears.items()
    )


def of_folder(folder: pathlib.Path, config: Mapping[str, Any]) -> Quantization | None:
  """What a model folder says; None for a dense one.

  Args:
    config: the folder's config.json.
  Raises: ValueError naming what is not supported; CorruptFile for JSON that does not parse.
  """
  stored = config.get(KEY)
  file = files.member(folder, MODELOPT_FILE) if folder.is_dir() else None
  beside = files.read_json_object(file) if file else None
  if not stored:
    return parse_modelopt(beside, MODELOPT_FILE) if beside else None
  found = parse(stored)
  if beside is not None and found.layout == "modelopt":
    other = parse_modelopt(beside, MODELOPT_FILE)
    if other.rules != found.rules:  # lists of modules are spelt differently in some files
      raise errors.CorruptFile(
        file, "quantization", f"says another thing than {KEY} of {CONFIG}", "Correct one of them."
      )
  elif beside is not None:
    logging.warning("%s: %s is ignored: %s has another layout", folder, MODELOPT_FILE, CONFIG)
  return found


def parse(stored: Any) -> Quantization:
  """What a `quantization_config` of config.json says.

  Raises: ValueError naming the key that is not supported, its value, and what is supported.
  """
  if not isinstance(stored, Mapping):
    raise fp4_ct_config.unsupported(KEY, stored)
  method = stored.get("quant_method")
  _mention_cache(stored)
  match method:
    case "compressed-tensors":
      parsed = fp4_ct_config.parse(stored)
      return Quantization("compressed_tensors", parsed.rules, parsed.ignore, parsed.rotations)
    case "modelopt" | "modelopt_fp4":
      return parse_modelopt(stored, CONFIG)
    case "fp_quant":
      return _parse_fp_quant(stored)
    case "mxfp4":
      return Quantization(GPT_OSS, (), tuple(stored.get("modules_to_not_convert") or ()))
    case _:
      raise fp4_ct_config.unsupported("quant_method", method)


def parse_modelopt(stored: Mapping[str, Any], file: str) -> Quantization:
  """What a `hf_quant_config.json`, or config.json in ModelOpt's words, says."""
  body = stored.get("quantization", stored)
  if not isinstance(body, Mapping):
    raise fp4_ct_config.unsupported("quantization", body)
  _mention_cache(body)
  algorithm = body.get("quant_algo")
  if isinstance(algorithm, str):  # some versions write lower case
    algorithm = algorithm.upper()
  fp4_ct_config.one_of("quant_algo", algorithm, MODELOPT_ALGORITHMS)
  if body.get("group_size") not in (None, 16):
    raise fp4_ct_config.unsupported("group_size", body["group_size"])
  for key in ("has_zero_point", "pre_quant_scale", "quantized_layers"):
    if body.get(key):
      raise fp4_ct_config.unsupported(key, body[key])
  activations = MODELOPT_ALGORITHMS[algorithm]
  scheme = Scheme("modelopt", "nvfp4", activations, activations == "fp4")
  ignore = body.get("exclude_modules") or body.get("ignore") or ()
  rules = ((fp4_ct_config.Modules(("Linear",)), scheme),)
  return Quantization("modelopt", rules, _texts("ignore", ignore), file=file)


def _parse_fp_quant(stored: Mapping[str, Any]) -> Quantization:
  one_of = fp4_ct_config.one_of
  format = one_of("forward_dtype", stored.get("forward_dtype", "nvfp4"), ROTATION_SIZES)
  methods = METHOD_SCALE if format == "mxfp4" else ("abs_max",)
  method = stored.get("forward_method", "abs_max")
  one_of(f"forward_method of {format}", method, methods)
  if stored.get("store_master_weights"):
    raise fp4_ct_config.unsupported("store_master_weights", True)
  size = stored.get("hadamard_group_size") or (16 if format == "nvfp4" else 32)
  one_of(f"hadamard_group_size of {format}", size, ROTATION_SIZES[format])
  transform = stored.get("transform_init", "hadamard")
  one_of("transform_init", transform, ("hadamard", "identity", "gsr"))
  pseudo = bool(stored.get("pseudoquantization", False))
  scheme = Scheme("fp_quant", format, "fp4", True, size, method, transform, pseudo)
  dense = stored.get("modules_to_not_convert")
  dense = ("lm_head",) if dense is None else _texts("modules_to_not_convert", dense)
  return Quantization("fp_quant", ((fp4_ct_config.Modules(("Linear",)), scheme),), dense)


def _mention_cache(stored: Mapping[str, Any]) -> None:
  for key in CACHE_KEYS:
    if stored.get(key):
      logging.warning("%s = %r is for servers; here the cache keeps its dtype", key, stored[key])


def _texts(key: str, value: Any) -> tuple[str, ...]:
  if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
    raise fp4_ct_config.unsupported(key, value)
  return tuple(value)


def _ignores(layout: str, pattern: str, module: str) -> bool:
  if layout == "compressed_tensors":
    return fp4_ct_config.matches(pattern, module)
  if layout == "modelopt":  # shell wildcards; also a parent's name
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")
  return module == pattern or module.endswith(f".{pattern}") or module.startswith(f"{pattern}.")


# --- writing


def describe(
  linears: Mapping[str, tuple[Scheme, int]],
  dense: Mapping[str, int],
  stored: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """The `quantization_config` for linears in one layout.

  Args:
    linears: {module: (how it is stored, inputs)}; at least one, all of one layout.
    dense: {module: inputs} of the linears that are not packed.
    stored: a `quantization_config` that is kept as it is where it says the same.
  Raises: ValueError for what one config of the layout cannot say.
  """
  schemes = {module: scheme for module, (scheme, _) in linears.items()}
  (layout,) = {scheme.layout for scheme in schemes.values()}
  if stored and _says_the_same(stored, linears, dense):
    return dict(stored)
  ignore = sorted({*dense, "lm_head"} - linears.keys())  # also where it is a tied embedding
  if layout == "compressed_tensors":
    return fp4_ct_config.describe(schemes, ignore)
  found = set(schemes.values())
  if len(found) > 1:
    raise ValueError(
      f"save: {layout} has one scheme for all linears; got {len(found)}, such as "
      f"{sorted(map(str, found))[:2]}. Use compressed_tensors."
    )
  scheme = found.pop()
  return _modelopt_json(scheme, ignore) if layout == "modelopt" else _fp_quant_json(scheme, ignore)


def _says_the_same(stored, linears, dense) -> bool:
  try:
    parsed = parse(stored)
  except ValueError:  # of a layout that is not read: nothing of it is kept
    return False
  return parsed.says(linears, dense)


def _modelopt_json(scheme: Scheme, ignore: list[str]) -> dict[str, Any]:
  weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
  acts = {"input_activations": weights} if scheme.activations == "fp4" else {}
  return {
    "config_groups": {"group_0": {**acts, "weights": weights, "targets": ["Linear"]}},
    "ignore": ignore,
    "quant_algo": "NVFP4" if scheme.activations == "fp4" else "W4A16_NVFP4",
    "producer": _producer(),
    "quant_method": "modelopt",
  }


def write_beside(stored: Mapping[str, Any], folder: pathlib.Path) -> None:
  """ModelOpt's own file for a `quantization_config` that `describe` made; none for others."""
  if stored.get("quant_method") != "modelopt":
    return
  body = {
    "producer": _producer(),
    "quantization": {
      "quant_algo": stored["quant_algo"],
      "kv_cache_quant_algo": None,
      "group_size": 16,
      "exclude_modules": list(stored["ignore"]),
    },
  }
  (folder / MODELOPT_FILE).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _producer() -> dict[str, str]:
  return {"name": "modelopt", "version": "written by jaxlab"}  # servers ask for the name


def _fp_quant_json(scheme: Scheme, ignore: list[str]) -> dict[str, Any]:
  return {
    "quant_method": "fp_quant",
    "forward_dtype": scheme.format,
    "forward_method": scheme.method,
    "backward_dtype": "bf16",
    "store_master_weights": False,
    "hadamard_group_size": scheme.rotation,
    "pseudoquantization": scheme.pseudo,
    "transform_init": scheme.transform,
    "modules_to_not_convert": ignore,
  }
