"""Training on text: a run and its plan, one device and a mesh, a run and its resumption."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab import lora
from jaxlab.data import text
from jaxlab.models import presets
from jaxlab.nn import weights
from jaxlab.optim import config as optim
from jaxlab.parallel import mesh as meshes
from jaxlab.train import config as train_config
from jaxlab.train import metrics, pretrain, signals, tiny
from tests.models import tiny as tiny_models
from tests.train import tiny as tiny_train

TOKENS = 32
MESH = meshes.MeshConfig(data=2, fsdp=2, tensor=2)
# Another order of summation in float32; losses of about 5.
LOSS = 2e-5
# AdamW divides by the root of its second moment: a rounding in a tiny gradient is a whole step.
WEIGHTS = 2e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A byte model that every axis of `MESH` divides, and text for it."""
  base = tmp_path_factory.mktemp("base")
  tiny.byte_model(base, width=32, layers=2, mlp_width=64, heads=4, positions=TOKENS)
  rows = [{"text": f"{n} times {n} is {n * n}. " * 3} for n in range(200)]
  (base / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return base


@pytest.fixture(scope="module")
def config(folder):
  return train_config.TrainConfig(
    data=text.TextData((str(folder / "text.jsonl"),)), steps=4, rows=8, tokens=TOKENS,
    model=str(folder), init="random", micro_rows=4, save_every=2, chunk_tokens=64,
    optimizer=optim.OptimizerConfig(lr=1e-2, warmup=1, clip_norm=1.0),
  )  # fmt: skip


def trainer_of(config, mesh=None) -> pretrain.Trainer:
  mesh = None if mesh is None else meshes.make_mesh(mesh)
  return pretrain.prepare(pretrain.read_model_config(config.model), config, mesh)


def train(config, workdir, mesh=None, params=None):
  """(trained parameters, figures, metrics without timing) of a run."""
  with signals.Interrupt() as stop:
    trained, figures = pretrain.run(
      trainer_of(config, mesh), params, tiny.byte_tokenizer(), workdir=workdir, seed=3,
      config_text="", stop=stop,
    )  # fmt: skip
  lines = [{k: v for k, v in line.items() if k != "seconds"} for line in metrics.read(workdir)]
  return trained, figures, lines


@pytest.fixture(scope="module")
def one_device(config, tmp_path_factory):
  return train(config, tmp_path_factory.mktemp("one"))


def test_it_learns_and_says_so(one_device, config):
  _, figures, lines = one_device
  assert figures["loss_first"] == pytest.approx(math.log(tiny.VOCABULARY), abs=0.1)  # at random
  assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
  assert figures["steps"] == 4 and figures["tokens"] == 4 * 8 * TOKENS
  rows = text.read_rows(config.data, tiny.byte_tokenizer(), TOKENS)
  assert [line["epoch"] for line in lines] == [i * 8 / len(rows) for i in (1, 2, 3, 4)]


def test_a_resumed_run_is_the_run(one_device, config, workdir):
  """Cut off a step after a checkpoint: all numbers of the uninterrupted run, bit for bit."""
  train(config, workdir)
  (workdir / "metrics.jsonl").rename(workdir / "whole.jsonl")
  lines = (workdir / "whole.jsonl").read_text().splitlines(keepends=True)
  (workdir / "metrics.jsonl").write_text("".join(lines[:3]))  # as killed in step 4
  (workdir / "checkpoints" / "4").rename(workdir / "gone")
  trained, _, resumed = train(config, workdir)
  assert tiny_train.exact(resumed) == tiny_train.exact(one_device[2])
  assert tiny_train.same_bits(trained, one_device[0])


@pytest.mark.parametrize("mesh", [MESH, meshes.MeshConfig(fsdp=8)])
def test_a_mesh_computes_what_one_device_does(one_device, config, workdir, mesh):
  config = dataclasses.replace(config, micro_rows=None)  # fsdp=8 leaves a row a device
  trained, figures, lines = train(config, workdir, mesh)
  assert figures["devices"] == 8
  for line, want in zip(lines, one_device[2], strict=True):
    assert line["loss"] == pytest.approx(want["loss"], abs=LOSS)
  for x, want in zip(jax.tree.leaves(trained), jax.tree.leaves(one_device[0]), strict=True):
    np.testing.assert_allclose(x, want, rtol=0, atol=WEIGHTS)


@pytest.mark.slow
def test_an_ettin_decoder_trains_alike_on_a_mesh(config, folder, tmp_path):
  """Two steps of the other family of decoders, a global and a local layer, from noise."""
  small = presets.BY_NAME["jhu-clsp/ettin-decoder-17m"]() | {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "local_attention": 8,
    "vocab_size": tiny.VOCABULARY, "max_position_embeddings": TOKENS,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "cls_token_id": 0, "sep_token_id": 1,
  }  # fmt: skip
  (tmp_path / "config.json").write_text(json.dumps(small))
  changes = {"micro_rows": None, "remat": False, "chunk_tokens": 4096}  # less to compile
  config = dataclasses.replace(config, model=str(tmp_path), steps=2, **changes)
  one, mesh = (train(config, tmp_path / str(m is None), m) for m in (None, MESH))
  for line, want in zip(mesh[2], one[2], strict=True):
    assert line["loss"] == pytest.approx(want["loss"], abs=LOSS)
  for x, want in zip(jax.tree.leaves(mesh[0]), jax.tree.leaves(one[0]), strict=True):
    np.testing.assert_allclose(x, want, rtol=0, atol=WEIGHTS)


@pytest.mark.parametrize("mesh", [None, MESH])
@pytest.mark.parametrize("adapters", [None, lora.LoRAConfig(rank=4)])
def test_the_plan_is_the_program_of_the_run(config, mesh, adapters):
  """Arguments, results and temporaries of the compiled programs, to the byte."""
  init = "random" if adapters is None else "checkpoint"
  config = dataclasses.replace(config, init=init, lora=adapters)
  model = pretrain.read_model_config(config.model)
  mesh = None if mesh is None else meshes.make_mesh(mesh)
  train_step, shapes = pretrain.abstract_step(model, config, mesh)
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
  planned = train_step.lower(*shapes)

  trainer = pretrain.prepare(model, config, mesh)
  params = None
  if adapters is not None:
    params = trainer.module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  state, frozen, key = trainer.start(params, jax.random.key(0))
  rows = text.read_rows(config.data, tiny.byte_tokenizer(), TOKENS)
  rounds = trainer.rounds(rows, 0)
  arguments = state, frozen, rounds(0, state).batches[0], key
  for shape, x in zip(jax.tree.leaves(shapes), jax.tree.leaves(arguments), strict=True):
    assert (shape.shape, shape.dtype) == (x.shape, x.dtype)
    assert mesh is None or shape.sharding.is_equivalent_to(x.sharding, x.ndim)
  real = trainer.train_step.lower(*arguments)
  assert real.as_text() == planned.as_text()
  parts = [f"{part}_size_in_bytes" for part in ("argument", "output", "temp", "alias")]
  sizes = lambda compiled: [getattr(compiled.memory_analysis(), part) for part in parts]
  assert sizes(real.compile()) == sizes(planned.compile())

  for step in range(2):  # its result is its argument: no second compilation
    state, _ = trainer.train_step(state, frozen, rounds(step, state).batches[0], key)
  assert trainer.train_step._cache_size() == 1
  for shape, x in zip(jax.tree.leaves(shapes[0]), jax.tree.leaves(state), strict=True):
    assert mesh is None or shape.sharding.is_equivalent_to(x.sharding, x.ndim)


def test_a_random_model_is_made_in_pieces():
  """No device holds a whole table, let alone the model: of 8 devices each makes an eighth."""
  model = tiny_models.config("qwen2", vocab_size=4096, hidden_size=256, intermediate_size=1024)
  config = train_config.TrainConfig(
    data=text.TextData(("none",)), steps=1, rows=8, tokens=16, init="random"
  )
  mesh = meshes.make_mesh(meshes.MeshConfig(fsdp=8))
  trainer = pretrain.prepare(model | {"num_attention_heads": 8}, config, mesh)
  state, *_ = trainer.abstract()
  made = jax.jit(trainer._random, out_shardings=trainer._shardings(state))
  sizes = made.lower(jax.random.key(0)).compile().memory_analysis()
  whole = sum(x.size * 4 for x in jax.tree.leaves(state))
  assert sizes.output_size_in_bytes < 1.05 * whole / 8
  assert sizes.temp_size_in_bytes < whole / 8


def test_a_32b_plan_takes_seconds():
  """Shapes only: 32.8e9 parameters, and of each array every device has its part."""
  config = train_config.TrainConfig(data=text.TextData(("none",)), steps=1, rows=512, tokens=4096)
  mesh = meshes.make_mesh(meshes.MeshConfig(fsdp=4, tensor=2))
  model = presets.BY_NAME["Qwen/Qwen2.5-32B-Instruct"]()
  _, (state, frozen, batch, _) = pretrain.abstract_step(model, config, mesh)
  assert sum(x.size for x in state.trainable.values()) == pytest.approx(32.764e9, rel=1e-3)
  assert not jax.tree.leaves(frozen)
  local = lambda x: x.sharding.shard_shape(x.shape)
  assert local(batch.tokens_BT) == (128, 4096)
  a_device = sum(math.prod(local(x)) * 4 for x in jax.tree.leaves(state))
  assert a_device == pytest.approx(12 * 32.764e9 / 8, rel=0.01)  # masters and two moments


def test_products_run_in_the_configured_dtype(config):
  """Masters and gradients stay float32; the matrices that meet are bfloat16."""
  config = dataclasses.replace(config, dtype="bfloat16", micro_rows=None)
  train_step, shapes = pretrain.abstract_step(pretrain.read_model_config(config.model), config)
  products = [
    line for line in train_step.lower(*shapes).as_text().splitlines() if "dot_general" in line
  ]
  assert products and not [line for line in products if "tensor<8x32x32xf32>, " in line]
  state = jax.eval_shape(train_step, *shapes)[0]
  assert {x.dtype for x in state.trainable.values()} == {jnp.dtype(jnp.float32)}


def test_adapters_train_and_the_base_stays(config, folder, workdir, tmp_path):
  tiny_models.write_folder(tmp_path / "m", tiny_models.config(vocab_size=tiny.VOCABULARY))
  lm = jaxlab.load(tmp_path / "m")
  changes = {"init": "checkpoint", "lora": lora.LoRAConfig(rank=4), "model": str(tmp_path / "m")}
  trained, figures, lines = train(dataclasses.replace(config, **changes), workdir, params=lm.params)
  assert lines[-1]["loss"] < lines[0]["loss"]
  for path, w in weights.leaf_paths(trained).items():
    if isinstance(w, weights.LoRA):
      base = weights.leaf_paths(lm.params)[path]
      assert tiny_train.same_bits(w.base, base) and np.abs(w.b).max() > 0
  factors = [w for w in weights.leaf_paths(trained).values() if isinstance(w, weights.LoRA)]
  assert figures["trained_parameters"] >= sum(w.a.size + w.b.size for w in factors) > 0


@pytest.mark.parametrize(
  "changes, mesh, words",
  [
    ({"tokens": 64}, None, "TrainConfig.tokens: a row must fit the context of 32 tokens; got 64"),
    ({"micro_rows": 2}, MESH, "TrainConfig.micro_rows: must be a multiple of the mesh's"),
    ({"rows": 6, "micro_rows": None}, MESH, "TrainConfig.rows: must be a multiple"),
    ({"tokens": 31}, meshes.MeshConfig(sequence=2, fsdp=-1), "TrainConfig.tokens: must be a mult"),
    ({}, meshes.MeshConfig(tensor=8), "attention heads; got tensor = 8 and 4 heads"),
    ({"model": "no/such"}, None, "'no/such' does not exist. Give a model folder"),
  ],
)
def test_what_does_not_fit_is_said_before_anything_is_made(config, changes, mesh, words):
  with pytest.raises(ValueError, match=words):
    trainer_of(dataclasses.replace(config, **changes), mesh)


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"rows": 0}, "TrainConfig.rows: must be at least 1; got 0"),
    ({"micro_rows": 3}, "must divide the rows of a step; got rows=8 and micro_rows=3"),
    ({"lora": lora.LoRAConfig()}, "adapters need a trained base"),
  ],
)
def test_settings_that_cannot_be(config, changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(config, **changes)


def test_too_little_memory_and_a_foreign_tokenizer(config, workdir, monkeypatch):
  monkeypatch.setattr(pretrain.budget, "available_bytes", lambda: 100_000)
  with pytest.raises(ValueError, match="not enough memory: state"):
    train(config, workdir)
  small = tiny_models.config(vocab_size=40, max_position_embeddings=TOKENS)
  trainer = pretrain.prepare(small, config)
  with pytest.raises(ValueError, match="must not have more tokens than its table of 40"):
    pretrain.run(
      trainer, None, tiny.byte_tokenizer(), workdir=workdir, seed=0, config_text="",
      stop=signals.Interrupt(),
    )  # fmt: skip
