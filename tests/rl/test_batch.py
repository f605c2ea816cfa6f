"""Packed rows against one sequence a row and against a plain forward pass of every sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab import lora
from jaxlab.models import causal_lm
from jaxlab.nn import weights
from jaxlab.objectives import policy_gradient as pg
from jaxlab.quant import model as quant
from jaxlab.rl import batch
from jaxlab.train import guard, state, step

MODULE = causal_lm.CausalLM(
  causal_lm.CausalLMConfig(
    vocab_size=24, width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=48
  )
)
LENGTH = 6  # T
P1, P2, P3 = [5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 10, 11]
# P1 is a prefix of P3, and what P3 asks with is what others answer with.
ASKED = (
  (P1, [10, 11, 12]), (P1, [10, 11, 12]), (P2, [14, 3]), (P1, [10, 11]), (P3, [12, 12]),
  (P2, [14, 15, 16, 17, 3]), (P1, [13]), (P3, [4, 5, 6, 7, 8, 9]), (P2, [14]),
)  # fmt: skip
N = len(ASKED)
PACKINGS = (1, 4, N)
CONFIG = pg.PolicyGradientConfig(temperature=0.7, chunk_tokens=40, max_tokens=LENGTH)
LOSSES = {name: pg.PolicyGradientConfig(**CONFIG.__dict__ | {"loss": name}) for name in pg.LOSSES}
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}  # float32, sums of a hundred terms of size one


@functools.cache
def params():
  """Away from the start, where every layer is nearly the identity."""
  made = jax.jit(MODULE.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  return jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, made)


@functools.cache
def samples() -> tuple[batch.Sample, ...]:
  random = np.random.default_rng(0)
  rows = []
  for i, (prompt, answer) in enumerate(ASKED):
    logp = random.normal(-2, 1, len(answer)).astype(np.float32)
    rows.append(batch.Sample(prompt, answer, logp, float(random.normal()), i != N - 1))
  return tuple(rows)


def padded(rows) -> np.ndarray:
  """[N, T] float32 of lists."""
  out = np.zeros((len(rows), LENGTH), np.float32)
  for row, values in zip(out, rows, strict=True):
    row[: len(values)] = values
  return out


def pack(per_row, rows=None, **settings):
  rows = samples() if rows is None else rows
  return batch.pack(rows, per_row=per_row, max_answer=LENGTH, **settings)


def unpacked(x_RQT) -> np.ndarray:
  """The rows of the N sequences, in their order."""
  return np.asarray(x_RQT).reshape(-1, *x_RQT.shape[2:])[:N]


MASK = padded([[s.train] * len(s.answer) for s in samples()]).astype(bool)
ROLLOUT = padded([s.logp for s in samples()])
ADVANTAGE = np.asarray([s.advantage for s in samples()], np.float32)


@jax.jit
def packed_forward(params, packed, cotangent):
  """(log-probabilities, entropies, their pull-back) of packed rows."""
  (logp, entropy), pull = jax.vjp(lambda p: batch.score(MODULE, p, packed, CONFIG), params)
  return logp, entropy, pull((cotangent, jnp.zeros_like(entropy)))[0]


@jax.jit
def plain_forward(params, cotangent_NT):
  """The same of every sequence alone: right-padded, causal, the whole vocabulary at once."""
  longest = max(len(p) + len(a) for p, a in ASKED)
  tokens = np.zeros((N, longest), np.int32)
  at = np.zeros((N, LENGTH), np.int32)  # position of each answer token
  for row, where, (prompt, answer) in zip(tokens, at, ASKED, strict=True):
    row[: len(prompt) + len(answer)] = prompt + answer
    where[: len(answer)] = len(prompt) + np.arange(len(answer))
  answered = padded([[1] * len(a) for _, a in ASKED]).astype(bool)

  def forward(params):
    logits = MODULE.apply({"params": params}, jnp.asarray(tokens)) / CONFIG.temperature
    logq = jax.nn.log_softmax(logits)
    logq = jnp.take_along_axis(logq, jnp.maximum(at - 1, 0)[..., None], axis=1)
    target = np.take_along_axis(tokens, at, axis=1)[..., None]
    logp = jnp.take_along_axis(logq, target, axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logq) * logq, axis=-1)
    return jnp.where(answered, logp, 0.0), jnp.where(answered, entropy, 0.0)

  (logp, entropy), pull = jax.vjp(forward, params)
  return logp, entropy, pull((cotangent_NT, jnp.zeros_like(entropy)))[0]


@functools.partial(jax.jit, static_argnames="config")
def loss_and_cotangent(logp, data, config):
  def loss(logp):
    return pg.policy_gradient_loss(logp, jnp.zeros_like(logp), data, config)[0].mean()

  return jax.value_and_grad(loss)(logp)


def policy_batch(packed) -> pg.PolicyBatch:
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  return pg.PolicyBatch(
    mask_BT=flat(packed.mask_RQT), advantage_B=flat(packed.advantage_RQ),
    logp_rollout_BT=flat(packed.logp_rollout_RQT), valid_B=flat(packed.valid_RQ),
  )  # fmt: skip


def assert_close(got, expected, **tolerance):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, **(ROUNDING | tolerance))


# --- the layout, by hand


def test_a_tree_by_hand():
  asked = [([1, 2], [3, 4]), ([1, 2], [3]), ([1, 2], [5]), ([1, 2], [3, 4])]
  rows = [batch.Sample(p, a, np.zeros(len(a), np.float32), 1.0, True) for p, a in asked]
  packed = batch.pack(rows, per_row=4, max_answer=2)
  slots = 5
  np.testing.assert_array_equal(packed.tokens_RS[0, :slots], [1, 2, 3, 4, 5])
  np.testing.assert_array_equal(packed.positions_RS[0, :slots], [0, 1, 2, 3, 2])
  np.testing.assert_array_equal(packed.until_RS[0, :slots], [5, 5, 4, 4, 5])
  assert (packed.positions_RS[0, slots:] == -1).all()
  np.testing.assert_array_equal(packed.source_RK[0, :3], [1, 2, 1])
  np.testing.assert_array_equal(packed.target_RK[0, :3], [2, 3, 4])
  np.testing.assert_array_equal(packed.pair_RQT[0], [[0, 1], [0, 0], [2, 0], [0, 1]])
  np.testing.assert_array_equal(packed.mask_RQT[0], [[1, 1], [1, 0], [1, 0], [1, 1]])


def test_eight_answers_cost_one_prompt():
  prompt = list(range(100))
  rows = [batch.Sample(prompt, [200 + i], np.zeros(1, np.float32), 1.0, True) for i in range(8)]
  packed = batch.pack(rows, per_row=8, max_answer=1)
  assert int((packed.positions_RS >= 0).sum()) == 108
  assert packed.tokens_RS.shape == (1, batch.SLOT_MULTIPLE)


def test_rows_are_filled_up_to_a_multiple():
  packed = pack(2, row_multiple=4)
  assert packed.tokens_RS.shape[0] == 8
  assert int(packed.valid_RQ.sum()) == N
  assert not packed.mask_RQT.reshape(-1, LENGTH)[N:].any()


def test_few_shapes_for_any_number_of_groups():
  def rows(groups, **settings):
    samples = [batch.Sample([1, 2], [3 + i], np.zeros(1), 1.0, True) for i in range(groups * 4)]
    packed = batch.pack(samples, max_answer=2, **settings)
    assert int(packed.valid_RQ.sum()) == groups * 4
    return packed.tokens_RS.shape[0]

  most = 12 * 4
  assert {rows(g, per_row=1, most=most) for g in range(1, 13)} == {4, 8, 16, 32, 48}
  assert {rows(g, per_row=8, most=most) for g in range(1, 13)} == {1, 2, 4, 6}
  assert {rows(g, per_row=64, most=most) for g in range(1, 13)} == {1}
  assert {rows(g, per_row=1, most=most, row_multiple=16) for g in range(1, 13)} == {16, 32, 48}


# --- against the plain forward pass


@pytest.fixture(scope="module")
def plain():
  """(log-probabilities, entropies) of the sequences, each alone."""
  logp, entropy, _ = plain_forward(params(), jnp.zeros((N, LENGTH)))
  return np.asarray(logp), np.asarray(entropy)


@pytest.mark.parametrize("per_row", PACKINGS)
def test_log_probabilities_losses_and_gradients_do_not_depend_on_the_packing(per_row, plain):
  packed = pack(per_row)
  zeros = jnp.zeros(packed.mask_RQT.shape)
  logp, entropy, _ = packed_forward(params(), packed, zeros)
  answered = padded([[1] * len(a) for _, a in ASKED]).astype(bool)
  np.testing.assert_allclose(unpacked(logp)[answered], plain[0][answered], **ROUNDING)
  np.testing.assert_allclose(unpacked(entropy)[answered], plain[1][answered], **ROUNDING)
  alone = pg.PolicyBatch(
    mask_BT=jnp.asarray(MASK), advantage_B=jnp.asarray(ADVANTAGE),
    logp_rollout_BT=jnp.asarray(ROLLOUT),
  )  # fmt: skip
  for config in LOSSES.values():
    flat_logp = logp.reshape(-1, LENGTH)
    loss, cotangent = loss_and_cotangent(flat_logp, policy_batch(packed), config)
    expected, plain_cotangent = loss_and_cotangent(jnp.asarray(plain[0]), alone, config)
    assert float(loss) == pytest.approx(float(expected), abs=1e-5), config.loss
    _, _, grads = packed_forward(params(), packed, cotangent.reshape(zeros.shape))
    _, _, expected_grads = plain_forward(params(), plain_cotangent)
    assert_close(grads, expected_grads)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads)) > 0.01


# --- O8: limits


def test_the_first_update_is_the_plain_policy_gradient_for_any_clip(plain):
  packed = pack(N)
  tight = pg.PolicyGradientConfig(clip_low=0.01, clip_high=0.01, correction="none")
  logp = jnp.asarray(plain[0])
  _, cotangent = loss_and_cotangent(logp, policy_batch(packed), tight)
  np.testing.assert_allclose(cotangent, -ADVANTAGE[:, None] * MASK / MASK.sum(), atol=1e-7)


def test_equal_lengths_make_grpo_dapo_and_bnpo_equal(plain):
  rows = [s._replace(answer=s.answer[:1], logp=s.logp[:1], train=True) for s in samples()]
  packed = pack(N, rows)
  values = [
    loss_and_cotangent(jnp.asarray(plain[0]), policy_batch(packed), LOSSES[name])
    for name in ("grpo", "dapo", "bnpo")
  ]
  for value in values[1:]:
    assert_close(value, values[0], atol=1e-6)


def test_at_the_reference_the_kl_and_its_gradient_are_zero(plain):
  data = policy_batch(pack(N))
  data = pg.PolicyBatch(**data.__dict__ | {"logp_ref_BT": jnp.asarray(plain[0])})
  with_kl = pg.PolicyGradientConfig(**CONFIG.__dict__ | {"kl_coef": 5.0})
  assert_close(
    loss_and_cotangent(jnp.asarray(plain[0]), data, with_kl),
    loss_and_cotangent(jnp.asarray(plain[0]), data, CONFIG),
    atol=1e-7,
  )


# --- micro-batches: the update of the train step


@pytest.fixture(scope="module")
def updates():
  """{(loss, micro rows): (loss, gradient)} of whole train steps, five losses in one program."""
  packed = pack(3, row_multiple=4)  # the last row only fills

  def objective(params, rows, key):
    scored = batch.score(MODULE, params, rows["packed"], CONFIG)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(batch, "score", lambda *args: scored)
      objectives = [batch.make_objective(MODULE, config) for config in LOSSES.values()]
      branches = [lambda _, o=o: o(params, rows["packed"], key)[0] for o in objectives]
      return jax.lax.switch(rows["which"][0], branches, None), {}

  optimizer = guard.guarded(optax.sgd(1.0))
  found = {}
  for micro in (None, 1):
    train_step = step.make_train_step(objective, optimizer, micro_batch=micro)
    for which, name in enumerate(LOSSES):
      trainable, frozen = weights.partition(params(), lambda path: "layers" in path)
      before = state.TrainState.create(trainable, optimizer)
      rows = {"packed": packed, "which": jnp.full(4, which, jnp.int32)}
      after, metrics = train_step(before, frozen, rows, jax.random.key(0))
      grads = {path: trainable[path] - x for path, x in after.trainable.items()}
      found[name, micro] = float(metrics["loss"]), grads
  return found


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_any_split_into_micro_batches_gives_the_same_update(loss, updates):
  value, grads = updates[loss, None]
  assert max(float(jnp.abs(g).max()) for g in grads.values()) > 0.01
  split_value, split_grads = updates[loss, 1]
  assert split_value == pytest.approx(value, abs=1e-6)
  assert_close(split_grads, grads, rtol=0, atol=2e-6)


def test_bnpo_is_the_mean_over_micro_batches_that_hold_sequences(updates, plain):
  """Rows that only fill are no micro-batch."""
  data = policy_batch(pack(N))
  halves = []
  for start in range(0, N, 3):  # one packed row each
    rows = jax.tree.map(lambda x, i=start: x[i : i + 3], data)
    logp = jnp.asarray(plain[0][start : start + 3])
    halves.append(float(loss_and_cotangent(logp, rows, LOSSES["bnpo"])[0]))
  assert updates["bnpo", 1][0] == pytest.approx(np.mean(halves), abs=1e-6)
  assert abs(updates["bnpo", None][0] - np.mean(halves)) > 1e-3


# --- O11, O13


def test_masters_in_float32_move_where_bfloat16_stands_still():
  start = 0.012023926
  optimizer = guard.guarded(optax.sgd(1e-5))
  masters = state.TrainState.create({"a": jnp.full(3, start, jnp.bfloat16)}, optimizer).trainable
  assert masters["a"].dtype == jnp.float32

  def thousand(x):
    return jax.lax.fori_loop(0, 1000, lambda _, x: x - jnp.asarray(1e-5, x.dtype), x)

  np.testing.assert_allclose(thousand(masters["a"]), start - 0.01, atol=1e-6)
  stalled = jnp.full(3, start, jnp.bfloat16)
  np.testing.assert_array_equal(thousand(stalled), stalled)


@pytest.mark.usefixtures("full_compilation")
def test_the_train_step_holds_neither_a_dense_model_nor_all_logits():
  """A deep, narrow model whose dense kernels and logits would each dwarf all that is needed."""
  depth, width, vocab, rows, per_row, length = 64, 256, 262_144, 2, 2, 64
  module = causal_lm.CausalLM(
    causal_lm.CausalLMConfig(
      vocab_size=vocab, width=width, num_layers=depth, num_heads=4, num_kv_heads=4, head_dim=64,
      mlp_width=768,
    ),
    remat=True,
  )  # fmt: skip
  config = lora.LoRAConfig(rank=2)
  optimizer = guard.guarded(optax.adam(1e-4))

  def build(key):
    packed = quant.quantize(module.init(key, jnp.zeros((1, 1), jnp.int32))["params"])
    parts = weights.partition(lora.attach(packed, config, key), lora.is_trainable(config))
    return state.TrainState.create(parts[0], optimizer), parts[1]

  train_state, frozen = jax.eval_shape(build, jax.random.key(0))
  answers = [
    batch.Sample([1] * 60 + [i], [i % 97] * length, np.zeros(length, np.float32), 1.0, True)
    for i in range(rows * per_row)
  ]
  packed = batch.pack(answers, per_row=per_row, max_answer=length)
  objective = batch.make_objective(module, pg.PolicyGradientConfig(chunk_tokens=8))
  train_step = step.make_train_step(objective, optimizer)
  lowered = train_step.lower(train_state, frozen, packed, jax.random.key(0))
  temporary = lowered.compile().memory_analysis().temp_size_in_bytes
  linears = depth * (4 * width * width + 3 * width * 768)
  pairs = packed.source_RK.size
  assert temporary < 4 * linears / 2, "a dense copy of the model would be twice this bound"
  assert temporary < 4 * pairs * vocab / 2, "the logits of all tokens would be twice this bound"
