"""What a rollout hands to the trainer: log-probabilities, groups, masks, noise, and which items."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import noise
from jaxlab.decode import autoregressive
from jaxlab.models import causal_lm
from jaxlab.objectives import policy_gradient
from jaxlab.rl import config as rl_config
from jaxlab.rl import rollout
from tests.rl import tiny

WITH_KL = policy_gradient.PolicyGradientConfig(chunk_tokens=64, kl_coef=0.5)
ROUNDING = 1e-5  # two float32 programs of one policy, in nats


def digest(tree) -> str:
  """Changes with any bit of any array."""
  content = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
  return hashlib.sha256(content).hexdigest()


def at(trainer, trainable):
  """The trainer's state with other trainable arrays."""
  return dataclasses.replace(trainer.state, trainable=trainable)


def answers(source) -> list[tuple[int, ...]]:
  """The token ids of the last rollout."""
  return [a.response.token_ids for g in source.seen for a in g.answers]


def masked_gap(batch, logp) -> float:
  difference = np.abs(np.asarray(batch.logp_rollout_RQT - logp))
  return float(np.where(batch.mask_RQT, difference, 0).max())


# --- O10: sampler and trainer are one policy


@pytest.mark.parametrize("per_row", [1, 8])
def test_recorded_log_probabilities_are_the_trainers(packed_lm, per_row):
  trainer = tiny.trainer(packed_lm, aqn=None, mask_truncated=False, sequences_per_row=per_row)
  trainable = tiny.moved(trainer.state.trainable)
  (batch,) = trainer.source(0, at(trainer, trainable)).batches
  assert batch.mask_RQT.sum() > 30
  logp = rollout.score_step(packed_lm.module, trainer.config.loss, trainable, trainer.frozen, batch)
  assert masked_gap(batch, logp) < ROUNDING
  base = rollout.score_step(
    packed_lm.module, trainer.config.loss, trainer.state.trainable, trainer.frozen, batch
  )
  assert masked_gap(batch, base) > 0.01  # it is this policy, not any


def test_a_rollout_is_a_function_of_step_and_adapters(packed_lm):
  first, second = (tiny.trainer(packed_lm) for _ in range(2))
  one, other = first.source(2, first.state), first.source(3, first.state)
  again = second.source(2, second.state)
  assert digest(one.batches) == digest(again.batches) != digest(other.batches)
  timing = ("rollout_seconds",)
  same = lambda metrics: {k: v for k, v in metrics.items() if k not in timing}
  assert same(one.metrics) == same(again.metrics) and one.rows == again.rows


# --- which items


@pytest.mark.parametrize("items, count", [(10, 4), (7, 7), (5, 12)])
def test_an_epoch_asks_every_item_once(items, count):
  key = jax.random.key(3)
  steps = -(-3 * items // count)
  asked = [i for step in range(steps) for i in rollout.item_index(items, count, step, 0, 1, key)]
  for epoch in range(len(asked) // items):
    assert sorted(asked[epoch * items : (epoch + 1) * items]) == list(range(items))
  assert asked[:items] != asked[items : 2 * items]  # a new order


def test_which_items_are_asked_is_a_pure_function():
  key, other = jax.random.key(3), jax.random.key(4)
  ask = lambda step, attempt, key=key: rollout.item_index(100, 8, step, attempt, 3, key)
  late = ask(40, 0)
  for step in range(30):
    ask(step, 0)
  assert ask(40, 0) == late != rollout.item_index(100, 8, 40, 0, 3, other)
  # Sampling again neither skips items of the first attempts nor asks its own twice.
  again = [i for step in range(6) for attempt in (1, 2) for i in ask(step, attempt)]
  assert sorted(again[:96]) == sorted(set(again[:96]))
  assert ask(3, 0) == rollout.item_index(100, 8, 3, 0, 1, key)


def test_prompts_keep_their_last_tokens_and_share_a_long_prefix(lm):
  items = tiny.items(3)
  prompts = rollout.tokenize(items, lm.tokenizer, max_tokens=4)
  assert [lm.tokenizer.decode(ids) for ids in prompts.ids] == [i.prompt[-4:] for i in items]
  assert prompts.prefix == 0
  long = [dataclasses.replace(i, prompt="12+34?\n" * 5 + i.prompt) for i in items]
  prompts = rollout.tokenize(long, lm.tokenizer, max_tokens=64)
  assert prompts.prefix == 35
  assert len({tuple(ids[:35]) for ids in prompts.ids}) == 1


def test_a_system_prompt_goes_before_conversations_without_one(lm):
  turn = {"role": "user", "content": "1+1?"}
  own = {"role": "system", "content": "2"}
  items = [
    dataclasses.replace(i, prompt=None, messages=messages)
    for i, messages in zip(tiny.items(2), [(turn,), (own, turn)], strict=True)
  ]
  prompts = rollout.tokenize(items, lm.tokenizer, max_tokens=64, system_prompt="3")
  first, second = (lm.tokenizer.decode(ids, False) for ids in prompts.ids)
  assert "\n3<|im_end|>" in first and "\n2<|im_end|>" in second and "\n3<" not in second


# --- groups, rewards, masks


def test_groups_advantages_and_masks_by_hand(packed_lm):
  trainer = tiny.trainer(packed_lm, aqn=None, overlong_buffer=3)
  work = trainer.source(0, trainer.state)
  (batch,) = work.batches
  groups = trainer.source.seen
  assert len(groups) == 4 and all(len(g.answers) == 4 for g in groups)
  for g in groups:
    rewards = np.array([a.reward for a in g.answers])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4) * g.has_variance
    np.testing.assert_allclose(g.advantage, expected, atol=1e-6)
    for a in g.answers:
      n = len(a.response.token_ids)
      assert a.parts["overlong"] == -max(0, n - 3) / 3
      assert a.reward == a.parts["even"] + a.parts["overlong"]
      stopped = a.response.finish == "stop"
      assert stopped == (a.response.token_ids[-1] == tiny.EOS)
      assert stopped or n == 6
      assert tiny.EOS not in a.response.token_ids[:-1]
  flat = [a for g in groups for a in g.answers]
  kept = [len(a.response.token_ids) * (a.response.finish == "stop") for a in flat]
  assert 0 in kept and batch.mask_RQT.reshape(16, -1).sum(1).tolist() == kept
  assert batch.valid_RQ.all()  # a truncated answer still counts as a sequence
  assert work.metrics["truncated"] == kept.count(0) / 16
  assert work.rows == [g.answers[0].item.id for g in groups]


def test_truncated_answers_train_if_asked_to(packed_lm):
  trainer = tiny.trainer(packed_lm, aqn=None, mask_truncated=False)
  (batch,) = trainer.source(0, trainer.state).batches
  lengths = [len(ids) for ids in answers(trainer.source)]
  assert batch.mask_RQT.reshape(16, -1).sum(1).tolist() == lengths


def test_a_rollout_without_any_whole_answer_trains_nothing(packed_lm):
  trainer = tiny.trainer(packed_lm, aqn=None)
  endless = dataclasses.replace(trainer.source.sampler, stop_ids=())
  source = dataclasses.replace(trainer.source, sampler=endless)
  work = source(0, trainer.state)
  assert work.metrics["truncated"] == 1.0 and list(work.batches) == []


def odd_items_alike(item, response):
  """Items with an odd number cannot be told apart by their answers."""
  alike = int(item.id.rsplit("/", 1)[1]) % 2
  return {"reward": 1.0 if alike else tiny.even_digits(item, response)["even"]}


def test_groups_without_variance_are_sampled_again(packed_lm):
  settings = {"drop_equal_groups": True, "max_groups": 4, "aqn": None}
  trainer = tiny.trainer(packed_lm, reward=odd_items_alike, max_rollouts=6, **settings)
  for step in range(3):
    work = trainer.source(step, trainer.state)
    seen = trainer.source.seen
    assert len(work.rows) == 4 and len(seen) > 4
    used = [g for g in seen if g.has_variance][:4]
    assert work.rows == [g.answers[0].item.id for g in used]
    assert work.metrics["zero_variance"] == 1 - sum(g.has_variance for g in seen) / len(seen)
    assert (work.batches[0].advantage_RQ != 0).any()
    # Later attempts have random numbers of their own.
    drawn = {}
    for g in seen:
      drawn.setdefault(g.answers[0].item.id, []).append([a.response.token_ids for a in g.answers])
    twice = [tries for tries in drawn.values() if len(tries) > 1]
    assert all(tries[0] != tries[1] for tries in twice)
  once = tiny.trainer(packed_lm, reward=odd_items_alike, **settings)
  assert len(once.source(0, once.state).rows) < 4


def test_equal_rewards_everywhere_leave_nothing_to_train_on(packed_lm):
  trainer = tiny.trainer(packed_lm, reward=tiny.constant, drop_equal_groups=True)
  work = trainer.source(0, trainer.state)
  assert list(work.batches) == [] and list(work.rows) == []
  assert work.metrics["zero_variance"] == 1 and work.metrics["groups_used"] == 0


def test_what_was_not_measured_trains_nothing(packed_lm):
  def unreadable(item, response):
    return {"reward": None if len(response.token_ids) == 1 else float(len(response.token_ids))}

  trainer = tiny.trainer(packed_lm, reward=unreadable, aqn=None)
  work = trainer.source(0, trainer.state)
  short = [len(ids) == 1 for ids in answers(trainer.source)]
  assert any(short) and not all(short)
  assert (np.asarray(work.batches[0].advantage_RQ).reshape(-1)[short] == 0).all()
  assert work.metrics["reward"] > 1  # the mean over what was measured


# --- old policy, reference policy, minibatches


def test_later_updates_of_a_rollout_see_the_policy_that_was(packed_lm):
  trainer = tiny.trainer(packed_lm, iterations=2, minibatches=2, loss=WITH_KL)
  trainable = tiny.moved(trainer.state.trainable)
  batches = list(trainer.source(0, at(trainer, trainable)).batches)
  assert len(batches) == 4
  assert digest(batches[0]) == digest(batches[2]) and digest(batches[1]) == digest(batches[3])
  assert [int(b.valid_RQ.sum()) for b in batches] == [8] * 4  # whole groups
  score = lambda x, b: rollout.score_step(
    packed_lm.module, trainer.config.loss, x, trainer.frozen, b
  )
  for b in batches[:2]:
    np.testing.assert_array_equal(b.logp_old_RQT, score(trainable, b))
    np.testing.assert_array_equal(b.logp_ref_RQT, score(trainer.state.trainable, b))
    assert np.abs(np.asarray(b.logp_ref_RQT - b.logp_old_RQT)[np.asarray(b.mask_RQT)]).max() > 0.01


def test_a_single_update_needs_neither(packed_lm):
  trainer = tiny.trainer(packed_lm)
  (batch,) = trainer.source(0, trainer.state).batches
  assert batch.logp_old_RQT is None and batch.logp_ref_RQT is None


# --- adaptive quantisation noise


def test_sigma_zero_is_no_noise_bit_for_bit(packed_lm):
  silent, without = tiny.trainer(packed_lm), tiny.trainer(packed_lm, aqn=None)
  work, expected = (t.source(0, t.state) for t in (silent, without))
  assert work.metrics["aqn/sigma"] == 0
  assert answers(silent.source) == answers(without.source)
  assert digest(work.batches) == digest(expected.batches)


def test_noise_changes_the_answers_and_never_a_parameter(packed_lm):
  trainer = tiny.trainer(packed_lm)
  before = digest((trainer.frozen, trainer.state.trainable))
  clean = tiny.trainer(packed_lm, aqn=None)
  for step in range(1, 101):
    trainer.source(step, trainer.state)
  assert digest((trainer.frozen, trainer.state.trainable)) == before
  work = trainer.source(1, trainer.state)
  clean.source(1, clean.state)
  assert answers(trainer.source) != answers(clean.source)
  assert work.metrics["aqn/sigma"] == pytest.approx(0.1)
  # 2 layers, 2 gains of 64: the sample of 256 numbers has a spread of 4 %.
  assert work.metrics["aqn/effective_std"] == pytest.approx(0.1, rel=0.2)


def test_one_noisy_activation_reaches_q_k_and_v():
  """Kernels alike in q, k and v give outputs alike: all three read the same noisy rows (O4)."""
  config = causal_lm.CausalLMConfig(
    vocab_size=8, width=4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, mlp_width=2,
    qk_norm=False,
  )  # fmt: skip
  kernel = jnp.array([[1.0, 0], [0, 2], [-1, 1], [4, -2]])
  gain = jnp.array([0.5, 1, 2, 0.25])
  z = jnp.array([0.01, -0.02, 0.03, 0.005])
  x = jnp.array([1.0, -2, 3, 0.5])[None, None]
  layer = {name: {"kernel": kernel} for name in ("q", "k", "v", "gate", "up")}
  layer |= {"o": {"kernel": kernel.T}, "down": {"kernel": jnp.eye(2, 4)}, "mlp_norm": gain}
  block = causal_lm.Block(config)
  for shift, expected in ((0 * z, [-2.649064, 0.927173]), (z, [-2.686151, 1.014592])):
    params = layer | {"attn_norm": gain + shift}
    q, k, v = block.apply({"params": params}, x, method="qkv")
    np.testing.assert_allclose(q.reshape(2), expected, atol=2e-6)
    np.testing.assert_array_equal(q, k)
    np.testing.assert_array_equal(q, v)


def test_prefill_and_decode_share_one_draw(packed_lm):
  """The noisy rollout's log-probabilities are those of one forward pass with that noise."""
  trainer = tiny.trainer(packed_lm, mask_truncated=False)
  (batch,) = trainer.source(1, trainer.state).batches
  key = jax.random.fold_in(jax.random.fold_in(trainer.key, 1), 1)
  clean = trainer.source.serving.params(trainer.state.trainable)
  params = noise.perturb(clean, jnp.float32(0.1), key)
  logits = jax.jit(packed_lm.module.apply)({"params": params}, batch.tokens_RS[:, :16])
  logq = np.asarray(jax.nn.log_softmax(logits))
  for row, tokens in enumerate(np.asarray(batch.tokens_RS)):
    n, end = int(batch.mask_RQT[row].sum()), int((batch.positions_RS[row] >= 0).sum())
    logp = logq[row, np.arange(end - n - 1, end - 1), tokens[end - n : end]]
    np.testing.assert_allclose(batch.logp_rollout_RQT[row, 0, :n], logp, atol=ROUNDING)


def test_a_second_rollout_compiles_nothing(packed_lm):
  trainer = tiny.trainer(packed_lm)
  trainer.source(0, trainer.state)
  programs = autoregressive.prefill, autoregressive.decode
  sizes = [program._cache_size() for program in programs]
  for step in range(1, 4):  # sigma and adapters change
    trainer.source(step, at(trainer, tiny.moved(trainer.state.trainable, seed=step)))
  assert [program._cache_size() for program in programs] == sizes


def test_the_data_must_be_there():
  with pytest.raises(ValueError, match="RLData.train: the data set is empty"):
    rl_config.RLData(train=[], rewards=(tiny.constant,))
  with pytest.raises(ValueError, match="RLData.rewards: there is no reward"):
    rl_config.RLData(train=tiny.items(1))
