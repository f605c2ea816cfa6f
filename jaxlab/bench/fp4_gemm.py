"""The FP4 product beside a dense one, for decode and prefill, on whatever device is there.

Weights come out of memory, as in a model: each program multiplies with several matrices in turn, so
many that the dense ones do not fit a cache. Dims: M rows, K in, O out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlab.bench import pairs
from jaxlab.quant import fp4
from pallas_kernels import target
from pallas_kernels.fp4_gemm import fp4_matmul

Row = dict[str, Any]
DENSE_BYTES = 128 << 20  # of the dense matrices of one program [ours: four times a large cache]
MOST = 48  # matrices in one program [ours: compile time]


def fp4_gemm_rows(
  shapes: tuple[tuple[int, int], ...] = ((576, 1536), (1536, 576), (4096, 4096)),
  rows: tuple[int, ...] = (1, 8, 64, 512),
  formats: tuple[str, ...] = ("nvfp4", "mxfp4"),
  implementation: str | None = None,
  dtype: str | None = None,
  repeats: int = pairs.PAIRS,
) -> list[Row]:
  """`ratio_to_dense` (above 1: FP4 is faster) of one product, for every shape, M and format.

  Args:
    shapes: (K, O) of W.
    rows: M; 1 to 16 is decoding, hundreds are prefill.
    implementation: of `fp4_matmul`; None leaves it to the rule.
    dtype: of x and of the dense W; None is float32 on a CPU, bfloat16 elsewhere.
  """
  on_cpu = target.current_target().platform == "cpu"
  dtype = jnp.dtype(dtype or ("float32" if on_cpu else "bfloat16"))
  return [
    _row(k, o, m, format, implementation, dtype, repeats)
    for k, o in shapes
    for format in formats
    for m in rows
  ]


def _row(k, o, m, format, implementation, dtype, repeats) -> Row:
  count = max(2, min(MOST, DENSE_BYTES // (k * o * dtype.itemsize)))
  keys = jax.random.split(jax.random.key(0), count)
  draw = jax.jit(lambda key: jax.random.normal(key, (k, o), dtype) / k**0.5)
  dense = [draw(key) for key in keys]
  packed = [fp4.quantize(w, format) for w in dense]
  x = jax.random.normal(jax.random.key(1), (m, k), dtype)
  multiply = lambda x, w: fp4_matmul(
    x, w.codes, w.scale, w.multiplier, implementation=implementation
  )
  ours, theirs = _chain(multiply), _chain(jnp.matmul)
  timing = pairs.interleaved(
    lambda: ours(x, packed).block_until_ready(), lambda: theirs(x, dense).block_until_ready(),
    pairs=repeats,
  )  # fmt: skip
  return {
    "what": "fp4_gemm", "shape": f"{k}x{o}", "batch": m, "format": format, "dtype": dtype.name,
    "implementation": implementation or "by rule", "device": target.current_target().device_kind,
    "seconds": timing["seconds"] / count, "dense_seconds": timing["baseline_seconds"] / count,
    "ratio_to_dense": timing["ratio"], "ratio_to_dense_low": timing["ratio_low"],
    "ratio_to_dense_high": timing["ratio_high"],
  }  # fmt: skip


def _chain(product):
  """Products with all matrices, one after the other: each x needs the y before it."""

  @jax.jit
  def run(x, ws):
    for w in ws:
      x = x + product(x, w)[:, :1] * 1e-6
    return x

  return run
