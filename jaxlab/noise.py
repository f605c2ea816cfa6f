"""Adaptive quantisation noise (AQN): scheduled Gaussian noise on the block norms' gains.

A packed FP4 matrix cannot take high-precision noise, so QeRL puts it on the RMSNorm gain in front:
gain_eff = w + z, z ~ N(0, sigma^2 I). That equals multiplying input row j of every consumer by
1 + z_j / w_j (eq. 12); q, k, v share one z, gate and up another; o, down and the head see none.

The noise belongs to the sampling policy only: `perturb` returns new parameters for the rollout, the
trainer and the evaluation keep the clean ones. It is added in float32 whatever the gain's dtype is:
around 1 the spacing of bfloat16 is 2^-7, so sigma <= 5e-4 added in bfloat16 changes nothing at all.

Source: arXiv 2510.11696 §3.3; schedule as in NVlabs/QeRL e8c6e79 trl_trainer/noise_scheduler.py.
Dims: L layers, D width.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

PyTree = Any

# The index of a gain is its `which` in the key: changing the order changes every noisy rollout.
GAINS = ("attn_norm", "mlp_norm")
SHAPES = ("exponential", "linear", "cosine", "log")


def sigma_table(
  *,
  stages: int,
  sigma_start: float,
  sigma_end: float,
  shape: str = "exponential",
  paper_form: bool = False,
) -> tuple[float, ...]:
  """Sigma of each stage: 0 in stage 0 (quantisation noise alone), then from start to end.

  With u = (k - 1) / (K - 2) for stage k of K: exponential s (e/s)^u; linear s + (e - s) u; cosine
  e + (s - e)(1 + cos pi u)/2; log s + (e - s) ln k / ln(K - 1). `paper_form` is eq. 8, whose
  exponent (k - 1) / (K - 1) never reaches sigma_end; the released code does (u above).
  """
  _check_schedule(stages, sigma_start, sigma_end, shape, paper_form)

  def sigma(k: int) -> float:
    u = (k - 1) / (stages - (1 if paper_form else 2))
    if shape == "exponential":
      return sigma_start * (sigma_end / sigma_start) ** u
    if shape == "linear":
      return sigma_start + (sigma_end - sigma_start) * u
    if shape == "cosine":
      return sigma_end + (sigma_start - sigma_end) * (1 + math.cos(math.pi * u)) / 2
    return sigma_start + (sigma_end - sigma_start) * math.log(k) / math.log(stages - 1)

  return (0.0, *(sigma(k) for k in range(1, stages)))


def sigma_at(
  step: int | Int[Array, ""],
  *,
  total_steps: int,
  sigma_start: float = 1e-2,  # [paper §3.3, Table 4]
  sigma_end: float = 5e-4,  # [paper Table 4]; the released scripts use 1e-4
  stages: int = 10,  # [paper Table 4]
  shape: str = "exponential",  # [paper Fig. 9: the most stable]
  paper_form: bool = False,  # [code: the last stage is exactly sigma_end]
) -> float | Float[Array, ""]:
  """Noise scale of a step: stage floor(step / (total_steps / stages)), clamped to the last.

  Args:
    step: global step from 0, a Python int or a traced integer (no recompilation).
  Returns: a float for an int, a float32 scalar for an array.
  Raises: ValueError on a bad schedule; a negative step counts as step 0.
  """
  if total_steps < 1:
    raise ValueError(f"sigma_at: total_steps must be >= 1; got {total_steps}.")
  table = sigma_table(
    stages=stages,
    sigma_start=sigma_start,
    sigma_end=sigma_end,
    shape=shape,
    paper_form=paper_form,
  )
  if isinstance(step, int):
    return table[min(max(step, 0) * stages // total_steps, stages - 1)]
  # First steps of the stages as a table: step * stages would overflow int32 in a long run.
  starts = jnp.array([-(-k * total_steps // stages) for k in range(1, stages)], jnp.int32)
  stage = jnp.sum(step >= starts)
  return jnp.array(table, jnp.float32)[stage]


def perturb(
  params: PyTree,
  sigma: float | Float[Array, ""],
  key: Key[Array, ""],
  *,
  relative: bool = False,
) -> PyTree:
  """Parameters of the sampling policy: every block-norm gain w becomes f32(w) + sigma * z.

  Args:
    params: a causal LM with `layers` stacked (a dict) or unstacked (a list): the same z in both,
      drawn from fold_in(fold_in(key, layer), which), so one key gives one policy in every program.
    sigma: a float or a traced scalar; 0 gives gains equal to w bit for bit (in float32).
    relative: sigma * |w| instead of sigma, an experiment for checkpoints whose gains were divided
      by activation scales (AWQ).
  Returns: a new tree; all leaves but the gains are shared with `params`, which stay as they are.
  Raises: ValueError if the layers have no such gains.
  """
  layers = params["layers"]
  stacked = isinstance(layers, dict)
  gains = [_gains(layers, which) for which in GAINS]
  noisy = []
  for which, gain_LD in enumerate(gains):
    gain_LD = gain_LD.astype(jnp.float32)
    depth, width = gain_LD.shape
    z_LD = _noise(key, which, depth=depth, width=width)
    scale = sigma * jnp.abs(gain_LD) if relative else sigma
    noisy.append(gain_LD + scale * z_LD)
  named = dict(zip(GAINS, noisy, strict=True))
  if stacked:
    return params | {"layers": layers | named}
  rows = [layer | {n: x_LD[i] for n, x_LD in named.items()} for i, layer in enumerate(layers)]
  return params | {"layers": rows}


def effective_std(params: PyTree, noisy: PyTree) -> Float[Array, ""]:
  """Root mean square of the noise the gains really carry, in float32, over all perturbed gains.

  Log it beside sigma as `aqn/effective_std`: noise that was rounded away, or never reached the
  sampler, shows as a number far below sigma. `noisy` is the tree the sampler was given.
  """
  total, count = jnp.float32(0.0), 0
  for which in GAINS:
    clean_LD, noisy_LD = (_gains(tree["layers"], which) for tree in (params, noisy))
    difference_LD = noisy_LD.astype(jnp.float32) - clean_LD.astype(jnp.float32)
    total, count = total + jnp.sum(difference_LD**2), count + difference_LD.size
  return jnp.sqrt(total / count)


@functools.partial(jax.jit, static_argnames=("depth", "width"))
def _noise(
  key: Key[Array, ""], which: int | Int[Array, ""], *, depth: int, width: int
) -> Float[Array, "L D"]:
  """One row a layer, in a loop over keys: some generators draw other numbers under vmap."""

  def row(layer):
    layer_key = jax.random.fold_in(jax.random.fold_in(key, layer), which)
    return jax.random.normal(layer_key, (width,), jnp.float32)

  return jax.lax.map(row, jnp.arange(depth))


def _gains(layers: PyTree, which: str) -> Float[Array, "L D"]:
  have = layers if isinstance(layers, dict) else layers[0]
  if which not in have:
    raise ValueError(
      f"perturb: layers need the norm gains {', '.join(GAINS)}; got {', '.join(sorted(have))}. "
      "Noise is defined for pre-norm decoder blocks only."
    )
  return layers[which] if isinstance(layers, dict) else jnp.stack([x[which] for x in layers])


def _check_schedule(stages, sigma_start, sigma_end, shape, paper_form):
  if stages < 3:
    raise ValueError(
      f"sigma_table: stages must be >= 3 (one without noise, a first and a last); got {stages}."
    )
  if shape not in SHAPES:
    raise ValueError(f"sigma_table: shape must be one of {', '.join(SHAPES)}; got {shape!r}.")
  if paper_form and shape != "exponential":
    raise ValueError(
      f"sigma_table: paper_form is eq. 8, an exponential; got shape={shape!r}. Drop one of them."
    )
  lowest = "> 0" if shape == "exponential" else ">= 0"
  for name, value in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
    if not (value > 0 or (value == 0 and lowest == ">= 0")) or math.isinf(value):
      raise ValueError(
        f"sigma_table: {name} must be {lowest} and finite for a {shape} schedule; got {value}. "
        "Switch the noise off by not calling perturb."
      )
