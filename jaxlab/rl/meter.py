"""The off-policy meter: how far the sampler was from the trainer, split by cause.

Four log-probabilities of the same answer tokens, each a step further from the sampler:

  mu      as recorded while sampling
  served  the trainer's forward pass with the rollout's noise and the kernels that the sampler uses
  noisy   ... with the noise, on the trainer's own packed kernels
  old     ... without the noise: the policy that is updated

  log mu - log old =  (mu - served)  +  (served - noisy)  +  (noisy - old)
       total       =      rest       +        fp4         +      noise

"fp4" is what unpacking the kernels for the rollouts costs; where they serve packed it is exactly 0.
"rest" is what is no difference of policies: cache dtype, padding, order of sums, decode kernels.
Every figure is the mean |difference| in nats over the tokens that train, so the parts bound the
total and do not add up to it. Dims: R rows, Q sequences a row, T answer tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlab import noise as aqn
from jaxlab.decode import autoregressive
from jaxlab.models import causal_lm
from jaxlab.nn import weights
from jaxlab.objectives import policy_gradient
from jaxlab.rl import batch

PyTree = Any


def measure(
  module: causal_lm.CausalLM,
  loss: policy_gradient.PolicyGradientConfig,
  trainable: dict[str, Array],
  frozen: PyTree,
  packed: batch.PackedBatch,
  noise: autoregressive.Noise | None,
  *,
  unpacked: bool,
  micro_rows: int | None = None,
) -> dict[str, float]:
  """{"meter/total", "meter/noise", "meter/fp4", "meter/rest"} of one packed rollout, in nats.

  Costs a forward pass for each policy that differs from the one before.

  Args:
    trainable, frozen: of the policy that sampled.
    packed: its answers, with `logp_rollout_RQT`.
    noise: of the rollout; None if there was none.
    unpacked: whether the rollouts used dense copies of packed kernels.
    micro_rows: rows in memory at once; divides the rows of `packed`.
  """
  old, noisy, served = policies(
    module, loss, trainable, frozen, packed, noise, unpacked=unpacked, micro_rows=micro_rows
  )
  found = gaps(packed.logp_rollout_RQT, served, noisy, old, packed.mask_RQT)
  return {f"meter/{cause}": float(gap) for cause, gap in found.items()}


def gaps(
  mu: Float[Array, "*tokens"],
  served: Float[Array, "*tokens"],
  noisy: Float[Array, "*tokens"],
  old: Float[Array, "*tokens"],
  mask: Bool[Array, "*tokens"],
) -> dict[str, Float[Array, ""]]:
  """Mean |difference| of each cause over the tokens of the mask; 0 if there are none."""
  count = jnp.maximum(mask.sum(), 1)
  mean = lambda a, b: jnp.where(mask, jnp.abs(a - b), 0.0).sum() / count
  return {
    "total": mean(mu, old),
    "noise": mean(noisy, old),
    "fp4": mean(served, noisy),
    "rest": mean(mu, served),
  }


@functools.partial(jax.jit, static_argnames=("module", "loss", "unpacked", "micro_rows"))
def policies(module, loss, trainable, frozen, packed, noise, *, unpacked, micro_rows):
  """(old, noisy, served): log-probabilities [R, Q, T] of the answers under each."""

  def score(params):
    rows = lambda part: batch.score(module, params, part, loss)[0]
    return batch.map_rows(rows, packed, micro_rows)

  params = weights.merge(trainable, frozen)
  old = noisy = score(params)
  if noise is not None:
    params = aqn.perturb(params, noise.sigma, noise.key, relative=noise.relative)
    noisy = score(params)
  served = score(weights.densify(params)) if unpacked else noisy
  return old, noisy, served
