"""Errors and sizes of a quantised model, by hand in numpy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import lora
from jaxlab.models import causal_lm
from jaxlab.nn import weights
from jaxlab.quant import by_group, fp4, report
from jaxlab.quant import model as quant

CONFIG = causal_lm.CausalLMConfig(50, 64, 2, 4, 2, 16, 128)
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.125, "bf16": 16.0}


@dataclasses.dataclass(frozen=True)
class Model:  # the only field of a jaxlab.LM that is looked at
  params: Any


@pytest.fixture(scope="module")
def params():
  module = causal_lm.CausalLM(CONFIG)
  return module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def test_the_error_is_that_of_the_decoded_matrix(params):
  w = params["layers"]["up"]["kernel"]
  packed = fp4.quantize(w)
  found = report.relative_error(w, packed)
  a, b = (np.asarray(x, np.float64) for x in (w, weights.dense(packed)))
  expected = np.linalg.norm(a - b, axis=(1, 2)) / np.linalg.norm(a, axis=(1, 2))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert found == pytest.approx([0.0952] * 2, abs=0.003), "of Gaussian weights (spec qerl O2)"
  assert report.relative_error(w[0], w[0]) == 0.0
  assert (report.relative_error(0 * w, w) < np.inf).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_the_error_does_not_depend_on_the_magnitude(magnitude):
  w = jax.random.normal(jax.random.key(1), (64, 64))
  plain, scaled = (report.relative_error(x, fp4.quantize(x)) for x in (w, w * magnitude))
  np.testing.assert_allclose(plain, scaled, rtol=0.03)


@pytest.mark.parametrize("format", BITS)
def test_format_and_sizes(params, format):
  packed = quant.quantize(params, format)
  assert report.format_of(packed) == ("bfloat16" if format == "bf16" else format)
  sizes = report.sizes(packed)
  linears = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
  rest = 50 * 64 + 5 * 64
  assert sizes["weight_bytes_bf16"] == 2 * linears
  assert sizes["model_bytes_bf16"] == 2 * (linears + rest)
  assert sizes["weight_bytes"] == pytest.approx(BITS[format] / 8 * linears, abs=2 * 4 * 14)
  assert sizes["model_bytes"] == sizes["weight_bytes"] + 2 * rest
  assert sizes["bits_per_weight"] == pytest.approx(BITS[format], rel=0.01)


def test_groups_and_the_head_are_quantised_as_the_whole(params):
  quantize = functools.partial(quant.quantize, search="four_over_six", head="int8")
  made, errors = by_group.quantize_by_group(Model(params), quantize)
  whole = quantize(params)
  assert jax.tree.structure(made.params) == jax.tree.structure(whole)
  for a, b in zip(jax.tree.leaves(made.params), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
  assert isinstance(made.params["embed"], weights.Int8Array)
  up = report.relative_error(params["layers"]["up"]["kernel"], whole["layers"]["up"]["kernel"])
  np.testing.assert_array_equal(errors["up"], up)


def test_adapters_do_not_hide_the_format(params):
  adapted = lora.attach(quant.quantize(params), lora.LoRAConfig(rank=2), jax.random.key(0))
  assert report.format_of(adapted) == "nvfp4"
  mixed = adapted | {"layers": adapted["layers"] | {"q": params["layers"]["q"]}}
  with pytest.raises(ValueError, match=r"share one format; got \['float32', 'nvfp4'\]"):
    report.format_of(mixed)
