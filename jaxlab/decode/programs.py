"""The two programs of a sampler with abstract arguments, for a plan. Dims: B prompts, N rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlab.decode import autoregressive
from jaxlab.parallel import plan, rules

PyTree = Any


def programs(
  name: str,
  sampler: autoregressive.Sampler,
  params: PyTree,
  mesh: rules.Mesh,
  *,
  prompts: int,
  samples: int,
  prompt_tokens: int,
  sigma: float | None = None,
  relative: bool = False,
  runs: float = 1.0,
) -> list[plan.Program]:
  """`NAME_prefill`, and `NAME_decode`: all further tokens of answers that never stop.

  Args:
    params: shapes with shardings on `mesh`, as the sampler gets them.
    prompts, samples: B, and the answers to each; N = B * samples rows.
    prompt_tokens: the longest prompt; padded as in a run.
    sigma: anything but None: the norm gains are perturbed in both programs.
    runs: generations in a step of the recipe.
  """
  place = functools.partial(plan.place, mesh=mesh)
  whole = lambda *shape, dtype=jnp.int32: place(jax.ShapeDtypeStruct(shape, dtype), PartitionSpec())
  key = place(jax.eval_shape(lambda: jax.random.key(0)), PartitionSpec())
  noise = None
  if sigma is not None:
    drawn = lambda key: autoregressive.Noise(jnp.float32(sigma), key, relative)
    noise = place(jax.eval_shape(drawn, key), PartitionSpec())
  bucket = autoregressive.prompt_bucket(prompt_tokens, sampler.module.config.max_positions)
  row_ids = whole(prompts * samples, dtype=jnp.uint32)
  asked = (params, whole(prompts, bucket), whole(prompts), row_ids, key, noise)
  kwargs = {"samples": samples, "prefix": 0}
  live = jax.eval_shape(functools.partial(autoregressive.prefill, sampler, **kwargs), *asked)

  def keep(x):
    spec = rules.cache_spec if x.ndim >= 4 else rules.activation_spec
    return place(x, spec(x.shape, mesh))

  decoded = (sampler, params, jax.tree.map(keep, live), key, noise)
  tokens = float(sampler.config.max_new_tokens - 1)  # the first one comes from the prefill
  return [
    plan.Program(f"{name}_prefill", autoregressive.prefill, (sampler, *asked), kwargs, runs),
    plan.Program(
      f"{name}_decode", autoregressive.decode, decoded, {"steps": whole(), "uniform": False},
      runs, tokens,
    ),
  ]  # fmt: skip
