"""Batched sampling from a causal LM: two compiled programs, `prefill` and `decode`.

Prompts are right-padded to a bucket and computed once each; their cache is then repeated for the
samples of a group. Slot = position (see `jaxlab.attention.cache`), so rows of different length need
no bookkeeping. Every row owns its key, `fold_in(fold_in(key, row_id), t)`: its tokens depend
neither on the batch nor on order, padding or compaction. Parameters, adapters and noise are
arguments of the programs, never constants in them. A placed module (`parallel.rules.Placement`)
keeps rows over `data` and `fsdp` and the cache's heads over `tensor`, from call to call.
Dims: B prompts, N rows = B * samples, T new tokens, S slots.
Source: arXiv 2510.11696 (QeRL) §3; requirements of its rollouts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Key, UInt32

from jaxlab import noise as aqn
from jaxlab.attention import cache as kv
from jaxlab.decode import sampling
from jaxlab.models import causal_lm, zoo
from jaxlab.nn import pytree, weights
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules

PROMPT_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SHARED_PREFIX = 32  # a common prefix of fewer tokens is computed with each prompt
CHUNK_TOKENS = 128  # tokens between two looks of the host


@pytree.pytree(static=("relative",))
class Noise:
  """Adaptive quantisation noise of one rollout; regenerated from the key in every program."""

  sigma: Float32[Array, ""]
  key: Key[Array, ""]
  relative: bool = False  # in units of the gain itself


@pytree.pytree()
class DecodeState:
  """Everything a decode step reads and writes; donated from call to call."""

  cache: kv.KVCache
  tokens_NT: Int[Array, "N T"]
  logp_NT: Float32[Array, "N T"]
  logp_kept_NT: Float32[Array, "N T"] | None  # None unless the distribution is truncated
  entropy_NT: Float32[Array, "N T"]
  length_N: Int[Array, "N"]  # new tokens so far, the stop token included
  prompt_length_N: Int[Array, "N"]
  done_N: Bool[Array, "N"]
  row_id_N: UInt32[Array, "N"]
  seen_NV: Bool[Array, "N V"] | None  # tokens of prompt and answer, for the repetition penalty
  step: Int[Array, ""]  # tokens drawn so far, also by rows that are done


@dataclasses.dataclass(frozen=True)
class Completions:
  """Host arrays of a finished generation; rows are ordered prompt-major, as asked for."""

  tokens_NT: np.ndarray  # int32; pad after the stop token
  length_N: np.ndarray  # int32; counts the stop token. Masks come from here, never from pad
  logp_NT: np.ndarray  # float32; of the tempered full softmax
  logp_kept_NT: np.ndarray  # float32; renormalised over the kept tokens
  entropy_NT: np.ndarray  # float32, nats
  stopped_N: np.ndarray  # bool; False: ran into max_new_tokens

  def ids(self, row: int) -> list[int]:
    """The row's new tokens without padding, the stop token included."""
    return self.tokens_NT[row, : self.length_N[row]].tolist()


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws completions; hashable, so that equal samplers share their compiled programs.

  stop_ids: any of them ends a row. A pad id that is also a stop id is fine: lengths are kept apart.
  """

  module: zoo.Model
  config: sampling.SamplingConfig
  stop_ids: tuple[int, ...]
  pad_id: int = 0
  chunk_tokens: int = CHUNK_TOKENS
  compact: bool = True  # drop finished rows between chunks when half of the batch is done

  def __call__(
    self,
    params: Any,
    prompts: Sequence[Sequence[int]],
    key: Key[Array, ""],
    *,
    samples: int = 1,
    prefix: int = 0,
    row_ids: Sequence[int] | None = None,
    noise: Noise | None = None,
    on_chunk: Callable[[np.ndarray, np.ndarray], np.ndarray | None] | None = None,
  ) -> Completions:
    """Samples `samples` completions of every prompt.

    Args:
      params: model parameters, stacked or unstacked, packed or dense, with or without adapters.
      prompts: token ids, each at least one token long.
      prefix: the first tokens that all prompts have in common (a template), computed only once.
      row_ids: identity of each row for its random numbers, default 0..N-1.
      noise: perturbs the norm gains during the whole generation.
      on_chunk: called with (tokens_NT, length_N) of all rows after each chunk, for streaming and
        stop strings; may return a bool [N] of rows to stop.
    Raises: ValueError for an empty prompt or one that leaves no room in the context.
    """
    if not prompts:
      raise ValueError("Sampler: there is no prompt. Pass at least one.")
    lengths = [len(p) for p in prompts]
    self._check(prompts, prefix)
    rows = len(prompts) * samples
    row_ids = np.arange(rows) if row_ids is None else np.asarray(row_ids)
    bucket = prompt_bucket(max(lengths), self.module.config.max_positions)
    tokens_BP = np.full((len(prompts), bucket), self.pad_id, np.int32)
    for row, prompt in zip(tokens_BP, prompts, strict=True):
      row[: len(prompt)] = prompt
    if self.module.placement is not None:
      key, noise = rules.replicate((key, noise), self.module.placement.mesh)
    state = prefill(
      self._programs, params, tokens_BP, np.asarray(lengths, np.int32), row_ids.astype(np.uint32),
      key, noise, samples=samples, prefix=prefix,
    )  # fmt: skip
    return self._decode_all(params, state, key, noise, len(set(lengths)) == 1, on_chunk)

  def _decode_all(self, params, state, key, noise, uniform, on_chunk) -> Completions:
    rows, limit = state.tokens_NT.shape
    out, index = _to_host(state), np.arange(rows)
    chunk = limit if on_chunk is None and not self.compact else self.chunk_tokens
    while not out.stopped_N.all() and int(state.step) < limit:
      state = decode(
        self._programs, params, state, key, noise, steps=min(chunk, limit), uniform=uniform
      )
      _scatter(out, _to_host(state), index)
      if on_chunk is not None:
        stop_N = on_chunk(out.tokens_NT, out.length_N)
        if stop_N is not None:
          out.stopped_N[:] |= stop_N
          state = dataclasses.replace(state, done_N=self._put_rows(out.stopped_N[index]))
      live = np.flatnonzero(~out.stopped_N[index])
      if self.compact and 0 < batch_bucket(len(live)) <= len(index) // 2:
        keep = np.concatenate([live, np.setdiff1d(np.arange(len(index)), live)])
        keep = keep[: batch_bucket(len(live))]
        state, index = take_rows(state, keep, placement=self.module.placement), index[keep]
    return out

  def _put_rows(self, x_N: np.ndarray) -> jax.Array:
    """A host array where the programs keep such a part of their state."""
    placement = self.module.placement
    if placement is None:
      return jnp.asarray(x_N)
    spec = rules.activation_spec(x_N.shape, placement.mesh)
    return rules.place(x_N, jax.sharding.NamedSharding(placement.mesh, spec))

  @property
  def _programs(self) -> "Sampler":
    """Names the compiled programs: how often the host looks does not change them."""
    return dataclasses.replace(self, chunk_tokens=CHUNK_TOKENS, compact=True)

  def _check(self, prompts, prefix: int) -> None:
    limit = self.module.config.max_positions
    for i, prompt in enumerate(prompts):
      n = len(prompt)
      if n == 0:
        raise ValueError(f"Sampler: prompt {i} is empty. Give every prompt at least one token.")
      if n + self.config.max_new_tokens > limit:
        raise ValueError(
          f"Sampler: prompt {i} has {n} tokens and {self.config.max_new_tokens} more are wanted, "
          f"but the context holds {limit}. Shorten the prompt or lower max_new_tokens."
        )
      if prefix >= n or list(prompt[:prefix]) != list(prompts[0][:prefix]):
        raise ValueError(
          f"Sampler: prompt {i} must begin with the common prefix of {prefix} tokens and go on. "
          "Pass common_prefix(prompts), or 0."
        )


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
  """How many first tokens all prompts share, leaving each at least one of its own."""
  shortest = max(0, min(len(p) for p in prompts) - 1)
  table = np.asarray([p[:shortest] for p in prompts])
  differs = np.flatnonzero((table != table[:1]).any(axis=0))
  return int(differs[0]) if len(differs) else shortest


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
  """`common_prefix` where a forward pass of its own is worth it, else 0."""
  common = common_prefix(prompts) if len(prompts) > 1 else 0
  return common if common >= SHARED_PREFIX else 0


def prompt_bucket(length: int, limit: int) -> int:
  """The padded prompt length: the next bucket, at most the context."""
  return min(next((b for b in PROMPT_BUCKETS if b >= length), length), max(limit, length))


def batch_bucket(rows: int) -> int:
  """Batch sizes after compaction: powers of two from 8 on, so that few programs are compiled."""
  return rows and max(8, 1 << (rows - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("sampler", "samples", "prefix"))
def prefill(
  sampler: Sampler, params, tokens_BP, length_B, row_id_N, key, noise, *, samples: int, prefix: int
):
  """Runs every prompt once, repeats its cache `samples` times, draws each row's first token."""
  module, config = sampler.module, sampler.config
  b, p = tokens_BP.shape
  params = _noisy(params, noise)
  variables = {"params": params}
  cache = _prefix_cache(sampler, variables, tokens_BP, prefix)
  positions_BP = jnp.broadcast_to(jnp.arange(prefix, p)[None], (b, p - prefix))
  hidden_BPD, cache = module.apply(
    variables,
    tokens_BP[:, prefix:],
    positions_BP,
    None,
    cache.at(jnp.int32(prefix)),
    method="hidden",
  )
  index_B11 = (length_B - 1 - prefix)[:, None, None]
  last_BD = jnp.take_along_axis(hidden_BPD, index_B11, axis=1)[:, 0]
  logits_NV = jnp.repeat(module.apply(variables, last_BD, method="head"), samples, axis=0)
  extra = config.max_new_tokens - 1  # the last token drawn is never fed back
  spread = lambda x: jnp.repeat(
    jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, extra), (0, 0)]), samples, axis=x.ndim - 4
  )
  n, limit = b * samples, config.max_new_tokens
  length_N = jnp.repeat(length_B, samples)
  seen_NV = None
  if config.repetition_penalty != 1.0:
    seen_BV = jnp.zeros((b, logits_NV.shape[-1]), bool)
    valid_BP = jnp.arange(p)[None] < length_B[:, None]
    seen_BV = seen_BV.at[jnp.arange(b)[:, None], tokens_BP].max(valid_BP)
    seen_NV = jnp.repeat(seen_BV, samples, axis=0)
  table = lambda: jnp.zeros((n, limit), jnp.float32)
  state = DecodeState(
    cache=jax.tree.map(spread, dataclasses.replace(cache, write=None)),
    tokens_NT=jnp.full((n, limit), sampler.pad_id, jnp.int32),
    logp_NT=table(),
    logp_kept_NT=table() if config.truncated else None,
    entropy_NT=table(),
    length_N=jnp.zeros(n, jnp.int32),
    prompt_length_N=length_N,
    done_N=jnp.zeros(n, bool),
    row_id_N=row_id_N,
    seen_NV=seen_NV,
    step=jnp.int32(0),
  )
  return _placed(_draw(sampler, state, logits_NV, key), module.placement)


def _prefix_cache(sampler: Sampler, variables, tokens_BP, prefix: int) -> kv.KVCache:
  """A cache for all prompts whose first `prefix` slots were computed in a single row."""
  b, p = tokens_BP.shape
  params = variables["params"]
  stacked = not isinstance(params["layers"], list)
  rows = 1 if prefix else b
  embed = params["embed"]
  dtype = jnp.float32 if isinstance(embed, weights.Int8Array) else embed.dtype
  cache = causal_lm.init_cache(sampler.module.config, rows, p, dtype, stacked=stacked)
  if not prefix:
    return _placed(cache, sampler.module.placement)
  _, cache = sampler.module.apply(
    variables, tokens_BP[:1, :prefix], None, None, cache, method="hidden"
  )
  repeat = lambda x: jnp.repeat(x, b, axis=x.ndim - 4)
  cache = jax.tree.map(repeat, dataclasses.replace(cache, write=None))
  return _placed(cache, sampler.module.placement)


@functools.partial(jax.jit, static_argnames=("sampler", "uniform"), donate_argnames=("state",))
def decode(
  sampler: Sampler, params, state: DecodeState, key, noise, *, steps: int | Int[Array, ""],
  uniform: bool,
):  # fmt: skip
  """Up to `steps` further tokens; stops early when every row is done.

  uniform: all rows stand at one position, so that the cache is written by one contiguous update.
  """
  module = sampler.module
  params = _noisy(params, noise)
  limit = state.tokens_NT.shape[1]
  end = jnp.minimum(state.step + steps, limit)

  def body(state):
    last_N1 = jax.lax.dynamic_slice_in_dim(state.tokens_NT, state.step - 1, 1, axis=1)
    position_N = state.prompt_length_N + state.step - 1
    write = position_N[0] if uniform else position_N
    hidden_N1D, cache = module.apply(
      {"params": params}, last_N1, position_N[:, None], None, state.cache.at(write), method="hidden"
    )
    logits_NV = module.apply({"params": params}, hidden_N1D[:, 0], method="head")
    state = _draw(sampler, dataclasses.replace(state, cache=cache.at(None)), logits_NV, key)
    return _placed(state, module.placement)

  return jax.lax.while_loop(lambda s: (s.step < end) & ~jnp.all(s.done_N), body, state)


def _draw(sampler: Sampler, state: DecodeState, logits_NV, key) -> DecodeState:
  """Draws token `step` of every row and records it; rows that are done get pad and zeros."""
  step, live_N = state.step, ~state.done_N
  fold = lambda row_id: jax.random.fold_in(jax.random.fold_in(key, row_id), step)
  drawn = sampling.draw(logits_NV, jax.vmap(fold)(state.row_id_N), sampler.config, state.seen_NV)
  token_N = jnp.where(live_N, drawn.token_N, sampler.pad_id)

  def put(table_NT, value_N):
    column_N1 = jnp.where(live_N, value_N, 0).astype(table_NT.dtype)[:, None]
    return jax.lax.dynamic_update_slice_in_dim(table_NT, column_N1, step, axis=1)

  tokens_NT = jax.lax.dynamic_update_slice_in_dim(state.tokens_NT, token_N[:, None], step, axis=1)
  seen_NV = state.seen_NV
  if seen_NV is not None:
    seen_NV = seen_NV.at[jnp.arange(token_N.shape[0]), token_N].max(live_N)
  kept_NT = state.logp_kept_NT
  stop_N = jnp.isin(token_N, jnp.asarray(sampler.stop_ids, jnp.int32)) & live_N
  return dataclasses.replace(
    state,
    tokens_NT=tokens_NT,
    logp_NT=put(state.logp_NT, drawn.logp_N),
    logp_kept_NT=None if kept_NT is None else put(kept_NT, drawn.logp_kept_N),
    entropy_NT=put(state.entropy_NT, drawn.entropy_N),
    length_N=state.length_N + live_N,
    done_N=state.done_N | stop_N,
    seen_NV=seen_NV,
    step=step + 1,
  )


@functools.partial(jax.jit, static_argnames="placement")
def take_rows(
  state: DecodeState, keep_M: Int[Array, "M"], *, placement: rules.Placement | None = None
) -> DecodeState:
  """The state of the given rows only: finished rows stop costing time."""

  def take(x):
    return jnp.take(x, keep_M, axis=x.ndim - 4 if x.ndim >= 4 else 0) if x.ndim else x

  return _placed(jax.tree.map(take, state), placement)


def _placed(tree: Any, placement: rules.Placement | None) -> Any:
  """A state or a cache where `placement` wants it; arrays of four or more axes are caches.

  Both programs say it of their results: donated from call to call, a state that came out placed
  otherwise than it went in would be another compilation.
  """
  if placement is None:
    return tree
  put = lambda x: placement.cache(x) if x.ndim >= 4 else placement.rows(x)
  return jax.tree.map(put, tree)


def _noisy(params, noise: Noise | None):
  return (
    params
    if noise is None
    else aqn.perturb(params, noise.sigma, noise.key, relative=noise.relative)
  )


def _to_host(state: DecodeState) -> Completions:
  kept = state.logp_NT if state.logp_kept_NT is None else state.logp_kept_NT
  fields = (state.tokens_NT, state.length_N, state.logp_NT, kept, state.entropy_NT, state.done_N)
  return Completions(*(np.array(x) for x in meshes.to_host(fields)))


def _scatter(out: Completions, part: Completions, index: np.ndarray) -> None:
  for field in dataclasses.fields(Completions):
    getattr(out, field.name)[index] = getattr(part, field.name)
