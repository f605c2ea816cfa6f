"""The memory budget against the numbers of spec qerl 8, and against arrays that really exist."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxlab
from jaxlab import lora
from jaxlab.models import causal_lm
from jaxlab.nn import weights
from jaxlab.quant import model as quant
from jaxlab.train import budget
from pallas_kernels import target
from tests.decode import tiny
from tests.models import tiny as tiny_models


def qwen(width, layers, heads, kv_heads, mlp_width, vocab, *, tie=False):
  return causal_lm.CausalLMConfig(
    vocab, width, layers, heads, kv_heads, 128, mlp_width, tie_embeddings=tie, qkv_bias=True
  )


QWEN = {
  "3B": qwen(2048, 36, 16, 2, 11008, 151936, tie=True),
  "7B": qwen(3584, 28, 28, 4, 18944, 152064),
  "14B": qwen(5120, 48, 40, 8, 13824, 152064),
  "32B": qwen(5120, 64, 40, 8, 27648, 152064),
}
WORK = budget.Work(
  lora_rank=32, rollout_sequences=8, rollout_tokens=2304, train_sequences=8, train_tokens=2304
)


def gb(n) -> float:
  return n / 1e9


# --- the specification's table: GB at S = 2304, micro-batch 8


@pytest.mark.parametrize(
  "size, linear, nvfp4, bf16", [("7B", 6.525, 5.85, 15.23), ("14B", 13.212, 10.55, 29.54),
                                ("32B", 31.206, 20.67, 65.5), ("3B", None, 2.18, None)],
)  # fmt: skip
def test_weights_are_those_of_the_paper(size, linear, nvfp4, bf16):
  config = QWEN[size]
  assert gb(budget.weight_bytes(config, "nvfp4")) == pytest.approx(nvfp4, abs=0.006)
  if linear:
    assert gb(budget.num_linear_weights(config)) == pytest.approx(linear, abs=5e-4)
    assert gb(budget.weight_bytes(config)) == pytest.approx(bf16, abs=0.06)


@pytest.mark.parametrize(
  "size, adapters, inputs, block, logits, train, train_bf16, cache",
  [
    ("7B", 1.3, 3.7, 5.7, 5.0, 21.5, 30.9, 1.1),
    ("14B", 2.2, 9.1, 5.1, 5.0, 31.9, 50.9, 3.6),
    ("32B", 4.3, 12.1, 8.6, 5.0, 50.6, 95.5, 4.8),
  ],
)
def test_training_is_that_of_the_specification(
  size, adapters, inputs, block, logits, train, train_bf16, cache
):
  parts = budget.memory_budget(QWEN[size], "nvfp4", WORK)
  found = [parts[k] for k in ("adapters", "block_inputs", "block", "logits", "peak", "cache")]
  expected = [adapters, inputs, block, logits, train, cache]
  assert [gb(n) for n in found] == pytest.approx(expected, abs=0.051)
  dense = budget.memory_budget(QWEN[size], "bf16", WORK)
  assert gb(dense["peak"]) == pytest.approx(train_bf16, abs=0.051)


def test_rollout_and_training_alternate():
  config = QWEN["7B"]
  many = dataclasses.replace(WORK, rollout_sequences=490)
  parts = budget.memory_budget(config, "nvfp4", many)
  lasting = parts["weights"] + parts["adapters"]
  assert parts["peak"] == lasting + parts["cache"] + 8 * config.vocab_size * 490
  assert gb(lasting + parts["cache"]) == pytest.approx(72, abs=0.8), "490 sequences in 72 GB"


# --- what exists


def size_of(tree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("case", ["llama", "llama_biases", "qwen2_tied", "qwen3"])
def test_weight_bytes_are_those_of_the_arrays(case):
  from jaxlab.models import zoo

  module = zoo.from_config(tiny_models.CASES[case] | {"hidden_size": 64 * 6, "head_dim": 64})
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  assert budget.weight_bytes(module.config, "bf16", 4) == size_of(shapes)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
def test_packed_bytes_are_those_of_the_arrays(format):
  config = causal_lm.CausalLMConfig(50, 64, 2, 4, 2, 16, 128)
  module = causal_lm.CausalLM(config)
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  packed = jax.eval_shape(lambda p: quant.quantize(p, format), shapes)
  scalars = 2 * 4 * 2 * 7  # two words a matrix at most: tensor scale, or step and minimum
  assert 0 <= size_of(packed) - budget.weight_bytes(config, format, 4) <= scalars


def test_adapters_and_cache_are_those_of_the_arrays():
  config = causal_lm.CausalLMConfig(50, 64, 3, 4, 2, 16, 128)
  module = causal_lm.CausalLM(config)
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  settings = lora.LoRAConfig(rank=4, train_norms=False)
  adapted = jax.eval_shape(lambda p: lora.attach(p, settings, jax.random.key(0)), shapes)
  factors = [(w.a, w.b) for w in weights.leaf_paths(adapted).values() if weights.is_leaf(w)]
  work = budget.Work(dtype_bytes=4, lora_rank=4, rollout_sequences=5, rollout_tokens=11)
  parts = budget.memory_budget(config, "bf16", work)
  assert parts["adapters"] == 4 * size_of(factors), "master, two moments, gradient"
  cache = causal_lm.init_cache(config, 5, 11, jnp.float32, stacked=True)
  assert parts["cache"] == size_of([cache.k, cache.v])


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_a_checkpoint_is_described_without_loading_it(tmp_path, format):
  lm = jaxlab.load(tiny.write_model(tmp_path / "hf"))
  assert budget.describe_checkpoint(tmp_path / "hf") == (lm.module.config, "bf16")
  if format == "bf16":
    jaxlab.save(lm, tmp_path / "own")
  else:
    jaxlab.save(dataclasses.replace(lm, params=quant.quantize(lm.params, format)), tmp_path / "own")
  assert budget.describe_checkpoint(tmp_path / "own") == (lm.module.config, format)


# --- what there is


def test_a_budget_that_fits_is_one_line_and_one_that_does_not_is_refused():
  parts = budget.memory_budget(QWEN["7B"], "nvfp4", WORK)
  line = budget.require_fits(parts, int(80e9))
  assert line.startswith("memory: weights 5.85 GB, adapters 1.29 GB, cache 1.06 GB")
  assert line.endswith("peak 21.54 GB; there is 80.00 GB")
  with pytest.raises(ValueError, match=r"not enough memory: .*peak 95.49 GB; there is 80.00 GB\."):
    budget.require_fits(budget.memory_budget(QWEN["32B"], "bf16", WORK), int(80e9))


def test_what_is_not_known_is_not_refused(monkeypatch):
  monkeypatch.setattr(budget, "available_bytes", lambda: None)
  assert "an unknown amount" in budget.require_fits({"peak": 10**15})


def test_a_containers_limit_counts_without_the_files_it_can_drop(tmp_path):
  stat = "inactive_file 300\ntotal_inactive_file 7\n"
  (tmp_path / "memory.max").write_text("1000\n")
  (tmp_path / "memory.current").write_text("500\n")
  (tmp_path / "memory.stat").write_text(stat)
  assert budget._cgroup_free(tmp_path) == [1000 - 500 + 300]
  (tmp_path / "memory.max").write_text("max\n")
  assert budget._cgroup_free(tmp_path) == []
  old = tmp_path / "memory"
  old.mkdir()
  (old / "memory.limit_in_bytes").write_text("900")
  (old / "memory.usage_in_bytes").write_text("100")
  (old / "memory.stat").write_text(stat)
  assert budget._cgroup_free(tmp_path) == [900 - 100 + 7]


def test_this_machine_has_some_memory():
  assert 10**7 < budget.available_bytes() < 10**14
  assert budget.default_dtype_bytes() == 4
  with target.use_target("h100"):
    assert budget.default_dtype_bytes() == 2


def test_an_unknown_format_is_refused():
  with pytest.raises(ValueError, match="unknown format; got 'int4'. Use one of nvfp4, mxfp4"):
    budget.weight_bytes(QWEN["7B"], "int4")
