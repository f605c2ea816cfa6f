"""Adapter folders: our names and bytes, PEFT's options, and what is refused by field."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import errors, lora
from jaxlab.io import peft, safetensors
from jaxlab.models import zoo
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4
from tests.models import tiny

CONFIG = tiny.config(
  hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16, num_hidden_layers=2
)
MODULE = zoo.from_config(CONFIG)
LORA = lora.LoRAConfig(rank=4, alpha=8, targets=("q", "down"))


def moved(params, config, seed=1):
  """Adapters and norms as after some training."""
  params = lora.attach(params, config, jax.random.key(7))
  trainable, frozen = weights.partition(params, lora.is_trainable(config))
  random = np.random.RandomState(seed)
  trainable = {
    path: x + jnp.asarray(0.1 * random.standard_normal(x.shape), jnp.float32)
    for path, x in sorted(trainable.items())
  }
  return weights.merge(trainable, frozen)


@pytest.fixture(scope="module")
def base():
  return MODULE.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


@pytest.fixture(scope="module")
def trained(base):
  return moved(base, LORA)


@pytest.fixture
def folder(trained, tmp_path):
  peft.save_adapter(trained, LORA, tmp_path / "adapter", base="some/base")
  return tmp_path / "adapter"


def edit(folder, **changes):
  config = json.loads((folder / "adapter_config.json").read_text()) | changes
  (folder / "adapter_config.json").write_text(json.dumps(config))


def test_names_and_shapes_are_those_of_peft(folder, trained):
  """As huggingface/peft 0.21 writes an adapter of q_proj and down_proj with two kinds of norms."""
  tensors = safetensors.SafetensorsFolder(folder / "adapter_model.safetensors")
  layer = "base_model.model.model.layers.{}."
  shapes = {
    "self_attn.q_proj.lora_A.weight": (4, 64), "self_attn.q_proj.lora_B.weight": (64, 4),
    "mlp.down_proj.lora_A.weight": (4, 96), "mlp.down_proj.lora_B.weight": (64, 4),
    "input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,),
  }  # fmt: skip
  expected = {layer.format(i) + name: shape for i in range(2) for name, shape in shapes.items()}
  assert {n: tensors.shape_dtype(n)[0] for n in tensors.names()} == expected
  assert {tensors.shape_dtype(n)[1] for n in tensors.names()} == {np.dtype(np.float32)}
  a = trained["layers"]["q"]["kernel"].a
  stored = tensors.read(layer.format(1) + "self_attn.q_proj.lora_A.weight")
  np.testing.assert_array_equal(stored, np.asarray(a[1]).T)


def test_the_config_is_what_peft_reads(folder):
  config = json.loads((folder / "adapter_config.json").read_text())
  expected = {
    "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "peft_type": "LORA",
    "modules_to_save": ["input_layernorm", "post_attention_layernorm"], "bias": "none",
    "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/base",
  }  # fmt: skip
  assert expected.items() <= config.items()
  assert peft.lora_config(folder) == LORA


def test_without_norms_none_are_saved(base, tmp_path):
  config = lora.LoRAConfig(rank=4, alpha=4, targets=("v",), train_norms=False)
  peft.save_adapter(moved(base, config), config, tmp_path / "a", base="b")
  assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["modules_to_save"] is None
  assert peft.lora_config(tmp_path / "a") == config
  found = peft.load_adapter(tmp_path / "a", base)
  assert found["layers"]["attn_norm"] is base["layers"]["attn_norm"]


@pytest.mark.parametrize("packed", [False, True])
def test_saved_and_loaded_is_the_same(base, packed, tmp_path):
  start = fp4.quantize_params(base) if packed else base
  live = moved(start, lora.LoRAConfig(rank=4, alpha=8))
  peft.save_adapter(live, lora.LoRAConfig(rank=4, alpha=8), tmp_path / "a", base="b")
  again = peft.load_adapter(tmp_path / "a", start)
  assert jax.tree.structure(again) == jax.tree.structure(live)  # scale is static: compared here
  jax.tree.map(np.testing.assert_array_equal, again, live)


def test_stacked_and_unstacked_models_write_and_read_alike(base, trained, folder, tmp_path):
  peft.save_adapter(stack.unstack(trained), LORA, tmp_path / "listed", base="some/base")
  for name in ("adapter_config.json", "adapter_model.safetensors"):
    assert (tmp_path / "listed" / name).read_bytes() == (folder / name).read_bytes()
  listed = peft.load_adapter(folder, stack.unstack(base))
  expected = stack.unstack(trained)
  assert jax.tree.structure(listed) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, listed, expected)


def test_saving_again_replaces_the_folder(base, folder):
  other = moved(base, LORA, seed=2)
  peft.save_adapter(other, LORA, folder, base="some/base")
  jax.tree.map(np.testing.assert_array_equal, peft.load_adapter(folder, base), other)
  assert [p.name for p in folder.parent.iterdir()] == ["adapter"]
  (folder / "adapter_config.json").unlink()  # now it could be anything
  with pytest.raises(ValueError, match="must be new or empty"):
    peft.save_adapter(other, LORA, folder, base="some/base")


def test_rank_stabilised_scale(base, folder):
  edit(folder, use_rslora=True)
  assert peft.load_adapter(folder, base)["layers"]["q"]["kernel"].scale == 8 / 4**0.5


def test_alpha_pattern_of_a_linear(base, folder):
  edit(folder, alpha_pattern={"q_proj": 2})
  layers = peft.load_adapter(folder, base)["layers"]
  assert (layers["q"]["kernel"].scale, layers["down"]["kernel"].scale) == (0.5, 2.0)
  with pytest.raises(ValueError, match="alpha_pattern = .* is not supported"):
    peft.lora_config(folder)
  edit(folder, alpha_pattern={"model.layers.1.self_attn.q_proj": 2})  # one layer only
  with pytest.raises(ValueError, match="one rank and one scale for all layers of a linear"):
    peft.load_adapter(folder, base)
  edit(folder, alpha_pattern={"(a+)+$": 2})
  with pytest.raises(ValueError, match="alpha_pattern = .* ends of module paths"):
    peft.load_adapter(folder, base)


def rewrite(folder, change):
  source = safetensors.SafetensorsFolder(folder / "adapter_model.safetensors")
  tensors = {name: np.array(source.read(name)) for name in source.names()}
  change(tensors)
  safetensors.write_safetensors(folder / "adapter_model.safetensors", tensors)


Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_ranks_may_differ_between_linears(base, folder):
  def change(tensors):
    for name in list(tensors):
      if "q_proj.lora_A" in name:
        tensors[name] = tensors[name][:2]
      if "q_proj.lora_B" in name:
        tensors[name] = tensors[name][:, :2].copy()

  rewrite(folder, change)
  layers = peft.load_adapter(folder, base)["layers"]
  assert layers["q"]["kernel"].a.shape == (2, 64, 2) and layers["q"]["kernel"].scale == 4.0
  assert layers["down"]["kernel"].a.shape == (2, 96, 4)


@pytest.mark.parametrize(
  "change,message",
  [
    (lambda t: t.pop(Q0), f"has no tensor '{Q0}'. An adapter must cover all layers"),
    (lambda t: t.update({Q0: t[Q0][:, :-1].copy()}), None),
    (lambda t: t.update({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}),
     "no place for; got 'base_model.model.lm_head.weight'"),
    (lambda t: t.update({Q0.replace("q_proj", "x_proj"): t[Q0]}), "target_modules = .'self_attn.x"),
    (lambda t: t.pop("base_model.model.model.layers.1.input_layernorm.weight"), "1 is missing"),
  ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(base, folder, change, message):
  rewrite(folder, change)
  with pytest.raises(ValueError, match=message):
    peft.load_adapter(folder, base)


def test_an_adapter_of_another_base_is_refused(folder):
  wide = zoo.from_config(CONFIG | {"hidden_size": 128, "num_attention_heads": 8})
  params = wide.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  with pytest.raises(ValueError, match=r"must have .* \(2, 128\?*.*trained on another base"):
    peft.load_adapter(folder, params)


@pytest.mark.parametrize(
  "field,value",
  [
    ("use_dora", True), ("bias", "all"), ("lora_bias", True), ("fan_in_fan_out", True),
    ("layers_to_transform", [0]), ("layer_replication", [[0, 2]]), ("peft_type", "LOHA"),
    ("init_lora_weights", "pissa_niter_16"), ("r", 0), ("lora_alpha", None),
    ("trainable_token_indices", [1]), ("use_qalora", True),
  ],
)  # fmt: skip
def test_options_that_we_lack_are_named(base, folder, field, value):
  edit(folder, **{field: value})
  with pytest.raises(ValueError, match=f"{field} = .* is not supported; jaxlab has") as caught:
    peft.load_adapter(folder, base)
  assert "\n" not in str(caught.value)


def test_folders_that_are_no_adapter(base, folder, tmp_path):
  with pytest.raises(ValueError, match="the folder must exist"):
    peft.load_adapter(tmp_path / "nothing", base)
  (folder / "adapter_model.safetensors").unlink()
  with pytest.raises(ValueError, match="has no adapter_model.safetensors"):
    peft.load_adapter(folder, base)
  shutil.rmtree(folder)
  folder.mkdir()
  with pytest.raises(ValueError, match="has no adapter_config.json"):
    peft.load_adapter(folder, base)


def test_damaged_folders(base, folder):
  whole = (folder / "adapter_model.safetensors").read_bytes()
  (folder / "adapter_model.safetensors").write_bytes(whole[:-1])
  with pytest.raises(errors.CorruptFile, match="truncated"):
    peft.load_adapter(folder, base)
  (folder / "adapter_config.json").write_text("{")
  with pytest.raises(errors.CorruptFile, match="does not parse"):
    peft.load_adapter(folder, base)


def test_params_must_be_as_the_config_says(base, trained, tmp_path):
  with pytest.raises(ValueError, match=r"adapters on \['q'\], .*got \['down', 'q'\]"):
    peft.save_adapter(trained, lora.LoRAConfig(rank=4, targets=("q",)), tmp_path / "a", base="b")
  with pytest.raises(ValueError, match="layers/down/kernel has an adapter already"):
    peft.save_adapter(trained, LORA, tmp_path / "a", base="b")
    peft.load_adapter(tmp_path / "a", trained)
