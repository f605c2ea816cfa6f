"""Causal language modelling: the next token's cross-entropy over the tokens that count.

  loss = -sum_t m_t log p(x_t | x_<t) / sum_t m_t

The head runs in rematerialised chunks, so `[B, T, V]` logits never exist. Dims: B T D V.
Source: the usual maximum likelihood of a decoder, with the mask of supervised fine-tuning.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxlab.nn import pytree
from jaxlab.objectives import policy_gradient, policy_gradient_core
from jaxlab.objectives.weighted import Weighted

PyTree = Any


@pytree.pytree()
class TokenBatch:
  """Texts and which of their tokens are to be predicted.

  mask_BT is about the token itself, not about the one before it. The first column has no past and
  never counts. Padding goes behind a text, outside of the mask, and may be any token id.
  """

  tokens_BT: Int[Array, "B T"]
  mask_BT: Bool[Array, "B T"]


def make_objective(
  module: nn.Module, *, chunk_tokens: int = 4096
) -> Callable[[PyTree, TokenBatch, jax.Array], tuple[Weighted, dict[str, Weighted]]]:
  """The objective `(params, TokenBatch, key) -> (Weighted, metrics)`.

  Its total is in nats and its weight the number of tokens that count, so that micro-batches of any
  split add up to the mean over all tokens. Metric: "entropy", of the predictions, in nats.

  Args:
    module: a decoder on the model contract.
    chunk_tokens: tokens that one call of the head sees, about.
  Raises: ValueError for an encoder, which sees the tokens it would have to predict.
  """
  if not module.config.causal:
    raise ValueError(
      "clm.make_objective: the model must be causal; got an encoder. Choose a decoder."
    )

  def objective(params, batch: TokenBatch, key):
    del key  # nothing random
    variables = {"params": params}
    hidden_BTD, _ = module.apply(variables, batch.tokens_BT, method="hidden")
    logp_BT, entropy_BT = policy_gradient.chunked_logprobs(
      lambda rows: module.apply(variables, rows, method="head"),
      hidden_BTD[:, :-1],
      batch.tokens_BT[:, 1:],
      chunk_tokens=chunk_tokens,
    )
    mask_BT = batch.mask_BT[:, 1:]
    total = jnp.where(mask_BT, -logp_BT, 0.0).sum()
    entropy = policy_gradient_core.token_mean(entropy_BT, mask_BT)
    return Weighted(total, mask_BT.sum().astype(jnp.float32)), {"entropy": entropy}

  return objective
