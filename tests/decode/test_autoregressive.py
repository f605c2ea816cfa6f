"""The sampler's promises (spec qerl O10): exact, and the same whatever goes on around a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxlab.decode import autoregressive, sampling
from jaxlab.models import causal_lm
from jaxlab.nn import stack, weights
from jaxlab.objectives import policy_gradient
from jaxlab.quant import model as quant

CONFIG = causal_lm.CausalLMConfig(
  vocab_size=97, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48,
  max_positions=64,
)  # fmt: skip
MODULE = causal_lm.CausalLM(CONFIG)
PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [4], [20, 21, 22, 23])
NEW = 10
STOPS = tuple(range(60, 70))  # one token in ten ends a row
LOGP = 1e-5  # nats, between decoding and the trainer's forward, float32
KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def params():
  start = MODULE.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
  noise = lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape)
  return jax.tree.map(noise, start)


def sampler(stop_ids=STOPS, compact=False, chunk_tokens=128, **settings):
  config = sampling.SamplingConfig(**{"max_new_tokens": NEW} | settings)
  return autoregressive.Sampler(
    MODULE, config, stop_ids, chunk_tokens=chunk_tokens, compact=compact
  )


@jax.jit
def forward(params, tokens_BT):
  return MODULE.apply({"params": params}, tokens_BT)


def last_logits(params, ids) -> np.ndarray:
  """Logits after `ids` by a full forward without cache; one program for all lengths."""
  padded = jnp.asarray([list(ids) + [0] * (32 - len(ids))])
  return np.asarray(forward(params, padded))[0, len(ids) - 1].astype(np.float64)


def rows(out) -> list[list[int]]:
  return [out.ids(row) for row in range(len(out.length_N))]


def uniform(row_id: int, step: int) -> float:
  return float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEY, row_id), step)))


def twin(params, prompt, row_id, *, temperature=1.0, penalty=1.0) -> list[int]:
  """The sampler as a plain Python loop: full forwards, float64, the same random numbers."""
  ids = list(prompt)
  for step in range(NEW):
    x = last_logits(params, ids)
    seen = np.isin(np.arange(len(x)), ids)
    x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    p = np.exp((x - x.max()) / temperature)
    ids.append(int(np.searchsorted(np.cumsum(p / p.sum()), uniform(row_id, step), side="right")))
    if ids[-1] in STOPS:
      break
  return ids[len(prompt) :]


# --- the same as without cache, loop and batch


@pytest.fixture(scope="module")
def greedy(params):
  return sampler((), temperature=0.0)(params, PROMPTS, KEY)


def test_greedy_is_the_argmax_of_full_forwards(params, greedy):
  for row, prompt in enumerate(PROMPTS):
    ids = list(prompt)
    for _ in range(NEW):
      ids.append(int(last_logits(params, ids).argmax()))
    assert greedy.ids(row) == ids[len(prompt) :]


def test_a_list_of_layers_is_sampled_alike(params, greedy):
  listed = sampler((), temperature=0.0)(stack.unstack(params), PROMPTS, KEY)
  assert rows(listed) == rows(greedy)
  np.testing.assert_allclose(listed.logp_NT, greedy.logp_NT, atol=LOGP)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "penalty": 1.5}])
def test_the_loop_is_its_plain_python_twin(params, settings):
  own = {"repetition_penalty" if k == "penalty" else k: v for k, v in settings.items()}
  out = sampler(**own)(params, PROMPTS, KEY)
  assert rows(out) == [twin(params, p, i, **settings) for i, p in enumerate(PROMPTS)]


def test_recorded_log_probabilities_are_the_trainers(params):
  out = sampler((), temperature=0.7, top_k=4)(params, PROMPTS, KEY)
  start_B = np.array([len(p) for p in PROMPTS])
  tokens_BS = np.zeros((len(PROMPTS), start_B.max() + NEW), np.int32)
  for i, prompt in enumerate(PROMPTS):
    tokens_BS[i, : len(prompt) + NEW] = [*prompt, *out.ids(i)]
  tokens_BS = jnp.asarray(tokens_BS)
  hidden_BSD, _ = MODULE.apply({"params": params}, tokens_BS, method="hidden")
  head = lambda x: MODULE.apply({"params": params}, x, method="head")
  tables = policy_gradient.chunked_logprobs(
    head, hidden_BSD[:, :-1], tokens_BS[:, 1:], temperature=0.7, chunk_tokens=16
  )
  at_BT = start_B[:, None] - 1 + np.arange(NEW)[None]
  logp_BT, entropy_BT = (np.take_along_axis(np.asarray(x), at_BT, 1) for x in tables)
  np.testing.assert_allclose(out.logp_NT, logp_BT, atol=LOGP)
  np.testing.assert_allclose(out.entropy_NT, entropy_BT, atol=10 * LOGP)
  assert (out.logp_kept_NT > out.logp_NT).all(), "four tokens hold less than all of it"


def test_first_tokens_come_as_often_as_softmax_says(params):
  draws = 4000
  out = sampler(max_new_tokens=1)(params, [PROMPTS[0]], KEY, samples=draws)
  x = last_logits(params, PROMPTS[0])
  expected = np.exp(x - x.max()) / np.exp(x - x.max()).sum() * draws
  counts = np.bincount(out.tokens_NT[:, 0], minlength=97)
  big = expected >= 10
  cells = lambda y: np.append(y[big], y[~big].sum())
  assert stats.chisquare(cells(counts), cells(expected)).pvalue > 1e-4


def test_a_packed_model_is_sampled_as_its_dense_copy(params):
  packed = quant.quantize(params)
  a = sampler((), temperature=0.0)(packed, PROMPTS, KEY)
  b = sampler((), temperature=0.0)(weights.densify(packed), PROMPTS, KEY)
  assert rows(a) == rows(b)
  np.testing.assert_allclose(a.logp_NT, b.logp_NT, atol=LOGP)


# --- the same whatever the batch, its order and its padding


@pytest.fixture(scope="module")
def alone(params):
  """Each row by itself, with the id that it has in the batches below."""
  one = sampler()
  return [one(params, [p], KEY, row_ids=[i]).ids(0) for i, p in enumerate(PROMPTS)]


def test_rows_do_not_see_each_other(params, alone):
  one = sampler()
  assert rows(one(params, PROMPTS, KEY)) == alone
  order = [2, 0, 3, 1]
  mixed = one(params, [PROMPTS[i] for i in order], KEY, row_ids=order)
  assert rows(mixed) == [alone[i] for i in order]
  wider = one(params, [*PROMPTS, list(range(17, 37))], KEY)  # the next prompt bucket
  assert rows(wider)[:4] == alone


def test_expanding_a_group_is_repeating_its_prompt(params):
  one = sampler()
  expanded = one(params, PROMPTS, KEY, samples=3)
  repeated = one(params, [p for p in PROMPTS for _ in range(3)], KEY)
  assert rows(expanded) == rows(repeated)
  assert len({tuple(r) for r in rows(expanded)}) > 8, "samples of a group differ"
  np.testing.assert_allclose(expanded.logp_NT, repeated.logp_NT, atol=LOGP)


def test_a_shared_prefix_changes_nothing(params):
  prompts = [[30, 31, 32, 33, 34, *p] for p in PROMPTS]
  assert autoregressive.common_prefix(prompts) == 5
  assert autoregressive.common_prefix([[1, 2], [1, 2, 3]]) == 1  # each keeps one of its own
  one = sampler()
  plain, shared = one(params, prompts, KEY), one(params, prompts, KEY, prefix=5)
  assert rows(plain) == rows(shared)
  np.testing.assert_allclose(plain.logp_NT, shared.logp_NT, atol=LOGP)


def test_compaction_and_chunks_change_nothing(params):
  prompts, stop_ids = [[i] for i in range(10)], tuple(range(40, 80))
  plain = sampler(stop_ids)(params, prompts, KEY, samples=2)
  compacted = sampler(stop_ids, compact=True, chunk_tokens=1)(params, prompts, KEY, samples=2)
  live = (plain.length_N > 4).sum()
  assert 0 < live <= 8, "some rows must go on after most have ended"
  assert rows(compacted) == rows(plain)
  for field in ("logp_NT", "entropy_NT"):
    np.testing.assert_allclose(getattr(compacted, field), getattr(plain, field), atol=LOGP)
  assert (compacted.stopped_N == plain.stopped_N).all()


@pytest.mark.parametrize("pads", [0, 1, 5])
def test_left_padding_is_a_choice_of_positions(params, pads):
  prompt = jnp.asarray([PROMPTS[1]])
  hidden = lambda tokens, positions: MODULE.apply(
    {"params": params}, tokens, positions, method="hidden"
  )[0]
  padded = jnp.pad(prompt, ((0, 0), (pads, 0)), constant_values=3)
  positions = jnp.arange(-pads, prompt.shape[1])[None]
  expected = hidden(prompt, None)
  np.testing.assert_allclose(hidden(padded, positions)[:, pads:], expected, atol=1e-5)


# --- ends


def test_a_stop_token_counts_once_and_nothing_follows(params, greedy):
  free = greedy
  stop = int(free.tokens_NT[0, 4])
  at = free.tokens_NT[0].tolist().index(stop)  # its first appearance
  one = dataclasses.replace(sampler((stop, 500), temperature=0.0), pad_id=stop)
  out = one(params, PROMPTS, KEY)
  assert out.ids(0) == free.ids(0)[: at + 1] and out.stopped_N[0]
  assert (out.tokens_NT[0, at + 1 :] == stop).all(), "filled up with pad, here a stop id itself"
  for table in (out.logp_NT, out.logp_kept_NT, out.entropy_NT):
    assert table[0, : at + 1].all() and not table[0, at + 1 :].any()
  for row in range(len(PROMPTS)):
    assert out.stopped_N[row] == (stop in free.ids(row)), "False: the limit ended it"
    assert out.length_N[row] == NEW or out.stopped_N[row]


def test_one_token_is_a_generation_too(params):
  out = sampler((), temperature=0.0, max_new_tokens=1)(params, PROMPTS, KEY)
  assert rows(out) == [[int(last_logits(params, p).argmax())] for p in PROMPTS]


def test_the_host_may_stop_rows_between_chunks(params, greedy):
  calls = []

  def on_chunk(tokens_NT, length_N):
    calls.append(length_N.copy())
    return np.array([True, False, False, False]) if len(calls) == 2 else None

  one = sampler((), chunk_tokens=3, temperature=0.0)
  out = one(params, PROMPTS, KEY, on_chunk=on_chunk)
  assert [c.tolist() for c in calls[:2]] == [[4] * 4, [7] * 4]
  assert out.length_N.tolist() == [7, NEW, NEW, NEW]
  assert out.stopped_N.tolist() == [True, False, False, False]
  assert rows(out) == [greedy.ids(0)[:7], *rows(greedy)[1:]]


# --- noise


def test_noise_of_zero_is_no_noise_and_more_is_the_same_for_a_key(params):
  one = sampler()
  noise = lambda sigma: autoregressive.Noise(jnp.float32(sigma), jax.random.key(3))
  clean, zero = one(params, PROMPTS, KEY), one(params, PROMPTS, KEY, noise=noise(0.0))
  assert rows(clean) == rows(zero) and (clean.logp_NT == zero.logp_NT).all()
  loud = one(params, PROMPTS, KEY, noise=noise(0.3))
  again = one(params, PROMPTS, KEY, noise=noise(0.3))
  assert (loud.logp_NT != clean.logp_NT).any()
  assert rows(loud) == rows(again)


# --- programs


def test_programs_are_as_many_as_buckets(params):
  one = sampler(max_new_tokens=9)
  before = autoregressive.prefill._cache_size(), autoregressive.decode._cache_size()

  def compiled():
    now = autoregressive.prefill._cache_size(), autoregressive.decode._cache_size()
    return now[0] - before[0], now[1] - before[1]

  one(params, PROMPTS, KEY)
  assert compiled() == (1, 1)
  other = jax.tree.map(lambda x: x * 1.1, params)  # adapters and norms are arguments
  one(other, [p[::-1] for p in PROMPTS], jax.random.key(8))
  one(params, [[1] * 16, [2], [3, 3], [4]], KEY)
  dataclasses.replace(one, chunk_tokens=2)(params, PROMPTS, KEY)
  assert compiled() == (1, 1), "same bucket, same programs"
  one(params, [[1] * 17, [2], [3, 3], [4]], KEY)
  assert compiled() == (2, 2), "the next bucket"


# --- bad input


@pytest.mark.parametrize(
  "prompts, prefix, message",
  [
    ([], 0, "Sampler: there is no prompt"),
    ([[1], []], 0, "prompt 1 is empty"),
    ([[1], [2] * 60], 0, "prompt 1 has 60 tokens and 10 more .* but the context holds 64. Shorten"),
    ([[1, 2], [1, 3]], 2, "prompt 0 must begin with the common prefix of 2 tokens and go on"),
    ([[1, 2, 5], [1, 3, 5]], 2, "prompt 1 must begin with the common prefix of 2 tokens"),
  ],
)  # fmt: skip
def test_prompts_that_cannot_be_continued(params, prompts, prefix, message):
  with pytest.raises(ValueError, match=message):
    sampler()(params, prompts, KEY, prefix=prefix)
