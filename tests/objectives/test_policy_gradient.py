"""Policy-gradient losses against the hand-computed oracles O7, O8, O9 of the QeRL specification."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.objectives import policy_gradient as pg
from jaxlab.objectives import policy_gradient_core as core

LOGP = jnp.array([[-1.0, -0.5, -2.0], [-0.7, -1.2, -0.3]])
OLD = jnp.array([[-1.2, -0.5, -1.5], [-0.6, -1.8, -0.3]])
ROLLOUT = jnp.array([[-1.25, -0.45, -1.9], [-0.65, -2.6, -0.3]])
REF = jnp.array([[-1.1, -0.6, -1.9], [-0.7, -1.0, -0.4]])
MASK = jnp.array([[True, True, True], [True, True, False]])
ADVANTAGE = jnp.array([0.8, -1.1])
ENTROPY = jnp.full((2, 3), 0.5)
ORACLE = {"rel": 0, "abs": 2e-6}  # the oracles are printed with six decimals, computed in float32


def make_batch(**changes):
  batch = pg.PolicyBatch(mask_BT=MASK, advantage_B=ADVANTAGE, logp_old_BT=OLD)
  return dataclasses.replace(batch, **changes)


def loss_of(batch=None, logp=LOGP, **settings):
  config = pg.PolicyGradientConfig(**({"correction": "none"} | settings))
  batch = make_batch() if batch is None else batch
  weighted, _ = pg.policy_gradient_loss(logp, jnp.zeros_like(logp), batch, config)
  return float(weighted.mean())


def metrics_of(batch, **settings):
  config = pg.PolicyGradientConfig(**({"correction": "none"} | settings))
  _, metrics = pg.policy_gradient_loss(LOGP, ENTROPY, batch, config)
  return {name: float(value.mean()) for name, value in metrics.items()}


# --- O7: worked by hand ---------------------------------------------------------------------------


def test_ratio():
  ratio = core.importance_ratio(LOGP - OLD, MASK)
  np.testing.assert_allclose(
    ratio, [[1.221403, 1, 0.606531], [0.904837, 1.822119, 1]], atol=1e-6, rtol=0
  )


@pytest.mark.parametrize(
  "clip_high, dual_clip, expected",
  [
    (0.2, None, (0.375709, 0.150885, 0.094303)),
    (0.28, None, (0.372855, 0.147461, 0.092163)),
    (0.28, 1.5, (0.284273, 0.076595, 0.047872)),
  ],
)
def test_aggregations(clip_high, dual_clip, expected):
  settings = {"clip_high": clip_high, "dual_clip": dual_clip, "max_tokens": 4}
  for loss, value in zip(("grpo", "dapo", "dr_grpo"), expected, strict=True):
    assert loss_of(loss=loss, **settings) == pytest.approx(value, **ORACLE), loss


def rows(batch, *index):
  return jax.tree.map(lambda x: x[np.array(index)], batch)


def test_bnpo_averages_ratios_of_micro_batches_and_dapo_does_not():
  def accumulated(loss):
    config = pg.PolicyGradientConfig(loss=loss, correction="none")
    parts = [
      pg.policy_gradient_loss(LOGP[i : i + 1], ENTROPY[i : i + 1], rows(make_batch(), i), config)
      for i in range(2)
    ]
    return float(sum(part for part, _ in parts).mean())

  assert accumulated("bnpo") == pytest.approx(0.372855, **ORACLE)
  assert accumulated("dapo") == pytest.approx(0.147461, **ORACLE)


def test_gspo_ratio_is_one_number_a_sequence():
  ratio = core.importance_ratio(LOGP - OLD, MASK, sequence=True)
  np.testing.assert_allclose(ratio[:, 0], [0.904837, 1.284025], atol=1e-6)
  np.testing.assert_array_equal(ratio[:, 0], ratio[:, 1])
  # A > 0 keeps .904837; A < 0 takes the larger of rho and its clip: mean of -.723870 and 1.412428.
  assert loss_of(loss="gspo") == pytest.approx((-0.8 * 0.9048374 + 1.1 * 1.2840254) / 2, **ORACLE)


def test_kl_estimators():
  for kind, value in (("k1", -0.02), ("k2", 0.007), ("k3", 0.00724970), ("k3+", 0.00724970)):
    kl = core.kl_estimate(LOGP, REF, kind=kind)
    assert float(core.token_mean(kl, MASK).mean()) == pytest.approx(value, rel=1e-4), kind


def test_kl_gradients_and_clamps():
  logp, ref = jnp.array([[-1.0]]), jnp.array([[-1.7]])
  d = -0.7

  def gradient(kind, **clamps):
    return float(
      jax.grad(lambda x: core.kl_estimate(x, ref, kind=kind, **clamps).sum())(logp)[0, 0]
    )

  assert gradient("k1") == 1.0
  assert gradient("k2") == pytest.approx(-d)
  assert gradient("k3") == pytest.approx(1 - math.exp(d))
  assert gradient("k3+") == pytest.approx(-d)
  assert gradient("k3", log_clamp=0.5) == 0.0
  far = core.kl_estimate(jnp.array([[-300.0]]), jnp.zeros((1, 1)), log_clamp=20.0, value_clamp=10.0)
  assert float(far[0, 0]) == 10.0


# --- O8: limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, LOGP])
def test_first_update_is_the_plain_policy_gradient_for_any_clip(old):
  batch = make_batch(logp_old_BT=old)
  config = pg.PolicyGradientConfig(clip_low=0.01, clip_high=0.01, correction="none")
  grad = jax.grad(lambda x: pg.policy_gradient_loss(x, ENTROPY, batch, config)[0].mean())(LOGP)
  np.testing.assert_allclose(grad, -ADVANTAGE[:, None] * MASK / MASK.sum(), atol=1e-7)


def test_wide_clip_is_importance_sampling():
  ratio = np.exp(np.float64(LOGP) - np.float64(OLD))
  expected = -(ratio * np.float64(ADVANTAGE)[:, None] * np.asarray(MASK)).sum() / 5
  value = loss_of(clip_low=math.inf, clip_high=math.inf)
  assert value == pytest.approx(expected, **ORACLE)


def test_equal_lengths_make_grpo_dapo_and_bnpo_equal():
  batch = make_batch(mask_BT=jnp.ones((2, 3), bool))
  values = [loss_of(batch, loss=loss) for loss in ("grpo", "dapo", "bnpo")]
  np.testing.assert_allclose(values, values[0], rtol=1e-6)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(loss):
  rng = np.random.default_rng(0)
  logp, old = (jnp.array(rng.normal(-1, 0.3, (6, 4)), jnp.float32) for _ in range(2))
  batch = pg.PolicyBatch(
    mask_BT=jnp.array(rng.integers(0, 2, (6, 4)), bool),
    advantage_B=jnp.array(rng.normal(size=6), jnp.float32),
    logp_old_BT=old,
    valid_B=jnp.array([1, 1, 1, 0, 1, 1], bool),
  )
  config = pg.PolicyGradientConfig(loss=loss, correction="none", max_tokens=4)

  def split(logp, cuts):
    parts = (
      pg.policy_gradient_loss(logp[i:j], logp[i:j], rows(batch, *range(i, j)), config)
      for i, j in zip((0, *cuts), (*cuts, 6), strict=True)
    )
    return sum(part for part, _ in parts).mean()

  whole, grad = jax.value_and_grad(split)(logp, ())
  for cuts in [(2,), (2, 4)]:
    value, grad_split = jax.value_and_grad(split)(logp, cuts)
    assert float(value) == pytest.approx(float(whole), abs=1e-6)
    np.testing.assert_allclose(grad_split, grad, atol=1e-6)


def test_kl_at_the_reference_is_zero_with_zero_gradient():
  batch = make_batch(logp_ref_BT=LOGP)
  on = pg.PolicyGradientConfig(correction="none", kl_coef=5.0)
  off = pg.PolicyGradientConfig(correction="none")
  grads = [
    jax.grad(lambda x, c=c: pg.policy_gradient_loss(x, ENTROPY, batch, c)[0].mean())(LOGP)
    for c in (on, off)
  ]
  np.testing.assert_array_equal(*grads)
  assert metrics_of(batch, kl_coef=5.0)["kl"] == 0.0


@pytest.mark.parametrize("loss", pg.LOSSES)
def test_all_masked_batch_has_zero_loss_and_gradient(loss):
  batch = make_batch(mask_BT=jnp.zeros((2, 3), bool), logp_old_BT=jnp.full((2, 3), jnp.nan))
  config = pg.PolicyGradientConfig(loss=loss, correction="none", max_tokens=4)
  value, grad = jax.value_and_grad(
    lambda x: pg.policy_gradient_loss(x, ENTROPY, batch, config)[0].mean()
  )(LOGP)
  assert float(value) == 0.0
  np.testing.assert_array_equal(grad, 0.0)


def test_ratio_cannot_overflow():
  ratio = core.importance_ratio(jnp.array([[500.0, -500.0]]), jnp.ones((1, 2), bool))
  np.testing.assert_allclose(ratio[0], np.exp([20.0, -20.0]), rtol=1e-6)


# --- O9: corrections ------------------------------------------------------------------------------


def test_token_weights():
  weight, raw = core.correction_weight(OLD - ROLLOUT, MASK, mode="token_truncate", cap=2.0)
  expected = np.array([[1.051271, 0.951229, 1.491825], [1.051271, 2.225541, 1.0]])
  np.testing.assert_allclose(raw, expected, atol=1e-6)
  np.testing.assert_allclose(weight, np.minimum(expected, 2.0), atol=1e-6)
  masked, _ = core.correction_weight(OLD - ROLLOUT, MASK, mode="token_mask", cap=2.0, cap_low=1.0)
  np.testing.assert_allclose(masked, [[1.051271, 0, 1.491825], [1.051271, 0, 1]], atol=1e-6)


def test_sequence_weights():
  weight, _ = core.correction_weight(OLD - ROLLOUT, MASK, mode="sequence_truncate", cap=3.0)
  np.testing.assert_allclose(weight[:, 0], [1.491825, 2.339647], atol=1e-6)
  masked, _ = core.correction_weight(OLD - ROLLOUT, MASK, mode="sequence_mask", cap=2.0)
  np.testing.assert_allclose(masked[:, 0], [1.491825, 0.0], atol=1e-6)


def test_corrected_losses():
  batch = make_batch(logp_rollout_BT=ROLLOUT)
  assert loss_of(batch, correction="token_truncate") == pytest.approx(0.508588, **ORACLE)
  sequence = loss_of(batch, correction="sequence_truncate", cap=3.0)
  assert sequence == pytest.approx(0.728620, **ORACLE)
  bypass = loss_of(batch, correction="bypass")
  assert bypass == pytest.approx(loss_of(make_batch(logp_old_BT=ROLLOUT)), **ORACLE)


@pytest.mark.parametrize("mode", pg.CORRECTIONS)
def test_a_faithful_rollout_needs_no_correction(mode):
  batch = make_batch(logp_rollout_BT=OLD)
  assert loss_of(batch, correction=mode) == loss_of(batch, correction="none")
  metrics = metrics_of(batch, correction=mode)
  assert metrics["mismatch/abs_dlogp"] == metrics["mismatch/k3"] == metrics["mismatch/capped"] == 0
  assert metrics["mismatch/ess"] == pytest.approx(1.0)


def test_kl_term_is_not_weighted():
  batch = make_batch(logp_rollout_BT=ROLLOUT, logp_ref_BT=REF)
  settings = {"correction": "token_truncate"}
  gap = loss_of(batch, kl_coef=2.0, **settings) - loss_of(batch, **settings)
  assert gap == pytest.approx(2 * 0.00724970, abs=1e-6)


def test_metrics_by_hand():
  batch = make_batch(logp_rollout_BT=ROLLOUT, logp_ref_BT=REF)
  metrics = metrics_of(batch, dual_clip=1.5)
  mask, d = np.asarray(MASK), np.float64(OLD - ROLLOUT)
  w = np.exp(d)[mask]
  assert metrics["mismatch/abs_dlogp"] == pytest.approx(np.abs(d[mask]).mean(), rel=1e-5)
  assert metrics["mismatch/k3"] == pytest.approx((w - 1 - d[mask]).mean(), rel=1e-5)
  assert metrics["mismatch/ess"] == pytest.approx(w.sum() ** 2 / (5 * (w**2).sum()), rel=1e-5)
  assert metrics["mismatch/capped"] == pytest.approx(1 / 5)
  assert metrics["clip_high"] == 0.0  # 1.221 with A > 0 is inside 1.28
  assert metrics["clip_low"] == 0.0  # .904 with A < 0 is inside .8
  assert metrics["clip_dual"] == pytest.approx(1 / 5)  # 1.822 with A < 0
  assert metrics["kl"] == pytest.approx(0.00724970, rel=1e-4)
  assert metrics["entropy"] == 0.5


def test_padding_rows_count_nowhere():
  garbage = {"logp_old_BT": OLD.at[1].set(jnp.nan), "valid_B": jnp.array([True, False])}
  only = rows(make_batch(), 0)
  config = {"correction": "none", "max_tokens": 4}
  for loss in pg.LOSSES:
    value = loss_of(make_batch(**garbage), loss=loss, **config)
    assert value == pytest.approx(loss_of(only, LOGP[:1], loss=loss, **config), abs=1e-7), loss


# --- log-probabilities from hidden states ---------------------------------------------------------


def plain_logprobs(hidden, head, targets, temperature):
  logits = np.float64(hidden) @ np.float64(head) / temperature
  logq = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  chosen = np.take_along_axis(logq, np.asarray(targets)[..., None], -1)[..., 0]
  return chosen, -(np.exp(logq) * logq).sum(-1)


@pytest.mark.parametrize("batch, length, chunk", [(2, 7, 6), (1, 5, 1), (3, 4, 1), (2, 3, 4096)])
def test_chunked_logprobs_equal_the_plain_ones_with_their_gradients(batch, length, chunk):
  rng = np.random.default_rng(1)
  hidden = jnp.array(rng.normal(size=(batch, length, 4)), jnp.float32)
  head = jnp.array(rng.normal(size=(4, 11)), jnp.float32)
  targets = jnp.array(rng.integers(0, 11, (batch, length)))

  def chunked(hidden, head):
    return pg.chunked_logprobs(
      lambda x: x @ head, hidden, targets, temperature=0.7, chunk_tokens=chunk
    )

  logp, entropy = chunked(hidden, head)
  expected_logp, expected_entropy = plain_logprobs(hidden, head, targets, 0.7)
  np.testing.assert_allclose(logp, expected_logp, atol=2e-6)
  np.testing.assert_allclose(entropy, expected_entropy, atol=2e-6)

  def plain(hidden, head):
    logq = jax.nn.log_softmax(jnp.matmul(hidden, head) / 0.7)
    return (jnp.take_along_axis(logq, targets[..., None], -1)[..., 0] ** 2).sum()

  grads = jax.grad(lambda h, w: (chunked(h, w)[0] ** 2).sum(), (0, 1))(hidden, head)
  for got, expected in zip(grads, jax.grad(plain, (0, 1))(hidden, head), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_masked_logits_have_finite_entropy():
  def head(x):
    return jnp.concatenate([x, jnp.full_like(x[..., :1], -jnp.inf)], -1)

  hidden = jnp.array([[[0.0, 0.0]]])
  logp, entropy = pg.chunked_logprobs(head, hidden, jnp.zeros((1, 1), jnp.int32))
  assert float(entropy[0, 0]) == pytest.approx(math.log(2))
  assert float(logp[0, 0]) == pytest.approx(-math.log(2))


@pytest.mark.usefixtures("full_compilation")
def test_full_logits_never_exist():
  batch, length, width, vocab, chunk = 2, 512, 8, 1024, 32
  hidden = jax.ShapeDtypeStruct((batch, length, width), jnp.float32)
  head = jax.ShapeDtypeStruct((width, vocab), jnp.float32)
  targets = jax.ShapeDtypeStruct((batch, length), jnp.int32)

  def loss(hidden, head, targets):
    logp, entropy = pg.chunked_logprobs(lambda x: x @ head, hidden, targets, chunk_tokens=chunk)
    return logp.sum(), entropy.sum()

  compiled = jax.jit(jax.grad(loss, (0, 1), has_aux=True)).lower(hidden, head, targets).compile()
  full = batch * length * vocab * 4
  assert compiled.memory_analysis().temp_size_in_bytes < full / 4


def test_sharded_over_eight_devices_equals_one_device():
  devices = jax.devices()
  if len(devices) < 8:
    pytest.skip("needs eight (virtual) devices")
  rng = np.random.default_rng(2)
  hidden = jnp.array(rng.normal(size=(8, 6, 4)), jnp.float32)
  head = jnp.array(rng.normal(size=(4, 9)), jnp.float32)
  targets = jnp.array(rng.integers(0, 9, (8, 6)))
  batch = pg.PolicyBatch(
    mask_BT=jnp.array(rng.integers(0, 2, (8, 6)), bool),
    advantage_B=jnp.array(rng.normal(size=8), jnp.float32),
  )
  config = pg.PolicyGradientConfig(correction="none")

  def loss(hidden, head, targets, batch):
    logp, entropy = pg.chunked_logprobs(lambda x: x @ head, hidden, targets, chunk_tokens=16)
    return pg.policy_gradient_loss(logp, entropy, batch, config)[0].mean()

  step = jax.jit(jax.value_and_grad(loss, (0, 1)))
  mesh = jax.sharding.Mesh(np.array(devices[:8]), ("data",))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  of_rows = jax.device_put((hidden, targets, batch), rows)
  sharded = (of_rows[0], head, *of_rows[1:])
  value, grads = step(*sharded)
  expected_value, expected_grads = step(hidden, head, targets, batch)
  np.testing.assert_allclose(value, expected_value, atol=1e-6)
  for got, expected in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-6)
  # The chunks cut T, not B: no device ever needs another's hidden rows.
  text = step.lower(*sharded).compile().as_text()
  assert "all-gather" not in text
  assert "all-to-all" not in text


# --- shapes of trees and error messages -----------------------------------------------------------


def test_batch_is_a_pytree_of_anything():
  batch = make_batch()
  shapes = jax.eval_shape(lambda b: b, batch)
  assert shapes.mask_BT.shape == (2, 3)
  specs = jax.tree.map(lambda x: "data", batch)
  assert specs.advantage_B == "data"
  assert specs.logp_ref_BT is None
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
  assert ".mask_BT" in paths


def test_loss_compiles_once_for_two_batches():
  config = pg.PolicyGradientConfig()
  traces = []

  @jax.jit
  def step(logp, batch):
    traces.append(1)
    return pg.policy_gradient_loss(logp, ENTROPY, batch, config)[0].mean()

  batch = make_batch(logp_rollout_BT=ROLLOUT)
  step(LOGP, batch)
  step(LOGP + 0.1, dataclasses.replace(batch, advantage_B=-ADVANTAGE))
  assert len(traces) == 1


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"loss": "ppo"}, ["loss", "'ppo'", "dapo, grpo, bnpo, dr_grpo, gspo"]),
    ({"clip_low": 0.0}, ["clip_low", "0.0", "> 0"]),
    ({"clip_high": -0.1}, ["clip_high", "-0.1", "> 0"]),
    ({"dual_clip": 0.5}, ["dual_clip", "0.5", "> 1"]),
    ({"kl_coef": math.nan}, ["kl_coef", "nan"]),
    ({"kl": "k4"}, ["kl must", "'k4'", "k3+"]),
    ({"correction": "tis"}, ["correction", "'tis'", "token_truncate"]),
    ({"cap": 0.0}, ["cap must", "got 0.0", "> 0"]),
    ({"cap_low": 2.5}, ["cap_low", "2.5", "cap=2.0"]),
    ({"temperature": 0.0}, ["temperature", "0.0", "> 0"]),
    ({"loss": "dr_grpo"}, ["max_tokens", "None", "dr_grpo"]),
    ({"chunk_tokens": 0}, ["chunk_tokens", "got 0", ">= 1"]),
  ],
)
def test_config_errors_name_field_value_and_rule(settings, words):
  with pytest.raises(ValueError) as error:
    pg.PolicyGradientConfig(**settings)
  for word in words:
    assert word in str(error.value)


def test_missing_log_probabilities_are_named():
  with pytest.raises(ValueError, match="logp_rollout_BT=None"):
    loss_of(correction="token_truncate")
  with pytest.raises(ValueError, match="logp_ref_BT=None"):
    loss_of(kl_coef=0.1)
