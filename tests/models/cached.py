"""One jitted step of a model on its cache."""

import jax


def step(module):
  """(params, tokens, positions, cache) -> (logits of the new tokens, the cache with them)."""

  @jax.jit
  def run(params, tokens, positions, cache):
    variables = {"params": params}
    hidden, cache = module.apply(variables, tokens, positions, None, cache, method="hidden")
    return module.apply(variables, hidden, method="head"), cache

  return run
