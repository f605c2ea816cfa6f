"""One global scale for q/k/v and gate/up, recomputed from codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.io import fp4_fuse
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4


def params(format="nvfp4", divisor=True):
  """Two stacked layers whose linears have magnitudes a power of ten apart."""
  layers = {}
  for i, name in enumerate(("q", "k", "v", "o", "gate", "up", "down")):
    key = jax.random.key(i)
    w = fp4.quantize(jax.random.normal(key, (2, 64, 32)) * 10.0 ** (-i), format, activations="fp4")
    if format == "nvfp4":
      w = dataclasses.replace(w, act_scale=jnp.asarray([5.0 + i, 6.0]))
    if not divisor:
      w = dataclasses.replace(
        w, tensor_scale=1 / w.tensor_scale, act_scale=1 / w.act_scale, scale_is_divisor=False
      )
    layers[name] = {"kernel": w}
  return {"layers": layers, "embed": jnp.ones((4, 64))}


@pytest.mark.parametrize("divisor", [True, False])
@pytest.mark.parametrize("listed", [False, True])
def test_members_share_the_scale_of_the_largest(divisor, listed):
  before = params(divisor=divisor)
  first = "layers/0/" if listed else "layers/"
  before = stack.unstack(before) if listed else before
  assert f"{first}q/kernel" in fp4_fuse.unequal(before)
  after = fp4_fuse.fuse_tensor_scales(before)
  assert fp4_fuse.unequal(after) == []
  old, new = weights.leaf_paths(before), weights.leaf_paths(after)
  largest = jnp.minimum if divisor else jnp.maximum
  for names in (("q", "k", "v"), ("gate", "up")):
    paths = [f"{first}{n}/kernel" for n in names]
    for part in ("tensor_scale", "act_scale"):
      value = getattr(old[paths[0]], part)
      for p in paths[1:]:
        value = largest(value, getattr(old[p], part))
      for p in paths:
        np.testing.assert_array_equal(getattr(new[p], part), value)
  for p in (f"{first}o/kernel", f"{first}down/kernel", f"{first}q/kernel", "embed"):
    for a, b in zip(jax.tree.leaves(old[p]), jax.tree.leaves(new[p]), strict=True):
      if a.shape != (2,) and a.shape != ():
        np.testing.assert_array_equal(a, b)  # byte for byte


@pytest.mark.parametrize("shrink", [1.0, 10.0, 300.0])
def test_values_move_by_no_more_than_the_new_scale_allows(shrink):
  """The error of a block is at most what rounding its scale to E4M3, and then its values, costs."""
  w = fp4.quantize(jax.random.normal(jax.random.key(0), (64, 32)))
  big = fp4.quantize(shrink * jax.random.normal(jax.random.key(1), (64, 32)))
  layers = {"gate": {"kernel": big}, "up": {"kernel": w}}
  fused = fp4_fuse.fuse_tensor_scales({"layers": [layers]})["layers"][0]["up"]["kernel"]
  old, new = (np.asarray(weights.dense(x), np.float64).T.reshape(32, 4, 16) for x in (w, fused))
  unit = np.asarray(fused.scale, np.float64) / float(fused.tensor_scale)
  # Codes are at most 6 and their values half a step off, a step of 2; then the largest code clips.
  bound = np.maximum(unit * 1.0, np.abs(old).max(-1) * 2.0**-4) * (1 + 1e-6)
  assert (np.abs(new - old).max(-1) <= bound).all()
  if shrink <= 10:  # scales stay normal E4M3 numbers: codes do not move at all
    relative = np.abs(new - old) / np.where(old == 0, 1, np.abs(old))
    assert relative.max() <= 2.0**-4 + 1e-6


def test_other_formats_and_incomplete_sets_are_left_alone():
  before = params("mxfp4")
  assert (
    fp4_fuse.fuse_tensor_scales(before)["layers"]["q"]["kernel"]
    is (before["layers"]["q"]["kernel"])
  )
  lonely = {"layers": {"q": params()["layers"]["q"]}}
  assert fp4_fuse.unequal(lonely) == []
