"""Block and tensor scales of FP4: the absmax rules, searches of less error, and rounding with them.

For a matrix W with blocks b along its inputs, unit u_b = s_b / g (block scale over tensor divisor):
  q = e2m1(W_b / u_b),  W^_b = q * u_b
  start:  NVFP4: s_b = e4m3(g max|W_b| / 6), g = 2688 / max|W|
          MXFP4: s_b = 2^E by a rule of `formats`, g = 1 (3 for `fp43`)
  search: s_b = argmin over stored scales s near the start of  sum_i h_i |W_i - W^_i(s)|^2
  joint:  g = sum h (q s)^2 / sum h W q s  between searches, while the error falls
Source: arXiv 2509.23202 and its code, as reconstructed in the specification §2.3-2.4 (the paper's
own joint fit is not released). Dims: O out, I in, k blocks of a row, b elements of a block.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Shaped, UInt8

from jaxlab.quant import formats
from pallas_kernels.fp4_gemm import codec

SEARCHES = ("none", "mse", "mse_unrounded", "four_over_six")
# Every scale between .6 and 1.5 times the start: 8 stored E4M3 scales a factor of two; powers of 2.
OFFSETS = {"nvfp4": (0, -1, -2, -3, -4, -5, -6, 1, 2, 3, 4, 5), "mxfp4": (0, -1, 1)}
BYTES = {"nvfp4": (1, 126), "mxfp4": (formats.E8M0_MIN + 127, formats.E8M0_MAX + 127)}
# Bounds of g: 2^-9 / g is a normal float32 (no matrix of tiny numbers is flushed to zero), 2688 / g
# is finite.
MAX_DIVISOR = 2.0**117
MIN_DIVISOR = codec.E2M1_MAX * codec.E4M3_MAX * 2.0**-128 * (1 + 2.0**-20)
# Scale of an all-zero block: any will do; this is the one that compressed-tensors writes.
ZERO_BLOCK_SCALE = 0.125


@dataclasses.dataclass(frozen=True)
class ScaleConfig:
  """How scales are chosen.

  Fields:
    rule: mxfp4's exponent of a block: "even", "floor", "ceil", "fp43" or "quest"
      (`formats.e8m0_byte`).
    search: "none"; "mse", the stored scale of least squared error near the rule's; "four_over_six",
      nvfp4 only: the largest magnitude becomes code 6 or code 4, whichever errs less;
      "mse_unrounded", as FP-Quant searches: 100 scales from 1 to .2 of the largest magnitude's,
      sum |error|^2.4 with the scale before it is rounded, then the rule.
    joint_rounds: nvfp4 only, needs a search: rounds in which the tensor scale is fitted to the
      codes and the blocks are searched again; they end when the error does not fall.
  """

  rule: str = "even"  # [ours: smallest one-shot error on weights of the rules]
  search: str = "none"  # [paper: absmax scales]
  joint_rounds: int = 0  # [ours: off; 3 where it is used]

  def __post_init__(self):
    formats.require_rule("ScaleConfig.rule", self.rule)
    if self.search not in SEARCHES:
      raise ValueError(
        f"ScaleConfig.search: must be one of {', '.join(SEARCHES)}; got {self.search!r}."
      )
    if self.joint_rounds < 0 or (self.joint_rounds and self.search == "none"):
      raise ValueError(
        "ScaleConfig.joint_rounds: must be 0, or positive with a search to alternate with; got "
        f"{self.joint_rounds} with search {self.search!r}. Use 0, or search='mse'."
      )
    if self.rule == "quest" and self.search == "mse_unrounded":
      raise ValueError(
        "ScaleConfig.search: mse_unrounded shrinks the largest magnitude, which 'quest' does not "
        "look at; got both. Use search='mse', or another rule."
      )


ABSMAX = ScaleConfig()


class Fitted(NamedTuple):
  """Scales as stored: the block scale float8_e4m3fn or uint8 [O, k], the tensor's divisor g."""

  scale: Shaped[Array, "O k"]
  tensor_scale: Float32[Array, ""]


def fit(
  w_OI: Float32[Array, "O I"],
  format: str,
  config: ScaleConfig = ABSMAX,
  tensor_amax: Float32[Array, ""] | None = None,
  importance_I: Float32[Array, "I"] | None = None,
) -> Fitted:
  """The scales of one finite matrix; pure, to be jitted and mapped.

  Args:
    tensor_amax: nvfp4 only: the magnitude that g is made for, at least max|W|; for kernels that
      share one g. With `joint_rounds`, use `fit_fused` instead.
    importance_I: weight h_i >= 0 of each input's squared error in a search (such as the diagonal of
      a Hessian); None weighs all alike.
  Raises: ValueError for an option that the format does not have, or a block that does not divide I.
  """
  require_config("fit", format, config)
  if tensor_amax is not None and (format == "mxfp4" or config.joint_rounds):
    raise ValueError(
      f"fit: tensor_amax is for nvfp4 with a fixed tensor scale; got {format} with "
      f"joint_rounds={config.joint_rounds}. Leave it out, or fit the kernels with fit_fused."
    )
  blocks = _blocks(w_OI, format)
  h_Okb = None if importance_I is None else _blocks(importance_I[None], format)
  divisor = _divisor(blocks, format, config, tensor_amax)
  fitted = Fitted(_fit_blocks(blocks, h_Okb, format, config, divisor), divisor)
  return _joint(blocks, h_Okb, format, config, fitted) if config.joint_rounds else fitted


def fit_fused(
  ws: Sequence[Float32[Array, "_ I"]],
  format: str,
  config: ScaleConfig = ABSMAX,
  importance_I: Float32[Array, "I"] | None = None,
) -> list[Fitted]:
  """The scales of matrices that multiply the same inputs (q/k/v, gate/up) and share one g."""
  fitted = fit(jnp.concatenate(list(ws)), format, config, importance_I=importance_I)
  ends = [sum(w.shape[0] for w in ws[: i + 1]) for i in range(len(ws))]
  parts = jnp.split(fitted.scale, ends[:-1])
  return [Fitted(scale, fitted.tensor_scale) for scale in parts]


def encode(w_OI: Float32[Array, "O I"], format: str, fitted: Fitted) -> UInt8[Array, "O H"]:
  """Packed codes of the nearest values, H = I / 2; of values of `round_to_grid`, their own."""
  blocks = _blocks(w_OI, format)
  if format == "mxfp4":  # x g / 2^E is rounded once; x / (2^E / 3) would be twice
    x = _divide(blocks, codec.decode_scale(fitted.scale)[..., None]) * fitted.tensor_scale
  else:
    x = _divide(blocks, block_units(fitted)[..., None])
  return formats.pack(formats.encode_e2m1(x).reshape(w_OI.shape))


def block_units(fitted: Fitted) -> Float32[Array, "O k"]:
  """The value that code 1.0 stands for, by block: s_b / g."""
  return _divide(codec.decode_scale(fitted.scale), fitted.tensor_scale)


def round_to_grid(
  x: Float32[Array, "*shape"], unit: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
  """The nearest representable values, q * unit: what a column becomes once quantised.

  Args:
    unit: of each element, from `block_units` (column i of a matrix takes unit[:, i // block]).
  """
  return codec.round_e2m1(x / unit) * unit


def require_config(name: str, format: str, config: ScaleConfig) -> None:
  """Raises ValueError for an unknown format or an option that belongs to the other one."""
  if format not in codec.BLOCK:
    raise ValueError(f"{name}: format must be one of {', '.join(codec.BLOCK)}; got {format!r}.")
  if format == "nvfp4" and config.rule != "even":
    raise ValueError(
      f"{name}: nvfp4 has no scale rule; got {config.rule!r}. Leave it, or choose mxfp4."
    )
  if format == "mxfp4" and (config.search == "four_over_six" or config.joint_rounds):
    raise ValueError(
      f"{name}: four_over_six and joint_rounds need the E4M3 and tensor scales of nvfp4; got mxfp4 "
      f"with search {config.search!r} and {config.joint_rounds} rounds. Use search='mse'."
    )


def _blocks(w_OI, format):
  block = codec.BLOCK[format]
  if w_OI.shape[-1] % block:
    raise ValueError(
      f"scales: inputs must be a multiple of {format}'s block of {block}; got {w_OI.shape}. "
      "Leave this kernel out, or choose a format with a smaller block."
    )
  return w_OI.reshape(w_OI.shape[0], -1, block)


def _divisor(blocks, format, config, tensor_amax):
  if format == "mxfp4":
    return jnp.float32(3.0 if config.rule == "fp43" else 1.0)
  amax = jnp.max(jnp.abs(blocks)) if tensor_amax is None else tensor_amax
  # torch divides a number by a tensor as reciprocal and product, so compressed-tensors' own g can
  # differ from this one in the last bit.
  g = jnp.full_like(amax, codec.E4M3_MAX * codec.E2M1_MAX) / amax
  # An infinite maximum must not end as finite weights: NaN is seen, 6 * 448 / MIN_DIVISOR is not.
  g = jnp.where(jnp.isfinite(amax), jnp.clip(g, MIN_DIVISOR, MAX_DIVISOR), jnp.nan)
  return jnp.where(amax == 0, 1.0, g)


def _fit_blocks(blocks, h_Okb, format, config, divisor):
  """The stored block scales for a given g."""
  amax_Ok = jnp.max(jnp.abs(blocks), axis=-1)
  scale_Ok = _rule_scale(blocks, amax_Ok, format, config, divisor)
  match config.search:
    case "mse":
      scale_Ok = _nearby(blocks, h_Okb, format, divisor, scale_Ok)
    case "four_over_six":
      scale_Ok = _four_over_six(blocks, h_Okb, divisor, amax_Ok)
    case "mse_unrounded":
      ratio_Ok = _best_ratio(blocks, h_Okb, amax_Ok)
      scale_Ok = _rule_scale(blocks, amax_Ok * ratio_Ok, format, config, divisor)
  if format == "nvfp4":
    scale_Ok = jnp.where(amax_Ok == 0, jnp.asarray(ZERO_BLOCK_SCALE, scale_Ok.dtype), scale_Ok)
  return scale_Ok


def _rule_scale(blocks, amax_Ok, format, config, divisor):
  if format == "nvfp4":
    return _e4m3(divisor * _divide(amax_Ok, codec.E2M1_MAX))
  if config.rule == "quest":
    return formats.quest_byte(blocks)
  return formats.e8m0_byte(amax_Ok, config.rule)


def _e4m3(x):
  """A tiny block keeps the smallest scale: zero would lose it."""
  return formats.to_e4m3(jnp.maximum(x, codec.E4M3_TINY))


def _nearby(blocks, h_Okb, format, divisor, start_Ok):
  """The stored scale of least error among those around the start."""
  low, high = BYTES[format]
  start_byte = jax.lax.bitcast_convert_type(start_Ok, jnp.uint8).astype(jnp.int32)

  def stored(offset):
    byte = jnp.clip(start_byte + offset, low, high)
    byte = jnp.where(start_byte > high, start_byte, byte)  # a NaN stays one
    return jax.lax.bitcast_convert_type(byte.astype(jnp.uint8), start_Ok.dtype)

  def unit(offset):
    return codec.decode_scale(stored(offset)) / divisor

  offsets = jnp.asarray(OFFSETS[format], jnp.int32)
  return stored(_best(offsets, unit, blocks, h_Okb, unit(0)))


def _four_over_six(blocks, h_Okb, divisor, amax_Ok):
  """The largest magnitude on code 6 or, with a scale 1.5 times as large, on code 4."""

  def stored(ratio):
    return _e4m3(divisor * _divide(amax_Ok, codec.E2M1_MAX) * ratio)

  def unit(ratio):
    return codec.decode_scale(stored(ratio)) / divisor

  ratios = jnp.asarray([1.0, 1.5], jnp.float32)
  return stored(_best(ratios, unit, blocks, h_Okb, unit(1.0)))


def _best_ratio(blocks, h_Okb, amax_Ok):
  """FP-Quant's search: what of the largest magnitude's unit errs least, before any rounding."""
  start = jnp.maximum(amax_Ok / codec.E2M1_MAX, 2.0**-120)  # zeros, and .2 of it stays normal
  ratios = 1.0 - 0.8 * jnp.arange(100, dtype=jnp.float32) / 100
  return _best(ratios, lambda ratio: start * ratio, blocks, h_Okb, start, power=2.4)


def _best(candidates, unit: Callable, blocks, h_Okb, start_Ok, power=2.0):
  """By block, the candidate whose unit errs least, the first of equals; one after the other, so
  that none is held for the whole matrix but as one number a block."""

  def step(best, candidate):
    error = _error(blocks, h_Okb, unit(candidate), start_Ok, power)
    better = error < best[0]
    return (jnp.where(better, error, best[0]), jnp.where(better, candidate, best[1])), None

  first = jnp.full(start_Ok.shape, jnp.inf, jnp.float32), jnp.full(start_Ok.shape, candidates[0])
  return jax.lax.scan(step, first, candidates)[0][1]


def _error(blocks, h_Okb, unit_Ok, start_Ok, power=2.0):
  """sum_i h_i |(x_i - x^_i) / start|^power of each block: relative, so that squares of large or
  small weights stay in range. Products with reciprocals: a search may be off at ties, where codes
  may not."""
  unit, start = unit_Ok[..., None], start_Ok[..., None]
  miss = codec.round_e2m1(blocks * (1.0 / unit)) * (unit / start) - blocks * (1.0 / start)
  error = miss * miss if power == 2.0 else jnp.abs(miss) ** power
  return jnp.sum(error if h_Okb is None else error * h_Okb, axis=-1)


def _joint(blocks, h_Okb, format, config, fitted):
  """Alternates the least-squares g with a search of the blocks, while the error falls."""
  first = fitted.tensor_scale

  def total(fitted):
    unit = block_units(fitted)
    relative = unit * first  # to one measure for all rounds, of normal size
    return _sum(_error(blocks, h_Okb, unit, unit) * relative * relative)

  def improve(carry):
    rounds, _, fitted, error = carry
    divisor = fitted.tensor_scale / _least_squares(blocks, h_Okb, fitted)
    divisor = jnp.clip(divisor, MIN_DIVISOR, MAX_DIVISOR)
    new = Fitted(_fit_blocks(blocks, h_Okb, format, config, divisor), divisor)
    new_error = total(new)
    fell = new_error < error * (1 - 2.0**-20)
    kept = jax.tree.map(lambda a, b: jnp.where(fell, a, b), new, fitted)
    return rounds + 1, fell, kept, jnp.where(fell, new_error, error)

  start = (jnp.int32(0), jnp.bool_(True), fitted, total(fitted))
  return jax.lax.while_loop(lambda c: c[1] & (c[0] < config.joint_rounds), improve, start)[2]


def _least_squares(blocks, h_Okb, fitted):
  """The factor on all units of least squared error with the codes and block scales as they are."""
  scale = codec.decode_scale(fitted.scale)[..., None]
  x = blocks * fitted.tensor_scale
  value = codec.round_e2m1(x * (1.0 / scale)) * scale
  weighted = value if h_Okb is None else value * h_Okb
  product, square = _sum(weighted * x), _sum(weighted * value)
  # In steps, so that the order of a sum (stacked or not, sharded or not) does not show.
  return jnp.where(product > 0, jnp.round(product / square * 4096) / 4096, 1.0)


def _sum(x):
  """A sum in steps, one axis after the other: an axis of millions loses digits in float32."""
  while x.ndim:
    x = jnp.sum(x, axis=-1)
  return x


def _divide(a, b):
  """a / b rounded once. XLA rewrites a / broadcast(b) as a * broadcast(1 / b) and a / (b / c) as
  a * c / b; either changes codes at ties, where bfloat16 weights often are. The barrier hides b."""
  return a / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.float32(b), a.shape))
