"""PEFT adapter folders: `adapter_config.json` and `adapter_model.safetensors`, in and out.

PEFT stores A as [R, in] and B as [out, R], by layer; trained norms are full copies, listed under
`modules_to_save`. Source: huggingface/peft 0.21 `utils/save_and_load.py`, `tuners/lora/config.py`.
Dims: L layers, I in, O out, R rank.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import lora
from jaxlab.io import export, files, names
from jaxlab.io import safetensors as st
from jaxlab.nn import stack, weights

PyTree = Any
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MODULES = {linear: names.module_name(linear) for linear in lora.TARGETS}
# Gains that an adapter may bring along as full copies.
GAINS = ("layers/attn_norm", "layers/mlp_norm", "layers/q_norm", "layers/k_norm", "norm")
_FACTOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight")
PLAIN_PATTERN = re.compile(r"[\w.]+")
# Options that change the product or its names. Fields not listed are read, or have no effect on it.
REFUSED = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  "use_dora": (False,),
  "lora_bias": (False,),
  "use_qalora": (False,),
  "use_bdlora": (None, False),
  "fan_in_fan_out": (False,),
  "layers_to_transform": (None,),
  "layer_replication": (None,),
  "alora_invocation_tokens": (None,),
  "arrow_config": (None,),
  "kasa_config": (None,),
  "target_parameters": (None, []),
  "trainable_token_indices": (None,),
  "megatron_config": (None,),
}
# Initialisations that subtract their start from the base: the adapter fits another base then.
SHIFTING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def save_adapter(
  params: PyTree, config: lora.LoRAConfig, folder: str | os.PathLike[str], base: str
) -> None:
  """Writes the adapters of `params` (and the trained norms) as a PEFT folder, complete or absent.

  An older adapter folder there is replaced.

  Args:
    params: with adapters attached by `config`; stacked or not.
    base: name or path of the base model, for `base_model_name_or_path`.
  Raises: ValueError if a target of the config has no adapter in `params`.
  """
  tensors = {PREFIX + name: x for name, x in _adapter_tensors(params, config).items()}
  with export.new_folder(folder, replaces=CONFIG) as part:
    text = json.dumps(_peft_config(config, base), indent=2, sort_keys=True) + "\n"
    (part / CONFIG).write_text(text, encoding="utf-8")
    st.write_safetensors(part / WEIGHTS, tensors)


def load_adapter(folder: str | os.PathLike[str], params: PyTree) -> PyTree:
  """Attaches the adapters of a PEFT folder, written by us or by PEFT.

  Args:
    params: of the base model, without adapters, stacked or not.
  Returns: params with `weights.LoRA` leaves (float32 factors) and the saved norms (float32).
  Raises: ValueError naming the field and value of an unsupported option, or the tensor that does
    not fit the model; CorruptFile for a damaged file.
  """
  folder = pathlib.Path(folder)
  config = read_config(folder)
  tensors = st.SafetensorsFolder(_existing(folder, WEIGHTS))
  factors: dict[str, dict[int, dict[str, str]]] = {}
  gains: dict[str, dict[int | None, str]] = {}
  places = _gain_places(params)
  for name in tensors.names():
    short = name.removeprefix(PREFIX)
    if match := _FACTOR.fullmatch(short):
      layer, module, part = int(match[1]), match[2], match[3].lower()
      factors.setdefault(module, {}).setdefault(layer, {})[part] = name
    elif short in places:
      path, layer = places[short]
      gains.setdefault(path, {})[layer] = name
    else:
      raise ValueError(
        f"load_adapter: {folder} has a tensor that this model has no place for; got {name!r}. "
        "Adapters of the layers' linears and copies of norms are supported."
      )
  if unknown := sorted(factors.keys() - set(MODULES.values())):
    raise _unsupported(folder, "target_modules", unknown, ", ".join(MODULES.values()))
  return _attach(params, config, tensors, factors, gains)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """`adapter_config.json`, checked.

  Raises: ValueError naming the field and value of an option that we do not have.
  """
  folder = pathlib.Path(folder)
  config = files.read_json_object(_existing(folder, CONFIG))
  for field, supported in REFUSED.items():
    if config.get(field, supported[0]) not in supported:
      raise _unsupported(folder, field, config[field], " or ".join(map(str, supported)))
  init = config.get("init_lora_weights", True)
  if isinstance(init, str) and init.lower().startswith(SHIFTING_INITS):
    raise _unsupported(folder, "init_lora_weights", init, "true, false, 'gaussian' or 'eva'")
  for key in config.get("alpha_pattern") or ():
    if not PLAIN_PATTERN.fullmatch(key):  # PEFT takes regular expressions; one may never end
      raise _unsupported(folder, "alpha_pattern", key, "ends of module paths, such as 'q_proj'")
  for field in ("r", "lora_alpha"):
    if not isinstance(config.get(field), int | float) or not config[field] > 0:
      raise _unsupported(folder, field, config.get(field), "a number > 0")
  return config


def lora_config(folder: str | os.PathLike[str]) -> lora.LoRAConfig:
  """The `LoRAConfig` to go on training an adapter with.

  Raises: ValueError for options that one rank and one alpha cannot express.
  """
  config = read_config(folder)
  for field in ("rank_pattern", "alpha_pattern"):
    if config.get(field):
      raise _unsupported(pathlib.Path(folder), field, config[field], "one rank, one alpha")
  wanted = config["target_modules"]
  wanted = [wanted] if isinstance(wanted, str) else wanted
  short = {module.rpartition(".")[2]: linear for linear, module in MODULES.items()}
  targets = lora.TARGETS if wanted == ["all-linear"] else [short.get(w, w) for w in wanted]
  scale = _scale(config, "", config["r"])
  saved = set(config.get("modules_to_save") or ())
  norms = {"input_layernorm", "post_attention_layernorm"} <= saved
  order = [t for t in lora.TARGETS if t in targets] + [t for t in targets if t not in lora.TARGETS]
  return lora.LoRAConfig(config["r"], scale * config["r"], tuple(order), norms)


def _adapter_tensors(params: PyTree, config: lora.LoRAConfig) -> dict[str, st.TensorSpec]:
  """{name below the prefix: tensor}."""
  tensors: dict[str, st.TensorSpec] = {}
  gains = {names.HUGGING_FACE[f"layers/{norm}"] for norm in lora.NORMS if config.train_norms}
  found = set()
  for path, layer, like, take in export.per_layer(params):
    if path not in names.HUGGING_FACE:
      raise ValueError(
        f"save_adapter: the model must be a Llama or Qwen; got one with {path!r}. Use jaxlab.save."
      )
    template = names.HUGGING_FACE[path]
    name = template.format(layer)
    if isinstance(like, weights.LoRA):
      found.add(path.split("/")[1])
      module = name.removesuffix(".weight")
      for part, x in (("a", like.a), ("b", like.b)):
        make = lambda take=take, part=part: np.asarray(getattr(take(), part), np.float32).T
        spec = st.TensorSpec(x.shape[::-1], np.float32, make)
        tensors[f"{module}.lora_{part.upper()}.weight"] = spec
    elif template in gains:
      make = lambda take=take: np.asarray(take(), np.float32)
      tensors[name] = st.TensorSpec(like.shape, np.float32, make)
  if found != set(config.targets):
    raise ValueError(
      f"save_adapter: params must have adapters on {sorted(config.targets)}, as the config says; "
      f"got {sorted(found)}. Pass the config that attached them."
    )
  return tensors


def _peft_config(config: lora.LoRAConfig, base: str) -> dict[str, Any]:
  norms = [names.HUGGING_FACE[f"layers/{n}"].split(".")[-2] for n in lora.NORMS]
  alpha = config.scale * config.rank
  return {
    "base_model_name_or_path": base,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    "lora_dropout": 0.0,
    "modules_to_save": norms if config.train_norms else None,
    "peft_type": "LORA",
    "r": config.rank,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_modules": [MODULES[t].rpartition(".")[2] for t in config.targets],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
  }


def _gain_places(params: PyTree) -> dict[str, tuple[str, int | None]]:
  paths = {path for path, *_ in export.per_layer(params)} & set(GAINS)
  return names.expand(paths, names.HUGGING_FACE, stack.num_layers(params["layers"]))


def _attach(params, config, tensors, factors, gains) -> PyTree:
  """Kernels and gains of `params` replaced, in either layout."""
  depth = stack.num_layers(params["layers"])

  def replace(path: str, w: Any) -> Any:
    stacked_path, layer = export.split_path(path)
    layers = [layer] if layer is not None else range(depth)
    if stacked_path in gains:
      layers = [None] if stacked_path == "norm" else layers
      return _gain(gains[stacked_path], layers, tensors, w)
    linear = stacked_path.split("/")[1] if stacked_path.endswith("/kernel") else None
    if not stacked_path.startswith("layers/") or MODULES.get(linear) not in factors:
      return w
    if isinstance(w, weights.LoRA):
      raise ValueError(f"load_adapter: {path} has an adapter already. Merge or detach it first.")
    return _adapter(w, MODULES[linear], factors[MODULES[linear]], layers, tensors, config)

  return weights.map_leaves(replace, params)


def _adapter(w, module, found, layers, tensors, config) -> weights.LoRA:
  parts: dict[str, list[np.ndarray]] = {"a": [], "b": []}
  scales = set()
  for layer in layers:
    full = f"model.layers.{layer}.{module}"
    for part in ("a", "b"):
      name = f"{PREFIX}{full}.lora_{part.upper()}.weight"
      if found.get(layer, {}).get(part) != name:
        raise ValueError(
          f"load_adapter: {tensors.path} has no tensor {name!r}. An adapter must cover all layers."
        )
      parts[part].append(np.asarray(tensors.read(name), np.float32).T)
    scales.add(_scale(config, full, parts["a"][-1].shape[-1]))
  ranks = {a.shape[-1] for a in parts["a"]}
  if len(scales) > 1 or len(ranks) > 1:
    raise _unsupported(
      tensors.path.parent, "rank_pattern / alpha_pattern", f"ranks {sorted(ranks)} for {module}",
      "one rank and one scale for all layers of a linear",
    )  # fmt: skip
  pair = [parts[p][0] if len(w.shape) == 2 else np.stack(parts[p]) for p in ("a", "b")]
  rank = ranks.pop()
  for x, shape in zip(
    pair, ((*w.shape[:-1], rank), (*w.shape[:-2], rank, w.shape[-1])), strict=True
  ):
    if x.shape != shape:
      raise ValueError(
        f"load_adapter: {module} of {tensors.path} must have factors {shape} for this model; got "
        f"{x.shape}. It was trained on another base."
      )
  return weights.LoRA(w, *map(jax.device_put, pair), scales.pop())


def _gain(found, layers, tensors, w) -> jax.Array:
  missing = [layer for layer in layers if layer not in found]
  if missing:
    raise ValueError(
      f"load_adapter: {tensors.path} has a norm for some layers only; {missing[0]} is missing. "
      "Save the adapter again."
    )
  rows = [np.asarray(tensors.read(found[layer]), np.float32) for layer in layers]
  gain = np.stack(rows) if w.ndim == 2 else rows[0]
  if gain.shape != w.shape:
    raise ValueError(
      f"load_adapter: {found[layers[0]]} of {tensors.path} must have shape {w.shape}; got "
      f"{gain.shape}. It was trained on another base."
    )
  return jnp.asarray(gain)


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
  """alpha / r, or alpha / sqrt(r); a key of the pattern is the end of a module path."""
  alpha = config["lora_alpha"]
  for key, value in (config.get("alpha_pattern") or {}).items():
    if f".{module}".endswith(f".{key}"):
      alpha = value
      break
  return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _existing(folder: pathlib.Path, name: str) -> pathlib.Path:
  if not folder.is_dir():
    raise ValueError(f"load_adapter: the folder must exist; got {str(folder)!r}. Check the path.")
  path = files.member(folder, name)
  if path is None:
    raise ValueError(
      f"load_adapter: {folder} has no {name}. A PEFT adapter folder has {CONFIG} and {WEIGHTS}."
    )
  return path


def _unsupported(folder: pathlib.Path, field: str, value: Any, supported: str) -> ValueError:
  return ValueError(
    f"load_adapter: {folder / CONFIG}: {field} = {value!r} is not supported; "
    f"jaxlab has {supported}."
  )
