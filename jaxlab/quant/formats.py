"""Number formats of FP4: E2M1 codes, E4M3 and E8M0 block scales, packing. Arithmetic is float32.

Sources: OCP Microscaling Formats v1.0 §5-6; the scale rules as in the tools that use them (arXiv
2509.23202 and its code for `fp43`, compressed-tensors for `even`). Decoding: pallas_kernels codec.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8

from pallas_kernels.fp4_gemm import codec

E8M0_RULES = ("even", "floor", "ceil", "fp43")
# Exponents that are written. Below, float32 has denormals only, which XLA flushes to zero; above,
# 6 * 2^E overflows float32. [ours: E8M0 itself reaches from -127 to 127.]
E8M0_MIN, E8M0_MAX = -126, 125


def encode_e2m1(x: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
  """The code of the nearest E2M1 value: 0-7 for 0, .5, 1, 1.5, 2, 3, 4, 6, plus 8 if negative.

  Ties go to the even code, magnitudes above 6 saturate; small negatives give code 8 (-0), -0.0
  itself gives 0. A NaN would become 0: call `require_finite` on what comes from outside.
  """
  a = jnp.abs(x)
  passed = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
  code = sum(p.astype(jnp.uint8) for p in passed)
  return code + 8 * (x < 0).astype(jnp.uint8)


def pack(codes: UInt8[Array, "*lead K"]) -> UInt8[Array, "*lead H"]:
  """Two codes a byte along the last axis, even k in the low nibble; H = K / 2."""
  even, odd = codec.deinterleave(codes)
  return even | (odd << 4)


def to_e4m3(x: Float32[Array, "*shape"]) -> Float8e4m3fn[Array, "*shape"]:
  """Round to nearest even, saturating: an unclamped cast turns 465 into NaN."""
  return jnp.clip(x, -codec.E4M3_MAX, codec.E4M3_MAX).astype(jnp.float8_e4m3fn)


def e8m0_byte(amax: Float32[Array, "*shape"], rule: str = "even") -> UInt8[Array, "*shape"]:
  """Byte 127 + E of the power-of-two scale 2^E for blocks of largest magnitude `amax`.

  Args:
    rule: "floor" E = floor(log2 A) - 2 (OCP; clips A / 2^E in (6, 8) to 6);
      "even" E = floor(log2(A / 1.75)) - 1 (A / 2^E < 7; smallest error on weights of the four);
      "ceil" E = ceil(log2(A / 6)) (never clips);
      "fp43" E = floor(log2 A), for codes of 3 x / 2^E (MR-GPTQ; never clips).
  Returns: exponents clamped to [E8M0_MIN, E8M0_MAX]; an amax of 0 or a denormal gives E8M0_MIN.
  Raises: ValueError for an unknown rule.
  """
  require_rule("e8m0_byte", rule)
  # The integer view of a float is its exponent followed by its mantissa: exact, where log2 is not.
  bits = jax.lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
  mantissa_1_5, mantissa_0_25 = 0x400000, 0x200000
  exponent = {
    "floor": (bits >> 23) - 2,
    "even": ((bits + mantissa_0_25) >> 23) - 2,
    "ceil": (bits >> 23) - 2 + ((bits & 0x7FFFFF) > mantissa_1_5).astype(jnp.int32),
    "fp43": bits >> 23,
  }[rule]
  return jnp.clip(exponent, E8M0_MIN + 127, E8M0_MAX + 127).astype(jnp.uint8)


def require_rule(name: str, rule: str) -> None:
  """Raises ValueError unless `rule` is one of E8M0_RULES."""
  if rule not in E8M0_RULES:
    raise ValueError(
      f"{name}: unknown scale rule; got {rule!r}. Use one of {', '.join(E8M0_RULES)}."
    )


def require_finite(name: str, x: Float[Array, "..."]) -> None:
  """Raises ValueError if a concrete `x` holds NaN or inf, which FP4 codes cannot carry.

  Traced values cannot be read: a caller under jit checks before.
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
  return jnp.sum(~jnp.isfinite(x))
