"""`launch.quantize`: what it writes loads again and says what it did; refusals take one line."""

import dataclasses
import errno
import json

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.io import orbax
from jaxlab.nn import weights
from jaxlab.quant import by_group, fp4, report
from jaxlab.quant import model as quant
from jaxlab.train import budget
from launch import quantize
from tests.decode import tiny
from tests.launch import verbs
from tests.models import tiny as tiny_models

# All input axes are multiples of 64, so that NF4 fits too.
CONFIG = tiny.CONFIG | {"hidden_size": 64}
FORMATS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.125, "bf16": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  tiny.write_model(folder)
  for file in folder.glob("*.safetensors"):
    file.unlink()
  tiny_models.write_folder(folder, CONFIG)
  return folder


def run(capsys, workdir, model, output, *bindings, output_format=None):
  words = [f"--model={model}", f"--output={output}", f"--workdir={workdir}"]
  words += [f"--output_format={output_format}"] if output_format else []
  return verbs.call("quantize", [*words, *(f"--gin_bindings={b}" for b in bindings)], capsys)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_the_model_quantised(capsys, workdir, tmp_path, model, name):
  done = run(capsys, workdir, model, tmp_path / "out", f"quantize.format='{name}'")
  assert done.code == 0, done.err
  expected = quant.quantize(jaxlab.load(model).params, name)
  again = jaxlab.load(tmp_path / "out")
  dense = [weights.densify(p) for p in (expected, again.params)]
  jax.tree.map(np.testing.assert_array_equal, *dense)
  if name != "bf16":
    assert report.format_of(again.params) == name
  found = verbs.result(workdir)
  assert found["format"] == ("bfloat16" if name == "bf16" else name)
  assert found["weight_bytes"] == fp4.weight_bytes(expected)["linears"]
  assert found["weight_bytes_bf16"] / found["weight_bytes"] == pytest.approx(
    16 / FORMATS[name], rel=0.01
  )
  assert found["bits_per_weight"] == pytest.approx(FORMATS[name], rel=0.01)
  transformers = json.loads((tmp_path / "out" / "config.json").read_text())
  others_read_it = name in ("nvfp4", "mxfp4")
  assert ("quantization_config" in transformers) == others_read_it
  assert ("other programs do not read it" in done.out) != others_read_it
  assert found["layout"] == ("compressed_tensors" if others_read_it else "jaxlab")
  assert found["peak_host_bytes"] > 1e8 and "Peak of host memory" in done.out


def test_errors_are_those_of_the_decoded_matrices(capsys, workdir, tmp_path, model):
  assert run(capsys, workdir, model, tmp_path / "out").code == 0
  found = verbs.result(workdir)
  before, after = (jaxlab.load(path).params["layers"] for path in (model, tmp_path / "out"))
  errors = {}
  for name in ("q", "k", "v", "o", "gate", "up", "down"):
    w, new = (np.asarray(weights.dense(p[name]["kernel"]), np.float64) for p in (before, after))
    errors[name] = np.linalg.norm(w - new, axis=(1, 2)) / np.linalg.norm(w, axis=(1, 2))
  table = np.stack(list(errors.values()))
  assert found["relative_error_mean"] == pytest.approx(table.mean(), rel=1e-4)
  assert found["relative_error_max"] == pytest.approx(table.max(), rel=1e-4)
  layer, name = found["worst_kernel"].split("/")[1:]
  assert errors[name][int(layer)] == pytest.approx(table.max(), rel=1e-4)
  rows = [(r["layer"], r["relative_error_max"]) for r in found["rows"]]
  assert rows == [(i, pytest.approx(table[:, i].max(), rel=1e-4)) for i in range(2)]


def test_a_16_bit_checkpoint_stays_one(capsys, workdir, tmp_path):
  """Half the memory, the same codes: what is rounded is read in float32 anyway."""
  folder = tmp_path / "half"
  tiny_models.write_folder(folder, CONFIG, dtype=tiny_models.BF16)
  done = run(capsys, workdir, folder, tmp_path / "out")
  assert done.code == 0 and "dense parameters in bfloat16 (as asked)" in done.err, done.err
  expected = quant.quantize(jaxlab.load(folder).params)
  jax.tree.map(np.testing.assert_array_equal, jaxlab.load(tmp_path / "out").params, expected)


@pytest.mark.parametrize("layout", ["modelopt", "jaxlab"])
def test_other_layouts_hold_the_same_codes(capsys, workdir, tmp_path, model, layout):
  done = run(capsys, workdir, model, tmp_path / "out", output_format=layout)
  assert done.code == 0, done.err
  expected = quant.quantize(jaxlab.load(model).params)
  again = jaxlab.load(tmp_path / "out").params
  for name in ("q", "down"):
    a, b = (p["layers"][name]["kernel"] for p in (expected, again))
    np.testing.assert_array_equal(a.codes, b.codes)
  assert verbs.result(workdir)["layout"] == layout


def test_a_large_folder_is_read_matrix_by_matrix(capsys, workdir, tmp_path, model, monkeypatch):
  """The same files as from a model in memory, and the same errors."""
  assert run(capsys, tmp_path / "first", model, tmp_path / "whole").code == 0
  monkeypatch.setattr(quantize, "STREAM_ABOVE", 0)
  monkeypatch.setattr(jaxlab, "load", None)
  done = run(capsys, workdir, model, tmp_path / "out")
  assert done.code == 0 and "matrix by matrix" in done.err, done.err
  a, b = (verbs.result(w) for w in (tmp_path / "first", workdir))
  for name in ("relative_error_mean", "relative_error_max"):
    assert a[name] == pytest.approx(b[name], rel=1e-5)
  assert b["bytes_after"] < b["bytes_before"]
  monkeypatch.undo()
  whole, streamed = (jaxlab.load(tmp_path / name).params for name in ("whole", "out"))
  jax.tree.map(np.testing.assert_array_equal, whole, streamed)


def test_groups_together_are_the_whole_model(model):
  lm = jaxlab.load(model)
  grouped, errors = by_group.quantize_by_group(lm, quant.quantize)
  jax.tree.map(np.testing.assert_array_equal, grouped.params, quant.quantize(lm.params))
  assert set(errors) == {"q", "k", "v", "o", "gate", "up", "down"}


def test_a_full_disk_leaves_nothing_behind(capsys, workdir, tmp_path, model, monkeypatch):
  """Of a checkpoint of our own too, of which a part would stand in the way of the next try."""

  def full(path, *_):
    (path / "half").mkdir(parents=True)
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(orbax, "save_params", full)
  done = run(capsys, workdir, model, tmp_path / "out", output_format="jaxlab")
  assert done.error == f"{tmp_path / 'out'}: No space left on device"
  assert not list(tmp_path.glob("*out*"))


# --- refused in one line


def test_a_quantised_model_is_refused(capsys, workdir, tmp_path, model):
  lm = jaxlab.load(model)
  jaxlab.save(dataclasses.replace(lm, params=quant.quantize(lm.params, "mxfp4")), tmp_path / "q")
  done = run(capsys, workdir, tmp_path / "q", tmp_path / "out")
  assert "must be dense; got FP4Array. Quantise a dense checkpoint" in done.error
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  "binding, message",
  [
    ("quantize.format='int4'", "unknown format; got 'int4'. Use one of nvfp4, mxfp4, nf4, bf16."),
    ("quantize.formats='nf4'", "quantize has no argument 'formats'. Did you mean format?"),
    ("quantise.format='nf4'", "nothing is called 'quantise'. Did you mean quantize?"),
    ("quantize.format=4", "quantize.format must be str; got 4."),
    ("mr_gptq.format='mxfp4'", "mr_gptq.format has no effect: mr_gptq is not used in this run."),
    ("SamplingConfig.top_k=4", "SamplingConfig.top_k has no effect"),
  ],
)
def test_a_wrong_binding_is_refused(capsys, workdir, tmp_path, model, binding, message):
  assert message in run(capsys, workdir, model, tmp_path / "out", binding).error


@pytest.mark.parametrize(
  ("layout", "bindings", "message"),
  [
    (
      "compressed_tensors",
      ("quantize.format='mxfp4'", "quantize.rule='fp43'"),
      "--output_format: compressed_tensors mxfp4 has no tensor scale; got the rule fp43",
    ),
    (
      "modelopt",
      ("quantize.head='int8'",),
      "--output_format: modelopt holds dense and FP4 weights; got Int8Array at embed. Use "
      "--output_format=jaxlab",
    ),
    ("modelopt", ("quantize.activations='fp4'",), "W4A4 needs a static scale of the activations"),
    ("fp_quant", (), "its programs always round activations to FP4; got activations 'none'"),
  ],
)
def test_what_a_layout_has_no_place_for_is_refused_before_the_work(
  capsys, workdir, tmp_path, model, layout, bindings, message
):
  done = run(capsys, workdir, model, tmp_path / "out", *bindings, output_format=layout)
  assert message in done.error
  assert not (tmp_path / "out").exists() and "load:" not in done.err


def test_a_layout_that_cannot_hold_the_format_is_refused(capsys, workdir, tmp_path, model):
  done = run(
    capsys, workdir, model, tmp_path / "out", "quantize.format='nf4'", output_format="fp_quant"
  )
  assert "--output_format: fp_quant holds nvfp4 and mxfp4; got nf4. Use --output_format=jaxlab" in (
    done.error
  )


def test_what_does_not_suit_the_format_is_refused_before_loading(capsys, workdir, tmp_path):
  folder = tiny.write_model(tmp_path / "model")  # width 32
  done = run(capsys, workdir, folder, tmp_path / "out", "quantize.format='nf4'")
  assert "in a multiple of 64; got (2, 32, 64)" in done.error
  assert "load:" not in done.err, "shapes were enough"


def test_an_output_in_use_is_refused_before_the_work(capsys, workdir, tmp_path, model):
  (tmp_path / "out").mkdir()
  (tmp_path / "out" / "mine.txt").touch()
  assert "--output: must be new or empty" in run(capsys, workdir, model, tmp_path / "out").error
  below = tmp_path / "out" / "mine.txt" / "deep"
  assert "--output: must be where a folder can be written" in (
    run(capsys, workdir, model, below).error
  )
  missing = verbs.call("quantize", [f"--model={model}", f"--workdir={workdir}"], capsys)
  assert "--output: must be given" in missing.error


def test_a_model_that_does_not_fit_is_refused_with_numbers(
  capsys, workdir, tmp_path, model, monkeypatch
):
  monkeypatch.setattr(budget, "available_bytes", lambda: 200_000)
  done = run(capsys, workdir, model, tmp_path / "out")
  assert done.error.startswith("not enough memory: weights 0.")
  assert "there is 0.20 MB. Choose fewer" in done.error
