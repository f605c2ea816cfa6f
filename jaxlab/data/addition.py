"""Two-digit addition with the digits of the sum reversed, for models of a few thousand weights.

`47+85=` is answered by `231` and a stop token: six prompt tokens, one a character, then three
digits, units first, so that each needs only the carry of the one before. A base model is
pre-trained on sums that are mostly wrong (ten too much): the right answer is then a rare sample,
the setting in which the entropy of a policy can help RL to find it. Source: specification of the
small QeRL experiment [ours]. Dims: B texts, T = 10 tokens.
"""

import functools
import hashlib
import random
from typing import NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Bool, Int
from tokenizers import decoders, models, pre_tokenizers

from jaxlab.data import tasks
from jaxlab.eval import records
from jaxlab.io import tokenizer as tokenizer_lib

TASK = "reversed_addition"
SYMBOLS = "0123456789+="
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
VOCABULARY = (*SYMBOLS, *SPECIAL)  # 16 tokens; a token's id is its place
PAD_ID, EOS_ID = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
LOW, HIGH = 10, 99  # of both summands
DIGITS = 3  # of an answer
PROMPT_TOKENS = len("47+85=")
TEXT_TOKENS = PROMPT_TOKENS + DIGITS + 1
WRONG_BY = 10


class Texts(NamedTuple):
  """Prompts with their answers; the mask is true for the answers, stop token included."""

  tokens_BT: Int[np.ndarray, "B T"]
  mask_BT: Bool[np.ndarray, "B T"]


def reversed_addition(n: int, split: str = "train", seed: int = 0) -> list[records.Item]:
  """The first n distinct questions of a split, in an order of the seed's.

  One question in ten is held out, whatever the seed: no training, nor pre-training, ever sees it.
  Raises: ValueError for an unknown split, or when it has fewer than n questions.
  """
  pairs = _pairs(split)
  if not 1 <= n <= len(pairs):
    raise ValueError(
      f"reversed_addition: split {split!r} has {len(pairs)} questions; got n={n}. Ask for 1 to "
      f"{len(pairs)}."
    )
  order = random.Random(f"{TASK}/{split}/{seed}").sample(pairs, n)
  return [
    records.Item(
      id=f"{TASK}/{a}+{b}", task=TASK, split=split, prompt=question(a, b), target=answer(a + b)
    )
    for a, b in order
  ]


def question(a: int, b: int) -> str:
  return f"{a}+{b}="


def answer(total: int) -> str:
  """The digits of a sum, units first: 132 -> "231", 95 -> "590"."""
  return f"{total:0{DIGITS}d}"[::-1]


def pretraining_texts(step: int, batch: int, *, wrong_share: float = 0.97, seed: int = 0) -> Texts:
  """The batch of one step: questions of the training split, answers wrong at random.

  A function of its arguments, so that a resumed run sees what an uninterrupted one does.

  Args:
    wrong_share: probability that an answer is that of a sum larger by 10.
  """
  random_ = np.random.default_rng((seed, step))
  pairs_N2 = np.asarray(_pairs("train"))
  pairs_B2 = pairs_N2[random_.integers(len(pairs_N2), size=batch)]
  wrong_B = random_.random(batch) < wrong_share
  ids = {symbol: i for i, symbol in enumerate(VOCABULARY)}
  tokens_BT = [
    [*(ids[c] for c in question(a, b) + answer(a + b + WRONG_BY * int(wrong))), EOS_ID]
    for (a, b), wrong in zip(pairs_B2.tolist(), wrong_B, strict=True)
  ]
  mask_BT = np.tile(np.arange(TEXT_TOKENS) >= PROMPT_TOKENS, (batch, 1))
  return Texts(np.asarray(tokens_BT, np.int32), mask_BT)


def make_tokenizer() -> tokenizer_lib.Tokenizer:
  """One token a character, 16 tokens in all."""
  ids = {symbol: i for i, symbol in enumerate(VOCABULARY)}
  backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
  backend.add_special_tokens(list(SPECIAL))
  backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
  backend.decoder = decoders.Fuse()  # without it the digits come back with blanks between
  special = {f"{name.strip('<>')}_token": name for name in SPECIAL}
  return tokenizer_lib.Tokenizer(backend, special, (EOS_ID,), PAD_ID, None, {})


@functools.cache
def _pairs(split: str) -> tuple[tuple[int, int], ...]:
  """All summands of a split, decided by a hash of the question alone."""
  if split not in tasks.SPLITS:
    raise ValueError(
      f"reversed_addition: split must be one of {', '.join(tasks.SPLITS)}; got {split!r}."
    )
  numbers = range(LOW, HIGH + 1)
  return tuple((a, b) for a in numbers for b in numbers if _split_of(question(a, b)) == split)


def _split_of(text: str) -> str:
  digest = hashlib.sha256(f"{TASK}/{text}".encode()).digest()
  return "test" if int.from_bytes(digest[:8], "big") % tasks.TEST_SHARE == 0 else "train"
