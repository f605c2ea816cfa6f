"""Rows of a text, and what is seen of a block's inputs, against float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import stack
from jaxlab.quant import blocks, calibrate, fp4
from pallas_kernels.fp4_gemm import codec
from tests.quant import small
from tests.quant.small import MLP, SITES

pytestmark = pytest.mark.usefixtures("quick_compilation")
run_block = jax.jit(blocks.run, static_argnums=(0, 1))
END = 2


# --- rows


def documents():
  return [[10 * n + i for i in range(length)] for n, length in enumerate((7, 3, 9, 4))]


def test_windows_lie_in_one_document_and_use_all_that_are_long_enough():
  rows = calibrate.rows(documents(), calibrate.Calibration(sequences=6, length=4), END)
  assert rows.shape == (6, 4) and rows.dtype == np.int32
  np.testing.assert_array_equal(np.diff(rows, axis=1), np.ones((6, 3)))
  sources = (rows[:, 0] // 10).tolist()
  assert set(sources) == {0, 2, 3}
  assert set(sources[:3]) == set(sources[3:]) == {0, 2, 3}, "all, before any gives a second one"


def test_joined_documents_are_cut_into_rows():
  config = calibrate.Calibration(sequences=6, length=4, join=True)
  stream = [token for ids in documents() for token in (*ids, END)]
  assert len(stream) == 27
  rows = calibrate.rows(documents(), config, END)
  cut = [stream[i : i + 4] for i in range(0, 24, 4)]
  assert sorted(rows.tolist()) == sorted(cut)


def test_a_seed_is_a_choice():
  make = lambda seed: calibrate.rows(
    documents(), calibrate.Calibration(sequences=3, length=3, seed=seed), END
  )
  np.testing.assert_array_equal(make(0), make(0))
  assert any((make(seed) != make(0)).any() for seed in range(1, 4))


def test_a_text_that_is_too_short_is_refused():
  with pytest.raises(ValueError, match="got 10, and 4 documents of at most 9. Take less, or"):
    calibrate.rows(documents(), calibrate.Calibration(sequences=1, length=10), END)
  with pytest.raises(ValueError, match="got 7 of 4 tokens and a text of 27 tokens"):
    calibrate.rows(documents(), calibrate.Calibration(sequences=7, length=4, join=True), END)
  with pytest.raises(ValueError, match="Calibration.length: must be at least 1; got 0"):
    calibrate.Calibration(length=0)


# --- one block


def layers_of(lm):
  return stack.unstack(lm.params)["layers"]


def embed(lm, rows=3):
  ids = jnp.asarray(small.tokens(rows, 10))
  return ids, lm.module.apply({"params": lm.params}, ids, method="embed")


@pytest.mark.parametrize("family", ["qwen2", "modernbert"])
def test_blocks_one_by_one_are_the_model(family):
  lm = small.model(family)
  layers, (ids, x) = layers_of(lm), embed(lm)
  alike = blocks.first_alike(lm.module, layers[0])
  for i, layer in enumerate(layers):
    x = run_block(lm.module, alike[i], layer, x)
  x = np.asarray(x, np.float64)  # the model adds its final norm only
  if family == "modernbert":
    x = x - x.mean(-1, keepdims=True)
  scale = np.sqrt((x**2).mean(-1, keepdims=True) + lm.module.config.norm_eps)
  expected = small.run_hidden(lm.module, lm.params, ids)
  np.testing.assert_allclose(x / scale * np.asarray(lm.params["norm"]), expected, atol=5e-5)


@pytest.mark.parametrize("family", small.CONFIGS)
def test_sites_are_found_for_every_family(family):
  lm = small.model(family)
  expected = small.BERT_SITES if family == "bert" else SITES
  assert blocks.find_sites(lm.module, layers_of(lm)[0]) == expected


def test_alike_blocks_share_a_program():
  lm = small.model()
  assert blocks.first_alike(lm.module, layers_of(lm)[0]) == [0, 0]
  lm = small.model("modernbert")
  alike = blocks.first_alike(lm.module, layers_of(lm)[0])
  kinds = [(i == 0, local) for i, local in enumerate(lm.module.config.local_layers)]
  assert alike == [kinds.index(kind) for kind in kinds] and len(set(alike)) == 3


def statistics(how, layer, batches):
  module = small.model().module
  seen = calibrate.nothing_seen(how, layer)
  for x in batches:
    seen = calibrate.observe(module, 0, how, layer, x, seen)
  return seen


def inputs():
  _, x = embed(small.model(), 6)
  return [x[:3], x[3:]]


def test_the_statistics_are_those_of_the_inputs():
  """q/k/v and gate/up: norms in NumPy; down: the whole MLP."""
  module, layer = small.model().module, layers_of(small.model())[0]
  seen = statistics(calibrate.Inputs(SITES), layer, inputs())
  x = np.concatenate([np.asarray(b, np.float64) for b in inputs()])
  eps = module.config.norm_eps
  norm = lambda x, g: x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(g, np.float64)
  kernel = lambda name: np.asarray(layer[name]["kernel"], np.float64)
  qkv = norm(x, layer["attn_norm"])
  out = np.asarray(run_block(module, 0, _without_mlp(layer), jnp.float32(x)), np.float64)
  mlp = norm(out, layer["mlp_norm"])
  gate, up = mlp @ kernel("gate"), mlp @ kernel("up")
  down = gate / (1 + np.exp(-gate)) * up
  for name, rows in (("q", qkv), ("gate", mlp), ("down", down)):
    flat = rows.reshape(-1, rows.shape[-1])
    found = seen[name]
    expected = 2 * flat.T @ flat / 6
    np.testing.assert_allclose(found.hessian_II, expected, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(found.amax, np.abs(flat).max(), rtol=1e-4)
    np.testing.assert_allclose(found.magnitude_I, np.abs(flat).mean(0), rtol=1e-4)
    assert float(found.sequences) == 6


def _without_mlp(layer):
  return layer | {"down": jax.tree.map(jnp.zeros_like, layer["down"])}


def test_means_are_over_sequences_of_batches_of_any_size():
  """H n / (n + b) + 2 / (n + b) X^T X, and so on, against all rows at once."""
  random = np.random.default_rng(0)
  x = random.standard_normal((7, 5, 8))
  seen = calibrate.Statistics(jnp.zeros((8, 8)), jnp.float32(0), jnp.float32(0), jnp.zeros(8))
  for part in (x[:4], x[4:6], x[6:]):
    seen = calibrate.update(seen, jnp.float32(part))
  flat = x.reshape(-1, 8)
  np.testing.assert_allclose(seen.hessian_II, 2 * flat.T @ flat / 7, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(seen.magnitude_I, np.abs(flat).mean(0), rtol=1e-5)
  assert float(seen.sequences) == 7 and float(seen.amax) == np.float32(np.abs(x).max())


def test_rotated_inputs_and_kernels_are_the_same_block():
  module, layer = small.model().module, layers_of(small.model())[0]
  turned = {name: codec.unrotate(w, 16) for name, w in blocks.kernels(layer).items()}
  turned, how = blocks.replace_kernels(layer, turned), calibrate.Inputs(SITES, 16)
  x, nothing = inputs()[0], dict.fromkeys([site[0] for site in SITES])
  found = calibrate.forward(module, 0, how, turned, x, nothing)
  np.testing.assert_allclose(found, run_block(module, 0, layer, x), atol=5e-5)
  unturned = statistics(calibrate.Inputs(SITES), layer, inputs())["down"].hessian_II
  turn = np.kron(np.eye(MLP // 16), np.asarray(codec.rotate(jnp.eye(16), 16)))
  expected = turn @ np.asarray(unturned, np.float64) @ turn
  seen = statistics(how, turned, inputs())["down"].hessian_II
  np.testing.assert_allclose(seen, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_rounded_inputs_are_those_of_packed_kernels(format):
  """What calibration simulates is what `weights.matmul` does with an FP4 leaf."""
  module, layer = small.model().module, layers_of(small.model())[0]
  scale = jnp.float32(0.002) if format == "nvfp4" else None

  def pack(w_IO):
    leaf = fp4.quantize(codec.unrotate(w_IO, 16), format, activations="fp4")
    act_scale = None if scale is None else 1 / scale
    return dataclasses.replace(leaf, act_scale=act_scale, rotation=16)

  packed = {name: pack(w) for name, w in blocks.kernels(layer).items()}
  decoded = {
    name: codec.decode(w.codes, w.scale, w.multiplier, jnp.float32).T for name, w in packed.items()
  }
  x, how = inputs()[0], calibrate.Inputs(SITES, 16, format)
  scales = {site[0]: scale for site in SITES}
  found = calibrate.forward(module, 0, how, blocks.replace_kernels(layer, decoded), x, scales)
  expected = run_block(module, 0, blocks.replace_kernels(layer, packed), x)
  plain = run_block(module, 0, layer, x)
  # A code may flip where the sums differ in the last bit: a few elements, by one step.
  assert np.mean(np.abs(found - expected)) < 0.02 * np.mean(np.abs(expected - plain))


def test_hessians_are_left_out_where_nothing_needs_them():
  how = calibrate.Inputs(SITES, rounding="nvfp4", hessian=False)
  seen = statistics(how, layers_of(small.model())[0], inputs())
  assert all(s.hessian_II is None for s in seen.values())
  assert float(seen["down"].amax) > 0
