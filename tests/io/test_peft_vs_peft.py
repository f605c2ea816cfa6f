"""One adapter five ways, against huggingface/peft: live, saved, merged, live and merged there.

Reference: peft >= 0.21 on transformers, float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab import lora
from jaxlab.io import huggingface, peft
from jaxlab.nn import stack, weights
from jaxlab.quant import fp4
from tests.io import test_peft as ours
from tests.models import tiny

pytestmark = pytest.mark.parity
LOGITS = 1e-4
CONFIG = tiny.config(
  "qwen2", hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16,
  num_hidden_layers=2,
)  # fmt: skip
EACH = [(t,) for t in lora.TARGETS]
ALL_BUT = [tuple(t for t in lora.TARGETS if t != gone) for gone in lora.TARGETS]
SHORT = {t: peft.MODULES[t].rpartition(".")[2] for t in lora.TARGETS}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """{kind: (lm, folder)}: a dense model, and an NVFP4 one with a folder of decoded weights."""
  root = tmp_path_factory.mktemp("models")
  tiny.write_folder(root / "dense", CONFIG)
  dense = jaxlab.load(root / "dense")
  packed = dataclasses.replace(dense, params=fp4.quantize_params(dense.params))
  decoded = dataclasses.replace(dense, params=weights.densify(packed.params))
  huggingface.save_pretrained(decoded, root / "decoded")
  return {"dense": (dense, root / "dense"), "nvfp4": (packed, root / "decoded")}


def logits(lm, params) -> np.ndarray:
  # A list of layers, op by op: every choice of targets would be a program of its own.
  params = stack.unstack(params)
  return np.asarray(lm.module.apply({"params": params}, jnp.asarray(tiny.tokens(2, 9))))


def torch_base(folder):
  import torch
  import transformers

  torch.set_num_threads(1)
  auto = transformers.AutoModelForCausalLM
  return auto.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
@pytest.mark.parametrize("targets", [*EACH, *ALL_BUT, lora.TARGETS, ("q", "v")], ids="+".join)
def test_live_saved_merged_and_merged_in_transformers_agree(models, kind, targets, tmp_path):
  import peft as theirs

  lm, folder = models[kind]
  config = lora.LoRAConfig(rank=4, alpha=8, targets=targets, train_norms=len(targets) % 2 == 0)
  live = ours.moved(lm.params, config)
  peft.save_adapter(live, config, tmp_path / "adapter", base=str(folder))
  expected = logits(lm, live)
  assert np.abs(expected - logits(lm, lm.params)).max() > 0.05  # not the base
  loaded = logits(lm, peft.load_adapter(tmp_path / "adapter", lm.params))
  merged = logits(lm, lora.merge_adapters(live))
  there = theirs.PeftModel.from_pretrained(torch_base(folder), tmp_path / "adapter").eval()
  live_there = tiny.torch_logits(there, tiny.tokens(2, 9))
  merged_there = tiny.torch_logits(there.merge_and_unload(), tiny.tokens(2, 9))
  for found in (loaded, merged, live_there, merged_there):
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)


def perturbed(model, seed=0):
  """A PEFT model whose B is not zero."""
  import torch

  torch.manual_seed(seed)
  for p in model.parameters():
    if p.requires_grad:
      p.data += 0.1 * torch.randn_like(p)
  return model.eval()


@pytest.mark.parametrize(
  "options",
  [
    {"target_modules": ["q_proj", "down_proj"]},
    {"target_modules": "all-linear", "use_rslora": True},
    {
      "target_modules": ["q_proj", "up_proj"],
      "modules_to_save": ["input_layernorm", "post_attention_layernorm"],
    },
    {"target_modules": ["v_proj", "o_proj"], "alpha_pattern": {"v_proj": 16},
     "rank_pattern": {"o_proj": 2}},
    {"target_modules": r".*\.mlp\..*_proj", "init_lora_weights": "gaussian"},
  ],
  ids=["two", "rslora", "norms", "patterns", "regex"],
)  # fmt: skip
def test_a_folder_of_peft_is_read(models, options, tmp_path):
  import peft as theirs

  lm, folder = models["dense"]
  config = theirs.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
  model = perturbed(theirs.get_peft_model(torch_base(folder), config))
  model.save_pretrained(tmp_path)
  expected = tiny.torch_logits(model, tiny.tokens(2, 9))
  found = logits(lm, peft.load_adapter(tmp_path, lm.params))
  assert np.abs(expected - logits(lm, lm.params)).max() > 0.05
  np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)


def test_our_folder_is_the_folder_of_peft(models, tmp_path):
  """Read by us, written by us: the same tensors, byte for byte, and a config that says the same."""
  import json

  import peft as theirs

  lm, folder = models["dense"]
  modules = [SHORT[t] for t in ("k", "gate")]
  config = theirs.LoraConfig(
    r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM",
    modules_to_save=["input_layernorm", "post_attention_layernorm"],
  )  # fmt: skip
  model = perturbed(theirs.get_peft_model(torch_base(folder), config))
  model.save_pretrained(tmp_path / "theirs")
  params = peft.load_adapter(tmp_path / "theirs", lm.params)
  peft.save_adapter(params, peft.lora_config(tmp_path / "theirs"), tmp_path / "ours", str(folder))
  name = "adapter_model.safetensors"
  assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
  read = lambda side: json.loads((tmp_path / side / "adapter_config.json").read_text())
  same = read("ours").keys() & read("theirs").keys() - {"target_modules", "modules_to_save"}
  assert {k: read("ours")[k] for k in same} == {k: read("theirs")[k] for k in same}
  for key in ("target_modules", "modules_to_save"):  # sets
    assert sorted(read("ours")[key]) == sorted(read("theirs")[key])


def test_dora_is_refused_by_name(models, tmp_path):
  import peft as theirs

  lm, folder = models["dense"]
  config = theirs.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
  theirs.get_peft_model(torch_base(folder), config).save_pretrained(tmp_path)
  with pytest.raises(ValueError, match="use_dora = True is not supported; jaxlab has False"):
    peft.load_adapter(tmp_path, lm.params)


def test_a_starts_from_the_same_distribution(models):
  """Kaiming-uniform with a = sqrt(5): same bound, same spread, B = 0."""
  import peft as theirs

  lm, folder = models["dense"]
  config = theirs.LoraConfig(r=64, target_modules=["down_proj"], task_type="CAUSAL_LM")
  model = theirs.get_peft_model(torch_base(folder), config)
  state = {n: p.detach().numpy() for n, p in model.named_parameters() if "lora_A" in n}
  a = np.stack(list(state.values()))
  own = lora.attach(lm.params, lora.LoRAConfig(rank=64), jax.random.key(0))
  own = np.asarray(own["layers"]["down"]["kernel"].a)
  assert a.size == own.size
  assert own.std() == pytest.approx(a.std(), rel=0.02)
  assert np.abs(own).max() == pytest.approx(np.abs(a).max(), rel=0.01)
