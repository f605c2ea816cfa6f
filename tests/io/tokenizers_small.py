"""Small tokenizers in memory, in a folder and in a GGUF file, for the tests of this folder."""

import json
import struct

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxlab.io import gguf, tokenizer

TEXT = "The cat's 12 hats cost $3.50, isn't it? Größe: naïve café 日本語 🤗"
TEXT += "👩\u200d👧 \n\n  x\t½ ²  end \ufffd!"
CHAT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<pad>", "<s>", "</s>"]


def bpe(pre_tokenizer=None, normalizer=None):
  """A trained byte-level BPE of 400 tokens with SPECIAL as ids 0 to 2."""
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.post_processor = processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
  )
  if normalizer:
    backend.normalizer = normalizer
  trainer = trainers.BpeTrainer(
    vocab_size=400, special_tokens=SPECIAL, initial_alphabet=ALPHABET, show_progress=False
  )
  backend.train_from_iterator([TEXT, "the cat sat on the mat 2024 times " * 3], trainer)
  return backend


def write_folder(folder, backend=None, **files):
  folder.mkdir(exist_ok=True)
  (folder / "tokenizer.json").write_text((backend or bpe()).to_str())
  for name, value in files.items():
    path = folder / (name + (".jinja" if name == "chat_template" else ".json"))
    path.write_text(value if isinstance(value, str) else json.dumps(value))
  return folder


CONFIG = {
  "tokenizer_class": "PreTrainedTokenizerFast",
  "bos_token": "<s>",
  "eos_token": {"content": "</s>", "lstrip": False, "__type": "AddedToken"},
  "pad_token": "<pad>",
  "chat_template": CHAT,
}


def stream(ours, ids, **kwargs):
  decoder = tokenizer.StreamDecoder(ours, **kwargs)
  return [*(decoder.push(i) for i in ids), decoder.finish()]


def gguf_file(tmp_path, metadata):
  """A GGUF file of metadata alone, written by hand."""

  def text(s):
    return struct.pack("<Q", len(s.encode())) + s.encode()

  def value(v):
    if isinstance(v, bool):
      return struct.pack("<I?", 7, v)
    if isinstance(v, int):
      return struct.pack("<Iq", 11, v)
    if isinstance(v, str):
      return struct.pack("<I", 8) + text(v)
    if all(isinstance(x, str) for x in v):
      return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(text, v))
    return struct.pack(f"<IIQ{len(v)}i", 9, 5, len(v), *v)

  body = b"".join(text(k) + value(v) for k, v in metadata.items() if v is not None)
  count = sum(v is not None for v in metadata.values())
  path = tmp_path / "x.gguf"
  path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, count) + body)
  return gguf.read_gguf(path)


def as_metadata(backend, **changes):
  """What a converter would store for `backend`: SPECIAL are control tokens."""
  model = json.loads(backend.to_str())["model"]
  tokens = sorted(model["vocab"], key=model["vocab"].get)
  metadata = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
    "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": CHAT,
  }
  return metadata | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}


def assert_equal_tokenizers(a, b):
  for text in (TEXT, "<s>a</s>", ""):
    assert a.encode(text, True) == b.encode(text, True)
  for name in ("special_tokens", "eos_ids", "pad_id", "vocab_size", "chat_template"):
    assert getattr(a, name) == getattr(b, name), name


def auto(folder):
  import transformers

  return transformers.AutoTokenizer.from_pretrained(folder)


def assert_equals_transformers(ours, theirs):
  for text in (TEXT, "<s>a</s> b", "", " x"):
    for special in (False, True):
      ids = ours.encode(text, special)
      assert ids == theirs(text, add_special_tokens=special)["input_ids"]
      assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)
    theirs_plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.encode(text, allow_special=False) == theirs_plain
  chat = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "x"}]
  want = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
  assert ours.apply_chat_template(chat) == want
  assert ours.special_tokens == theirs.special_tokens_map
  assert (ours.pad_id, ours.eos_ids[0]) == (theirs.pad_token_id, theirs.eos_token_id)
