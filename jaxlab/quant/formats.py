"""Number formats of FP4: E2M1 codes, E4M3 and E8M0 block scales, packing, the swizzle of scales.

Arithmetic is float32. Which scale a block gets is `scales.py`; decoding, and what kernels
share (encoding, the swizzle), is in pallas_kernels.
Sources: OCP Microscaling Formats v1.0 §5-6; the scale rules as in the tools that use them (arXiv
2509.23202 and its code for `fp43` and `quest`, compressed-tensors for `even`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int, UInt8

from pallas_kernels.fp4_gemm import codec, scale_tiles

encode_e2m1, pack = codec.encode_e2m1, codec.pack
swizzle, unswizzle = scale_tiles.swizzle, scale_tiles.unswizzle

E8M0_RULES = ("even", "floor", "ceil", "fp43", "quest")
# Exponents that are written. Below, float32 has denormals only, which XLA flushes to zero; above,
# 6 * 2^E overflows float32. [ours: E8M0 itself reaches from -127 to 127.]
E8M0_MIN, E8M0_MAX = -126, 125
FP43_MIN = -124  # 2^E / 3 is a normal float32
E8M0_NAN = 255
QUEST_CLIP = 2.92247856  # standard deviations that code 6 stands for


def to_e4m3(x: Float32[Array, "*shape"]) -> Float8e4m3fn[Array, "*shape"]:
  """Round to nearest even, saturating: an unclamped cast turns 465 into NaN."""
  return jnp.clip(x, -codec.E4M3_MAX, codec.E4M3_MAX).astype(jnp.float8_e4m3fn)


def e8m0_byte(amax: Float32[Array, "*shape"], rule: str = "even") -> UInt8[Array, "*shape"]:
  """Byte 127 + E of the power-of-two scale 2^E for blocks of largest magnitude `amax`.

  Args:
    rule: "floor" E = floor(log2 A) - 2 (OCP; clips A / 2^E in (6, 8) to 6);
      "even" E = floor(log2(A / 1.75)) - 1 (A / 2^E < 7; smallest error on weights of the rules);
      "ceil" E = ceil(log2(A / 6)) (never clips);
      "fp43" E = floor(log2 A), for codes of 3 x / 2^E (MR-GPTQ; never clips below 2^126).
  Returns: exponents clamped to [E8M0_MIN, E8M0_MAX] (fp43: from FP43_MIN); an amax of 0 or a
    denormal gives the smallest, inf or NaN the byte of NaN.
  Raises: ValueError for an unknown rule, and for "quest", which needs blocks: `quest_byte`.
  """
  require_rule("e8m0_byte", rule)
  # The integer view of a float is its exponent followed by its mantissa: exact, where log2 is not.
  bits = jax.lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
  mantissa_1_5, mantissa_0_25 = 0x400000, 0x200000
  match rule:
    case "floor":
      exponent = (bits >> 23) - 2
    case "even":
      exponent = ((bits + mantissa_0_25) >> 23) - 2
    case "ceil":
      exponent = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > mantissa_1_5).astype(jnp.int32)
    case "fp43":
      exponent = bits >> 23
    case _:
      raise ValueError(f"e8m0_byte: {rule!r} takes blocks, not maxima. Use quest_byte.")
  low = FP43_MIN if rule == "fp43" else E8M0_MIN
  return _byte(exponent, low, amax)


def quest_byte(blocks: Float32[Array, "*shape b"]) -> UInt8[Array, "*shape"]:
  """Byte of the rule "quest": E = floor(log2(2.92247856 / 6 * std)), which clips.

  `std` is the population's, over a block. Two departures keep blocks from turning into zeros: the
  source adds 1e-8 to the scale, which loses blocks of small weights; and where less than a quarter
  of the largest magnitude would be left (a mean that dwarfs the deviation), `even` is taken.
  Source: FP-Quant and QuTLASS, forward_method "quest" [ours: the departures].
  """
  amax = jnp.max(jnp.abs(blocks), axis=-1)
  unit = blocks / jnp.where(amax > 0, amax, 1.0)[..., None]  # squares neither overflow nor vanish
  scale = (QUEST_CLIP / codec.E2M1_MAX) * jnp.std(unit, axis=-1) * amax
  byte = _byte(jax.lax.bitcast_convert_type(scale, jnp.int32) >> 23, E8M0_MIN, amax)
  kept = codec.decode_scale(byte) * codec.E2M1_MAX
  return jnp.where(kept < amax * 0.25, e8m0_byte(amax, "even"), byte)


def _byte(biased, low, amax):
  byte = jnp.clip(biased, low + 127, E8M0_MAX + 127)
  return jnp.where(jnp.isfinite(amax), byte, E8M0_NAN).astype(jnp.uint8)


def require_rule(name: str, rule: str) -> None:
  """Raises ValueError unless `rule` is one of E8M0_RULES."""
  if rule not in E8M0_RULES:
    raise ValueError(
      f"{name}: unknown scale rule; got {rule!r}. Use one of {', '.join(E8M0_RULES)}."
    )


def require_finite(name: str, x: Float[Array, "..."]) -> None:
  """Raises ValueError if a concrete `x` holds NaN or inf, which FP4 codes cannot carry.

  Float64 beyond float32's range counts as inf. Traced values cannot be read: a caller under jit
  checks before, or finds NaN in the scales.
  """
  if isinstance(x, jax.core.Tracer):
    return
  bad = int(_count_bad(x))
  if bad:
    raise ValueError(
      f"{name}: weights must be finite; got {bad} of {x.size} NaN or inf. Repair the checkpoint."
    )


@jax.jit
def _count_bad(x):
  return jnp.sum(~jnp.isfinite(x.astype(jnp.float32)))


def vanished(w_IO: Float32[Array, "I O"], unit_Ok: Float32[Array, "O k"]) -> Int[Array, ""]:
  """How many blocks hold something, be it denormal, but are nearest to zero.

  Args:
    unit_Ok: what code 1.0 of a block stands for.
  """
  k = unit_Ok.shape[1]
  # As bits, which sort as magnitudes do: a comparison would flush a denormal before it looks.
  bits = jax.lax.bitcast_convert_type(w_IO, jnp.int32) & 0x7FFFFFFF
  largest_Ok = jnp.max(bits.reshape(k, -1, w_IO.shape[1]), axis=1).T
  code = jax.lax.bitcast_convert_type(largest_Ok, jnp.float32) / unit_Ok
  return jnp.sum((largest_Ok > 0) & (code <= 0.25))
