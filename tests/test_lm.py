"""`jaxlab.load` and `jaxlab.save`: the dtype rule, our own checkpoints, the public names."""

import dataclasses
import pathlib
import tomllib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlab
from jaxlab import lora
from jaxlab.io import huggingface
from jaxlab.parallel import mesh as meshes
from jaxlab.quant import fp4
from pallas_kernels import target
from tests.models import tiny

EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture
def folder(tmp_path):
  tiny.write_folder(tmp_path / "in", tiny.config(**EVEN), dtype=ml_dtypes.bfloat16)
  return tmp_path / "in"


def dtypes(lm) -> set[str]:
  return {str(x.dtype) for x in jax.tree.leaves(lm.params)}


def test_the_dtype_is_float32_on_a_cpu_and_the_checkpoints_elsewhere(folder):
  assert dtypes(jaxlab.load(folder)) == {"float32"}
  with target.use_target("h100"):
    lm = jaxlab.load(folder)
  assert dtypes(lm) == {"bfloat16"} and lm.module.param_dtype == jnp.bfloat16
  assert dtypes(jaxlab.load(folder, dtype=jnp.bfloat16)) == {"bfloat16"}


def test_the_parts_of_a_model(folder):
  lm = jaxlab.load(folder)
  assert lm.path == str(folder) and lm.tokenizer is None
  assert lm.config["model_type"] == "llama" and lm.module.config.width == 64
  logits = lm.module.apply({"params": lm.params}, jnp.asarray(tiny.tokens(1, 4)))
  assert logits.shape == (1, 4, tiny.VOCAB)


def test_our_checkpoint_keeps_every_kernel_as_it_is(folder, tmp_path):
  """FP4 codes, adapters, float32 masters, static fields; and it can be exported afterwards."""
  lm = jaxlab.load(folder)
  params = lora.attach(fp4.quantize_params(lm.params), lora.LoRAConfig(rank=2), jax.random.key(0))
  lm = dataclasses.replace(lm, params=params)
  jaxlab.save(lm, tmp_path / "own")
  again = jaxlab.load(tmp_path / "own")
  assert jax.tree.structure(again.params) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, again.params, params)
  assert again.config == lm.config and again.module == lm.module
  base = dataclasses.replace(again, params=lora.detach(again.params))
  huggingface.save_pretrained(base, tmp_path / "out")
  assert huggingface.load_source(tmp_path / "out").dtypes["model.norm.weight"] == "bfloat16"


def test_a_dense_checkpoint_of_ours_is_exported_byte_equal(folder, tmp_path):
  jaxlab.save(jaxlab.load(folder), tmp_path / "own")
  huggingface.save_pretrained(jaxlab.load(tmp_path / "own"), tmp_path / "out")
  for file in folder.iterdir():
    assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_saving_over_a_checkpoint_replaces_it(folder, tmp_path):
  lm = jaxlab.load(folder)
  jaxlab.save(lm, tmp_path / "own")
  half = jaxlab.load(tmp_path / "own")
  moved = dataclasses.replace(half, params=half.params | {"norm": half.params["norm"] * 2})
  jaxlab.save(moved, tmp_path / "own")  # its own source
  again = jaxlab.load(tmp_path / "own")
  np.testing.assert_array_equal(again.params["norm"], 2 * lm.params["norm"])


def test_16_bit_checkpoints_of_ours_follow_the_dtype_rule(folder, tmp_path):
  jaxlab.save(jaxlab.load(folder, dtype=jnp.bfloat16), tmp_path / "own")
  assert dtypes(jaxlab.load(tmp_path / "own")) == {"float32"}
  assert dtypes(jaxlab.load(tmp_path / "own", dtype=jnp.bfloat16)) == {"bfloat16"}


@pytest.mark.parametrize("own", [False, True])
def test_on_a_mesh_parameters_arrive_sharded(folder, tmp_path, own):
  lm = jaxlab.load(folder)
  lm = dataclasses.replace(lm, params=fp4.quantize_params(lm.params))
  if own:
    jaxlab.save(lm, tmp_path / "there")
  else:
    huggingface.save_pretrained(lm, tmp_path / "there")
  mesh = meshes.make_mesh(meshes.MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
  sharded = jaxlab.load(tmp_path / "there", mesh=mesh)
  codes = sharded.params["layers"]["up"]["kernel"].codes
  assert len(codes.sharding.device_set) == 4
  assert codes.addressable_shards[0].data.size * 4 == codes.size
  assert jax.tree.structure(sharded.params) == jax.tree.structure(lm.params)
  jax.tree.map(np.testing.assert_array_equal, sharded.params, lm.params)


def test_public_names():
  pyproject = pathlib.Path(jaxlab.__file__).parent.parent / "pyproject.toml"
  declared = tomllib.loads(pyproject.read_text())["project"]
  assert declared.get("version", jaxlab.__version__) == jaxlab.__version__
  assert jaxlab.load.__module__ == jaxlab.LM.__module__ == "jaxlab.lm"
  with pytest.raises(AttributeError, match="no attribute 'lode'"):
    jaxlab.lode  # noqa: B018
