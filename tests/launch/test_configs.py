"""Every recipe: its gin file builds all that its verb asks for, and its model exists as shapes.

Nothing is downloaded: the files that a recipe reads are written here, and a model that is not
packaged is its preset. Numbers are those of arXiv 2510.11696 and the specification of its method.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxlab import lora
from jaxlab.data import assets
from jaxlab.io import huggingface
from jaxlab.models import causal_lm, presets, zoo
from jaxlab.nn import weights
from jaxlab.quant import fp4
from jaxlab.quant import model as quantizer
from jaxlab.rl import base as base_lib
from jaxlab.rl import config as rl_config
from jaxlab.rl import tiny
from jaxlab.train import budget
from launch import registry
from pallas_kernels import target

ROOT = pathlib.Path(__file__).resolve().parents[2]
GIN_FILES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "configs").rglob("*.gin"))]
QERL = [path for path in GIN_FILES if path.startswith("configs/qerl/")]
# What a verb asks of the registry; all of it must be built for `check_unused` to be content.
ROOTS = {
  "rl": ("RLConfig", "RLData"),
  "arms": ("ArmsConfig", "RLData"),
  "quantize": (),
  "generate": ("SamplingConfig",),
  "evaluate": ("AccuracyConfig", "SamplingConfig"),
  "bench": ("BenchConfig",),
  "train": ("TrainConfig",),
}
CHANGES_QUANTIZE = ("rl", "quantize")
OTHER_ROOTS = {
  "configs/evaluate/perplexity.gin": ("PerplexityConfig",),
  "configs/evaluate/wikitext.gin": ("PerplexityConfig",),
  "configs/mr_gptq/smollm2_cpu.gin": ("PTQConfig",),
  "configs/mr_gptq/llama3p1_8b.gin": ("PTQConfig",),
  "configs/mr_gptq/qwen3_8b.gin": ("PTQConfig",),
}
# What a user must give, for the files that say so in their header.
GIVEN = {
  "configs/evaluate/gsm8k.gin": ["gsm8k_items.path = 'test.parquet'"],
  "configs/evaluate/local_file.gin": ["read_items.path = 'questions.jsonl'"],
}
ROW = {
  "question": "One and one?", "prompt": "One and one?", "problem": "One and one?",
  "answer": "#### 2", "solution": "2", "unique_id": "a",
}  # fmt: skip


@pytest.fixture
def data_files(tmp_path, monkeypatch):
  """A folder, made the current one, with every data file that a recipe names; one row each."""
  monkeypatch.chdir(tmp_path)
  text = "".join((ROOT / path).read_text() for path in GIN_FILES) + "".join(sum(GIVEN.values(), []))
  for name in re.findall(r"\.path ?= ?'([^']+)'", text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
      pyarrow.parquet.write_table(pa.Table.from_pylist([ROW]), path)
    else:
      path.write_text(json.dumps(ROW) + "\n")


def verb_of(path: str) -> str:
  return re.search(r"python -m launch\.(\w+)", (ROOT / path).read_text())[1]


def build(path: str) -> dict:
  """{name: object} of all that the verb of a gin file asks for; no binding may be left over."""
  registry.parse([path], GIVEN.get(path, []))
  verb = verb_of(path)
  built = {name: registry.get(name)() for name in OTHER_ROOTS.get(path, ROOTS[verb])}
  if verb in CHANGES_QUANTIZE:
    built["quantize"] = registry.get("quantize")
  registry.check_unused()
  return built


def recipes(path: str) -> list[tuple[rl_config.RLConfig, Callable]]:
  """(settings, quantize) of an RL recipe, or of each of its arms."""
  built = build(path)
  if "ArmsConfig" in built:
    return [(arm.config, arm.quantize) for arm in built["ArmsConfig"].arms]
  return [(built["RLConfig"], built["quantize"])] if "RLConfig" in built else []


def model_config(model) -> dict:
  """config.json of a recipe's model, without its weights; {} where even that is elsewhere."""
  if model == "demo":
    found = assets.find_demo_model()
    return huggingface.load_config(found) if found else {}
  return tiny.CONFIG if callable(model) else presets.BY_NAME[model]()


def shapes(config: dict, quantize: Callable, adapters: lora.LoRAConfig):
  """(trainable, frozen) of a run as shapes: initialised, quantised, with adapters, divided."""

  def make():
    module = zoo.from_config(config, jnp.bfloat16)
    params = module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params = lora.attach(quantize(params), adapters, jax.random.key(1))
    return weights.partition(params, lora.is_trainable(adapters))

  return jax.eval_shape(make)


def format_of(architecture: causal_lm.CausalLMConfig, quantize: Callable) -> str:
  shapes = zoo.param_shapes(causal_lm.CausalLM(architecture))
  return base_lib.format_of(jax.eval_shape(quantize, shapes))


def count(arrays) -> int:
  return sum(x.size for x in jax.tree.leaves(arrays))


@pytest.mark.parametrize("path", GIN_FILES)
def test_it_builds_and_leaves_no_binding_over(path, data_files):
  assert build(path) or verb_of(path) == "quantize"


@pytest.mark.parametrize("path", [p for p in GIN_FILES if verb_of(p) in ("rl", "arms")])
def test_its_model_takes_the_recipe(path, data_files):
  """The whole way of a run as shapes: model, quantised base, adapters, what trains."""
  for config, quantize in recipes(path):
    if not (model := model_config(config.model)):
      pytest.skip("the demo model is not installed")
    trainable, _ = shapes(model, quantize, config.lora)
    architecture = zoo.causal_lm_config(model)
    expected = budget.memory_budget(architecture, "bf16", budget.Work(lora_rank=config.lora.rank))
    gains = 2 * architecture.num_layers * architecture.width * config.lora.train_norms
    assert count(trainable) == expected["adapters"] // 16 + gains
    assert {x.dtype for x in trainable.values()} == {jnp.dtype(jnp.float32)}


def test_the_shipped_values_of_the_7b_recipe(data_files):
  """Table 2.10 of the specification, column "ours"."""
  [(c, quantize)] = recipes("configs/qerl/qwen2p5_7b_gsm8k.gin")
  assert (c.prompts * c.samples, c.samples, c.iterations) == (128, 8, 1)
  assert (c.max_prompt_tokens, c.sampling.max_new_tokens, c.steps) == (256, 2048, 600)
  assert (c.optimizer.lr, c.lora.rank, c.lora.scale, c.lora.train_norms) == (1e-5, 32, 1.0, True)
  assert (c.loss.clip_low, c.loss.clip_high, c.loss.kl_coef) == (0.2, 0.28, 0.0)
  assert (c.optimizer.b1, c.optimizer.b2, c.optimizer.eps) == (0.9, 0.99, 1e-8)
  assert (c.optimizer.weight_decay, c.optimizer.clip_norm, c.optimizer.warmup) == (0.1, 0.2, 0.1)
  assert (c.aqn.sigma_start, c.aqn.sigma_end, c.aqn.stages) == (1e-2, 5e-4, 10)
  assert (c.mask_truncated, c.loss.loss, c.loss.correction) == (True, "dapo", "token_truncate")
  assert c.sampling.temperature == 1.0 and not c.sampling.truncated
  [(math, _)] = recipes("configs/qerl/qwen2p5_7b_bigmath.gin")
  assert (math.max_prompt_tokens, math.sampling.max_new_tokens) == (1024, 4096)


def test_the_official_settings(data_files):
  built = build("configs/qerl/parity_official.gin")
  c = built["RLConfig"]
  assert (c.prompts, c.samples, c.lora.rank, c.lora.alpha) == (1, 2, 16, 16.0)
  assert (c.loss.loss, c.loss.correction, c.optimizer.clip_norm) == ("bnpo", "none", 0.2)
  assert (c.aqn.sigma_start, c.aqn.sigma_end) == (1e-2, 1e-4)
  [reward] = built["RLData"].rewards
  assert reward.keywords == {"strict": True}


@pytest.mark.parametrize(
  "arm, kind", [("bf16_lora", "bf16"), ("nf4", "nf4"), ("mxfp4", "mxfp4"), ("no_aqn", "nvfp4")]
)
def test_an_arm_differs_from_the_recipe_where_it_says(arm, kind, data_files):
  [(base, _)] = recipes("configs/qerl/qwen2p5_7b_gsm8k.gin")
  [(c, quantize)] = recipes(f"configs/qerl/arm_{arm}.gin")
  assert format_of(zoo.causal_lm_config(presets.BY_NAME[c.model]()), quantize) == kind
  lr = 5e-6 if arm == "bf16_lora" else 1e-5
  optimizer = dataclasses.replace(base.optimizer, lr=lr)
  assert c == dataclasses.replace(base, aqn=None, optimizer=optimizer)


@pytest.mark.parametrize(
  "name, linears, base_gb, adapters",
  [
    ("7B", 6.525e9, 5.85, 80.7e6),
    ("14B", 13.212e9, 10.55, 137.6e6),
    ("32B", 31.206e9, 20.67, 268.4e6),
  ],
)
def test_presets_have_the_papers_bytes(name, linears, base_gb, adapters):
  """Weights of the linears, bytes of the NVFP4 model, rank-32 adapters; to the printed digits."""
  config = presets.BY_NAME[f"Qwen/Qwen2.5-{name}-Instruct"]()
  rank_32 = lora.LoRAConfig(rank=32, train_norms=False)
  trainable, frozen = shapes(config, quantizer.quantize, rank_32)
  assert count(trainable) == pytest.approx(adapters, rel=1e-3)
  sizes = fp4.weight_bytes(frozen)
  assert sizes["linears"] / 0.5625 == pytest.approx(linears, rel=1e-4)
  assert sizes["total"] / 1e9 == pytest.approx(base_gb, abs=0.01)


@pytest.mark.parametrize(
  "name, parameters",
  [
    ("0.5B", 0.494e9),
    ("1.5B", 1.544e9),
    ("3B", 3.086e9),
    ("7B", 7.616e9),
    ("14B", 14.770e9),
    ("32B", 32.764e9),
  ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
  """As the hub counts them in the safetensors of each model."""
  config = presets.BY_NAME[f"Qwen/Qwen2.5-{name}-Instruct"]()
  _, base = shapes(config, lambda params: params, lora.LoRAConfig(train_norms=False))
  assert count(base) == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize("path", [p for p in QERL if "tiny" not in p])
def test_the_launcher_lets_it_start_on_80_gb(path, data_files):
  """By the budget that every run prints; 16-bit weights of the 32B model are refused."""
  [(c, quantize)] = recipes(path)
  config = zoo.causal_lm_config(presets.BY_NAME[c.model]())
  kind = format_of(config, quantize)
  with target.use_target("h100"):
    work = base_lib.work(c, kind)
  budget.require_fits(budget.memory_budget(config, kind, work), 80 * 10**9)
  if "32b" in path:
    with pytest.raises(ValueError, match="not enough memory"):
      budget.require_fits(budget.memory_budget(config, "bf16", work), 80 * 10**9)
