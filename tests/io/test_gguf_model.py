"""GGUF files written by the gguf package against the Hugging Face folder of the same weights."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab.io import export, gguf_model, huggingface
from jaxlab.io import gguf as reader
from jaxlab.models import zoo
from jaxlab.nn import weights
from tests.models import tiny

EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
NAMES = {  # of llama.cpp
  "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
  "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}  # fmt: skip
TYPES = gguf.GGMLQuantizationType


def permute(rows, heads):
  """convert_hf_to_gguf.py, LlamaModel.permute."""
  return (
    rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    .swapaxes(1, 2)
    .reshape(rows.shape)
  )


def gguf_name(name: str) -> str:
  stem, kind = name.rsplit(".", 1)
  if stem.startswith("model.layers."):
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"
  return f"{NAMES[stem]}.{kind}"


def write(path, config, kind=TYPES.F32, **more) -> dict[str, np.ndarray]:
  """Writes a model as convert_hf_to_gguf.py does; returns the values a reader should find, by
  Hugging Face name."""
  arch = config["model_type"]
  w = gguf.GGUFWriter(path, arch)
  heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
  w.add_block_count(config["num_hidden_layers"])
  w.add_context_length(config["max_position_embeddings"])
  w.add_embedding_length(config["hidden_size"])
  w.add_feed_forward_length(config["intermediate_size"])
  w.add_head_count(heads)
  w.add_head_count_kv(kv)
  w.add_layer_norm_rms_eps(config["rms_norm_eps"])
  w.add_rope_freq_base(config.get("rope_theta", 10_000.0))
  if "head_dim" in config:
    w.add_key_length(config["head_dim"])
  for add, value in more.items():
    getattr(w, add)(value)
  values = {}
  for name, x in tiny.weights(config).items():
    stored = x
    if arch == "llama" and ".q_proj." in name:
      stored = permute(x, heads)
    if arch == "llama" and ".k_proj." in name:
      stored = permute(x, kv)
    use = kind if x.ndim == 2 else TYPES.F32
    packed = gguf.quants.quantize(np.ascontiguousarray(stored), use)
    w.add_tensor(gguf_name(name), packed, raw_dtype=use)
    back = gguf.quants.dequantize(packed, use)
    undo = lambda rows, n: (
      rows.reshape(n, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
      back = undo(back, heads if ".q_proj." in name else kv)
    values[name] = back
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return values


def load(path):
  config = huggingface.load_config(path)
  module = zoo.from_config(config)
  return config, module, huggingface.load_params(path, module, jnp.float32)


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_1])
def test_values_are_those_of_the_gguf_package(kind, tmp_path):
  """Every tensor, by the names and dtypes that an export would give it."""
  expected = write(tmp_path / "m.gguf", tiny.config(**EVEN), kind)
  _, _, params = load(tmp_path / "m.gguf")
  source = huggingface.load_source(tmp_path / "m.gguf")
  found = export.export_tensors(params, source.dtypes)
  assert found.keys() == expected.keys()
  for name, spec in found.items():
    np.testing.assert_array_equal(np.asarray(spec.make(), np.float32), expected[name], err_msg=name)
    exact = {TYPES.F16: "float16", TYPES.BF16: "bfloat16"}.get(kind, "float32")
    assert str(spec.dtype) == (exact if len(spec.shape) == 2 else "float32")


@pytest.mark.parametrize(
  "config",
  [
    tiny.config(**EVEN),
    tiny.config(**EVEN, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    tiny.config("qwen2", **EVEN, rope_theta=1e6),
    tiny.config("qwen3", **EVEN),
  ],
  ids=["llama", "llama_tied_biases", "qwen2", "qwen3"],
)
def test_it_is_the_model_of_the_folder(config, tmp_path):
  write(tmp_path / "m.gguf", config)
  tiny.write_folder(tmp_path / "folder", config)
  made, module, params = load(tmp_path / "m.gguf")
  assert module == zoo.from_config(config)
  assert made["tie_word_embeddings"] == config["tie_word_embeddings"]
  folder = huggingface.load_params(tmp_path / "folder", module, jnp.float32)
  jax.tree.map(np.testing.assert_array_equal, params, folder)


def test_llama3_scaling_is_found_from_its_divisors(tmp_path):
  """llama.cpp stores rope_freqs.weight and no parameters: divisor 1 to 8 a frequency."""
  head_dim, theta = 64, 5e5
  config = tiny.config(
    hidden_size=64, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1,
    head_dim=head_dim, rope_theta=theta,
  )  # fmt: skip
  freq = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  wavelength = 2 * np.pi / freq
  smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
  divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
  path = tmp_path / "m.gguf"
  original = gguf.GGUFWriter.write_header_to_file

  def with_factors(writer, *args):
    writer.add_tensor("rope_freqs.weight", divisors)
    return original(writer, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    write(path, config)
  scaling = huggingface.load_config(path)["rope_scaling"]
  assert scaling == {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }  # fmt: skip
  load(path)
  divisors *= 1.5
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    write(path, config)
  with pytest.raises(ValueError, match="rope_freqs.weight = .* is not supported"):
    huggingface.load_config(path)


def test_linear_scaling(tmp_path):
  write(
    tmp_path / "m.gguf", tiny.config(**EVEN),
    add_rope_scaling_type=gguf.RopeScalingType.LINEAR, add_rope_scaling_factor=4.0,
  )  # fmt: skip
  assert huggingface.load_config(tmp_path / "m.gguf")["rope_scaling"] == {
    "rope_type": "linear", "factor": 4.0,
  }  # fmt: skip


@pytest.mark.parametrize(
  "arch,more,message",
  [
    ("mamba", {}, "general.architecture = 'mamba' is not supported"),
    ("llama", {"add_expert_count": 8}, "llama.expert_count = 8 is not supported"),
    ("llama", {"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "rope.scaling.type = 'yarn'"),
    ("llama", {"add_rope_dimension_count": 8}, "rope.dimension_count = 8 .* the head width 16"),
    ("llama", {"add_head_count": [4, 4, 2]}, r"head_count = \[4, 4, 2\] .* one whole number"),
  ],
)
def test_what_we_do_not_have_is_named(arch, more, message, tmp_path, monkeypatch):
  config = tiny.config(**EVEN) | {"model_type": arch}
  embedding = {"model.embed_tokens.weight": np.zeros((tiny.VOCAB, 64), np.float32)}
  monkeypatch.setattr(tiny, "weights", lambda config: embedding)
  if "add_head_count" in more:  # a second value for a key is refused by the writer
    config["num_attention_heads"] = more.pop("add_head_count")
  write(tmp_path / "m.gguf", config, **more)
  with pytest.raises(ValueError, match=message):
    huggingface.load_config(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path, monkeypatch):
  whole = tiny.weights
  gone = "model.layers.1.mlp.up_proj.weight"
  monkeypatch.setattr(tiny, "weights", lambda c: {k: v for k, v in whole(c).items() if k != gone})
  write(tmp_path / "m.gguf", tiny.config(**EVEN))
  with pytest.raises(ValueError, match="m.gguf has no tensor 'blk.1.ffn_up.weight'"):
    load(tmp_path / "m.gguf")


def test_split_half_undoes_the_permutation_of_llama_cpp():
  rows = np.arange(2 * 8 * 3).reshape(16, 3)
  np.testing.assert_array_equal(gguf_model.split_half(permute(rows, 2), 2), rows)
  np.testing.assert_array_equal(gguf_model.split_half(permute(rows[:, 0], 2), 2), rows[:, 0])


def test_numbers_are_the_decimals_that_were_meant(tmp_path):
  write(tmp_path / "m.gguf", tiny.config(**EVEN, rope_theta=1e5))
  config = huggingface.load_config(tmp_path / "m.gguf")
  assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 1e5)


# --- the packaged model


@pytest.fixture(scope="module")
def smollm():
  return jaxlab.load("demo")


@pytest.mark.slow
def test_the_packaged_model_knows_the_capital_of_france(smollm):
  prompt = smollm.tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is the capital of France?"}]
  )
  ids = smollm.tokenizer.encode(prompt)
  start = len(ids)
  forward = jax.jit(
    lambda params, tokens, last: smollm.module.apply({"params": params}, tokens)[0, last]
  )
  while ids[-1] not in smollm.tokenizer.eos_ids and len(ids) < start + 16:
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    ids.append(int(forward(smollm.params, tokens, len(ids) - 1).argmax()))
  assert smollm.tokenizer.decode(ids[start:]) == "The capital of France is Paris."


@pytest.mark.slow
def test_the_packaged_model_loads_in_seconds(smollm):
  import time

  began = time.monotonic()
  params = jax.block_until_ready(jaxlab.load("demo").params)
  assert time.monotonic() - began < 15  # 3 s on two quiet cores
  assert sum(x.size for x in jax.tree.leaves(params)) == 134_515_008
  assert not any(weights.is_packed(w) for w in weights.leaf_paths(params).values())


@pytest.mark.slow
def test_the_packaged_file_is_four_bits_already():
  from jaxlab.data import assets

  file = reader.read_gguf(assets.demo_model_path())
  kinds = [t.type for t in file.tensors.values()]
  assert (kinds.count("Q4_1"), kinds.count("Q8_0"), kinds.count("F32")) == (210, 1, 61)
