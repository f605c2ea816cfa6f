"""From logits to a token: temperature, top-k, top-p, min-p, repetition penalty. Dims: N rows, V.

The order of the filters is that of transformers (penalty, temperature, top-k, top-p, min-p), so
that settings mean the same here and there.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Key

from jaxlab.nn import pytree

_BLOCK = 256  # vocabulary entries per block of the two-level inverse transform


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """How to draw tokens; defaults are those of QeRL's rollouts (arXiv 2510.11696 Table 4)."""

  max_new_tokens: int = 256  # [ours: short answers; RL recipes set their own]
  temperature: float = 1.0  # [paper Table 4]; 0 is greedy
  top_k: int = 0  # 0 is off [paper Table 4]
  top_p: float = 1.0  # 1 is off [paper Table 4]
  min_p: float = 0.0  # 0 is off [ours: transformers' default]
  repetition_penalty: float = 1.0  # 1 is off [ours: transformers' default]
  stop_strings: tuple[str, ...] = ()  # [ours: stop ids end a turn already]

  def __post_init__(self):
    rules = {
      "max_new_tokens": self.max_new_tokens >= 1,
      "temperature": self.temperature >= 0,
      "top_k": self.top_k >= 0,
      "top_p": 0 < self.top_p <= 1,
      "min_p": 0 <= self.min_p < 1,
      "repetition_penalty": self.repetition_penalty > 0,
      "stop_strings": all(self.stop_strings),  # an empty one would be found everywhere
    }
    for field, ok in rules.items():
      if not ok:
        raise ValueError(
          f"SamplingConfig.{field}: out of range; got {getattr(self, field)}. See its comment."
        )

  @property
  def truncated(self) -> bool:
    """True if tokens are drawn from less than the whole distribution."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@pytree.pytree()
class Draw:
  """One token per row and what the trainer needs to know of it (nats, of the tempered softmax)."""

  token_N: Int[Array, "N"]
  logp_N: Float32[Array, "N"]  # under softmax(logits / temperature), before any truncation
  logp_kept_N: Float32[
    Array, "N"
  ]  # renormalised over the kept tokens; mixing the two biases ratios
  entropy_N: Float32[Array, "N"]


def draw(
  logits_NV: Float32[Array, "N V"],
  key_N: Key[Array, "N"],
  config: SamplingConfig,
  seen_NV: Bool[Array, "N V"] | None = None,
) -> Draw:
  """Draws a token for every row with the row's own key.

  Temperature 0 takes the argmax and records log-probabilities at temperature 1.
  """
  if config.repetition_penalty != 1.0:
    penalised = jnp.where(
      logits_NV > 0, logits_NV / config.repetition_penalty, logits_NV * config.repetition_penalty
    )
    logits_NV = jnp.where(seen_NV, penalised, logits_NV)
  logp_NV = jax.nn.log_softmax(logits_NV / (config.temperature or 1.0), axis=-1)
  kept_NV = truncate(logp_NV, config) if config.truncated else logp_NV
  if config.temperature == 0:
    token_N = _first_largest(logits_NV)
  else:
    token_N = invert(kept_NV, jax.vmap(jax.random.uniform)(key_N))
  pick = lambda table: jnp.take_along_axis(table, token_N[:, None], axis=-1)[:, 0]
  entropy_N = -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=-1)
  return Draw(token_N.astype(jnp.int32), pick(logp_NV), pick(kept_NV), entropy_N)


def _first_largest(x_NV: Float32[Array, "N V"]) -> Int[Array, "N"]:
  """argmax by two plain reductions: on a CPU XLA's takes ten times as long (0.2 ms for V = 49152,
  a twentieth of a small model's step)."""
  top_N1 = jnp.max(x_NV, axis=-1, keepdims=True)
  index_1V = jnp.arange(x_NV.shape[-1])[None]
  return jnp.min(jnp.where(x_NV == top_N1, index_1V, x_NV.shape[-1] - 1), axis=-1)


def truncate(logp_NV: Float32[Array, "N V"], config: SamplingConfig) -> Float32[Array, "N V"]:
  """Keeps the tokens that top-k, then top-p, then min-p admit; renormalised, -inf elsewhere."""
  if config.top_k:
    k = min(config.top_k, logp_NV.shape[-1])
    floor_N1 = jax.lax.top_k(logp_NV, k)[0][:, -1:]
    logp_NV = _keep(logp_NV, logp_NV >= floor_N1)
  if config.top_p < 1:
    sorted_NV = jnp.flip(jnp.sort(logp_NV, axis=-1), axis=-1)
    before_NV = jnp.cumsum(jnp.exp(sorted_NV), axis=-1) - jnp.exp(sorted_NV)
    kept_NV = before_NV < config.top_p  # the token that crosses the threshold stays
    floor_N1 = jnp.min(jnp.where(kept_NV, sorted_NV, jnp.inf), axis=-1, keepdims=True)
    logp_NV = _keep(logp_NV, logp_NV >= floor_N1)
  if config.min_p:
    top_N1 = jnp.max(logp_NV, axis=-1, keepdims=True)
    logp_NV = _keep(logp_NV, logp_NV >= top_N1 + jnp.log(config.min_p))
  return logp_NV


def _keep(logp_NV, keep_NV):
  return jax.nn.log_softmax(jnp.where(keep_NV, logp_NV, -jnp.inf), axis=-1)


def invert(logp_NV: Float32[Array, "N V"], u_N: Float32[Array, "N"]) -> Int[Array, "N"]:
  """Inverse transform: the first token whose cumulative probability exceeds u.

  One uniform number a row instead of V Gumbel variables (on a CPU those cost as much as the model's
  own step). Two levels, block then entry, keep the running sums short and exact enough.
  """
  n, v = logp_NV.shape
  p_NV = jnp.pad(jnp.exp(logp_NV), ((0, 0), (0, -v % _BLOCK)))
  p_NbB = p_NV.reshape(n, -1, _BLOCK)
  block_cdf_Nb = jnp.cumsum(jnp.sum(p_NbB, axis=-1), axis=-1)
  target_N = u_N * block_cdf_Nb[:, -1]
  block_N = jnp.sum(block_cdf_Nb <= target_N[:, None], axis=-1)
  block_N = jnp.minimum(block_N, p_NbB.shape[1] - 1)
  before_N = jnp.where(
    block_N > 0,
    jnp.take_along_axis(block_cdf_Nb, jnp.maximum(block_N - 1, 0)[:, None], axis=-1)[:, 0],
    0.0,
  )
  inside_NB = jnp.take_along_axis(p_NbB, block_N[:, None, None], axis=1)[:, 0]
  cdf_NB = before_N[:, None] + jnp.cumsum(inside_NB, axis=-1)
  # Rounding may leave u beyond the last sum: then the last entry with any probability is meant.
  last_N = _BLOCK - 1 - jnp.argmax(jnp.flip(inside_NB > 0, axis=-1), axis=-1)
  entry_N = jnp.minimum(jnp.sum(cdf_NB <= target_N[:, None], axis=-1), last_N)
  return block_N * _BLOCK + entry_N
