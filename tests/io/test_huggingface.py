"""Folders in and out: values, bytes, names that do not fit, NVFP4."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlab
from jaxlab import errors, lora
from jaxlab.io import huggingface, safetensors
from jaxlab.models import zoo
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4
from tests.models import tiny

# Widths of whole NVFP4 and Q8_0 blocks.
EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def load(folder: pathlib.Path, dtype=jnp.float32):
  module = zoo.from_config(huggingface.load_config(folder))
  return huggingface.load_params(folder, module, dtype)


def save(lm, folder: pathlib.Path, **changes) -> pathlib.Path:
  import dataclasses

  huggingface.save_pretrained(dataclasses.replace(lm, **changes), folder)
  return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


# --- import


@pytest.mark.parametrize("case", ["llama_biases", "qwen2_tied", "qwen3"])
def test_every_tensor_lands_in_its_place(case, tmp_path):
  stored = tiny.write_folder(tmp_path, tiny.CASES[case])
  params = load(tmp_path)
  layers = params["layers"]
  tensor = lambda i, name: stored[f"model.layers.{i}.{name}"]
  for i in range(tiny.LAYERS):
    for ours, theirs in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
      np.testing.assert_array_equal(layers[ours]["kernel"][i], tensor(i, f"{theirs}.weight").T)
      if "bias" in layers[ours]:
        np.testing.assert_array_equal(layers[ours]["bias"][i], tensor(i, f"{theirs}.bias"))
    np.testing.assert_array_equal(layers["attn_norm"][i], tensor(i, "input_layernorm.weight"))
    np.testing.assert_array_equal(
      layers["mlp_norm"][i], tensor(i, "post_attention_layernorm.weight")
    )
  np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
  assert ("head" in params) == ("lm_head.weight" in stored)
  assert sum(x.size for x in jax.tree.leaves(params)) == sum(x.size for x in stored.values())


def test_dtypes_are_converted_on_the_way(tmp_path):
  stored = tiny.write_folder(tmp_path, tiny.CASES["llama"], dtype=ml_dtypes.bfloat16)
  for dtype in (jnp.float32, jnp.bfloat16):
    params = load(tmp_path, dtype)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    expected = stored["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["norm"].astype(jnp.float32), expected)


def test_a_cpu_uses_the_buffers_as_they_are(tmp_path):
  tiny.write_folder(tmp_path, tiny.CASES["llama"])
  module = zoo.from_config(tiny.CASES["llama"])
  addresses = {}

  def place(path, leaf):
    addresses[path] = leaf.ctypes.data
    return jax.device_put(leaf)

  params = huggingface.load_params(tmp_path, module, jnp.float32, place=place)
  for path, x in weights.leaf_paths(params).items():
    assert x.unsafe_buffer_pointer() == addresses[path]


def rewrite(folder: pathlib.Path, change) -> None:
  """Changes the tensors of a folder with one file."""
  tensors = {}
  source = safetensors.SafetensorsFolder(folder)
  for name in source.names():
    tensors[name] = np.array(source.read(name))
  change(tensors)
  safetensors.write_safetensors(folder / "model.safetensors", tensors)


Q0 = "model.layers.0.self_attn.q_proj.weight"
DAMAGE = {
  "missing": (
    lambda t: t.pop(Q0),
    rf"has no tensor '{Q0}' \(1 missing\). Fetch the weights again",
  ),
  "unexpected": (
    lambda t: t.update({"model.layers.3.extra.weight": np.zeros(2, np.float32)}),
    r"1 tensors that its config.json does not describe, such as 'model.layers.3.extra.weight'",
  ),
  "shape": (
    lambda t: t.update({Q0: np.zeros((48, 47), np.float32)}),
    rf"'{Q0}' of .* has shape \(48, 47\), but config.json asks for \(48, 48\)",
  ),
  "float8": (
    lambda t: t.update({Q0: t[Q0].astype(ml_dtypes.float8_e4m3fn)}),
    rf"'{Q0}' of .* is float8_e4m3fn, which is no plain float",
  ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_does_not_fit_is_named_in_one_line(kind, tmp_path):
  change, message = DAMAGE[kind]
  tiny.write_folder(tmp_path, tiny.CASES["llama"])
  rewrite(tmp_path, change)
  with pytest.raises(ValueError, match=message) as caught:
    load(tmp_path)
  assert "\n" not in str(caught.value)


def test_buffers_that_everyone_recomputes_are_left_out(tmp_path):
  tiny.write_folder(tmp_path, tiny.CASES["llama"])
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  rewrite(tmp_path, lambda t: t.update({name: np.zeros(4, np.float32)}))
  load(tmp_path)


def test_a_tied_model_may_store_its_head(tmp_path):
  tiny.write_folder(tmp_path, tiny.CASES["llama_tied"])
  rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
  assert "head" not in load(tmp_path)


def test_truncated_and_missing_shards(tmp_path):
  tiny.write_folder(tmp_path / "a", tiny.CASES["llama"], max_shard_bytes=100_000)
  shards = sorted((tmp_path / "a").glob("*.safetensors"))
  assert len(shards) > 2
  whole = shards[1].read_bytes()
  shards[1].write_bytes(whole[:-1])
  with pytest.raises(errors.CorruptFile, match=f"{shards[1].name}.*truncated"):
    jaxlab.load(tmp_path / "a")
  shards[1].unlink()
  with pytest.raises(errors.CorruptFile, match=f"{shards[1].name}.*not in the folder"):
    jaxlab.load(tmp_path / "a")


def test_paths_that_are_no_model(tmp_path):
  with pytest.raises(ValueError, match="does not exist. Give a model folder, a .gguf file, or"):
    jaxlab.load(tmp_path / "nothing")
  with pytest.raises(ValueError, match="has no config.json"):
    jaxlab.load(tmp_path)


# --- export


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
def test_an_unchanged_model_comes_out_byte_equal(dtype, max_shard_bytes, tmp_path):
  tiny.write_folder(
    tmp_path / "in", tiny.CASES["qwen3"], dtype=dtype, max_shard_bytes=max_shard_bytes
  )
  (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": 2}')
  lm = jaxlab.load(tmp_path / "in")
  assert lm.params["norm"].dtype == jnp.float32  # on a CPU it was not even kept in its dtype
  assert contents(save(lm, tmp_path / "out")) == contents(tmp_path / "in")


def test_an_unstacked_model_comes_out_the_same(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.CASES["llama"])
  lm = jaxlab.load(tmp_path / "in")
  out = save(lm, tmp_path / "out", params=stack.unstack(lm.params))
  assert contents(out) == contents(tmp_path / "in")


def test_another_dtype_on_request(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.CASES["llama"])
  lm = jaxlab.load(tmp_path / "in")
  huggingface.save_pretrained(lm, tmp_path / "out", dtype=jnp.bfloat16)
  assert huggingface.load_config(tmp_path / "out")["dtype"] == "bfloat16"
  assert set(huggingface.load_source(tmp_path / "out").dtypes.values()) == {"bfloat16"}


def test_float16_does_not_overflow_silently(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.CASES["llama"])
  lm = jaxlab.load(tmp_path / "in")
  params = lm.params | {"norm": lm.params["norm"] * 1e6}
  with pytest.raises(ValueError, match="model.norm.weight reaches .*beyond float16"):
    import dataclasses

    lm = dataclasses.replace(lm, params=params)
    huggingface.save_pretrained(lm, tmp_path / "out", dtype=jnp.float16)
  assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 1  # no half folder


def test_a_folder_with_something_in_it_is_kept(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.CASES["llama"])
  lm = jaxlab.load(tmp_path / "in")
  with pytest.raises(ValueError, match="must be new or empty"):
    save(lm, tmp_path / "in")
  (tmp_path / "empty").mkdir()
  save(lm, tmp_path / "empty")


def test_adapters_and_other_formats_are_refused(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.config(**EVEN))
  lm = jaxlab.load(tmp_path / "in")
  adapted = lora.attach(lm.params, lora.LoRAConfig(rank=2), jax.random.key(0))
  with pytest.raises(ValueError, match="must be dense or FP4; got LoRA. Use lora.merge_adapters"):
    save(lm, tmp_path / "out", params=adapted)
  factored = {"kernel": weights.LowRank(jnp.ones((3, 64, 2)), jnp.ones((3, 2, 64)))}
  other = lm.params | {"layers": lm.params["layers"] | {"q": factored}}
  with pytest.raises(ValueError, match="must be dense or FP4; got LowRank"):
    save(lm, tmp_path / "out", params=other)


# --- NVFP4


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
  """(packed params, the folder written from them, the dense model)."""
  folder = tmp_path_factory.mktemp("nvfp4")
  config = tiny.config("qwen2", **EVEN, tie_word_embeddings=True)
  tiny.write_folder(folder / "in", config, dtype=ml_dtypes.bfloat16)
  lm = jaxlab.load(folder / "in")
  params = fp4.quantize_params(lm.params)
  return params, save(lm, folder / "out", params=params), lm


def test_nvfp4_goes_out_and_in_bit_for_bit(packed):
  params, folder, _ = packed
  again = jaxlab.load(folder).params
  assert jax.tree.structure(again) == jax.tree.structure(params)
  for path, x in weights.leaf_paths(params).items():
    y = weights.leaf_paths(again)[path]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(_bits(a), _bits(b)), x, y)


def _bits(x):
  return np.asarray(x).view(np.uint8) if x.dtype == ml_dtypes.float8_e4m3fn else np.asarray(x)


def test_nvfp4_folder_is_compressed_tensors(packed):
  _, folder, _ = packed
  config = json.loads((folder / "config.json").read_text())
  assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
  assert config["quantization_config"]["ignore"] == ["lm_head"]
  source = safetensors.SafetensorsFolder(folder)
  q = "model.layers.1.self_attn.q_proj"
  assert source.shape_dtype(f"{q}.weight_packed") == ((64, 32), np.uint8)
  assert source.shape_dtype(f"{q}.weight_scale") == ((64, 4), ml_dtypes.float8_e4m3fn)
  assert source.shape_dtype(f"{q}.weight_global_scale") == ((1,), np.float32)
  assert source.shape_dtype("model.norm.weight")[1] == ml_dtypes.bfloat16
  k = source.read("model.layers.1.self_attn.k_proj.weight_global_scale")
  np.testing.assert_array_equal(k, source.read(f"{q}.weight_global_scale"))  # fused by vLLM


def test_an_unchanged_nvfp4_model_comes_out_byte_equal(packed, tmp_path):
  _, folder, _ = packed
  assert contents(save(jaxlab.load(folder), tmp_path / "out")) == contents(folder)


def test_a_densified_nvfp4_model_is_a_dense_folder(packed, tmp_path):
  params, folder, _ = packed
  lm = jaxlab.load(folder)
  out = save(lm, tmp_path / "out", params=weights.densify(lm.params))
  assert "quantization_config" not in json.loads((out / "config.json").read_text())
  assert set(huggingface.load_source(out).dtypes.values()) == {"bfloat16"}
  found = jaxlab.load(out).params["layers"]["up"]["kernel"]
  expected = weights.dense(params["layers"]["up"]["kernel"], jnp.bfloat16)
  np.testing.assert_array_equal(found, expected.astype(jnp.float32))


def test_a_linear_packed_in_some_layers_only_is_named(packed, tmp_path):
  _, folder, lm = packed
  shutil.copytree(folder, tmp_path / "mixed")

  def change(tensors):
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
      del tensors[f"model.layers.0.mlp.up_proj.{part}"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((96, 64), ml_dtypes.bfloat16)

  rewrite(tmp_path / "mixed", change)
  with pytest.raises(
    ValueError, match="layers.0.mlp.up_proj is dense, but config.json says that it is nv"
  ):
    jaxlab.load(tmp_path / "mixed")


def test_other_quantisations_are_named(tmp_path):
  config = tiny.config(quantization_config={"quant_method": "gptq", "bits": 4})
  tiny.write_folder(tmp_path, config)
  with pytest.raises(ValueError, match="quant_method is not supported yet; got 'gptq'"):
    jaxlab.load(tmp_path)


# --- memory

CHILD = """
import pathlib, resource, sys
import jax.numpy as jnp, numpy as np, ml_dtypes
from jaxlab.io import huggingface
from jaxlab.models import zoo
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
folder = pathlib.Path(sys.argv[1])
module = zoo.from_config(huggingface.load_config(folder))
jnp.zeros(3).block_until_ready()
before = peak()
params = huggingface.load_params(folder, module, jnp.bfloat16)
print(before, peak())
"""


@pytest.mark.slow
def test_peak_memory_is_the_model_and_one_tensor(tmp_path):
  """320 MB of bfloat16; the largest tensor is the embedding, 32 MB."""
  config = tiny.config(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=16_384,
    num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True,
  )  # fmt: skip
  tiny.write_folder(tmp_path, config, dtype=ml_dtypes.bfloat16, max_shard_bytes=80_000_000)
  total = sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
  assert 2.5e8 < total < 3.5e8
  run = subprocess.run(
    [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True,
    env={**os.environ, "PYTHONPATH": str(pathlib.Path(jaxlab.__file__).parent.parent)},
  )  # fmt: skip
  before, after = map(int, run.stdout.split())
  largest = 16_384 * 1024 * 2
  assert after - before < total + largest + 20e6  # allocator and interpreter: 20 MB
