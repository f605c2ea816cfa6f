"""A language model as one value, from Hugging Face, GGUF or our own checkpoints, and back."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jaxlab.data import assets
from jaxlab.decode import sampling, text
from jaxlab.io import export as exports
from jaxlab.io import huggingface, names, orbax, receipt
from jaxlab.io import tokenizer as tokenizers
from jaxlab.models import zoo
from jaxlab.nn import weights
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from pallas_kernels import target

PyTree = Any
PARAMS = "params"  # folder of the arrays inside a checkpoint of ours
DEFAULT_SAMPLING = sampling.SamplingConfig()


@dataclasses.dataclass(frozen=True)
class LM:
  """A model with all that goes with it; `dataclasses.replace(lm, params=...)` makes a variant.

  module: `module.apply({"params": params}, tokens_BT) -> logits_BTV`.
  params: stacked; see `jaxlab.nn.weights` for what a kernel may be.
  config: the Hugging Face config.json; `module.config` is the architecture.
  tokenizer: None for a folder without one.
  path: as given to `load`.
  source: what an export repeats (names, dtypes, shards).
  """

  module: zoo.Model
  params: PyTree
  config: Mapping[str, Any]
  tokenizer: tokenizers.Tokenizer | None
  path: str
  source: huggingface.Source

  def generate(
    self,
    prompts: Sequence[text.Prompt],
    config: sampling.SamplingConfig = DEFAULT_SAMPLING,
    *,
    seed: int = 0,
    samples: int = 1,
    on_text: Callable[[int, str], None] | None = None,
  ) -> text.Generated:
    """Continues texts, answers conversations; `.texts` of the result are prompt-major.

    See `jaxlab.decode.text.generate_texts`. A loop of calls on a CPU is quicker with
    `dataclasses.replace(lm, params=text.serving_params(lm.params))`.
    """
    key = jax.random.key(seed)
    return text.generate_texts(self, prompts, config, key, samples=samples, on_text=on_text)


def load(
  path: str | os.PathLike[str],
  dtype: jax.typing.DTypeLike | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> LM:
  """Loads a model.

  Args:
    path: a Hugging Face folder, a `.gguf` file, a folder written by `save`, or "demo" (the packaged
      SmolLM2-135M-Instruct).
    dtype: of dense parameters; None means float32 on a CPU (16-bit matmuls are slow there) and the
      checkpoint's own elsewhere. The choice is logged.
    mesh: shards the parameters over it by the library's rules; the module is told.
  Raises: ValueError for what is not there or not supported; CorruptFile for damaged files.
  """
  name = str(path)
  path = assets.model_path(name)
  if not path.exists():
    raise ValueError(
      f"load: {name!r} does not exist. Give a model folder, a .gguf file, or 'demo'."
    )
  if orbax.is_checkpoint(path / PARAMS):
    return _load_own(name, path, dtype, mesh)
  config, source = huggingface.load_config(path), huggingface.load_source(path)
  dtype = _choose_dtype(dtype, source, config, name)
  module = _on_mesh(zoo.from_config(config, dtype), mesh)
  place = _place(mesh, module.config.num_kv_heads)
  params = huggingface.load_params(path, module, dtype, place=place)
  return LM(module, params, config, huggingface.load_tokenizer(path), name, source)


def save(lm: LM, path: str | os.PathLike[str]) -> None:
  """Writes a checkpoint of our own: every kernel type exactly as it is, adapters included.

  Only `load` reads it; `export` writes what other programs read. Replaces an older checkpoint
  there, which stays whole until the new one is. Of several processes all must call it.
  """
  path = pathlib.Path(path)
  path.mkdir(parents=True, exist_ok=True)
  if meshes.leads():
    exports.write_config(lm.config, lm.source.path, path)
    exports.write_tokenizer(lm.tokenizer, lm.source.path, path)
  source = {
    "dtypes": dict(lm.source.dtypes),
    "weight_map": lm.source.weight_map and dict(lm.source.weight_map),
    "metadata": lm.source.metadata and dict(lm.source.metadata),
  }
  dtype = str(jnp.dtype(lm.module.param_dtype))
  orbax.save_params(path / PARAMS, lm.params, {"source": source, "dtype": dtype})


def export(
  lm: LM,
  folder: str | os.PathLike[str],
  *,
  dtype: jax.typing.DTypeLike | None = None,
  layout: str | None = None,
) -> None:
  """Writes a folder that transformers loads, with a receipt of what it should answer there.

  As `huggingface.save_pretrained`, plus `receipt.json` and `verify.py`; the receipt is made from
  the written files, so it also checks the export. Needs memory for a second copy of the model.
  FP4 in other layouts than compressed-tensors gets none: transformers on a CPU cannot check it.

  Raises: ValueError for an encoder: there is no answer to be received.
  """
  if not lm.module.config.causal:
    raise ValueError(
      "export: the receipt is of continued texts, so the model must be a decoder; got an encoder. "
      "Use jaxlab.io.huggingface.save_pretrained."
    )
  with exports.new_folder(folder) as part:
    exports.write_folder(lm, part, dtype=dtype, layout=layout)
    if (layout or exports.source_layout(lm)) in (None, "compressed_tensors"):
      receipt.write_receipt(part)


def _load_own(name, path, dtype, mesh) -> LM:
  params, meta = orbax.load_params(path / PARAMS)
  if dtype is None and target.current_target().platform == "cpu":
    dtype = jnp.float32
  if dtype is not None:
    params = _cast_dense(params, dtype)
  config = huggingface.load_config(path)
  module = _on_mesh(zoo.from_config(config, dtype or jnp.dtype(meta["dtype"])), mesh)
  if mesh is not None:
    params = weights.map_leaves(_place(mesh, module.config.num_kv_heads), params)
  source = huggingface.Source(path, **meta["source"])
  return LM(module, params, config, huggingface.load_tokenizer(path), name, source)


def _cast_dense(params: PyTree, dtype) -> PyTree:
  """Dense kernels and gains in `dtype`; packed kernels and the masters of adapters stay."""

  def cast(w):
    if isinstance(w, weights.LoRA):
      return dataclasses.replace(w, base=cast(w.base))
    return w if weights.is_leaf(w) else w.astype(dtype)

  return jax.tree.map(cast, params, is_leaf=weights.is_leaf)


def _choose_dtype(dtype, source: huggingface.Source, config: Mapping[str, Any], name: str):
  platform = target.current_target().platform
  embed = names.huggingface(config.get("model_type"))["embed"]
  stored = source.dtypes.get(embed, "bfloat16")
  chosen = jnp.dtype(dtype or (jnp.float32 if platform == "cpu" else stored))
  why = "as asked" if dtype else "float32 on a CPU" if platform == "cpu" else "as in the checkpoint"
  logging.info("load: %s, dense parameters in %s (%s)", name, chosen, why)
  return chosen


def _on_mesh(module: zoo.Model, mesh: jax.sharding.Mesh | None) -> zoo.Model:
  """The module that knows its mesh: kernels of custom code are run on each device's part."""
  if mesh is None:
    return module
  return module.clone(placement=rules.Placement(mesh, module.config.num_kv_heads))


def _place(mesh: jax.sharding.Mesh | None, num_kv_heads: int):
  """(path, kernel of host or device arrays) -> kernel where it belongs."""
  if mesh is None:
    return lambda path, x: jax.device_put(x)
  return functools.partial(rules.shard_leaf, mesh=mesh, num_kv_heads=num_kv_heads)
