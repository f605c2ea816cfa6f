"""Looks at a model folder or GGUF file before anyone loads it, and says what it finds.

Every check reads files only (headers, then tensors one at a time) and returns findings; nothing is
raised for a bad model. A finding is "ok", "note" (worth knowing), "warning" (loads, may answer
badly) or "broken" (will not load, or cannot be right).
"""

import collections
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxlab.io import (
  assemble,
  doctor_fp4,
  export,
  files,
  fp4_checkpoints,
  gguf,
  gguf_model,
  huggingface,
  names,
  orbax,
)
from jaxlab.io import safetensors as st
from jaxlab.io import tokenizer as tokenizers
from jaxlab.io.findings import Finding
from jaxlab.io.findings import attempt as _attempt
from jaxlab.models import zoo

PARAMS = "params"  # where `jaxlab.save` puts the arrays
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>", "</s>")
PROBE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."})


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
    yield _format(tensors, config or {})
    quantization, dialect = doctor_fp4.dialect(tensors, config or {})
    yield from dialect
    yield from doctor_fp4.for_servers(tensors, quantization)
    yield _bits(tensors)
    if not is_broken(dialect):
      yield from doctor_fp4.bits(tensors)
    if module and not is_broken(dialect):
      yield _names(folder, module)
    yield from _tied(tensors, config or {})
    yield from _values(tensors)
    yield from doctor_fp4.scales(tensors, quantization)
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
    lambda: gguf_model.check_names(file, expected, tied=module.config.tie_embeddings),
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


def _format(tensors: st.SafetensorsFolder, config: Mapping[str, Any]) -> Finding:
  kinds = collections.Counter(str(tensors.shape_dtype(n)[1]) for n in tensors.names())
  dialect = doctor_fp4.name_of(tensors, config)
  return Finding("ok", f"format: safetensors, {dialect}, tensors {_counts(kinds)}")


def _bits(tensors: st.SafetensorsFolder) -> Finding:
  """Of the whole folder: parameters are what codes stand for and dense tensors hold."""
  packed = fp4_checkpoints.packed_names(tensors)
  count = stored = 0
  for name in tensors.names():
    stored += tensors.raw(name).nbytes
    module, _, part = name.rpartition(".")
    size = int(np.prod(tensors.shape_dtype(name)[0]))
    if name.endswith("_blocks") or (module in packed and part in fp4_checkpoints.CODES):
      count += 2 * size
    elif not (module in packed and part in doctor_fp4.FP4_PARTS) and not name.endswith("_scales"):
      count += size
  return _bits_line(count, stored)


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
