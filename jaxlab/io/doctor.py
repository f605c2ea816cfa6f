"""Looks at a model folder or GGUF file before anyone loads it, and says what it finds.

Every check reads files only (headers, then tensors one at a time) and returns findings; nothing is
raised for a bad model. A finding is "ok", "note" (worth knowing), "warning" (loads, may answer
badly) or "broken" (will not load, or cannot be right).
"""

import collections
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxlab.io import assemble, export, files, fp4_checkpoints, gguf, huggingface, names, orbax
from jaxlab.io import safetensors as st
from jaxlab.io import tokenizer as tokenizers
from jaxlab.models import zoo

PARAMS = "params"  # where `jaxlab.save` puts the arrays
LEVELS = ("ok", "note", "warning", "broken")
# Largest believable weight. Upside down, a global scale is off by its square, 1e5 or more.
MAX_WEIGHT = 1e3
MODELOPT_SCALE = "weight_scale_2"
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>", "</s>")
PROBE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."})


class Finding(NamedTuple):
  """One line of the report."""

  level: str  # of LEVELS
  text: str


def examine(path: str | os.PathLike[str]) -> list[Finding]:
  """All findings for a model folder or a `.gguf` file, in the order of the checks."""
  path = pathlib.Path(path)
  if not path.exists():
    return [Finding("broken", f"{path} does not exist.")]
  if huggingface.is_gguf(path):
    return list(_gguf_checks(path))
  if orbax.is_checkpoint(path / PARAMS):
    return [_own_check(path)]
  return list(_folder_checks(path))


def is_broken(findings: list[Finding]) -> bool:
  return any(f.level == "broken" for f in findings)


def _attempt(what: str, make) -> tuple[Any, Finding | None]:
  """(value, None), or (None, the finding that the user's mistake or the damaged file makes)."""
  try:
    return make(), None
  except ValueError as error:  # CorruptFile is one
    return None, Finding("broken", f"{what}: {' '.join(str(error).split())}")


def _own_check(folder: pathlib.Path) -> Finding:
  _, problem = _attempt("checkpoint", lambda: orbax.load_params(folder / PARAMS))
  return problem or Finding("ok", "format: a checkpoint of our own; every digest is right")


def _folder_checks(folder: pathlib.Path) -> Iterator[Finding]:
  config, problem = _attempt("config.json", lambda: huggingface.load_config(folder))
  if problem:
    yield problem
  yield from _foreign_code(folder, config or {})
  tensors, problem = _attempt("weights", lambda: st.SafetensorsFolder(folder))
  if problem:
    yield problem
  module = None
  if config:
    module, problem = _attempt("architecture", lambda: zoo.from_config(config))
    yield problem or Finding("ok", f"architecture: {config['model_type']}, {_size(module)}")
  if tensors:
    dialect = list(_dialect(tensors, config or {}))
    yield from dialect
    yield from _bits(tensors)
    if module and not is_broken(dialect):
      yield _names(folder, module)
    yield from _tied(tensors, config or {})
    yield from _values(tensors)
    yield from _scales(tensors)
  tokenizer, problem = _attempt("tokenizer", lambda: tokenizers.Tokenizer.from_folder(folder))
  if problem:
    yield problem
  elif tokenizer is None:
    yield Finding("warning", "tokenizer: the folder has no tokenizer.json; only token ids go in.")
  generation, problem = _attempt(export.GENERATION, lambda: _generation(folder))
  if problem:
    yield problem
  elif config:
    yield from _tokenizer(tokenizer, config, generation)


def _gguf_checks(path: pathlib.Path) -> Iterator[Finding]:
  file, problem = _attempt("file", lambda: gguf.read_gguf(path))
  if problem:
    yield problem
    return
  types = collections.Counter(t.type for t in file.tensors.values())
  yield Finding("ok", f"format: GGUF, tensors {_counts(types)}")
  count = sum(int(np.prod(t.shape)) for t in file.tensors.values())
  yield _bits_line(count, sum(len(t.raw) for t in file.tensors.values()))
  config, problem = _attempt("architecture", lambda: huggingface.load_config(path))
  if problem:
    yield problem
    return
  module = zoo.from_config(config)
  yield Finding("ok", f"architecture: {config['model_type']}, {_size(module)}")
  expected = names.expand(assemble.parameter_shapes(module), names.GGUF, module.config.num_layers)
  _, problem = _attempt(
    "tensors",
    lambda: assemble.check_names(
      expected, file.tensors, path.name, tied=module.config.tie_embeddings
    ),
  )
  yield problem or Finding("ok", "tensors: all there, none too many")
  yield Finding(
    "ok", f"head: {'tied to the embedding' if config['tie_word_embeddings'] else 'own'}"
  )
  bad = [n for n in file.tensors if n in expected and not np.isfinite(file.dequantize(n)).all()]
  yield _values_line(bad)
  tokenizer, problem = _attempt("tokenizer", lambda: tokenizers.Tokenizer.from_gguf(file))
  if problem:
    yield problem
  yield from _tokenizer(tokenizer, config, {})


def _size(module: Any) -> str:
  count = sum(int(np.prod(s)) for s in assemble.parameter_shapes(module).values())
  return f"{module.config.num_layers} layers, {count / 1e6:.1f} M parameters"


def _counts(counter: Mapping[str, int]) -> str:
  return ", ".join(f"{n} {kind}" for kind, n in sorted(counter.items()))


def _foreign_code(folder: pathlib.Path, config: Mapping[str, Any]) -> Iterator[Finding]:
  scripts = sorted(p.name for p in folder.glob("*.py") if p.name != "verify.py")
  if scripts or "auto_map" in config:
    yield Finding("note", f"code: {scripts or 'auto_map'} is ignored; nothing of it runs.")
  pickles = sorted(p.name for p in folder.iterdir() if p.suffix in files.PICKLE_SUFFIXES)
  if pickles:
    yield Finding("note", f"pickles: {pickles[0]} and the like are never opened.")


def _dialect(tensors: st.SafetensorsFolder, config: Mapping[str, Any]) -> Iterator[Finding]:
  kinds = collections.Counter(str(tensors.shape_dtype(n)[1]) for n in tensors.names())
  quantization = config.get("quantization_config")
  dialect = "dense"
  if quantization:
    dialect = f"{quantization.get('quant_method')} {quantization.get('format', '')}".strip()
  yield Finding("ok", f"format: safetensors, {dialect}, tensors {_counts(kinds)}")
  if quantization:
    _, problem = _attempt(
      "quantization_config", lambda: fp4_checkpoints.parse_quantization_config(quantization)
    )
    if problem:
      yield problem
  scaled = [n for n in tensors.names() if n.endswith(MODELOPT_SCALE)]
  if scaled:
    yield Finding(
      "broken", f"scales: {scaled[0]} is ModelOpt's layout (a multiplier), not ours yet."
    )
  has_codes = any(n.endswith(f".{fp4_checkpoints.PACKED}") for n in tensors.names())
  if has_codes and not quantization:
    yield Finding("broken", "config.json: there are packed weights but no quantization_config.")
  if quantization and not has_codes and not scaled:
    yield Finding("broken", "config.json: there is a quantization_config but no packed weight.")


def _bits(tensors: st.SafetensorsFolder) -> Iterator[Finding]:
  count = stored = 0
  for name in tensors.names():
    shape, _ = tensors.shape_dtype(name)
    stored += tensors.raw(name).nbytes
    if name.endswith(f".{fp4_checkpoints.PACKED}"):
      count += 2 * int(np.prod(shape))
    elif not name.endswith(("_scale", MODELOPT_SCALE)):
      count += int(np.prod(shape))
  yield _bits_line(count, stored)


def _bits_line(count: int, stored: int) -> Finding:
  bits = 8 * stored / max(count, 1)
  return Finding("ok", f"size: {stored / 1e6:.1f} MB, {bits:.2f} bits per parameter")


def _names(folder: pathlib.Path, module: Any) -> Finding:
  """Names and shapes, by the loader itself, with nothing kept."""

  def load():
    huggingface.load_params(folder, module, ml_dtypes.bfloat16, place=lambda path, leaf: None)

  _, problem = _attempt("tensors", load)
  return problem or Finding("ok", "tensors: all there, none too many, shapes as in config.json")


def _tied(tensors: st.SafetensorsFolder, config: Mapping[str, Any]) -> Iterator[Finding]:
  template = names.huggingface(config.get("model_type"))
  embed, head = template["embed"], template["head/kernel"]
  there = set(tensors.names())
  if not config.get("tie_word_embeddings", template is not names.HUGGING_FACE):
    yield Finding("ok", "head: own")
  elif head not in there or embed not in there:
    yield Finding("ok", "head: tied to the embedding")
  elif np.array_equal(tensors.raw(head), tensors.raw(embed)):
    yield Finding("note", "head: tied, and stored a second time with the same bytes")
  else:
    yield Finding(
      "warning", f"head: config.json ties it, but {head} differs from the embedding and is ignored."
    )


def _values(tensors: st.SafetensorsFolder) -> Iterator[Finding]:
  """NaN and infinity in dense tensors."""
  bad = []
  for name in tensors.names():
    value = tensors.read(name)
    if value.dtype in assemble.FLOATS and not np.isfinite(value).all():
      bad.append(name)
    assemble.release(value)
  yield _values_line(bad)


def _values_line(bad: list[str]) -> Finding:
  if bad:
    return Finding("broken", f"values: {len(bad)} tensors are not finite, such as {bad[0]}.")
  return Finding("ok", "values: all finite")


def _scales(tensors: st.SafetensorsFolder) -> Iterator[Finding]:
  """FP4: the three tensors of each linear, finite, and the global scale a divisor."""
  packed = [n for n in tensors.names() if n.endswith(f".{fp4_checkpoints.PACKED}")]
  if not packed:
    return
  there = set(tensors.names())
  largest = {}
  for name in packed:
    linear = name.removesuffix(f".{fp4_checkpoints.PACKED}")
    parts = [f"{linear}.{p}" for p in (fp4_checkpoints.PACKED, fp4_checkpoints.SCALE)]
    parts.append(f"{linear}.{fp4_checkpoints.GLOBAL_SCALE}")
    own = {part: tensors.read(part) for part in parts if part in there}
    leaf, problem = _attempt(
      "scales", lambda own=own: fp4_checkpoints.from_compressed_tensors(own, str(tensors.path))
    )
    if problem:
      yield problem
      return
    largest[linear] = 6 * float(leaf.scale.astype(np.float32).max()) / float(leaf.tensor_scale)
  linear = max(largest, key=largest.get)
  if largest[linear] > MAX_WEIGHT:
    yield Finding(
      "broken",
      f"scales: the largest weight of {linear} would be {largest[linear]:.3g}. Its global scale is "
      "a multiplier (ModelOpt's convention); compressed-tensors stores the divisor.",
    )
  else:
    yield Finding(
      "ok", f"scales: {len(packed)} linears, divisors, largest weight {largest[linear]:.3g}"
    )


def _generation(folder: pathlib.Path) -> Mapping[str, Any]:
  file = files.member(folder, export.GENERATION)
  return files.read_json_object(file) if file else {}


def _tokenizer(
  tokenizer: tokenizers.Tokenizer | None, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Iterator[Finding]:
  rows = config.get("vocab_size")
  ends = generation.get("eos_token_id", config.get("eos_token_id"))
  ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
  if isinstance(rows, int) and any(not 0 <= e < rows for e in ends):
    yield Finding("broken", f"eos: ids {ends} are not all below the vocabulary of {rows}.")
  if tokenizer is None:
    return
  if isinstance(rows, int):
    spare = rows - tokenizer.vocab_size
    if spare < 0:
      yield Finding(
        "broken",
        f"vocabulary: the tokenizer has {tokenizer.vocab_size} ids, the model {rows} rows.",
      )
    else:
      yield Finding("ok", f"vocabulary: {tokenizer.vocab_size} ids, {spare} padding rows")
  named = [tokenizer.decode([e], skip_special_tokens=False) for e in tokenizer.eos_ids]
  yield (
    Finding("ok", f"eos: {named}")
    if named
    else Finding("warning", "eos: no end of text is known; answers run to their limit.")
  )
  yield from _template(tokenizer, named)


def _template(tokenizer: tokenizers.Tokenizer, ends: list[str]) -> Iterator[Finding]:
  if tokenizer.chat_template is None:
    yield Finding("note", "template: none; give text, not messages.")
    return
  text, problem = _attempt("template", lambda: tokenizer.apply_chat_template(PROBE, False))
  if problem:
    yield problem
    return
  closing = [t for t in TURN_ENDS if t in text.rpartition(PROBE[1]["content"])[2]]
  if closing and not set(closing) & set(ends):
    yield Finding(
      "warning", f"template: a turn ends with {closing[0]}, which is not among the eos {ends}."
    )
  else:
    yield Finding("ok", "template: renders" + (f", turns end with {closing[0]}" if closing else ""))
