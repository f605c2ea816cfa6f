"""Quantising a folder matrix by matrix: the same bytes as in memory, in bounded memory."""

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
from jaxlab.io import huggingface, safetensors, stream
from jaxlab.nn import weights
from jaxlab.quant import fp4
from tests.io import random_folder
from tests.io.test_doctor import write_tokenizer
from tests.models import tiny

EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  folder = tmp_path_factory.mktemp("source") / "in"
  config = tiny.config("qwen2", **EVEN)  # its q, k and v have biases
  tiny.write_folder(folder, config, dtype=ml_dtypes.bfloat16, max_shard_bytes=50_000)
  write_tokenizer(folder)
  return folder, jaxlab.load(folder)


def tensors(folder):
  found = safetensors.SafetensorsFolder(folder)
  return {name: (found.shape_dtype(name), bytes(found.raw(name))) for name in found.names()}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_it_writes_what_quantising_in_memory_writes(source, format, tmp_path):
  folder, lm = source
  seen = []
  sizes = stream.quantize_folder(
    folder, tmp_path / "out", random_folder.quantizer(format),
    on_block=lambda *x: seen.append(x), max_shard_bytes=20_000,
  )  # fmt: skip
  params = fp4.quantize_params(lm.params, format)
  lm = dataclasses.replace(lm, params=params)
  huggingface.save_pretrained(lm, tmp_path / "expected")
  found, expected = tensors(tmp_path / "out"), tensors(tmp_path / "expected")
  assert found == expected
  for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
  assert seen == [(i, tiny.LAYERS) for i in range(tiny.LAYERS + 1)]
  assert sizes.matrices == 7 * tiny.LAYERS
  shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
  assert len(shards) > 3
  assert sizes.bytes_after == sum(p.stat().st_size for p in shards)
  assert sizes.bytes_before == sum(len(raw) for _, raw in tensors(folder).values())


def test_other_layouts_and_rotations(source, tmp_path):
  """A quantiser may rotate and say so; ModelOpt's two files are written."""
  folder, _ = source

  def rotated(w, amax):
    leaf = fp4.quantize(w, "nvfp4", activations="fp4")
    return dataclasses.replace(leaf, rotation=16, act_scale=amax)  # not right, but stored

  stream.quantize_folder(folder, tmp_path / "fp", rotated, "fp_quant")
  kernel = jaxlab.load(tmp_path / "fp").params["layers"]["k"]["kernel"]
  assert (kernel.rotation, kernel.activations) == (16, "fp4")
  amax = np.asarray(kernel.act_scale)[0]
  original = safetensors.SafetensorsFolder(folder)
  qkv = [original.read(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv"]
  assert amax == max(np.abs(x.astype(np.float32)).max() for x in qkv)  # of the fused set
  stream.quantize_folder(folder, tmp_path / "mo", random_folder.quantizer("nvfp4"), "modelopt")
  assert (tmp_path / "mo" / "hf_quant_config.json").exists()
  kernel = jaxlab.load(tmp_path / "mo").params["layers"]["up"]["kernel"]
  assert (kernel.scale_is_divisor, kernel.activations) == (False, "none")


# --- refused before any work


def test_what_cannot_be_quantised_is_refused_before_any_work(source, tmp_path):
  folder, _ = source
  nv, mx = map(random_folder.quantizer, ("nvfp4", "mxfp4"))
  out = tmp_path / "out"
  with pytest.raises(ValueError, match="is no folder"):
    stream.quantize_folder(tmp_path / "m.gguf", out, nv)
  with pytest.raises(ValueError, match="_proj as modelopt: it holds nvfp4 .*; got mxfp4"):
    stream.quantize_folder(folder, out, mx, "modelopt")
  tiny.write_folder(tmp_path / "odd", tiny.config(), dtype=ml_dtypes.bfloat16)  # width 48
  with pytest.raises(ValueError, match="_proj.weight: .*32"):
    stream.quantize_folder(tmp_path / "odd", out, mx)
  stream.quantize_folder(folder, tmp_path / "done", nv)
  with pytest.raises(ValueError, match="is quantised already"):
    stream.quantize_folder(tmp_path / "done", out, nv)
  with pytest.raises(ValueError, match="must be new or empty"):
    stream.quantize_folder(folder, tmp_path / "done", nv)
  assert not out.exists()


def test_a_number_that_is_none_is_named_and_nothing_is_left(source, tmp_path):
  config = tiny.config(**EVEN)
  made = tiny.weights(config)
  made["model.layers.2.mlp.up_proj.weight"][3, 4] = np.nan
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "config.json").write_text(json.dumps(config))
  safetensors.write_sharded(tmp_path / "in", made)
  with pytest.raises(ValueError, match="layers.2.mlp.up_proj.weight holds NaN or inf"):
    stream.quantize_folder(tmp_path / "in", tmp_path / "out", random_folder.quantizer("nvfp4"))
  assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


# --- memory


@pytest.mark.slow
def test_peak_memory_is_a_shard_and_a_block(tmp_path):
  """400 MB of bfloat16; a block in float32 is 61 MB, a shard 50 MB. Two processes: the peak of
  writing the input is no matter."""
  shard = 50_000_000

  def run():
    command = [sys.executable, "-m", "tests.io.random_folder", str(tmp_path), "small", "nvfp4"]
    done = subprocess.run(
      [*command, str(shard)], capture_output=True, text=True, timeout=600,
      env=os.environ | {"XLA_FLAGS": ""},  # eight devices have eight pools of memory
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

  run()
  found = run()
  grown = found["peak_bytes"] - found["peak_bytes_before"]
  # The largest matrix is a quarter of a block; rounding it needs some copies in float32.
  assert grown < shard + 4 * found["block_bytes_f32"] < found["bytes_before"]
  leaf = jaxlab.load(tmp_path / "out", dtype=jnp.bfloat16).params["layers"]["down"]["kernel"]
  assert isinstance(leaf, weights.FP4Array)
