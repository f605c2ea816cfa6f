"""Every illness that the doctor names, one at a time, and healthy patients."""

import dataclasses
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlab
from jaxlab.io import doctor, huggingface, safetensors
from jaxlab.nn import weights
from jaxlab.quant import fp4
from tests.io import test_gguf_model as gguf_files
from tests.models import tiny

EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
Q0 = "model.layers.0.self_attn.q_proj"


def write_tokenizer(folder, *, size=90, **config):
  """A word-level tokenizer with `size` ids."""
  import tokenizers
  from tokenizers import models, pre_tokenizers

  words = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *(f"w{i}" for i in range(size - 3))]
  made = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "w0"))
  made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  made.add_special_tokens(words[:3])
  made.save(str(folder / "tokenizer.json"))
  chatml = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}"
  )
  config = {"eos_token": "<|im_end|>", "chat_template": chatml} | config
  (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def dense(tmp_path):
  config = tiny.config(**EVEN, eos_token_id=1)
  tiny.write_folder(tmp_path / "dense", config, dtype=ml_dtypes.bfloat16, max_shard_bytes=100_000)
  write_tokenizer(tmp_path / "dense")
  return tmp_path / "dense"


@pytest.fixture
def packed(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.config(**EVEN, eos_token_id=1), dtype=ml_dtypes.bfloat16)
  write_tokenizer(tmp_path / "in")
  lm = jaxlab.load(tmp_path / "in")
  lm = dataclasses.replace(lm, params=fp4.quantize_params(lm.params))
  huggingface.save_pretrained(lm, tmp_path / "packed")
  return tmp_path / "packed"


def texts(folder, level=None) -> list[str]:
  return [f.text for f in doctor.examine(folder) if level in (None, f.level)]


def edit(folder, name="config.json", **changes):
  value = json.loads((folder / name).read_text()) | changes
  (folder / name).write_text(json.dumps(value))


def rewrite(folder, change):
  source = safetensors.SafetensorsFolder(folder)
  tensors = {name: np.array(source.read(name)) for name in source.names()}
  change(tensors)
  safetensors.write_sharded(folder, tensors)


# --- healthy


def test_a_healthy_dense_folder(dense):
  found = doctor.examine(dense)
  assert {f.level for f in found} == {"ok"}, found
  assert not doctor.is_broken(found)
  said = "\n".join(texts(dense))
  assert "format: safetensors, dense, tensors 30 bfloat16" in said
  assert "16.00 bits per parameter" in said
  assert "architecture: llama, 3 layers, 0.1 M parameters" in said
  assert "vocabulary: 90 ids, 7 padding rows" in said
  assert "eos: ['<|im_end|>']" in said
  assert "template: renders, turns end with <|im_end|>" in said


def test_a_healthy_nvfp4_folder(packed):
  found = doctor.examine(packed)
  assert {f.level for f in found} == {"ok", "note"}, found
  said = "\n".join(texts(packed))
  (note,) = texts(packed, "note")
  assert note.startswith("quantised already: 21 linears as compressed_tensors. To quantise anew")
  assert "compressed-tensors nvfp4-pack-quantized" in said
  assert "bits: packed linears take 4.50 a weight" in said
  assert "scales: 21 linears, divisors, largest weight" in said
  bits = float(said.split(" bits per parameter")[0].rsplit(" ", 1)[1])
  assert 4.5 < bits < 8  # embeddings, head and norms are 16 bits


def test_a_healthy_gguf_file(tmp_path):
  gguf_files.write(tmp_path / "m.gguf", tiny.config(**EVEN), gguf_files.TYPES.Q8_0)
  found = doctor.examine(tmp_path / "m.gguf")
  said = "\n".join(f.text for f in found)
  assert "format: GGUF, tensors 7 F32, 23 Q8_0" in said
  assert "tensors: all there, none too many" in said and "values: all finite" in said
  broken = [f.text for f in found if f.level == "broken"]
  assert len(broken) == 1 and broken[0].startswith("tokenizer:")  # the test file has none


@pytest.mark.slow
def test_the_packaged_model_is_healthy():
  from jaxlab.data import assets

  assert {f.level for f in doctor.examine(assets.demo_model_path())} == {"ok"}


def test_a_checkpoint_of_our_own(dense, tmp_path):
  jaxlab.save(jaxlab.load(dense), tmp_path / "own")
  assert texts(tmp_path / "own", "ok") == ["format: a checkpoint of our own; every digest is right"]


# --- ill

DENSE = {
  "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
  "bad json": (lambda d: (d / "config.json").write_text("{"), "config.json: .*does not parse"),
  "family": (lambda d: edit(d, model_type="mamba"), "architecture: .*model_type = 'mamba'"),
  "shard": (
    lambda d: sorted(d.glob("*.safetensors"))[1].unlink(), "weights: .*not in the folder",
  ),
  "truncated": (
    lambda d: os.truncate(sorted(d.glob("*.safetensors"))[0], 2000), "weights: .*truncated",
  ),
  "index": (
    lambda d: (d / "model.safetensors.index.json").unlink(), "weights: .*several files need an",
  ),
  "depth": (lambda d: edit(d, num_hidden_layers=4), "tensors: .*has no tensor 'model.layers.3"),
  "width": (lambda d: edit(d, intermediate_size=64), "tensors: .*shape .* asks for"),
  "tied": (lambda d: rewrite(d, lambda t: t.pop("lm_head.weight")), "no tensor 'lm_head.weight'"),
  "nan": (
    lambda d: rewrite(d, lambda t: t["model.norm.weight"].__setitem__(3, np.nan)),
    "values: 1 tensors are not finite, such as model.norm.weight",
  ),
  "vocabulary": (lambda d: write_tokenizer(d, size=99), "the tokenizer has 99 ids, the model 97"),
  "eos": (lambda d: edit(d, eos_token_id=97), r"eos: ids \[97\] are not all below .* 97"),
  "template": (
    lambda d: write_tokenizer(d, chat_template="{{ nothing.at.all }}"), "template: ",
  ),
  "gptq": (lambda d: edit(d, quantization_config={"quant_method": "gptq"}), "got 'gptq'"),
}  # fmt: skip


@pytest.mark.parametrize("illness", DENSE)
def test_what_makes_a_dense_folder_broken(illness, dense):
  harm, message = DENSE[illness]
  harm(dense)
  broken = texts(dense, "broken")
  import re

  assert any(re.search(message, text) for text in broken), broken
  assert all("\n" not in text for text in broken)


WARNED = {
  "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json"),
  "turn end": (
    lambda d: [write_tokenizer(d, eos_token="<|endoftext|>"), edit(d, eos_token_id=2)],
    "a turn ends with <.im_end.>, which is not among the eos",
  ),
  "other head": (lambda d: edit(d, tie_word_embeddings=True), "lm_head.weight differs"),
}


@pytest.mark.parametrize("illness", WARNED)
def test_what_is_only_a_warning(illness, dense):
  harm, message = WARNED[illness]
  harm(dense)
  import re

  found = doctor.examine(dense)
  assert not doctor.is_broken(found), found
  assert any(re.search(message, f.text) for f in found if f.level == "warning"), found


def test_foreign_code_is_a_note(dense):
  (dense / "modeling_custom.py").write_text("raise SystemExit")
  (dense / "pytorch_model.bin").write_bytes(b"\x80\x02")
  notes = texts(dense, "note")
  assert any("modeling_custom.py" in n and "nothing of it runs" in n for n in notes)
  assert any("pytorch_model.bin" in n for n in notes)


def test_every_layout_is_known(dense, tmp_path):
  """W4A4 with a rotation where the layout has one; and an upside-down scale in each."""
  lm = jaxlab.load(dense)
  cases = {
    "compressed_tensors": ("mxfp4", 32, 4.25, None),
    "modelopt": ("nvfp4", 0, 4.5, "weight_scale_2"),
    "fp_quant": ("nvfp4", 16, 4.5, "weight_global_scale"),
  }
  for layout, (format, rotation, bits, scale) in cases.items():
    params = fp4.quantize_params(lm.params, format)

    def w4a4(path, w, rotation=rotation, format=format):
      if not isinstance(w, weights.FP4Array):
        return w
      act = jnp.full(3, 100.0) if format == "nvfp4" else None
      return dataclasses.replace(w, activations="fp4", act_scale=act, rotation=rotation)

    params = weights.map_leaves(w4a4, params)
    folder = tmp_path / layout
    huggingface.save_pretrained(dataclasses.replace(lm, params=params), folder, layout=layout)
    found = doctor.examine(folder)
    assert {f.level for f in found} == {"ok", "note"}, found
    said = "\n".join(f.text for f in found)
    assert f"21 linears as {layout}" in said and f"take {bits:.2f} a weight" in said
    if scale is None:
      continue
    assert "activations: static scales for inputs up to 26.9 to 26.9" in said

    def upside_down(tensors, scale=scale):
      for name in [n for n in tensors if n.endswith(scale)]:
        tensors[name] = np.asarray(1 / tensors[name])

    rewrite(folder, upside_down)
    (broken,) = texts(folder, "broken")
    expected = {
      "modelopt": "Its global scale is a divisor; ModelOpt stores the multiplier",
      "fp_quant": "Its global scale is a multiplier (ModelOpt's convention)",
    }
    assert "scales: the largest weight of model.layers." in broken and expected[layout] in broken


def test_powers_of_two_upside_down(dense, tmp_path):
  """They stay small: nothing but the size of usual weights tells."""
  lm = jaxlab.load(dense)
  lm = dataclasses.replace(lm, params=fp4.quantize_params(lm.params, "mxfp4"))
  huggingface.save_pretrained(lm, tmp_path / "mx")
  assert not texts(tmp_path / "mx", "warning")

  def turn(tensors):
    tensors[f"{Q0}.weight_scale"] = 254 - tensors[f"{Q0}.weight_scale"]

  rewrite(tmp_path / "mx", turn)
  (warning,) = texts(tmp_path / "mx", "warning")
  assert f"half of the blocks of {Q0} would hold weights of" in warning


def test_nvfp4_activations_that_a_server_cannot_scale(packed):
  stored = json.loads((packed / "config.json").read_text())["quantization_config"]
  group = stored["config_groups"]["group_0"]
  group["input_activations"] = {**group["weights"], "dynamic": True}
  edit(packed, quantization_config=stored)
  assert any("vLLM needs a static scale" in text for text in texts(packed, "note"))


def test_scales_of_activations_upside_down(packed):
  edit_groups = json.loads((packed / "config.json").read_text())["quantization_config"]
  group = edit_groups["config_groups"]["group_0"]
  group["input_activations"] = {**group["weights"], "dynamic": "local"}
  edit(packed, quantization_config=edit_groups)
  names = [n for n in safetensors.SafetensorsFolder(packed).names() if n.endswith("weight_packed")]

  def with_scales(tensors):
    for name in names:
      tensors[name.replace("weight_packed", "input_global_scale")] = np.float32([1e-3])

  rewrite(packed, with_scales)
  (warning,) = texts(packed, "warning")
  assert "says that its inputs reach 2.69e+06; upside down? compressed_tensors stores" in warning


def test_unequal_scales_of_a_fused_set(packed):
  name = Q0.replace("q_proj", "k_proj")

  def change(tensors):
    tensors[f"{name}.weight_global_scale"] = tensors[f"{name}.weight_global_scale"] * 2

  rewrite(packed, change)
  (warning,) = texts(packed, "warning")
  assert "1 sets of linears" in warning and f"{Q0}. launch.export --fuse_global_scale" in warning


def test_experts_of_gpt_oss(tmp_path):
  """No model of ours, but scales and bits are looked at."""
  config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  stem = "model.layers.0.mlp.experts.down_proj"
  tensors = {
    f"{stem}_blocks": np.full((2, 4, 3, 16), 0x11, np.uint8),
    f"{stem}_scales": np.full((2, 4, 3), 120, np.uint8),
  }
  safetensors.write_sharded(tmp_path, tensors)
  said = "\n".join(texts(tmp_path))
  assert "1 linears as gpt_oss" in said and "packed linears take 4.25 a weight" in said
  assert "scales: 1 linears, powers of two, largest weight 0.0469" in said
  tensors[f"{stem}_scales"][1, 2, 0] = 255
  safetensors.write_sharded(tmp_path, tensors)
  assert any("_scales: 1 block scales are NaN" in t for t in texts(tmp_path, "broken"))
  tensors[f"{stem}_scales"] = np.full((2, 4, 3), 200, np.uint8)
  safetensors.write_sharded(tmp_path, tensors)
  assert any("the largest weight of" in t for t in texts(tmp_path, "broken"))


PACKED = {
  "missing scale": (lambda t: t.pop(f"{Q0}.weight_scale"), "weight_scale"),
  "nan scale": (
    lambda t: t[f"{Q0}.weight_scale"].view(np.uint8).__setitem__((0, 0), 0x7F), "NaN or negative",
  ),
  "upside down": (
    lambda t: t.update({f"{Q0}.weight_global_scale": 1 / t[f"{Q0}.weight_global_scale"]}),
    "Its global scale is a multiplier",
  ),
  "modelopt": (
    lambda t: t.update({f"{Q0}.weight_scale_2": np.ones(1, np.float32)}), "ModelOpt's layout",
  ),
  "zero scale": (
    lambda t: t[f"{Q0}.weight_scale"].view(np.uint8).__setitem__((0, 0), 0), "are zero over codes",
  ),
  "zero divisor": (
    lambda t: t.update({f"{Q0}.weight_global_scale": np.zeros(1, np.float32)}), "finite and pos",
  ),
  "one code a byte": (
    lambda t: t.update({f"{Q0}.weight_packed": np.zeros((64, 64), np.uint8)}),
    "bits: 1 linears take 8.50 bits a weight on disk",
  ),
  "scales of other blocks": (
    lambda t: t.update({f"{Q0}.weight_scale": t[f"{Q0}.weight_scale"][:, :2]}),
    "bits: 1 linears take 8.50 bits",
  ),
  "another layout": (
    lambda t: t.update({f"{Q0}.qweight": t.pop(f"{Q0}.weight_packed")}), "is stored as fp_quant",
  ),
  "no config": (lambda t: [t.pop(n) for n in list(t) if "weight_packed" in n], "no packed weight"),
}  # fmt: skip


@pytest.mark.parametrize("illness", PACKED)
def test_what_makes_an_nvfp4_folder_broken(illness, packed):
  harm, message = PACKED[illness]
  rewrite(packed, harm)
  broken = texts(packed, "broken")
  assert any(message in text for text in broken), broken


def test_packed_weights_without_their_config(packed):
  config = json.loads((packed / "config.json").read_text())
  del config["quantization_config"]
  (packed / "config.json").write_text(json.dumps(config))
  assert any("no quantization_config" in text for text in texts(packed, "broken"))


def test_a_quantization_config_that_is_no_object(packed):
  edit(packed, quantization_config=["nvfp4"])
  assert any("quantization_config is not supported yet" in text for text in texts(packed, "broken"))


def test_paths_that_are_nothing(tmp_path):
  assert doctor.examine(tmp_path / "x") == [("broken", f"{tmp_path / 'x'} does not exist.")]
  assert doctor.is_broken(doctor.examine(tmp_path))
  (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\0" * 40)
  assert doctor.is_broken(doctor.examine(tmp_path / "m.gguf"))


def test_the_launcher_exits_with_two_for_a_broken_model(dense, tmp_path):
  def run(*arguments):
    command = [sys.executable, "-m", "launch.doctor", *arguments, f"--workdir={tmp_path / 'run'}"]
    return subprocess.run(command, capture_output=True, text=True)

  well = run(str(dense))
  assert well.returncode == 0, well.stderr
  assert "16.00 bits per parameter" in well.stdout
  assert json.loads((tmp_path / "run" / "result.json").read_text())["broken"] == 0
  edit(dense, eos_token_id=97)
  ill = run(str(dense))
  assert ill.returncode == 2 and "BROKEN  eos:" in ill.stdout
  assert ill.stderr.strip().splitlines()[-1].startswith("error: doctor:")
  assert json.loads((tmp_path / "run" / "result.json").read_text())["broken"] == 1
  assert run().returncode == 2
