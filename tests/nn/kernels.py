"""One kernel of every leaf type, random and small."""

import jax.numpy as jnp
import numpy as np

from jaxlab.nn import weights
from jaxlab.quant import fp4, nf4

I, O, R = 64, 48, 4


def random(*shape, seed=0):
  return jnp.asarray(np.random.RandomState(seed).standard_normal(shape) * 0.3, jnp.float32)


def kernels(*stack: int, i: int = I, o: int = O) -> dict:
  """{name: kernel of shape [*stack, i, o]}; a new leaf type gets its row here."""
  dense = random(*stack, i, o)
  adapter = lambda base: weights.LoRA(
    base, random(*stack, i, R, seed=1), random(*stack, R, o, seed=2), 0.5
  )
  return {
    "dense": dense,
    "nvfp4": fp4.quantize(dense),
    "mxfp4": fp4.quantize(dense, "mxfp4"),
    "nf4": nf4.quantize(dense),
    "lora": adapter(dense),
    "lora over nvfp4": adapter(fp4.quantize(dense)),
    "lora over nf4": adapter(nf4.quantize(dense)),
    "lora over lora": adapter(adapter(dense)),
    "low rank": weights.LowRank(random(*stack, i, R, seed=1), random(*stack, R, o, seed=2)),
  }
