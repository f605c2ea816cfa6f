"""Text to token ids and back, on the `tokenizers` package; no code of a model folder runs."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from absl import logging

from jaxlab import errors
from jaxlab.io import chat_template as chat_templates
from jaxlab.io import files, gguf, tokenizer_gguf

MAX_TOKENIZER_BYTES = 256 << 20  # the largest tokenizer.json in use is about 35 MB
ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer with its special tokens and its chat template.

  Attributes:
    backend: the `tokenizers.Tokenizer` that does the work.
    special_tokens: role -> token, such as {"eos_token": "<|im_end|>"}.
    eos_ids: ids that end a generation; several for most chat models, possibly none.
    pad_id: id to fill with; where the model has none, its first eos id, else 0.
    chat_template: jinja2 source, from a stranger: rendered in a child process only.
    config: tokenizer_config.json as read, for `save`.
  """

  backend: tokenizers.Tokenizer
  special_tokens: Mapping[str, str]
  eos_ids: tuple[int, ...]
  pad_id: int
  chat_template: str | None
  config: Mapping[str, Any]

  @classmethod
  def from_folder(cls, path: str | os.PathLike[str]) -> "Tokenizer | None":
    """The tokenizer of a Hugging Face folder, from its JSON files alone.

    Args:
      path: the folder. Of tokenizer.json, tokenizer_config.json, special_tokens_map.json,
        generation_config.json, config.json (eos ids, where the former has none),
        chat_template.jinja and chat_template.json only the first must be there.
    Returns: the tokenizer, or None for a folder without tokenizer.json.
    Raises: CorruptFile for a damaged or hostile file.
    """
    folder = pathlib.Path(path)
    file = files.member(folder, "tokenizer.json")
    if file is None:
      return None
    backend = _read_backend(file)
    config = _read_object(folder, "tokenizer_config.json")
    if "auto_map" in config:
      logging.info("%s: auto_map is ignored; no code of a model folder runs.", folder)
    special_tokens = _special_tokens(folder, config)
    _add_missing(folder, backend, config, special_tokens)
    generation = _read_object(folder, "generation_config.json")
    ends = _ids(folder, generation, "eos_token_id")
    ends = ends or _ids(folder, _read_object(folder, "config.json"), "eos_token_id")
    if "eos_token" in special_tokens:
      ends = (*ends, backend.token_to_id(special_tokens["eos_token"]))
    eos_ids = tuple(dict.fromkeys(ends))
    pads = (*_ids(folder, generation, "pad_token_id"), *eos_ids, 0)
    if "pad_token" in special_tokens:
      pads = (backend.token_to_id(special_tokens["pad_token"]),)
    template = _chat_template(folder, config)
    return cls(backend, special_tokens, eos_ids, pads[0], template, config)

  @classmethod
  def from_gguf(cls, file: gguf.GGUFFile) -> "Tokenizer":
    """The tokenizer in the metadata of a GGUF file.

    Raises: ValueError for a kind of tokenizer that we do not know, naming it; CorruptFile if the
      metadata contradict themselves.
    """
    parts = tokenizer_gguf.build(file)
    pad = parts.special_tokens.get("pad_token")
    pad_id = parts.backend.token_to_id(pad) if pad is not None else (*parts.eos_ids, 0)[0]
    return cls(
        parts.backend, parts.special_tokens, parts.eos_ids, pad_id, parts.chat_template,
        parts.config,
    )  # fmt: skip

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the highest id; a model's table may have more rows."""
    return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

  @functools.cached_property
  def _plain(self) -> tokenizers.Tokenizer:
    """The backend, except that special tokens in a text are only text."""
    copy = tokenizers.Tokenizer(self.backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
      if getattr(self.backend, part) is not None:
        setattr(copy, part, getattr(self.backend, part))
    # In the order of their ids, those beyond the model's vocabulary get the same ids again.
    copy.add_tokens([token for _, token in sorted(self.backend.get_added_tokens_decoder().items())])
    copy.encode_special_tokens = True
    return copy

  def encode(
    self, text: str, add_special_tokens: bool = False, *, allow_special: bool = True
  ) -> list[int]:
    """Token ids of a text.

    Args:
      text: any text that UTF-8 can hold.
      add_special_tokens: add what the tokenizer puts around a text, such as a bos token.
      allow_special: read "<|im_end|>" in the text as that token; pass False for text of users,
        where it is only characters.
    Raises: ValueError for a text with half a surrogate pair (JSON can carry one).
    """
    backend = self.backend if allow_special else self._plain
    try:
      return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:
      raise ValueError(
        f"Tokenizer.encode: the text must be a str that UTF-8 can hold; got {text[:80]!r}. "
        "Replace its lone surrogates."
      ) from None

  def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
    """The text of token ids. Bytes that are not UTF-8 become U+FFFD; unknown ids nothing."""
    return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

  def apply_chat_template(
    self,
    messages: Messages,
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
  ) -> str:
    """The prompt for one conversation; see `apply_chat_templates`."""
    return self.apply_chat_templates(
      [messages], add_generation_prompt, tools=tools, variables=variables
    )[0]

  def apply_chat_templates(
    self,
    conversations: Sequence[Messages],
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
  ) -> list[str]:
    """The prompts for many conversations; the template runs in one child process for all.

    Args:
      conversations: lists of messages, {"role": ..., "content": ...}.
      add_generation_prompt: end with the header of an assistant's turn.
      tools: JSON schemas of functions, for templates that list them.
      variables: further names for the template, such as {"enable_thinking": False}.
    Returns: texts, special tokens spelt out; they carry their own bos, so encode without.
    Raises: ValueError without a template, or if it fails or works too long.
    """
    if self.chat_template is None:
      raise ValueError(
        "Tokenizer.apply_chat_template: the model must have a chat template; got none in its "
        "files. Pass text instead of messages."
      )
    return chat_templates.render_chat(
      self.chat_template,
      conversations,
      add_generation_prompt=add_generation_prompt,
      special_tokens=self.special_tokens,
      tools=tools,
      variables=variables,
    )

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes files from which transformers' AutoTokenizer makes the same tokenizer.

    tokenizer.json, tokenizer_config.json, and chat_template.jinja where there is a template (older
    readers take it from the config, newer ones prefer the file). eos ids beyond the eos token are
    kept in generation_config.json, unless the folder already has one.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in self.config.items() if k != "auto_map"} | dict(self.special_tokens)
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if self.chat_template is not None:
      config["chat_template"] = self.chat_template
      _write(folder / "chat_template.jinja", self.chat_template)
    _write(folder / "tokenizer.json", self.backend.to_str(pretty=True))
    _write(folder / "tokenizer_config.json", _json(config))
    eos = self.special_tokens.get("eos_token")
    known = () if eos is None else (self.backend.token_to_id(eos),)
    generation = folder / "generation_config.json"
    if self.eos_ids != known and not generation.exists():
      _write(generation, _json({"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}))


class StreamDecoder:
  """Turns ids into text as they come, never half a UTF-8 character.

  The pieces, joined, are `tokenizer.decode` of all ids. A trailing U+FFFD may be the start of a
  character whose other bytes are in the next token, so it is held back until the next token or
  `finish`. Decoding restarts from the tokens of the last piece, not from the first token, and keeps
  those before the new ones because some decoders treat the first token of a text in its own way.
  """

  def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
    self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    self._before: list[int] = []  # tokens of the last piece
    self._pending: list[int] = []  # tokens whose text is not all out
    self._given = 0  # characters of the pending text that are out

  def push(self, token_id: int) -> str:
    """The text that this token completes, possibly none."""
    self._pending.append(int(token_id))
    text = self._pending_text()
    whole = not text.endswith("\ufffd")
    ready = text if whole else text[:-1]
    piece, self._given = ready[self._given :], max(self._given, len(ready))
    if whole and text:
      self._before, self._pending, self._given = self._pending, [], 0
    return piece

  def finish(self) -> str:
    """What is still held back. Then the decoder is as new."""
    piece = self._pending_text()[self._given :]
    self._before, self._pending, self._given = [], [], 0
    return piece

  def _pending_text(self) -> str:
    before = self._decode(self._before)
    return self._decode(self._before + self._pending)[len(before) :]


def _read_backend(file: pathlib.Path) -> tokenizers.Tokenizer:
  text = files.read_text(file, max_bytes=MAX_TOKENIZER_BYTES)
  try:
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_truncation()  # or a saved setting would silently cut every text
    backend.no_padding()
    backend.decode(backend.encode("a 1", add_special_tokens=True).ids)
  except BaseException as error:
    # The package raises bare Exceptions, and panics (no Exception) on parts that contradict.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
      raise
    raise errors.CorruptFile(file, "tokenizer", f"is not read by tokenizers: {error}") from None
  return backend


def _read_object(folder: pathlib.Path, name: str) -> dict[str, Any]:
  """A JSON object of the folder, empty where the file is absent."""
  file = files.member(folder, name)
  return {} if file is None else files.read_json_object(file)


def _special_tokens(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
  """role -> token; a token is a text, or an object with its text under "content"."""
  found = {}
  for source in (_read_object(folder, "special_tokens_map.json"), config):
    for role in ROLES:
      token = source.get(role)
      token = token.get("content") if isinstance(token, dict) else token
      if isinstance(token, str):
        found[role] = token
  return found


def _add_missing(
  folder: pathlib.Path,
  backend: tokenizers.Tokenizer,
  config: Mapping[str, Any],
  special_tokens: Mapping[str, str],
) -> None:
  """Adds the tokens that only tokenizer_config.json knows, as transformers does."""
  known = {token.content for token in backend.get_added_tokens_decoder().values()}
  declared = config.get("added_tokens_decoder") or {}
  try:
    rows = sorted((int(i), row["content"], bool(row.get("special"))) for i, row in declared.items())
    new = [(i, t, special) for i, t, special in rows if t not in known]
    for token_id, token, special in new:
      # `normalized` follows the package's default: special tokens match the text as it is.
      backend.add_tokens([tokenizers.AddedToken(token, special=special, normalized=not special)])
      if backend.token_to_id(token) != token_id:
        raise ValueError(f"{token!r} has the id {backend.token_to_id(token)}, not {token_id}")
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise errors.CorruptFile(
      folder / "tokenizer_config.json", "added_tokens_decoder", f"does not fit: {error}"
    ) from None
  known |= {token for _, token, _ in new}
  for token in special_tokens.values():
    if token not in known:
      backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])


def _ids(folder: pathlib.Path, config: Mapping[str, Any], key: str) -> tuple[int, ...]:
  value = config.get(key)
  ids = [] if value is None else value if isinstance(value, list) else [value]
  if not all(type(i) is int and i >= 0 for i in ids):
    raise errors.CorruptFile(folder, key, f"must be an id or a list of ids; got {value!r}")
  return tuple(ids)


def _chat_template(folder: pathlib.Path, config: Mapping[str, Any]) -> str | None:
  """The default template; a file of its own wins over the config, as in transformers."""
  file = files.member(folder, "chat_template.jinja")
  if file is not None:
    return files.read_text(file)
  template = config.get("chat_template")
  if template is None:
    template = _read_object(folder, "chat_template.json").get("chat_template")
  if isinstance(template, list):  # of {"name": ..., "template": ...}
    named = {t["name"]: t.get("template") for t in template if isinstance(t, dict) and "name" in t}
    template = named.get("default")
  if not isinstance(template, str | None):
    raise errors.CorruptFile(folder, "chat_template", "must be a text")
  return template


def _json(value: Mapping[str, Any]) -> str:
  return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write(path: pathlib.Path, text: str) -> None:
  files.write_atomically(path, lambda f: f.write(text.encode()))
