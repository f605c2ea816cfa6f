"""Tokenizers: built here and read back, streamed, and equal to transformers' on the same files."""

import json
import random

import hypothesis as hp
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxlab import errors
from jaxlab.io import tokenizer
from tests.io import tokenizers_small as small


def metaspace():
  """A word-piece-like tokenizer whose decoder treats the first token in its own way."""
  backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((c, -3.0) for c in "▁abc")], 0))
  backend.pre_tokenizer = pre_tokenizers.Metaspace()
  backend.decoder = decoders.Metaspace()
  return backend


# --- a folder


def test_ids_and_text_are_those_of_the_tokenizers_package(tmp_path):
  backend = small.bpe()
  ours = tokenizer.Tokenizer.from_folder(
    small.write_folder(tmp_path, backend, tokenizer_config=small.CONFIG)
  )
  for special in (False, True):
    want = backend.encode(small.TEXT, add_special_tokens=special).ids
    assert ours.encode(small.TEXT, add_special_tokens=special) == want
  assert ours.decode(ours.encode(small.TEXT, True)) == small.TEXT
  assert ours.decode(ours.encode("a", True), skip_special_tokens=False) == "<s>a</s>"
  assert (ours.eos_ids, ours.pad_id, ours.vocab_size) == ((2,), 0, backend.get_vocab_size())
  assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
  assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>user: x</s>"


def test_a_folder_without_tokenizer_loads(tmp_path):
  assert tokenizer.Tokenizer.from_folder(tmp_path) is None


def test_a_saved_truncation_or_padding_is_not_applied(tmp_path):
  backend = small.bpe()
  backend.enable_truncation(2)
  backend.enable_padding(length=50)
  ours = tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path, backend))
  assert ours.decode(ours.encode(small.TEXT)) == small.TEXT


@pytest.mark.parametrize(
  "files, eos_ids, pad_id",
  [
    ({}, (), 0),
    ({"tokenizer_config": {"eos_token": "</s>"}}, (2,), 2),
    ({"special_tokens_map": {"eos_token": {"content": "</s>"}, "pad_token": "<s>"}}, (2,), 1),
    ({"generation_config": {"eos_token_id": [7, 2, 7], "pad_token_id": 9}}, (7, 2), 9),
    ({"generation_config": {"eos_token_id": 7}, "tokenizer_config": small.CONFIG}, (7, 2), 0),
    ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 5}}, (5,), 5),
    ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 5}}, (7,), 7),
  ],
)
def test_where_eos_and_pad_come_from(tmp_path, files, eos_ids, pad_id):
  ours = tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path, **files))
  assert (ours.eos_ids, ours.pad_id) == (eos_ids, pad_id)


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]


@pytest.mark.parametrize(
  "files, want",
  [
    ({}, None),
    ({"tokenizer_config": {"chat_template": "A"}}, "A"),
    ({"tokenizer_config": {"chat_template": "A"}, "chat_template": "B"}, "B"),
    ({"tokenizer_config": {"chat_template": NAMED}}, "D"),
  ],
)
def test_where_the_chat_template_comes_from(tmp_path, files, want):
  assert (
    tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path, **files)).chat_template == want
  )


def test_a_legacy_template_file(tmp_path):
  (small.write_folder(tmp_path) / "chat_template.json").write_text('{"chat_template": "C"}')
  assert tokenizer.Tokenizer.from_folder(tmp_path).chat_template == "C"


def test_tokens_that_only_the_config_knows(tmp_path):
  size = small.bpe().get_vocab_size()
  config = {
    "added_tokens_decoder": {
      str(size + 1): {"content": "<b>", "special": False},
      str(size): {"content": "<a>", "special": True},
    },
    "mask_token": "<mask>",
  }
  ours = tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path, tokenizer_config=config))
  assert ours.encode("<a><b><mask>") == [size, size + 1, size + 2]
  assert ours.vocab_size == size + 3
  assert ours.decode([size, size + 1, size + 2]) == "<b>"


# --- special tokens in the text of a user


def test_special_tokens_in_a_text_can_be_only_text(tmp_path):
  backend = small.bpe(normalizer=normalizers.NFC())
  backend.add_tokens([tokenizers.AddedToken("<think>", special=False)])
  backend.add_special_tokens(["<|end|>"])
  ours = tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path, backend))
  think, end = backend.token_to_id("<think>"), backend.token_to_id("<|end|>")
  text = "a</s><|end|> e\u0301 <think>"
  assert {2, end, think} <= set(ours.encode(text))
  plain = ours.encode(text, allow_special=False)
  assert not {2, end} & set(plain)
  assert think in plain  # not special: a word that has a token of its own
  assert ours.decode(plain) == "a</s><|end|> é <think>"
  assert ours.encode(small.TEXT, True, allow_special=False) == backend.encode(small.TEXT).ids
  assert ours.encode(text)[1] == 2  # the other reading is untouched


# --- streaming


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
  return tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path_factory.mktemp("byte_level")))


def test_a_character_comes_whole(byte_level):
  # Four tokens, one a byte: nothing, nothing, nothing, then the character.
  ids = [byte_level.backend.token_to_id(c) for c in ("ð", "Ł", "¤", "Ĺ")]
  assert small.stream(byte_level, ids) == ["", "", "", "🤗", ""]
  assert small.stream(byte_level, ids[:3]) == ["", "", "", "\ufffd"]
  # A byte that starts nothing is given as U+FFFD as soon as the next token shows that.
  assert (
    "".join(small.stream(byte_level, [ids[0], byte_level.backend.token_to_id("a")])) == "\ufffda"
  )


@hp.given(st.text(max_size=40), st.booleans())
@hp.settings(max_examples=200)
def test_the_pieces_make_the_text(byte_level, text, skip):
  ids = byte_level.encode(text, True)
  pieces = small.stream(byte_level, ids, skip_special_tokens=skip)
  assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)
  assert all("\ufffd" not in piece for piece in pieces[:-1]) or "\ufffd" in text


@hp.given(st.lists(st.integers(0, 270), max_size=40))
@hp.settings(max_examples=200)
def test_the_pieces_make_the_text_of_any_ids(byte_level, ids):
  assert "".join(small.stream(byte_level, ids)) == byte_level.decode(ids)


@hp.given(st.text(alphabet="abc ", max_size=12))
def test_a_decoder_that_strips_the_first_space(text):
  ours = tokenizer.Tokenizer(metaspace(), {}, (), 0, None, {})
  ids = ours.encode(text)
  assert "".join(small.stream(ours, ids)) == ours.decode(ids)


def test_finish_makes_the_decoder_new(byte_level):
  decoder = tokenizer.StreamDecoder(byte_level)
  for _ in range(2):
    pieces = [decoder.push(i) for i in byte_level.encode(small.TEXT)] + [decoder.finish()]
    assert "".join(pieces) == small.TEXT


# --- saving


def test_saved_and_read_again(tmp_path):
  files = {"tokenizer_config": small.CONFIG | {"auto_map": {"AutoTokenizer": ["x.py", None]}}}
  files["generation_config"] = {"eos_token_id": [5, 2]}
  first = tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path / "a", **files))
  first.save(tmp_path / "b")
  small.assert_equal_tokenizers(first, tokenizer.Tokenizer.from_folder(tmp_path / "b"))
  assert "auto_map" not in json.loads((tmp_path / "b/tokenizer_config.json").read_text())
  assert json.loads((tmp_path / "b/generation_config.json").read_text())["eos_token_id"] == [5, 2]
  (tmp_path / "b/generation_config.json").write_text('{"eos_token_id": [5], "top_p": 0.9}')
  first.save(tmp_path / "b")  # what the model's writer put there stays
  assert "top_p" in (tmp_path / "b/generation_config.json").read_text()


# --- hostile folders and texts


@pytest.mark.parametrize(
  "files",
  [
    {"tokenizer_config": "[]"},
    {"tokenizer_config": '{"added_tokens_decoder": {"x": {"content": "a"}}}'},
    {"tokenizer_config": '{"added_tokens_decoder": {"7": {"content": "<new>"}}}'},
    {"tokenizer_config": '{"added_tokens_decoder": {"7": 1}}'},
    {"tokenizer_config": '{"added_tokens_decoder": [1]}'},
    {"tokenizer_config": '{"chat_template": {"a": 1}}'},
    {"generation_config": '{"eos_token_id": "2"}'},
    {"generation_config": '{"eos_token_id": [true]}'},
    {"generation_config": '{"eos_token_id": -1}'},
    {"generation_config": "[" * 100_000},
    {"special_tokens_map": "1" * 5000},
    {"tokenizer": '{"model": 1}'},
    {"tokenizer": ""},
  ],
)
def test_a_damaged_folder_is_refused(tmp_path, files):
  with pytest.raises(errors.CorruptFile) as caught:
    tokenizer.Tokenizer.from_folder(small.write_folder(tmp_path, **files))
  assert str(caught.value).isprintable()


def test_1000_mutations_are_read_or_refused(tmp_path, capfd):
  raw, rng, accepted = small.bpe().to_str().encode(), random.Random(0), 0
  for _ in range(1000):
    mutant = bytearray(raw)
    at = rng.randrange(len(mutant))
    match rng.randrange(4):
      case 0:
        mutant[at] = rng.randrange(256)
      case 1:
        mutant[at] = rng.choice(b'0123456789"{}[],:-')
      case 2:
        del mutant[at : at + rng.randint(1, 30)]
      case 3:
        mutant[at:at] = mutant[rng.randrange(len(raw)) :][: rng.randint(1, 30)]
    (tmp_path / "tokenizer.json").write_bytes(bytes(mutant))
    try:
      ours = tokenizer.Tokenizer.from_folder(tmp_path)
    except errors.CorruptFile:
      continue
    accepted += 1
    ids = ours.encode("hello <s> wörld 1", True) + ours.encode("a", allow_special=False)
    assert ours.decode([*ids, 10**6]) is not None
    assert all(i < ours.vocab_size for i in ids)
  assert 25 < accepted < 975  # both branches were reached


def test_parts_that_make_the_package_panic_are_refused(tmp_path, capfd):
  broken = json.loads(small.bpe().to_str())
  broken["post_processor"]["special_tokens"] = {}
  small.write_folder(tmp_path, tokenizer=json.dumps(broken))
  with pytest.raises(errors.CorruptFile, match="tokenizer.json"):
    tokenizer.Tokenizer.from_folder(tmp_path)


def test_code_in_a_folder_is_not_run(tmp_path):
  canary = tmp_path / "canary"
  config = small.CONFIG | {"auto_map": {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}}
  folder = small.write_folder(tmp_path / "model", tokenizer_config=config)
  (folder / "tokenization_x.py").write_text(f"open({str(canary)!r}, 'w')")
  (folder / "__init__.py").write_text(f"open({str(canary)!r}, 'w')")
  ours = tokenizer.Tokenizer.from_folder(folder)
  assert ours.decode(ours.encode(small.TEXT)) == small.TEXT
  assert not canary.exists()


def test_messages_of_users_mistakes(byte_level):
  with pytest.raises(ValueError, match="must have a chat template"):
    byte_level.apply_chat_template([{"role": "user", "content": "x"}])
  with pytest.raises(ValueError, match="surrogates"):
    byte_level.encode("a\ud800")


# --- parity


@pytest.mark.parity
def test_a_folder_that_transformers_wrote(tmp_path):
  import transformers

  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=small.bpe(), bos_token="<s>", eos_token="</s>", pad_token="[NEW]"
  )
  theirs.chat_template = small.CHAT
  theirs.add_tokens(["<tool>"])
  theirs.save_pretrained(tmp_path / "theirs")
  ours = tokenizer.Tokenizer.from_folder(tmp_path / "theirs")
  small.assert_equals_transformers(ours, small.auto(tmp_path / "theirs"))
  ours.save(tmp_path / "ours")
  small.assert_equals_transformers(ours, small.auto(tmp_path / "ours"))
