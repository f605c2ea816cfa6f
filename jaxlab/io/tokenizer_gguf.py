"""A byte-level BPE tokenizer out of the metadata of a GGUF file.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves the rule to the reader; the
rules here are those of the models' own tokenizer.json where there is one, else of llama.cpp.
Source: llama.cpp `src/llama-vocab.cpp` (`llm_tokenizer_bpe`, `special_eog_ids`).
"""

from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxlab import errors
from jaxlab.io import gguf

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
WORDS = (  # Qwen2's and Llama 3's; they differ in how many digits go together
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
  r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {  # applied one after the other, each inside the pieces of the one before
  "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"),
  "gpt-2": (GPT2_SPLIT,),
  "llama-bpe": (WORDS.format(digits="{1,3}"),),
  "qwen2": (WORDS.format(digits=""),),
  "smollm": (r"\p{N}", GPT2_SPLIT),
}
# A model may end its turn with any of these; the file's own eos is only one of them.
END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
ROLES = {  # transformers' name -> GGUF's
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
}  # fmt: skip


class Parts(NamedTuple):
  """What a tokenizer is made of; see `tokenizer.Tokenizer`."""

  backend: tokenizers.Tokenizer
  special_tokens: dict[str, str]
  eos_ids: tuple[int, ...]
  chat_template: str | None
  config: dict[str, Any]


def build(file: gguf.GGUFFile) -> Parts:
  """The parts of a tokenizer.

  Raises: ValueError for a kind of tokenizer, or a pre-tokenizer, that we do not know; CorruptFile
    if lists are missing or contradict each other.
  """
  kind = file.metadata.get("tokenizer.ggml.model")
  if kind != "gpt2":
    raise ValueError(
      f"Tokenizer.from_gguf: tokenizer.ggml.model must be 'gpt2' (byte-level BPE); got {kind!r} "
      f"in {file.path}. Use the model's Hugging Face folder instead."
    )
  pre = file.metadata.get("tokenizer.ggml.pre", "default")
  if pre not in SPLITS:
    raise ValueError(
      f"Tokenizer.from_gguf: tokenizer.ggml.pre must be one of {', '.join(SPLITS)}; got {pre!r} "
      f"in {file.path}. Use the model's Hugging Face folder instead."
    )
  tokens = _list(file, "tokens", str)
  kinds = _list(file, "token_type", int, like=tokens)
  special_tokens = _special_tokens(file, tokens)
  backend = _backend(file, tokens, pre)
  control = [t for t, k in zip(tokens, kinds, strict=True) if k == CONTROL]
  own = [t for t, k in zip(tokens, kinds, strict=True) if k == USER_DEFINED]
  named = [t for t in special_tokens.values() if t not in control]
  backend.add_special_tokens([_added(t, special=True) for t in [*control, *named]])
  backend.add_tokens([_added(t, special=False) for t in own if t not in named])
  _set_post_processor(file, backend, special_tokens, pre)
  ends = [special_tokens.get("eos_token"), *(t for t in END_NAMES if t in control)]
  eos_ids = tuple(dict.fromkeys(backend.token_to_id(t) for t in ends if t is not None))
  template = file.metadata.get("tokenizer.chat_template")
  if not isinstance(template, str | None):
    raise _corrupt(file, "tokenizer.chat_template", "must be a text")
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  return Parts(backend, special_tokens, eos_ids, template, config)


def _corrupt(file: gguf.GGUFFile, key: str, rule: str) -> errors.CorruptFile:
  return errors.CorruptFile(file.path, f"key {key!r}", rule, "Convert the model again.")


def _list(file: gguf.GGUFFile, name: str, kind: type, like: list | None = None) -> list:
  key = f"tokenizer.ggml.{name}"
  values = file.metadata.get(key)
  if not isinstance(values, list) or not all(type(v) is kind for v in values):
    raise _corrupt(file, key, f"must be a list of {kind.__name__}")
  if like is not None and len(values) != len(like):
    raise _corrupt(file, key, f"must have one entry a token, {len(like)}; got {len(values)}")
  return values


def _special_tokens(file: gguf.GGUFFile, tokens: list[str]) -> dict[str, str]:
  found = {}
  for role, name in ROLES.items():
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.metadata.get(key)
    if token_id is None:
      continue
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
      raise _corrupt(file, key, f"must be an id below {len(tokens)}; got {token_id!r}")
    found[role] = tokens[token_id]
  return found


def _backend(file: gguf.GGUFFile, tokens: list[str], pre: str) -> tokenizers.Tokenizer:
  vocab = {token: i for i, token in enumerate(tokens)}
  if len(vocab) < len(tokens):
    raise _corrupt(file, "tokenizer.ggml.tokens", "must be unique")
  # A merge is "left right"; a left part may begin with a space, but holds no other.
  pairs = [(m[: m.find(" ", 1)], m[m.find(" ", 1) + 1 :]) for m in _list(file, "merges", str)]
  for left, right in pairs:
    if left not in vocab or right not in vocab or left + right not in vocab:
      raise _corrupt(file, "tokenizer.ggml.merges", f"{left!r} + {right!r} is not of tokens")
  # Llama 3 takes a whole word that is a token as it is, even where merges would not reach it.
  bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
  backend = tokenizers.Tokenizer(bpe)
  if pre == "qwen2":
    backend.normalizer = normalizers.NFC()
  splits = [pre_tokenizers.Split(tokenizers.Regex(r), "isolated") for r in SPLITS[pre]]
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
  backend.decoder = decoders.ByteLevel()
  return backend


def _added(token: str, *, special: bool) -> tokenizers.AddedToken:
  return tokenizers.AddedToken(token, special=special, normalized=False)


def _set_post_processor(
  file: gguf.GGUFFile, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], pre: str
) -> None:
  """Makes `encode(add_special_tokens=True)` add what the file asks for."""
  offsets = processors.ByteLevel(trim_offsets=False)
  template, used = ["$A"], []
  for role, default in (("bos", pre == "llama-bpe"), ("eos", False)):
    token = special_tokens.get(f"{role}_token")
    if token is None or not file.metadata.get(f"tokenizer.ggml.add_{role}_token", default):
      continue
    template = [token, *template] if role == "bos" else [*template, token]
    used.append((token, backend.token_to_id(token)))
  if not used:
    backend.post_processor = offsets
    return
  adds = processors.TemplateProcessing(single=template, special_tokens=used)
  backend.post_processor = processors.Sequence([offsets, adds])
