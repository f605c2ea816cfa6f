"""`launch.export` in its three formats, in one process, and the mistakes of its users."""

import json

import jax
import numpy as np
import pytest

import jaxlab
from jaxlab import lora
from jaxlab.io import huggingface, peft, safetensors
from jaxlab.nn import weights
from jaxlab.quant import fp4
from launch import common, export
from tests.io import test_peft as adapters
from tests.models import tiny

CONFIG = tiny.config(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
LORA = lora.LoRAConfig(rank=2, targets=("q", "up"))


@pytest.fixture
def model(tmp_path):
  """An NVFP4 folder and an adapter for it."""
  import dataclasses

  tiny.write_folder(tmp_path / "in", CONFIG, dtype=tiny.BF16)
  lm = jaxlab.load(tmp_path / "in")
  lm = dataclasses.replace(lm, params=fp4.quantize_params(lm.params))
  huggingface.save_pretrained(lm, tmp_path / "model")
  adapted = adapters.moved(lm.params, LORA)
  peft.save_adapter(adapted, LORA, tmp_path / "adapter", base="model")
  return tmp_path / "model", tmp_path / "adapter", adapted


def run(tmp_path, *arguments) -> int:
  argv = ["export", f"--workdir={tmp_path / 'run'}", *arguments]
  for name in ("model", "adapter", "format", "output", "output_format", "fuse_global_scale"):
    export.FLAGS[name].unparse()
  return common.execute(export.main, export.FLAGS, argv)


def test_merged(model, tmp_path):
  folder, adapter, adapted = model
  out = tmp_path / "out"
  code = run(
    tmp_path, f"--model={folder}", f"--adapter={adapter}", "--format=merged", f"--output={out}"
  )
  assert code == 0
  config = json.loads((out / "config.json").read_text())
  assert "quantization_config" not in config
  assert len(json.loads((out / "receipt.json").read_text())["prompts"]) == 8
  written = jaxlab.load(out).params
  for path, w in weights.leaf_paths(adapted).items():
    if path.endswith("kernel"):  # written as bfloat16, like the folder it came from
      found = weights.leaf_paths(written)[path]
      np.testing.assert_allclose(found, weights.dense(w), rtol=2**-8, atol=1e-6)
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert (result["format"], result["output"]) == ("merged", str(out))


def test_hf_keeps_the_packed_weights(model, tmp_path):
  folder, _, _ = model
  assert run(tmp_path, f"--model={folder}", f"--output={tmp_path / 'out'}") == 0
  name = "model.safetensors"
  assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
  assert (tmp_path / "out" / "verify.py").exists()


def test_peft_from_a_checkpoint_of_our_own(model, tmp_path):
  import dataclasses

  folder, adapter, adapted = model
  jaxlab.save(dataclasses.replace(jaxlab.load(folder), params=adapted), tmp_path / "own")
  out = tmp_path / "out"
  assert run(tmp_path, f"--model={tmp_path / 'own'}", "--format=peft", f"--output={out}") == 0
  name = "adapter_model.safetensors"
  assert (out / name).read_bytes() == (adapter / name).read_bytes()
  base = jaxlab.load(folder).params
  jax.tree.map(np.testing.assert_array_equal, peft.load_adapter(out, base), adapted)


def test_from_layout_to_layout_and_back(model, tmp_path, monkeypatch):
  """Nothing becomes dense on the way, and the same bytes come back, tensor scales within an ulp."""

  def never(*_):
    raise AssertionError("a dense copy was made")

  monkeypatch.setattr(weights, "dense", never)
  monkeypatch.setattr(weights, "densify", never)
  folder, _, _ = model
  there, back = tmp_path / "there", tmp_path / "back"
  code = run(tmp_path, f"--model={folder}", f"--output={there}", "--output_format=modelopt")
  assert code == 0
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["output_format"] == "modelopt"
  config = json.loads((there / "config.json").read_text())["quantization_config"]
  assert config["quant_method"] == "modelopt" and config["quant_algo"] == "W4A16_NVFP4"
  assert (there / "hf_quant_config.json").exists() and not (there / "receipt.json").exists()
  run(tmp_path, f"--model={there}", f"--output={back}", "--output_format=compressed_tensors")
  first, second = (safetensors.SafetensorsFolder(f) for f in (folder, back))
  assert first.names() == second.names()
  for name in first.names():
    if name.endswith("global_scale"):
      np.testing.assert_array_max_ulp(first.read(name), second.read(name), 1)
    else:
      np.testing.assert_array_equal(first.raw(name), second.raw(name))
  assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_global_scales_are_fused_when_asked(model, tmp_path):
  import dataclasses

  folder, _, _ = model
  lm = jaxlab.load(folder)
  q = lm.params["layers"]["q"]["kernel"]
  other = lm.params | {"layers": lm.params["layers"] | {
    "q": {"kernel": dataclasses.replace(q, tensor_scale=2 * q.tensor_scale)}}}  # fmt: skip
  huggingface.save_pretrained(dataclasses.replace(lm, params=other), tmp_path / "odd")
  out = tmp_path / "out"
  code = run(
    tmp_path, f"--model={tmp_path / 'odd'}", "--fuse_global_scale", f"--output={out}",
    "--output_format=compressed_tensors",
  )  # fmt: skip
  assert code == 0
  layers = jaxlab.load(out).params["layers"]
  scales = [np.asarray(layers[n]["kernel"].tensor_scale) for n in "qkv"]
  np.testing.assert_array_equal(scales[0], scales[1])
  np.testing.assert_array_equal(scales[0], scales[2])
  np.testing.assert_array_equal(scales[1], lm.params["layers"]["k"]["kernel"].tensor_scale)


@pytest.mark.parametrize(
  "arguments,message",
  [
    (["--output={out}"], "--model: must be given"),
    (["--model={folder}"], "--output: must be given"),
    (["--model={folder}", "--output={folder}"], "must be new or empty"),
    (["--model={folder}", "--adapter={adapter}", "--output={out}"], "--format: hf has no place"),
    (["--model={folder}", "--format=peft", "--output={out}"], "config_of: adapters must be there"),
    (["--model={out}", "--output={out}"], "does not exist. Give a model folder"),
    (["--model={folder}", "--format=onnx", "--output={out}"], "format"),
    (["--model={folder}", "--output_format=gguf", "--output={out}"], "output_format"),
    (
      ["--model={folder}", "--output_format=fp_quant", "--output={out}"],
      "always round activations to FP4; got activations 'none'",
    ),
    (
      ["--model={folder}", "--format=merged", "--output_format=modelopt", "--output={out}"],
      "--output_format: is for FP4 weights, of --format=hf; got merged",
    ),
    (
      ["--model={dense}", "--output_format=modelopt", "--output={out}"],
      "--output_format: the model has no FP4 weights. Run launch.quantize first",
    ),
    (
      ["--model={dense}", "--fuse_global_scale", "--output={out}"],
      "--fuse_global_scale: the model has no NVFP4 weights",
    ),
    (["--model={folder}", "--adapter={folder}", "--output={out}"], "has no adapter_config.json"),
  ],
)
def test_mistakes_are_one_line_and_exit_2(model, tmp_path, capfd, arguments, message):
  folder, adapter, _ = model
  places = {"folder": folder, "adapter": adapter, "out": tmp_path / "out"}
  places["dense"] = tmp_path / "in"
  assert run(tmp_path, *(a.format(**places) for a in arguments)) == 2
  last = capfd.readouterr().err.strip().splitlines()[-1]
  assert last.startswith("error: ") and message in last
  assert not (tmp_path / "out").exists()
