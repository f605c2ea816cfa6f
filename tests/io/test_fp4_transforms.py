"""The matrices that compressed-tensors stores of rotations: written, read, kept, and checked."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg

import jaxlab
from jaxlab import lm as language_model
from jaxlab.io import doctor, fp4_ct_config, fp4_transforms, huggingface, safetensors, stream
from jaxlab.nn import weights
from jaxlab.quant import fp4, hadamard
from tests.models import tiny

EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
SIZE = 32
MATRIX = f"model.layers.0.self_attn.q_proj.hadamard_{SIZE}_input.weight"
OTHER = "model.layers.1.mlp.down_proj.R4_input.weight"


def rotated(path, w):
  """The kernel in FP4, in the rotated basis."""
  if not path.endswith("/kernel") or "layers" not in path:
    return w
  turned = jnp.stack([hadamard.rotate_kernel(x.astype(jnp.float32), SIZE) for x in w])
  return dataclasses.replace(fp4.quantize(turned, "mxfp4"), rotation=SIZE)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("dense") / "in"
  tiny.write_folder(folder, tiny.config(**EVEN), dtype=ml_dtypes.bfloat16)
  lm = jaxlab.load(folder)
  return dataclasses.replace(lm, params=weights.map_leaves(rotated, lm.params))


def contents(folder):
  return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rewrite(folder, change):
  source = safetensors.SafetensorsFolder(folder)
  tensors = {name: np.array(source.read(name)) for name in source.names()}
  change(tensors)
  safetensors.write_sharded(folder, tensors)


def as_others_write(folder):
  """The same model with another name of its scheme, as SpinQuant's files have it."""

  def rename(tensors):
    tensors[OTHER] = tensors.pop(MATRIX).astype(ml_dtypes.bfloat16)

  rewrite(folder, rename)
  text = (folder / "config.json").read_text()
  (folder / "config.json").write_text(text.replace(f"hadamard_{SIZE}", "R4"))


def test_the_first_linear_holds_the_matrix(model, tmp_path):
  huggingface.save_pretrained(model, tmp_path / "a")
  folder = safetensors.SafetensorsFolder(tmp_path / "a")
  assert [n for n in folder.names() if "hadamard" in n] == [MATRIX]
  matrix = folder.read(MATRIX)
  assert matrix.dtype == np.float32
  np.testing.assert_array_equal(matrix, scipy.linalg.hadamard(SIZE))
  again = jaxlab.load(tmp_path / "a")
  jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
  huggingface.save_pretrained(again, tmp_path / "b")
  assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_a_matrix_for_each_size_and_scheme():
  linears = {"model.layers.1.x.q_proj": 64, "model.layers.0.x.up_proj": 64, "a.0.down_proj": 96}
  every = fp4_ct_config.Modules(("Linear",))
  some = fp4_ct_config.Modules(("re:.*q_proj",))
  none = fp4_ct_config.Modules(("other",))
  made = fp4_transforms.matrices(
    [fp4_ct_config.Rotation("u", every, fp4_ct_config.FULL_WIDTH),
     fp4_ct_config.Rotation("v", some, 16), fp4_ct_config.Rotation("w", none, 16)],
    linears,
  )  # fmt: skip
  assert {name: spec.shape[0] for name, spec in made.items()} == {
    "model.layers.0.x.up_proj.u_input.weight": 64,
    "a.0.down_proj.u_input.weight": 96,
    "model.layers.1.x.q_proj.v_input.weight": 16,
  }


def test_matrices_under_other_names_are_read_and_kept(model, tmp_path):
  huggingface.save_pretrained(model, tmp_path / "a")
  as_others_write(tmp_path / "a")
  again = jaxlab.load(tmp_path / "a")
  jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
  huggingface.save_pretrained(again, tmp_path / "b")
  assert contents(tmp_path / "b") == contents(tmp_path / "a")
  jaxlab.save(again, tmp_path / "own")  # a checkpoint of our own holds parameters only
  own = jaxlab.load(tmp_path / "own")
  huggingface.save_pretrained(own, tmp_path / "c", layout="compressed_tensors")
  found = safetensors.SafetensorsFolder(tmp_path / "c").names()
  jax.tree.map(np.testing.assert_array_equal, jaxlab.load(tmp_path / "c").params, model.params)
  assert OTHER not in found  # its scheme is kept, the matrix is the source's that is gone


def test_another_matrix_is_refused(model, tmp_path):
  huggingface.save_pretrained(model, tmp_path / "a")

  def turn(tensors):
    tensors[MATRIX] = np.array(tensors[MATRIX][::-1])

  rewrite(tmp_path / "a", turn)
  with pytest.raises(ValueError, match=f"{MATRIX}.*must be Sylvester's Hadamard matrix"):
    jaxlab.load(tmp_path / "a")


def test_a_missing_matrix_is_a_warning_and_is_written_when_asked(model, tmp_path):
  huggingface.save_pretrained(model, tmp_path / "a")
  rewrite(tmp_path / "a", lambda tensors: tensors.pop(MATRIX))
  warnings = [f.text for f in doctor.examine(tmp_path / "a") if f.level == "warning"]
  assert any(f"vLLM needs a tensor X.hadamard_{SIZE}_input.weight" in w for w in warnings)
  again = jaxlab.load(tmp_path / "a")
  huggingface.save_pretrained(again, tmp_path / "b")
  assert contents(tmp_path / "b") == contents(tmp_path / "a")
  huggingface.save_pretrained(again, tmp_path / "c", layout="compressed_tensors")
  assert MATRIX in safetensors.SafetensorsFolder(tmp_path / "c").names()
  assert not any("vLLM needs" in f.text for f in doctor.examine(tmp_path / "c"))


def test_a_folder_that_is_streamed_has_them(model, tmp_path):
  quantize = lambda w, amax: dataclasses.replace(fp4.quantize(w, "mxfp4"), rotation=SIZE)
  stream.quantize_folder(model.source.path, tmp_path / "out", quantize)
  assert MATRIX in safetensors.SafetensorsFolder(tmp_path / "out").names()
  assert jaxlab.load(tmp_path / "out").params["layers"]["q"]["kernel"].rotation == SIZE


# --- live against compressed-tensors


@pytest.mark.parity
def test_parity_what_compressed_tensors_saves(model, tmp_path):
  import transformers
  from compressed_tensors.transform import TransformConfig, apply_transform_config

  huggingface.save_pretrained(model, tmp_path / "ours")
  config = json.loads((tmp_path / "ours" / "config.json").read_text())
  theirs = transformers.AutoModelForCausalLM.from_pretrained(model.source.path, dtype="auto")
  written = TransformConfig.model_validate(config["quantization_config"]["transform_config"])
  apply_transform_config(theirs, written)
  theirs.save_pretrained(tmp_path / "theirs")
  a, b = (safetensors.SafetensorsFolder(tmp_path / name) for name in ("ours", "theirs"))
  assert [n for n in b.names() if "hadamard" in n] == [MATRIX]
  np.testing.assert_array_equal(a.read(MATRIX), b.read(MATRIX))
  assert a.shape_dtype(MATRIX) == b.shape_dtype(MATRIX)


@pytest.mark.parity
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_parity_the_receipt_of_a_rotated_folder_is_verified(dtype, tmp_path):
  """transformers leaves the rotations out, the script adds them; a float32 model's other tensors
  are verified in float32, though it is declared bfloat16, in which alone transformers runs it."""
  import torch
  import transformers

  tiny.write_folder(tmp_path / "in", tiny.config(**EVEN), dtype=dtype)
  lm = jaxlab.load(tmp_path / "in")
  model = dataclasses.replace(lm, params=weights.map_leaves(rotated, lm.params))
  language_model.export(model, tmp_path / "out")
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
  assert theirs.dtype == torch.bfloat16
  theirs(torch.tensor([[0]]))
  verify = [sys.executable, str(tmp_path / "out" / "verify.py")]
  done = subprocess.run(verify, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and "verified" in done.stdout, done.stdout + done.stderr[-2000:]
