"""The comparison of arms: criteria worked by hand, and a run of two steps from end to end."""

import json

import jax.numpy as jnp
import pytest

from jaxlab import lora
from jaxlab.data import addition
from jaxlab.decode import sampling
from jaxlab.io import orbax
from jaxlab.quant import model as quantizer
from jaxlab.rl import arms, config, rewards, tiny
from jaxlab.train import metrics, signals

ROWS = [
  {"arm": arm, "seed": seed, "entropy_start": start, "entropy_early": early,
   "accuracy_after": accuracy, "weight_bytes_bf16": 32_000, "weight_bytes": size}
  for arm, seed, start, early, accuracy, size in (
    ("bf16", 0, 0.04, 0.10, 0.99, 32_000),
    ("bf16", 1, 0.06, 0.12, 1.00, 32_000),
    ("nvfp4", 0, 0.05, 0.11, 0.98, 9_004),
    ("nvfp4", 1, 0.06, 0.13, 0.97, 9_004),
    ("nvfp4_aqn", 0, 0.05, 0.11, 0.99, 9_004),
    ("nvfp4_aqn", 1, 0.06, 0.13, 0.98, 9_004),
  )
]  # fmt: skip
MISMATCH = {0.0: 4e-7, 1e-2: 1e-3, 1e-3: 1e-4}


def judge(rows=ROWS, mismatch=MISMATCH):
  found = arms.criteria(rows, mismatch, baseline="bf16", quantized="nvfp4")
  return {c.name: c.held for c in found}, {c.name: c.found for c in found}


def changed(arm, **values):
  return [row | values if row["arm"] == arm else row for row in ROWS]


def test_all_criteria_can_hold():
  held, found = judge()
  assert all(held.values()) and len(held) == 4
  # 0.055 and 0.12 are means of the rows above; 32,000 / 9,004 = 3.554.
  assert (
    "nvfp4 0.0550 against bf16 0.0500 at step 0, 0.1200 against 0.1100"
    in (found["entropy_is_higher"])
  )
  assert "higher in 1 and 2 of 2 seeds" in found["entropy_is_higher"]
  assert "bf16 0.9950; nvfp4 -0.0200, nvfp4_aqn -0.0100" in found["accuracy_is_kept"]
  assert "3.554, 4.502 bits" in found["bytes_are_4p5_bits"]


@pytest.mark.parametrize(
  "name, rows, mismatch",
  [
    ("entropy_is_higher", changed("nvfp4", entropy_start=0.05), MISMATCH),
    ("entropy_is_higher", changed("nvfp4", entropy_early=0.09), MISMATCH),
    ("accuracy_is_kept", changed("nvfp4_aqn", accuracy_after=0.97), MISMATCH),
    ("bytes_are_4p5_bits", changed("nvfp4", weight_bytes=8_500), MISMATCH),
    ("mismatch_rises_with_noise", ROWS, {0.0: 4e-7, 1e-3: 1e-3, 1e-2: 1e-3}),
    ("mismatch_rises_with_noise", ROWS, {0.0: 2e-5, 1e-3: 1e-4}),
    ("mismatch_rises_with_noise", ROWS, {1e-3: 1e-4, 1e-2: 1e-3}),
  ],
)
def test_each_criterion_can_fail_alone(name, rows, mismatch):
  held, _ = judge(rows, mismatch)
  assert [key for key, value in held.items() if not value] == [name]


def recipe(**changes) -> config.RLConfig:
  base = lambda folder: tiny.addition_model(folder, steps=2, batch=8)
  return config.RLConfig(
    **{"model": base, "steps": 2, "prompts": 2, "samples": 4, "sequences_per_row": 8, "aqn": None,
       "remat": False, "sampling": sampling.SamplingConfig(max_new_tokens=4), "save_every": 1,
       "lora": lora.LoRAConfig(rank=2), **changes}
  )  # fmt: skip


@pytest.mark.slow
def test_a_comparison_from_end_to_end(tmp_path):
  quantize = lambda kind: lambda params: quantizer.quantize(params, kind)
  two = [arms.Arm(kind, recipe(), quantize(kind)) for kind in ("bf16", "nvfp4")]
  data = config.RLData(
    train=addition.reversed_addition(8),
    test=addition.reversed_addition(5, "test"),
    rewards=(rewards.exact_match,),
  )
  comparison = arms.ArmsConfig(two, seeds=1, sigmas=(0.0, 0.1))

  def run():
    with signals.Interrupt() as stop:
      return arms.run(comparison, data, workdir=tmp_path, seed=7, config_text="", stop=stop)

  result = run()
  assert [(row["arm"], row["seed"]) for row in result["rows"]] == [("bf16", 7), ("nvfp4", 7)]
  assert result["bytes_are_4p5_bits"] and result["criteria"] == 4
  steps = metrics.read(tmp_path / "nvfp4" / "7")
  assert [s["step"] for s in steps] == [1, 2]
  row = result["rows"][1]
  assert row["entropy_start"] == steps[0]["entropy_rollout"]
  assert row["reward_run"] == (steps[0]["reward"] + steps[1]["reward"]) / 2
  clean, noisy = (point["abs_dlogp"] for point in result["mismatch"])
  assert clean < 1e-5 < noisy
  report = (tmp_path / "report.md").read_text()
  assert "| nvfp4" in report and "accuracy is kept" in report
  assert {p.name for p in (tmp_path / "plots").iterdir()} == {
    "arms_entropy.png", "arms_reward.png"
  }  # fmt: skip
  base = tmp_path / "base"
  assert orbax.is_checkpoint(base / "params") and (base / "tokenizer.json").exists()
  kept = (tmp_path / "nvfp4" / "7" / "figures.json").stat().st_mtime_ns
  again = run()  # finished runs are read, not repeated
  assert json.dumps(again) == json.dumps(result)
  assert (tmp_path / "nvfp4" / "7" / "figures.json").stat().st_mtime_ns == kept


def test_the_base_is_a_function_of_its_settings_and_survives_a_cut(tmp_path):
  def weights(folder, **kw):
    params, _ = orbax.load_params(tiny.addition_model(folder, batch=8, **kw) + "/params")
    return params["layers"]["q"]["kernel"]

  whole = weights(tmp_path / "a", steps=3)
  assert jnp.array_equal(weights(tmp_path / "b", steps=3), whole)
  assert not jnp.array_equal(weights(tmp_path / "c", steps=3, seed=1), whole)


def test_errors():
  two = [arms.Arm(name, recipe(), quantizer.quantize) for name in ("bf16", "bf16")]
  with pytest.raises(ValueError, match="names must differ and hold baseline and quantized"):
    arms.ArmsConfig(two)
