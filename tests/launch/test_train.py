"""`launch.train`: what it leaves behind, resuming, a user's mistakes, and the shipped recipes."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab.models import presets
from jaxlab.nn import weights
from jaxlab.parallel import mesh as meshes
from jaxlab.train import metrics, pretrain
from launch import registry
from tests.launch import small_train, verbs
from tests.models import tiny as tiny_models
from tests.train import tiny as tiny_train

RECIPES = {
  "configs/train/qwen2p5_32b_full.gin": "Qwen/Qwen2.5-32B-Instruct",
  "configs/ettin/decoder_1b_pretrain.gin": "jhu-clsp/ettin-decoder-1b",
}


def lines(workdir: pathlib.Path) -> list[dict]:
  return [{k: v for k, v in line.items() if k != "seconds"} for line in metrics.read(workdir)]


@pytest.fixture
def run(capsys, tmp_path):
  """Runs the small recipe with more bindings in a workdir."""

  def run(workdir: pathlib.Path, *bindings: str, without: str = "none") -> verbs.Done:
    recipe = small_train.gin(tmp_path)
    kept = [line for line in recipe.read_text().splitlines() if without not in line]
    recipe.write_text("\n".join(kept))
    words = [f"--gin_file={recipe}", f"--workdir={workdir}"]
    return verbs.call("train", [*words, *(f"--gin_bindings={b}" for b in bindings)], capsys)

  return run


def test_it_trains_saves_a_model_and_resumes(run, workdir, tmp_path):
  assert run(workdir).code == 0
  result = verbs.result(workdir)
  assert (result["steps"], result["tokens"], result["devices"]) == (small_train.STEPS, 1024, 1)
  assert result["loss_last"] < result["loss_first"] and result["tokens_per_s"] > 0
  assert (workdir / "plots" / "loss.png").stat().st_size > 1000
  lm = jaxlab.load(workdir / "model")
  assert lm.tokenizer.decode(lm.tokenizer.encode("a b")) == "a b"
  assert np.isfinite(lm.module.apply({"params": lm.params}, jnp.array([[1, 2]]))).all()
  whole = lines(workdir)
  text = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
  (workdir / "metrics.jsonl").write_text("".join(text[:3]))  # as killed in the last step
  (workdir / "checkpoints" / str(small_train.STEPS)).rename(tmp_path / "gone")
  assert run(workdir).code == 0
  assert tiny_train.exact(lines(workdir)) == tiny_train.exact(whole)
  again = jaxlab.load(workdir / "model")
  assert tiny_train.same_bits(again.params, lm.params)


def test_a_mesh_is_one_more_binding(run, tmp_path):
  assert run(tmp_path / "one").code == 0
  assert run(tmp_path / "mesh", *small_train.MESH).code == 0
  assert verbs.result(tmp_path / "mesh")["devices"] == 8
  for line, want in zip(lines(tmp_path / "mesh"), lines(tmp_path / "one"), strict=True):
    assert line["loss"] == pytest.approx(want["loss"], abs=2e-5)


def test_a_checkpoint_is_fine_tuned_whole_or_with_adapters(run, tmp_path):
  base = tmp_path / "base"
  tiny_models.write_folder(base, tiny_models.config(vocab_size=264))
  assert run(tmp_path / "first").code == 0
  for file in ("tokenizer.json", "tokenizer_config.json"):
    (base / file).write_bytes((tmp_path / "first" / "model" / file).read_bytes())
  before = jaxlab.load(base).params
  whole = (f"TrainConfig.model = '{base}'", "TrainConfig.init = 'checkpoint'")
  adapters = (*whole, "TrainConfig.lora = @LoRAConfig()", "LoRAConfig.rank = 4")
  for name, bindings in (("whole", whole), ("lora", adapters)):
    assert run(tmp_path / name, *bindings, without="byte_model").code == 0
    after = jaxlab.load(tmp_path / name / "model").params
    found = weights.leaf_paths(after)["layers/q/kernel"]
    assert isinstance(found, weights.LoRA) == (name == "lora")
    base_q = found.base if name == "lora" else found
    assert tiny_train.same_bits(base_q, before["layers"]["q"]["kernel"]) == (name == "lora")


@pytest.mark.parametrize(
  "bindings, words",
  [
    (["TrainConfig.step = 3"], ["TrainConfig has no argument 'step'", "Did you mean steps?"]),
    (["TrainConfig.init = 'zeros'"], ["TrainConfig.init must be 'checkpoint' or 'random'"]),
    (["TrainConfig.micro_rows = 3"], ["must divide the rows of a step; got rows=8"]),
    (["TrainConfig.rows = 6", *small_train.MESH], ["TrainConfig.rows", "data * fsdp = 4; got 6"]),
    (["TrainConfig.mesh = @MeshConfig()", "MeshConfig.data = 3"], ["make_mesh", "8 devices"]),
    (["TrainConfig.tokens = 64"], ["a row must fit the context of 32 tokens; got 64"]),
    (["TextData.paths = ('no.txt',)"], ["the file must exist; got no.txt"]),
    (["TextData.paths = ()"], ["TextData.paths: must name at least one file"]),
    (["TrainConfig.data = None"], ["TrainConfig.data must be", "TextData"]),
  ],
)
def test_a_users_mistake_is_one_line(run, workdir, bindings, words):
  error = run(workdir, *bindings).error
  assert all(word in error for word in words), error
  assert not (workdir / "checkpoints").exists()


@pytest.mark.parametrize(
  "model, words",
  [
    ("no/such/model", ["'no/such/model' does not exist", "jhu-clsp/ettin-decoder-1b"]),
    ("Qwen/Qwen2.5-0.5B-Instruct", ["has no tokenizer.json", "hf download Qwen/Qwen2.5-0.5B"]),
    ("jhu-clsp/ettin-encoder-17m", ["must be causal; got an encoder"]),
  ],
)
def test_a_model_that_cannot_be_trained(run, workdir, tmp_path, monkeypatch, model, words):
  monkeypatch.chdir(tmp_path)  # where the name of a preset is no folder
  error = run(workdir, f"TrainConfig.model = '{model}'", without="byte_model").error
  assert all(word in error for word in words), error


def test_text_that_is_damaged_or_too_short(run, workdir, tmp_path):
  rows = tmp_path / "rows.jsonl"
  for content, words in (
    (json.dumps({"body": "x"}), "rows.jsonl, row 1: field 'text' must be a text"),
    ("{", "rows.jsonl: row 1: a row must be JSON"),
    (json.dumps({"text": "x"}), "must fill at least one row of 32 tokens; got 2"),
  ):
    rows.write_text(content)
    assert words in run(workdir, f"TextData.paths = ('{rows}',)").error


@pytest.mark.parametrize("path, name", RECIPES.items())
def test_a_shipped_recipe_is_a_program(path, name):
  """Traced on 8 devices with the mesh's proportions given up: sizes are those of the preset."""
  registry.parse([path], ["MeshConfig.data = 1", "MeshConfig.fsdp = 4", "MeshConfig.tensor = 2"])
  config = registry.get("TrainConfig")()
  registry.check_unused()
  assert config.model == name
  train_step, arguments = pretrain.abstract_step(
    presets.BY_NAME[name](), config, meshes.make_mesh(config.mesh)
  )
  state = arguments[0]
  published = {"32B": 32.764e9, "1b": 1.028e9}[name.split("-")[1 if "Qwen" in name else -1]]
  assert sum(x.size for x in state.trainable.values()) == pytest.approx(published, rel=5e-3)
  result, metric = jax.eval_shape(train_step, *arguments)
  assert jax.tree.structure(result) == jax.tree.structure(state) and "loss" in metric


def test_the_values_of_the_ettin_recipe():
  """Specification ettin 2.4: rows and tokens of a step, betas, eps, rate, warm-up tokens."""
  registry.parse(["configs/ettin/decoder_1b_pretrain.gin"], [])
  c = registry.get("TrainConfig")()
  assert (c.rows, c.tokens, c.init) == (4608, 1024, "random")
  o = c.optimizer
  assert (o.b1, o.b2, o.eps, o.lr, o.clip_norm) == (0.9, 0.98, 1e-6, 5e-4, None)
  assert o.weight_decay * o.lr == pytest.approx(5e-5)
  assert o.warmup * c.rows * c.tokens == pytest.approx(2e9, rel=2e-3)
  assert c.steps * c.rows * c.tokens == pytest.approx(667e9, rel=2e-3)
