"""Tokenizers out of GGUF metadata: each named pre-tokenizer against the model's own."""

import random

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from jaxlab import errors
from jaxlab.data import assets
from jaxlab.io import gguf, tokenizer
from tests.io import tokenizers_small as small


def byte_level_pre(*before):
  return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def split(pattern):
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


# The pre-tokenizers in the models' own tokenizer.json (SmolLM2, Qwen2.5, Llama 3), written out.
QWEN2 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN = {
  "smollm": byte_level_pre(pre_tokenizers.Digits(individual_digits=True)),
  "gpt-2": byte_level_pre(),
  "qwen2": split(QWEN2),
  "llama-bpe": split(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")),
}


@pytest.mark.parametrize("pre", OWN)
def test_a_named_pre_tokenizer_is_that_of_the_model(tmp_path, pre):
  backend = small.bpe(OWN[pre], normalizers.NFC() if pre == "qwen2" else None)
  file = small.gguf_file(tmp_path, small.as_metadata(backend, pre=pre))
  ours = tokenizer.Tokenizer.from_gguf(file)
  rng = random.Random(0)
  pool = small.TEXT + "0123456789٣²½Ⅷ　\u00a0\r\n'S'LL e\u0301"
  texts = ["".join(rng.choices(pool, k=rng.randint(0, 40))) for _ in range(300)]
  for text in [small.TEXT, *texts]:
    assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids, text


def test_the_default_pre_tokenizer_is_that_of_llama_cpp(tmp_path):
  # Worked from llama.cpp's four regexes: punctuation apart, then words, then digits by threes.
  ours = tokenizer.Tokenizer.from_gguf(
    small.gguf_file(tmp_path, small.as_metadata(small.bpe(), pre=None))
  )
  pieces = [p for p, _ in ours.backend.pre_tokenizer.pre_tokenize_str("it's a 1234567x, ok")]
  assert pieces == ["it", "'", "s", "Ġa", "Ġ", "123", "456", "7", "x", ",", "Ġok"]


def test_roles_types_and_ends(tmp_path):
  backend = small.bpe()
  metadata = small.as_metadata(backend)
  tokens = metadata["tokenizer.ggml.tokens"]
  kinds = metadata["tokenizer.ggml.token_type"]
  tokens[300:302], kinds[300:302] = ["<|endoftext|>", "<tool>"], [3, 4]
  metadata["tokenizer.ggml.merges"] = []
  ours = tokenizer.Tokenizer.from_gguf(small.gguf_file(tmp_path, metadata))
  assert ours.eos_ids == (2, 300)  # the file's own eos, and another that ends a text
  assert ours.pad_id == 0
  assert ours.chat_template == small.CHAT
  assert ours.encode("<tool><|endoftext|>") == [301, 300]
  assert ours.decode([301, 300, 1]) == "<tool>"  # user-defined tokens are text, control is not
  assert 300 not in ours.encode("<|endoftext|>", allow_special=False)


@pytest.mark.parametrize(
  "changes, want",
  [
    ({}, []),
    ({"add_bos_token": True}, [1]),
    ({"pre": "llama-bpe"}, [1]),
    ({"pre": "llama-bpe", "add_bos_token": False}, []),
  ],
)
def test_bos_is_added_as_the_file_says(tmp_path, changes, want):
  backend = small.bpe()
  ours = tokenizer.Tokenizer.from_gguf(
    small.gguf_file(tmp_path, small.as_metadata(backend, **changes))
  )
  assert ours.encode("a", add_special_tokens=True) == [*want, backend.token_to_id("a")]
  assert ours.encode("a") == [backend.token_to_id("a")]


@pytest.mark.parametrize(
  "changes, kind, match",
  [
    ({"pre": "tekken"}, ValueError, "tekken"),
    ({"model": "llama"}, ValueError, "llama"),
    ({"model": None}, ValueError, "None"),
    ({"tokens": None}, errors.CorruptFile, "tokens"),
    ({"tokens": [1, 2]}, errors.CorruptFile, "tokens"),
    ({"tokens": ["a", "a", "b"], "token_type": [1, 1, 1]}, errors.CorruptFile, "unique"),
    ({"token_type": [1]}, errors.CorruptFile, "one entry a token"),
    ({"merges": ["a"]}, errors.CorruptFile, "merges"),
    ({"merges": ["a nothing-like-this"]}, errors.CorruptFile, "nothing-like-this"),
    ({"eos_token_id": 10**6}, errors.CorruptFile, "eos_token_id"),
    ({"eos_token_id": -1}, errors.CorruptFile, "eos_token_id"),
  ],
)
def test_metadata_that_contradict_themselves(tmp_path, changes, kind, match):
  with pytest.raises(kind, match=match):
    tokenizer.Tokenizer.from_gguf(
      small.gguf_file(tmp_path, small.as_metadata(small.bpe(), **changes))
    )


@pytest.fixture(scope="module")
def smollm2():
  path = assets.find_demo_model()
  if path is None:
    pytest.skip("the demo model is not on this machine; `make demo` fetches it")
  return tokenizer.Tokenizer.from_gguf(gguf.read_gguf(path))


def test_smollm2(smollm2):
  assert (smollm2.eos_ids, smollm2.pad_id, smollm2.vocab_size) == ((2, 0), 2, 49152)
  prompt = "".join(
    f"<|im_start|>user\nLargest of {q}?<|im_end|>\n<|im_start|>assistant\n{a}"
    for q, a in (
      ("54, 52, 86, 14, 79", "86<|im_end|>\n"),
      ("14, 48, 42, 18, 82", "82<|im_end|>\n"),
      ("31, 57, 22, 90, 16", ""),
    )
  )
  ids = smollm2.encode(prompt)
  assert len(ids) == 107  # measured with the model's own tokenizer.json
  assert smollm2.decode(ids, skip_special_tokens=False) == prompt
  assert len(smollm2.encode("86<|im_end|>")) == 3
  assert smollm2.decode(smollm2.encode(small.TEXT)) == small.TEXT
  assert "".join(small.stream(smollm2, smollm2.encode(small.TEXT))) == small.TEXT


def test_saved_from_gguf(tmp_path):
  first = tokenizer.Tokenizer.from_gguf(small.gguf_file(tmp_path, small.as_metadata(small.bpe())))
  first.save(tmp_path / "b")
  small.assert_equal_tokenizers(first, tokenizer.Tokenizer.from_folder(tmp_path / "b"))
  assert not (tmp_path / "b/generation_config.json").exists()  # eos is the eos token


# --- parity


@pytest.mark.parity
def test_transformers_reads_what_we_save_from_gguf(tmp_path):
  backend = small.bpe(OWN["smollm"])
  ours = tokenizer.Tokenizer.from_gguf(
    small.gguf_file(tmp_path, small.as_metadata(backend, pre="smollm", add_bos_token=True))
  )
  ours.save(tmp_path / "ours")
  small.assert_equals_transformers(ours, small.auto(tmp_path / "ours"))


@pytest.mark.parity
def test_transformers_reads_smollm2_as_we_save_it(tmp_path, smollm2):
  smollm2.save(tmp_path)
  small.assert_equals_transformers(smollm2, small.auto(tmp_path))
