"""Text in, text out: prompts to tokens, the sampler, tokens to text, stop strings, streaming.

Stop strings and streaming look at the text every few tokens; what a row wrote beyond its stop
string is taken back, so that the result does not depend on when the host looked. Dims: N rows, T
tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Key

from jaxlab.decode import autoregressive, sampling
from jaxlab.io import tokenizer as tokenizers
from jaxlab.nn import stack, weights
from pallas_kernels import target
from pallas_kernels.fp4_gemm import cpu

PyTree = Any
Prompt = str | Sequence[Mapping[str, Any]]  # text as it is, or messages for the chat template
LOOK_TOKENS = 4  # between two looks of the host at the text [ours: smooth on a terminal, cheap]


@dataclasses.dataclass(frozen=True)
class Generated:
  """What was said, one entry a row, prompt-major.

  texts: without special tokens, cut before the first stop string.
  completions: their tokens; a stop string counts, nothing after it does.
  """

  texts: list[str]
  completions: autoregressive.Completions


def generate_texts(
  lm: Any,
  prompts: Sequence[Prompt],
  config: sampling.SamplingConfig,
  key: Key[Array, ""],
  *,
  samples: int = 1,
  on_text: Callable[[int, str], None] | None = None,
) -> Generated:
  """Continues every prompt `samples` times.

  Args:
    lm: a `jaxlab.LM`; see `serving_params` for what a CPU does with its parameters.
    prompts: texts, continued as they are, or conversations, answered through the chat template.
    on_text: called with (row, new piece of its text) as the text comes.
  Raises: ValueError for a model without tokenizer, conversations without a chat template, an empty
    prompt, or one that is longer than the context.
  """
  tokenizer = require_tokenizer(lm)
  ids = encode_prompts(tokenizer, prompts)
  params = serving_params(lm.params)
  return complete(
    make_sampler(lm, config), tokenizer, params, ids, key, samples=samples, on_text=on_text
  )


def require_tokenizer(lm: Any) -> tokenizers.Tokenizer:
  """The model's tokenizer. Raises: ValueError if it has none."""
  if lm.tokenizer is None:
    raise ValueError(
      f"generate: {lm.path} has no tokenizer.json, so it knows tokens but no text. Put the model's "
      "tokenizer beside it."
    )
  return lm.tokenizer


def make_sampler(lm: Any, config: sampling.SamplingConfig) -> autoregressive.Sampler:
  """A sampler that stops at any of the tokenizer's end ids."""
  tokenizer = require_tokenizer(lm)
  return autoregressive.Sampler(lm.module, config, tuple(tokenizer.eos_ids), tokenizer.pad_id)


def encode_prompts(tokenizer: tokenizers.Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
  """Token ids of every prompt. Texts get the tokenizer's own bos, unless they begin with it."""
  conversations = [p for p in prompts if not isinstance(p, str)]
  rendered = iter(tokenizer.apply_chat_templates(conversations) if conversations else ())
  return [
    _encode_text(tokenizer, prompt) if isinstance(prompt, str) else tokenizer.encode(next(rendered))
    for prompt in prompts
  ]


def _encode_text(tokenizer: tokenizers.Tokenizer, prompt: str) -> list[int]:
  """The text after what the tokenizer puts in front of one; what it puts behind is left out."""
  plain = tokenizer.encode(prompt)
  bos = tokenizer.special_tokens.get("bos_token")
  if bos is not None and prompt.startswith(bos):
    return plain
  full = tokenizer.encode(prompt, add_special_tokens=True)
  if not plain:
    return [token_id for token_id in full if token_id not in tokenizer.eos_ids]
  fits = (k for k in range(len(full) - len(plain) + 1) if full[k : k + len(plain)] == plain)
  return full[: next(fits, 0)] + plain


def serving_params(params: PyTree) -> PyTree:
  """Parameters as decoding wants them: on a CPU made for speed, elsewhere as they are.

  On a CPU FP4 kernels stay packed where native code multiplies them (`fp4_gemm/cpu.py`), with all
  bits of the activations: one row takes 0.27 to 0.38 of the dense model's time (with an int8 head
  and without), eight rows two thirds, 32 rows the same (configs/bench/fp4_decode.gin), and int8
  activations gain too little beside AVX-512 to be the rule. Packed layers stay a stack, which is
  read in place: a list of them decodes one row at 0.83 of the speed.
  Without native code they are unpacked: XLA's packed product takes 1.2 to 1.8 times a dense one.
  Dense kernels and adapters want a list of layers, which decodes 1.8 to 2.1 times faster than a
  stack. All that copies is logged. An int8 head is the user's choice: `quant.int8.quantize_head`.
  """
  if target.current_target().platform != "cpu":
    return params
  layers = jax.tree.leaves(params["layers"], is_leaf=weights.is_leaf)
  has_dense = any(not weights.is_packed(w) and _is_matrix(w) for w in layers)
  packed = [w for w in jax.tree.leaves(params, is_leaf=weights.is_packed) if weights.is_packed(w)]
  unpack = not all(map(_is_native, packed))
  if not unpack and (isinstance(params["layers"], list) or not has_dense):
    return params
  what = "an unpacked, unstacked" if unpack else "an unstacked"
  logging.log_first_n(
    logging.INFO, "serving_params: this is a CPU, so decoding uses %s copy of the weights.", 1, what
  )
  params = stack.unstack(params)  # first: one layer at a time is unpacked
  embed = params["embed"]
  dtype = jnp.float32 if isinstance(embed, weights.Int8Array) else embed.dtype
  dense = lambda w: weights.dense(w, dtype) if weights.is_packed(w) and not _is_native(w) else w
  # A packed embedding is a kernel [D, V].
  embed = embed if dense(embed) is embed else dense(embed).T
  return jax.tree.map(dense, params, is_leaf=weights.is_packed) | {"embed": embed}


def _is_matrix(w: Any) -> bool:
  """True for what a loop over a stack copies out at every token, gains and biases apart."""
  return weights.is_leaf(w) or w.ndim > 2


def _is_native(w: Any) -> bool:
  """True for a packed kernel that native code multiplies; asking compiles it, once."""
  if isinstance(w, weights.Int8Array):
    return cpu.why_no_library() is None
  return isinstance(w, weights.FP4Array) and not cpu.why_not(
    1, jnp.float32, w.codes.shape, w.format, target.current_target()
  )


def complete(
  sampler: autoregressive.Sampler,
  tokenizer: tokenizers.Tokenizer,
  params: PyTree,
  prompts: Sequence[Sequence[int]],
  key: Key[Array, ""],
  *,
  samples: int = 1,
  prefix: int = 0,
  row_ids: Sequence[int] | None = None,
  noise: autoregressive.Noise | None = None,
  on_text: Callable[[int, str], None] | None = None,
) -> Generated:
  """`sampler(params, prompts, key, ...)` with text, `sampler.config.stop_strings` and streaming."""
  stops = sampler.config.stop_strings
  reader = None
  if stops or on_text is not None:
    rows = len(prompts) * samples
    reader = _Reader([_Row(tokenizer, stops) for _ in range(rows)], on_text)
    sampler = dataclasses.replace(sampler, chunk_tokens=LOOK_TOKENS)
  out = sampler(
    params, prompts, key, samples=samples, prefix=prefix, row_ids=row_ids, noise=noise,
    on_chunk=reader,
  )  # fmt: skip
  if reader is None:
    return Generated([tokenizer.decode(out.ids(row)) for row in range(len(out.length_N))], out)
  reader(out.tokens_NT, out.length_N)  # a generation may end before the first look
  reader.finish()
  return Generated([row.text for row in reader.rows], _cut(out, reader.rows, sampler.pad_id))


class _Row:
  """The text of one row so far, up to a stop string."""

  def __init__(self, tokenizer: tokenizers.Tokenizer, stops: Sequence[str]):
    self._decoder = tokenizers.StreamDecoder(tokenizer)
    self._stops = stops
    self.text = ""
    self.tokens = 0  # read so far
    self.given = 0  # characters that have been streamed
    self.stopped = False

  def read(self, ids: Sequence[int]) -> None:
    """Appends the text of `ids`, token by token, up to the one that completes a stop string."""
    for token_id in ids:
      if self.stopped:
        return
      self.tokens += 1
      self._append(self._decoder.push(token_id))

  def finish(self) -> None:
    """What the decoder held back, because it could have been half a character."""
    if not self.stopped:
      self._append(self._decoder.finish())

  def _append(self, piece: str) -> None:
    longest = max(map(len, self._stops), default=0)
    start = max(0, len(self.text) - longest)  # earlier text has been searched
    self.text += piece
    found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
    if found:
      self.text, self.stopped = self.text[: min(found)], True

  def new_piece(self, *, last: bool) -> str:
    """Text that was not given yet; what may become a stop string is held back unless `last`."""
    end = len(self.text)
    if not (last or self.stopped):
      end -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
    piece, self.given = self.text[self.given : end], max(self.given, end)
    return piece


@dataclasses.dataclass
class _Reader:
  """The sampler's `on_chunk`: reads new tokens, streams, says which rows to stop."""

  rows: list[_Row]
  on_text: Callable[[int, str], None] | None

  def __call__(self, tokens_NT: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    for row, tokens_T, length in zip(self.rows, tokens_NT, length_N, strict=True):
      row.read(tokens_T[row.tokens : length].tolist())
    self._stream(last=False)
    return np.array([row.stopped for row in self.rows])

  def finish(self) -> None:
    for row in self.rows:
      row.finish()
    self._stream(last=True)

  def _stream(self, *, last: bool) -> None:
    if self.on_text is not None:
      for index, row in enumerate(self.rows):
        if piece := row.new_piece(last=last):
          self.on_text(index, piece)


def _overlap(text: str, stop: str) -> int:
  """Length of the longest end of `text` with which `stop` begins."""
  longest = min(len(text), len(stop) - 1)
  return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _cut(
  out: autoregressive.Completions, rows: Sequence[_Row], pad_id: int
) -> autoregressive.Completions:
  """Takes back what rows wrote after the token that completed their stop string."""
  stopped_N = np.array([row.stopped for row in rows])
  length_N = np.where(stopped_N, [row.tokens for row in rows], out.length_N).astype(np.int32)
  keep_NT = np.arange(out.tokens_NT.shape[1])[None] < length_N[:, None]
  number = lambda table_NT: np.where(keep_NT, table_NT, 0).astype(table_NT.dtype)
  return autoregressive.Completions(
    tokens_NT=np.where(keep_NT, out.tokens_NT, pad_id).astype(np.int32),
    length_N=length_N,
    logp_NT=number(out.logp_NT),
    logp_kept_NT=number(out.logp_kept_NT),
    entropy_NT=number(out.entropy_NT),
    stopped_N=out.stopped_N | stopped_N,
  )
