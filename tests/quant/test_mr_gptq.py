"""MR-GPTQ on whole models: its data flow, forms of parameters, resuming, devices, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import errors
from jaxlab.nn import stack, weights
from jaxlab.quant import blocks, calibrate, gptq, mr_gptq, resume, scales, site
from jaxlab.quant import model as quant
from pallas_kernels.fp4_gemm import codec
from tests.quant import small
from tests.quant.small import model, tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")
ONE = slice(0, 1)  # of the devices: eight virtual ones share two cores


def quantize(config, lm=None, ids=None, **options):
  ids = tokens() if ids is None else ids
  options = {"devices": jax.devices()[ONE]} | options
  return mr_gptq.quantize_model(lm or model(), config, ids, **options)


@functools.cache
def done(preset, format, activations="none"):
  return quantize(getattr(mr_gptq, preset)(format, activations))


def logits(lm):
  return np.asarray(small.run_logits(lm.module, lm.params, jnp.asarray(tokens())), np.float64)


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


# --- presets


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_rtn_is_the_plain_quantiser(format):
  lm, rows = mr_gptq.quantize_model(model(), mr_gptq.rtn(format), devices=jax.devices()[ONE])
  assert_same(lm.params, quant.quantize(model().params, format))
  assert [(r["layer"], r["linear"]) for r in rows[:7]] == [(0, name) for name in small.LINEARS]
  assert len(rows) == 14 and all(0.05 < r["weight_error"] < 0.2 for r in rows)


def test_presets_are_the_named_combinations():
  found = {
    name: (c.rotation, c.solver, c.order if c.solver == "gptq" else None, c.scales.search)
    for name in ("rtn", "rtn_hadamard", "gptq", "mr_gptq")
    for c in [getattr(mr_gptq, name)("mxfp4", "fp4")]
  }
  assert found == {
    "rtn": (0, "rtn", None, "none"),
    "rtn_hadamard": (None, "rtn", None, "none"),
    "gptq": (0, "gptq", "default", "none"),
    "mr_gptq": (None, "gptq", "activation", "mse"),
  }


@pytest.mark.parametrize(("format", "activations"), [("nvfp4", "none"), ("mxfp4", "fp4")])
def test_outputs_on_the_text_err_less_than_rounded_ones(format, activations):
  lm, rows = done("mr_gptq", format, activations)
  for row in rows:
    assert row["output_error"] < row["output_error_rtn"], row
    assert row["damp"] == 0.01 and row["damp_retries"] == 0 and row["dead_inputs"] == 0
  kernel = lm.params["layers"]["q"]["kernel"]
  assert (kernel.format, kernel.activations, kernel.rotation) == (format, activations, 64)
  kept = lm.params["layers"]["attn_norm"], model().params["layers"]["attn_norm"]
  np.testing.assert_array_equal(*kept)
  np.testing.assert_array_equal(lm.params["embed"], model().params["embed"])
  # The model that is computed with is the dense one that its kernels stand for.
  dense = dataclasses.replace(lm, params=weights.densify(lm.params))
  if activations == "none":
    np.testing.assert_allclose(logits(lm), logits(dense), atol=2e-4)
  far = np.abs(logits(lm) - logits(model())).mean()
  assert far < 0.6 * np.abs(logits(model())).mean()


def test_static_activation_scales_are_shared_and_cover_what_was_seen():
  lm, rows = done("mr_gptq", "nvfp4", "fp4")
  layers = lm.params["layers"]
  scales_of = {name: np.asarray(layers[name]["kernel"].act_scale) for name in ("q", "k", "v", "up")}
  np.testing.assert_array_equal(scales_of["q"], scales_of["k"])
  np.testing.assert_array_equal(scales_of["q"], scales_of["v"])
  assert (scales_of["q"] != scales_of["up"]).all()
  assert rows[0]["act_scale"] == scales_of["q"][0]
  params = model().params
  x = np.asarray(params["embed"], np.float64)[tokens()]
  gain = np.asarray(params["layers"]["attn_norm"][0], np.float64)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model().module.config.norm_eps) * gain
  turn = np.asarray(codec.rotate(jnp.eye(64), 64))
  np.testing.assert_allclose(scales_of["q"][0], 2688 / np.abs(x @ turn).max(), rtol=1e-5)


def test_without_text_activation_scales_come_from_each_token():
  config = mr_gptq.rtn_hadamard("nvfp4", "fp4")
  lm, rows = mr_gptq.quantize_model(model(), config, devices=jax.devices()[ONE])
  kernel = lm.params["layers"]["q"]["kernel"]
  assert kernel.act_scale is None and kernel.activations == "fp4" and "act_scale" not in rows[0]


# --- the data flow


def test_each_block_is_solved_on_the_outputs_of_quantised_ones():
  """The last site of the last block, from Hessians that are made here by the plain forward pass of
  a model whose first block is packed and whose second is not."""
  config = mr_gptq.MRGPTQConfig("nvfp4", rotation=16, batch=6)
  programs = lambda: [f._cache_size() for f in (calibrate.observe, calibrate.forward)]
  before = programs()
  lm, _ = quantize(config)
  assert programs() == [n + 1 for n in before], "one for all blocks"
  packed, dense = stack.unstack(lm.params)["layers"], stack.unstack(model().params)["layers"]
  module = model().module

  @jax.jit
  def last_inputs(x):
    seen = []
    spy = lambda name, x: (seen.append(x) if name == "down" else None, x)[1]
    x = blocks.run(module, 0, packed[0], x)
    blocks.run(module, 1, blocks.watch(dense[1], spy), x)
    return codec.rotate(seen[0], 16)

  x = module.apply({"params": model().params}, jnp.asarray(tokens()), method="embed")
  rows = np.asarray(last_inputs(x), np.float64).reshape(-1, small.MLP)
  hessian = jnp.float32(2 * rows.T @ rows / 6)
  w_IO = codec.unrotate(dense[1]["down"]["kernel"], 16)
  fitted = scales.fit(w_IO.T, "nvfp4", config.scales)
  factor = gptq.factorise(hessian, 0.01, "activation")
  new_IO = gptq.solve(w_IO, scales.block_units(fitted).T, factor)
  found = packed[1]["down"]["kernel"]
  np.testing.assert_array_equal(found.scale.astype(jnp.float32), fitted.scale.astype(jnp.float32))
  values = codec.decode(found.codes, found.scale, found.multiplier, jnp.float32).T
  assert np.mean(np.abs(values - new_IO) > 1e-6) < 0.01  # ties within the sums' last bits
  assert np.mean(np.abs(values - w_IO) > 1e-6) > 0.5


def test_fused_sets_share_one_tensor_scale():
  layers = done("mr_gptq", "nvfp4")[0].params["layers"]
  tensor_scales = lambda names: {tuple(layers[n]["kernel"].tensor_scale.tolist()) for n in names}
  assert len(tensor_scales(("q", "k", "v"))) == len(tensor_scales(("gate", "up"))) == 1
  layer = stack.unstack(model().params)["layers"][0]
  kernels = {name: layer[name]["kernel"] for name in ("q", "k")}
  apart, facts = site.quantize(kernels, None, dataclasses.replace(mr_gptq.rtn(), fuse=False), 0)
  assert float(apart["q"].tensor_scale) != float(apart["k"].tensor_scale)
  assert facts["k"]["tensor_scale"] == float(apart["k"].tensor_scale)


# --- forms of a model


def test_a_list_of_layers_gives_the_same_codes():
  listed = dataclasses.replace(model(), params=stack.unstack(model().params))
  found, rows = quantize(mr_gptq.mr_gptq(), listed)
  assert isinstance(found.params["layers"], list)
  expected, expected_rows = done("mr_gptq", "nvfp4")
  assert_same(stack.restack(found.params), expected.params)
  assert rows == expected_rows


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "modernbert", "bert"])
def test_other_families(family):
  lm, rows = quantize(mr_gptq.mr_gptq("mxfp4", "fp4"), model(family))
  names = [n for n in small.LINEARS if (family, n) != ("bert", "gate")]
  assert [r["linear"] for r in rows[: len(names)]] == names
  assert all(r["output_error"] < r["output_error_rtn"] for r in rows)
  found, before = logits(lm), logits(model(family))
  nearest, _ = quantize(mr_gptq.rtn("mxfp4", "fp4"), model(family))
  # Another head, another norm: it is enough that the whole errs less than by rounding.
  assert np.abs(found - before).mean() < np.abs(logits(nearest) - before).mean()


@pytest.mark.slow
def test_eight_devices_solve_and_read_as_one():
  """Sums over sequences are split, so that a code may flip at a tie."""
  ids = tokens(rows=8)
  config = dataclasses.replace(mr_gptq.mr_gptq("nvfp4", "fp4"), batch=8)
  one, rows_one = quantize(config, ids=ids)
  eight, rows_eight = quantize(config, ids=ids, devices=jax.devices()[:8])
  same = []
  for name in ("q", "down"):
    a, b = (np.asarray(m.params["layers"][name]["kernel"].codes) for m in (one, eight))
    same.append((a == b).mean())
  assert min(same) > 0.98, same
  errors = [[r["output_error"] for r in rows] for rows in (rows_one, rows_eight)]
  np.testing.assert_allclose(*errors, rtol=0.02)


# --- resuming


class Stop(Exception):
  pass


def test_an_interrupted_run_takes_up_its_finished_blocks(tmp_path, monkeypatch):
  config = mr_gptq.mr_gptq("nvfp4", "fp4")
  shown = []

  def stop_after_one(done, total):
    shown.append((done, total))
    if done == 1:
      raise Stop

  with pytest.raises(Stop):
    quantize(config, workdir=tmp_path, on_block=stop_after_one)
  assert shown == [(0, 2), (1, 2)]
  solved = []
  quantize_block = mr_gptq.quantize_block
  monkeypatch.setattr(
    mr_gptq,
    "quantize_block",
    lambda job, i, *rest: solved.append(i) or quantize_block(job, i, *rest),
  )
  found, rows = quantize(config, workdir=tmp_path)
  assert solved == [1]
  expected, expected_rows = done("mr_gptq", "nvfp4", "fp4")
  assert_same(found.params, expected.params)
  assert rows == expected_rows
  again, _ = quantize(config, workdir=tmp_path)
  assert solved == [1], "a finished run is read"
  assert_same(again.params, expected.params)


def test_blocks_of_another_run_are_refused(tmp_path):
  quantize(mr_gptq.rtn(), workdir=tmp_path)
  with pytest.raises(ValueError, match="blocks of another run: .*format: nvfp4 -> mxfp4"):
    quantize(mr_gptq.rtn("mxfp4"), workdir=tmp_path)
  other = dataclasses.replace(
    model(), params=model().params | {"embed": model().params["embed"] + 1}
  )
  with pytest.raises(ValueError, match="another run: model: "):
    quantize(mr_gptq.rtn(), other, workdir=tmp_path)
  with pytest.raises(ValueError, match="another run: text: "):
    quantize(mr_gptq.rtn(), ids=tokens(5), workdir=tmp_path)


def test_a_damaged_block_is_refused(tmp_path):
  quantize(mr_gptq.rtn(), workdir=tmp_path)
  path = tmp_path / resume.FOLDER / "00001.safetensors"
  whole = path.read_bytes()
  path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
  with pytest.raises(errors.CorruptFile, match="00001.safetensors.*checksum.*made again"):
    quantize(mr_gptq.rtn(), workdir=tmp_path)
  path.write_bytes(whole.replace(b"format", b"formet", 1))
  with pytest.raises(errors.CorruptFile, match="metadata"):
    quantize(mr_gptq.rtn(), workdir=tmp_path)
  path.unlink()
  assert_same(quantize(mr_gptq.rtn(), workdir=tmp_path)[0].params, done("rtn", "nvfp4")[0].params)


# --- refused


@pytest.mark.parametrize(
  ("config", "ids", "message"),
  [
    (mr_gptq.mr_gptq(), None, "GPTQ and AWQ need calibration sequences; got none"),
    (dataclasses.replace(mr_gptq.rtn(), awq=True), None, "GPTQ and AWQ need calibration"),
    (mr_gptq.mr_gptq(), np.zeros((1, 300), np.int32), "at most 256 tokens; got \\(1, 300\\)"),
    (mr_gptq.mr_gptq(), np.full((1, 8), 97, np.int32), r"tokens must be in \[0, 97\); got 97"),
    (
      mr_gptq.MRGPTQConfig(rotation=64), tokens(),
      "rotation must divide the inputs of every site; got 64 for down with 96. Use at most 32",
    ),
  ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_work(config, ids, message):
  with pytest.raises(ValueError, match=message):
    mr_gptq.quantize_model(model(intermediate_size=96), config, ids)


def test_models_that_do_not_suit_are_refused_by_kernel():
  packed = dataclasses.replace(model(), params=quant.quantize(model().params))
  with pytest.raises(ValueError, match="kernels must be dense; got FP4Array at down"):
    quantize(mr_gptq.mr_gptq(), packed)
  with pytest.raises(ValueError, match="a multiple of mxfp4's block of 32; got 80 at down"):
    quantize(mr_gptq.mr_gptq("mxfp4"), model(intermediate_size=80))
  bad = jax.tree.map(lambda x: x, model().params)
  bad["layers"]["up"]["kernel"] = bad["layers"]["up"]["kernel"].at[1, 0, 0].set(jnp.nan)
  with pytest.raises(ValueError, match="layer 1, up: weights must be finite; got 1 of 4096 NaN"):
    quantize(mr_gptq.rtn(), dataclasses.replace(model(), params=bad))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"solver": "magic"}, "solver: must be one of rtn, gptq; got 'magic'"),
    ({"order": "random"}, "order: must be one of default, activation; got 'random'"),
    ({"activations": "int8"}, "activations: must be one of none, fp4; got 'int8'"),
    ({"format": "int4"}, "format must be one of nvfp4, mxfp4; got 'int4'"),
    ({"damp": 0.0}, "MRGPTQConfig.damp: must be positive; got 0.0"),
    ({"solver": "rtn", "importance": True}, "needs the Hessians of solver='gptq'"),
    ({"scales": scales.ScaleConfig(rule="ceil")}, "nvfp4 has no scale rule; got 'ceil'"),
  ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    mr_gptq.MRGPTQConfig(**options)
