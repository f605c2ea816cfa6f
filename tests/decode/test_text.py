"""Text around the sampler: stop strings and streams whatever the chunks, prompts, serving, chat."""

import dataclasses
import logging

import hypothesis as hp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxlab
from jaxlab import lora
from jaxlab.decode import autoregressive, chat, sampling, text
from jaxlab.io import tokenizer
from jaxlab.nn import weights
from jaxlab.quant import int8
from jaxlab.quant import model as quant
from pallas_kernels import target
from pallas_kernels.fp4_gemm import cpu
from tests.decode import tiny
from tests.io import tokenizers_small

KEY = jax.random.key(0)
CONFIG = sampling.SamplingConfig(max_new_tokens=24)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
  folder = tokenizers_small.write_folder(
    tmp_path_factory.mktemp("words"), tokenizer_config=tokenizers_small.CONFIG
  )
  return tokenizer.Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
  return jaxlab.load(tiny.write_model(tmp_path_factory.mktemp("model")))


@dataclasses.dataclass(frozen=True)
class Scripted(autoregressive.Sampler):
  """A sampler that says given tokens, `chunk_tokens` at a time; </s> ends a row."""

  says: tuple[tuple[int, ...], ...] = ()

  def __call__(self, params, prompts, key, *, on_chunk=None, **options):
    rows, limit = len(self.says), max(map(len, self.says))
    tokens_NT = np.zeros((rows, limit), np.int32)
    length_N, stopped_N = np.zeros(rows, np.int32), np.zeros(rows, bool)
    logp_NT = np.zeros((rows, limit), np.float32)
    for t in range(limit):
      for row, ids in enumerate(self.says):
        if t < len(ids) and not stopped_N[row]:
          tokens_NT[row, t], logp_NT[row, t] = ids[t], -1.0
          length_N[row], stopped_N[row] = t + 1, ids[t] == 2
      if on_chunk and t and t % self.chunk_tokens == 0:
        stopped_N |= on_chunk(tokens_NT, length_N)
    return autoregressive.Completions(tokens_NT, length_N, logp_NT, logp_NT, -logp_NT, stopped_N)


def complete(words, *said, stops=(), on_text=None) -> text.Generated:
  """`text.complete` of a model that says these texts, or tokens."""
  ids = tuple(tuple(words.encode(s) if isinstance(s, str) else s) for s in said)
  sampler = Scripted(None, sampling.SamplingConfig(stop_strings=stops), (2,), says=ids)
  return text.complete(sampler, words, None, [[1]] * len(ids), KEY, on_text=on_text)


# --- stop strings and streams


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
def test_a_stop_string_ends_a_row_wherever_the_host_looked(words, monkeypatch, chunk):
  monkeypatch.setattr(text, "LOOK_TOKENS", chunk)
  said = ("the cat sat. on the mat", "the mat", "café. 日本語. sat")
  out = complete(words, *said, stops=(". ", "sat"))
  assert out.texts == ["the cat ", "the mat", "café"]
  c = out.completions
  assert c.stopped_N.tolist() == [True, False, True]
  assert words.decode(c.ids(0)).endswith("sat"), "the stop string is the last thing that counts"
  assert words.decode(c.ids(0)[:-1]).find("sat") < 0
  outside = np.arange(c.tokens_NT.shape[1])[None] >= c.length_N[:, None]
  for table in (c.tokens_NT, c.logp_NT, c.logp_kept_NT, c.entropy_NT):
    assert not table[outside].any() and table[~outside].all()


TEXTS = st.text(st.sampled_from("ab.\n é日🤗"), min_size=1, max_size=20)


STOPS = st.lists(TEXTS.map(lambda s: s[:3]), max_size=2)


@hp.given(said=TEXTS, stops=STOPS, chunk=st.integers(1, 5))
@hp.settings(max_examples=60, suppress_health_check=[hp.HealthCheck.function_scoped_fixture])
def test_what_is_streamed_is_what_is_returned(words, monkeypatch, said, stops, chunk):
  monkeypatch.setattr(text, "LOOK_TOKENS", chunk)
  pieces: list[str] = []
  out = complete(words, said, stops=tuple(stops), on_text=lambda _, piece: pieces.append(piece))
  at = min((i for s in stops if (i := said.find(s)) >= 0), default=len(said))
  assert out.texts == [said[:at]] or any(s in said[:at] for s in stops)
  assert "".join(pieces) == out.texts[0]


def test_two_stop_strings_found_at_once_cut_at_the_first(words):
  assert complete(words, "xabcd", stops=("cd", "ab")).texts == ["x"]


def test_half_a_character_at_the_end_is_not_lost(words):
  ids = tuple(words.encode("a🤗"))[:-1]
  pieces: list[str] = []
  out = complete(words, ids, on_text=lambda _, piece: pieces.append(piece))
  assert out.texts == ["".join(pieces)] == [words.decode(ids)]


# --- prompts


def test_texts_get_one_bos_and_no_eos(words):
  plain = words.encode("the cat")
  conversation = [{"role": "user", "content": "hi"}]
  found = text.encode_prompts(words, ["the cat", conversation, "<s>the cat", ""])
  assert found == [[1, *plain], words.encode("<s>user: hi</s>"), [1, *plain], [1]]


# --- serving


TOKENS = jnp.asarray([[5, 6, 7]])


def logits(lm, params):
  return lm.module.apply({"params": params}, TOKENS)


def test_a_cpu_without_native_code_serves_a_dense_list_and_says_so_once(lm, caplog, monkeypatch):
  monkeypatch.setattr(cpu, "why_not", lambda *args: "no compiler")
  monkeypatch.setattr(cpu, "why_no_library", lambda: "no compiler")
  packed = lora.attach(int8.quantize_head(quant.quantize(lm.params)), lora.LoRAConfig(rank=2), KEY)
  with caplog.at_level(logging.INFO, logger="absl"):
    served = text.serving_params(packed)
    text.serving_params(packed)
  kernel = served["layers"][1]["q"]["kernel"]
  assert isinstance(kernel, weights.LoRA) and isinstance(kernel.base, jax.Array)
  assert served["embed"].shape == lm.params["embed"].shape
  np.testing.assert_allclose(logits(lm, served), logits(lm, packed), atol=1e-4)
  assert sum("serving_params" in r.getMessage() for r in caplog.records) <= 1
  assert text.serving_params(served) is served


@pytest.mark.skipif(cpu.why_no_library() is not None, reason="no C++ compiler")
def test_a_cpu_with_native_code_serves_packed_kernels(lm):
  packed = int8.quantize_head(quant.quantize(lm.params))
  assert text.serving_params(packed) is packed
  adapted = lora.attach(packed, lora.LoRAConfig(rank=2), KEY)
  served = text.serving_params(adapted)  # adapters are dense: a list of layers
  kernel = served["layers"][1]["q"]["kernel"]
  assert isinstance(kernel.base, weights.FP4Array) and served["embed"] is packed["embed"]
  np.testing.assert_allclose(logits(lm, served), logits(lm, adapted), atol=1e-4)
  assert isinstance(text.serving_params(lm.params)["layers"], list)


def test_accelerators_serve_what_is_trained(lm):
  packed = quant.quantize(lm.params)
  with target.use_target("h100"):
    assert text.serving_params(packed) is packed


# --- a model


def test_generate_is_the_sampler_and_the_tokenizer(lm):
  prompts = ["the cat", [{"role": "user", "content": "hat"}]]
  pieces = dict.fromkeys(range(4), "")

  def on_text(row, piece):
    pieces[row] += piece

  out = lm.generate(prompts, CONFIG, seed=3, samples=2, on_text=on_text)
  ids = text.encode_prompts(lm.tokenizer, prompts)
  expected = text.make_sampler(lm, CONFIG)(
    text.serving_params(lm.params), ids, jax.random.key(3), samples=2
  )
  assert (out.completions.tokens_NT == expected.tokens_NT).all()
  assert out.texts == [lm.tokenizer.decode(expected.ids(i)) for i in range(4)]
  assert pieces == dict(enumerate(out.texts))
  assert lm.generate(prompts, CONFIG, seed=3, samples=2).texts == out.texts
  stop = out.texts[0][5:7]
  config = dataclasses.replace(CONFIG, stop_strings=(stop,))
  cut = lm.generate(prompts, config, seed=3, samples=2)
  assert cut.texts[0] == out.texts[0][: out.texts[0].find(stop)]


@pytest.mark.parametrize(
  "prompt, message",
  [
    ("a" * 900, r"prompt 0 has \d+ tokens and 24 more .* but the context holds 128"),
    ([{"role": "user", "content": "a" * 900}], "but the context holds 128. Shorten the prompt"),
  ],
)
def test_a_prompt_longer_than_the_context(lm, prompt, message):
  with pytest.raises(ValueError, match=message):
    lm.generate([prompt], CONFIG)


def test_models_without_tokenizer_or_template_say_so(lm, tmp_path):
  mute = jaxlab.load(tiny.write_model(tmp_path, with_tokenizer=False))
  with pytest.raises(ValueError, match=r"has no tokenizer.json.* Put the model's tokenizer"):
    mute.generate(["a"], CONFIG)
  plain = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, chat_template=None))
  with pytest.raises(ValueError, match="must have a chat template"):
    plain.generate([[{"role": "user", "content": "a"}]], CONFIG)


def test_a_chat_remembers_and_forgets(lm):
  config = dataclasses.replace(CONFIG, max_new_tokens=8)
  session = chat.Chat(lm, config, KEY)
  pieces: list[str] = []
  first = session.ask("hat", pieces.append)
  assert "".join(pieces) == first
  second = session.ask("cat")
  assert [m["content"] for m in session.messages] == ["hat", first, "cat", second]
  before = list(session.messages)
  with pytest.raises(ValueError, match="context holds 128"):
    session.ask("a" * 900)
  assert session.messages == before and session.turns == 2
  session.reset()
  again = chat.Chat(lm, config, KEY)
  assert again.ask("hat") == first and not session.messages
