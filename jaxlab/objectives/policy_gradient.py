"""Group-relative policy gradients: GRPO, DAPO (exact and bnpo), Dr. GRPO, GSPO, with corrections.

Three policies are kept apart: mu sampled the tokens (4-bit base, noisy norms, decode numerics),
pi_old is the trainer before the update, pi_theta is being optimised. With delta = log pi_theta -
log pi_old, A the advantage, m the completion mask and w a stop-gradient weight for mu != pi_old:

  loss = sum_t m_t (w_t clipped(rho_t, A) + beta KL_t) / denominator,  rho_t = exp(delta_t)

whose parts are the functions of `policy_gradient_core.py`.

The model runs outside (`jaxlab.rl.batch`): hidden states -> `chunked_logprobs` ->
`policy_gradient_loss`. Only rows that predict a completion token meet the head, in rematerialised
chunks, so `[B, T, V]` logits never exist.

Sources: GRPO arXiv 2402.03300, DAPO arXiv 2503.14476, Dr. GRPO arXiv 2503.20783, GSPO arXiv
2507.18071; conventions of huggingface/trl f2cd577 [TRL] and volcengine/verl b178a3c [VERL].
Dims: B sequences, T completion tokens, D width, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlab.nn import pytree
from jaxlab.objectives import policy_gradient_core as core
from jaxlab.objectives.weighted import Weighted

LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "gspo")
CORRECTIONS = (
  "none",
  "token_truncate",
  "token_mask",
  "sequence_truncate",
  "sequence_mask",
  "bypass",
)
KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")


@dataclasses.dataclass(frozen=True)
class PolicyGradientConfig:
  """What the loss is. Raises ValueError naming field, value and rule.

  `bnpo` is what QeRL's official code calls DAPO; it differs from `dapo` whenever micro-batches hold
  different numbers of tokens. Presets are `dataclasses.replace` away: GRPO as published is
  loss="grpo", clip_high=0.2, kl_coef=0.04; Dr. GRPO adds max_tokens and advantages without scale.
  """

  loss: str = "dapo"  # [TRL default, VERL token-mean]
  clip_low: float = 0.2  # [QeRL Table 4]
  clip_high: float = 0.28  # [QeRL Table 4, DAPO §3.1]
  dual_clip: float | None = None  # [TRL: off]; [VERL]: 3
  kl_coef: float = 0.0  # beta [QeRL §4.1: no KL]
  kl: str = "k3"  # [TRL]
  kl_log_clamp: float | None = core.LOG_RATIO_LIMIT  # bounds log pi_ref - log pi [VERL]
  kl_value_clamp: float | None = None  # bounds the estimate [ours: off; VERL: 10]
  correction: str = "token_truncate"  # [VERL, TX; ours: default whenever noise is on]
  cap: float = 2.0  # C of the weight [VERL: 2 for tokens]; [TRL]: 3 for sequences
  cap_low: float = 0.0  # masks also drop weights below it [TRL: no lower bound]
  temperature: float = 1.0  # of the rollout; divides logits here too [QeRL Table 4]
  max_tokens: int | None = None  # T_max, the longest completion allowed; dr_grpo divides by it
  chunk_tokens: int = 4096  # tokens a head call [QeRL code]

  def __post_init__(self):
    self._one_of("loss", LOSSES)
    self._one_of("kl", KL_ESTIMATORS)
    self._one_of("correction", CORRECTIONS)
    self._require("clip_low", self.clip_low > 0, "> 0")
    self._require("clip_high", self.clip_high > 0, "> 0")
    self._require("dual_clip", self.dual_clip is None or self.dual_clip > 1, "None or > 1")
    self._require("kl_coef", 0 <= self.kl_coef < math.inf, ">= 0 and finite")
    for name in ("kl_log_clamp", "kl_value_clamp"):
      value = getattr(self, name)
      self._require(name, value is None or value > 0, "None or > 0")
    self._require("cap", self.cap > 0, "> 0")
    self._require("cap_low", 0 <= self.cap_low < self.cap, f"in [0, cap={self.cap})")
    self._require("temperature", 0 < self.temperature < math.inf, "> 0 and finite")
    self._require("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "None or >= 1")
    needs = self.loss == "dr_grpo" and self.max_tokens is None
    self._require("max_tokens", not needs, "given when loss='dr_grpo', whose denominator it is")
    self._require("chunk_tokens", self.chunk_tokens >= 1, ">= 1")

  def _require(self, field: str, ok: bool, rule: str):
    if not ok:
      value = getattr(self, field)
      raise ValueError(f"PolicyGradientConfig: {field} must be {rule}; got {value!r}.")

  def _one_of(self, field: str, choices: tuple[str, ...]):
    self._require(field, getattr(self, field) in choices, f"one of {', '.join(choices)}")


@pytree.pytree()
class PolicyBatch:
  """What the loss needs beside log pi_theta, one row a sampled sequence.

  mask_BT is true for the tokens that count, EOS included, decided by length and never by comparing
  with the pad id. valid_B is false for rows that only fill the batch: they count in no denominator.
  A real row whose mask is empty (truncated) does count in the per-sequence variants.
  """

  mask_BT: Bool[Array, "B T"]
  advantage_B: Float[Array, "B"]
  logp_old_BT: Float[Array, "B T"] | None = None  # trainer before the update; None: pi_theta itself
  logp_rollout_BT: Float[Array, "B T"] | None = None  # as sampled (mu)
  logp_ref_BT: Float[Array, "B T"] | None = None  # adapters and norms off
  valid_B: Bool[Array, "B"] | None = None  # None: every row is real


def chunked_logprobs(
  head_fn: Callable[[Float[Array, "B t D"]], Float[Array, "B t V"]],
  hidden_BTD: Float[Array, "B T D"],
  targets_BT: Int[Array, "B T"],
  *,
  temperature: float = 1.0,
  chunk_tokens: int = 4096,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """log softmax(head(hidden) / temperature)[target] and the entropy, never holding [B, T, V].

  Chunks cut T and keep B whole, so that a batch sharded over devices stays sharded, and take every
  n-th token, so that one whose T is sharded does too; a chunk holds at most max(chunk_tokens, B)
  tokens. Each chunk is rematerialised in the backward pass.

  Args:
    head_fn: hidden rows -> logits; may close over traced parameters, which then get gradients.
    targets_BT: token ids in [0, V).
  Returns: (logp_BT, entropy_BT), float32. The entropy (nats) is a measurement: no gradient.
  """
  batch, length, width = hidden_BTD.shape
  columns = max(1, chunk_tokens // max(batch, 1))
  chunks = max(1, -(-length // columns))
  columns = -(-length // chunks)  # even chunks: the least padding
  pad = chunks * columns - length
  hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0)))
  targets_BT = jnp.pad(targets_BT, ((0, 0), (0, pad)))

  def one_chunk(xs):
    hidden_BtD, targets_Bt = xs
    logits_BtV = head_fn(hidden_BtD).astype(jnp.float32) / temperature
    log_z_Bt = jax.nn.logsumexp(logits_BtV, axis=-1)
    chosen_Bt = jnp.take_along_axis(logits_BtV, targets_Bt[..., None], axis=-1)[..., 0]
    logq_BtV = jax.lax.stop_gradient(logits_BtV - log_z_Bt[..., None])
    # A masked logit is -inf: 0 log 0 is taken as 0.
    terms_BtV = jnp.where(jnp.isneginf(logq_BtV), 0.0, jnp.exp(logq_BtV) * logq_BtV)
    return chosen_Bt - log_z_Bt, -terms_BtV.sum(-1)

  xs = (
    jnp.moveaxis(hidden_BTD.reshape(batch, columns, chunks, width), 2, 0),
    jnp.moveaxis(targets_BT.reshape(batch, columns, chunks), 2, 0),
  )
  if chunks == 1:  # its logits are the peak either way: keeping them saves a product with the head
    out = jax.tree.map(lambda y: y[None], one_chunk(jax.tree.map(lambda x: x[0], xs)))
  else:
    out = jax.lax.map(jax.checkpoint(one_chunk), xs)
  logp_BT, entropy_BT = (jnp.moveaxis(y, 0, 2).reshape(batch, -1)[:, :length] for y in out)
  return logp_BT, entropy_BT


def policy_gradient_loss(
  logp_BT: Float[Array, "B T"],
  entropy_BT: Float[Array, "B T"],
  batch: PolicyBatch,
  config: PolicyGradientConfig,
) -> tuple[Weighted, dict[str, Weighted]]:
  """The loss of one micro-batch and its metrics, every one a `Weighted` to be summed.

  Metrics (token means): entropy, ratio, clip_low, clip_high, clip_dual, kl (with a reference) and,
  with rollout log-probabilities, those of `mismatch_metrics`.

  Raises: ValueError if config.correction or config.kl_coef needs log-probabilities that are None.
  """
  _check_batch(batch, config)
  advantage_B = batch.advantage_B
  valid_B = jnp.ones(advantage_B.shape, bool) if batch.valid_B is None else batch.valid_B
  mask_BT = batch.mask_BT & valid_B[:, None]
  # One update per rollout: pi_old is pi_theta, the ratio is 1 and the gradient -A grad log pi.
  trainer_BT = jax.lax.stop_gradient(logp_BT) if batch.logp_old_BT is None else batch.logp_old_BT
  old_BT = batch.logp_rollout_BT if config.correction == "bypass" else trainer_BT
  ratio_BT = core.importance_ratio(logp_BT - old_BT, mask_BT, sequence=config.loss == "gspo")
  loss_BT = core.clipped_loss(
    ratio_BT,
    advantage_B,
    clip_low=config.clip_low,
    clip_high=config.clip_high,
    dual_clip=config.dual_clip,
  )
  metrics = _clip_metrics(ratio_BT, advantage_B, mask_BT, config)
  metrics["entropy"] = core.token_mean(entropy_BT, mask_BT)
  if batch.logp_rollout_BT is not None:
    log_weight_BT = trainer_BT - batch.logp_rollout_BT
    weight_BT, raw_BT = core.correction_weight(
      log_weight_BT, mask_BT, mode=config.correction, cap=config.cap, cap_low=config.cap_low
    )
    metrics |= core.mismatch_metrics(log_weight_BT, raw_BT, mask_BT, config.cap)
    loss_BT = weight_BT * loss_BT
  if batch.logp_ref_BT is not None:
    kl_BT = core.kl_estimate(
      jnp.where(mask_BT, logp_BT, 0.0),
      jnp.where(mask_BT, batch.logp_ref_BT, 0.0),
      kind=config.kl,
      log_clamp=config.kl_log_clamp,
      value_clamp=config.kl_value_clamp,
    )
    metrics["kl"] = core.token_mean(kl_BT, mask_BT)
    loss_BT = loss_BT + config.kl_coef * kl_BT
  loss = core.aggregate(loss_BT, mask_BT, valid_B, loss=config.loss, max_tokens=config.max_tokens)
  return loss, jax.lax.stop_gradient(metrics)


def _clip_metrics(ratio_BT, advantage_B, mask_BT, config: PolicyGradientConfig):
  """Shares of tokens whose gradient a clip removed: the side that binds depends on A's sign."""
  negative_B1, positive_B1 = advantage_B[:, None] < 0, advantage_B[:, None] > 0
  cut = {
    "clip_low": negative_B1 & (ratio_BT < 1.0 - config.clip_low),
    "clip_high": positive_B1 & (ratio_BT > 1.0 + config.clip_high),
  }
  if config.dual_clip is not None:
    cut["clip_dual"] = negative_B1 & (ratio_BT > config.dual_clip)
  cut["ratio"] = ratio_BT
  return {name: core.token_mean(x_BT, mask_BT) for name, x_BT in cut.items()}


def _check_batch(batch: PolicyBatch, config: PolicyGradientConfig):
  if config.correction != "none" and batch.logp_rollout_BT is None:
    raise ValueError(
      f"policy_gradient_loss: correction={config.correction!r} needs the log-probabilities of the "
      "rollout; got logp_rollout_BT=None. Record them while sampling, or set correction='none'."
    )
  if config.kl_coef > 0 and batch.logp_ref_BT is None:
    raise ValueError(
      f"policy_gradient_loss: kl_coef={config.kl_coef} needs a reference policy; got "
      "logp_ref_BT=None. Compute it with adapters off, or set kl_coef=0."
    )
