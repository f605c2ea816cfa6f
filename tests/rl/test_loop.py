"""The loop, assembled: what trains, what does not, and rounds without anything to learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.decode import sampling
from jaxlab.nn import weights
from jaxlab.rl import config as rl_config
from jaxlab.rl import loop
from jaxlab.train import metrics
from tests.rl import tiny
from tests.train import tiny as tiny_train


@pytest.fixture(scope="module")
def trained(packed_lm, tmp_path_factory):
  """(trainer, its parameters after the run, workdir) of a few steps that reward even digits."""
  workdir = tmp_path_factory.mktemp("loop")
  trainer = tiny.trainer(
    packed_lm, steps=16, prompts=8, aqn=None, meter_every=8, mask_truncated=False
  )
  return trainer, trainer.run(workdir), workdir


def buffers(tree) -> list[int]:
  return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


# --- what trains


def test_training_raises_the_reward(trained):
  _, _, workdir = trained
  rewards = [line["reward"] for line in metrics.read(workdir)]
  assert len(rewards) == 16
  assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.5


def test_a_line_of_metrics_has_all_that_a_run_is_judged_by(trained):
  _, _, workdir = trained
  lines = metrics.read(workdir)
  names = {
    "reward", "reward/even", "entropy", "entropy_rollout", "clip_low", "clip_high", "zero_variance",
    "truncated", "length", "aqn/sigma", "mismatch/abs_dlogp", "mismatch/ess", "loss", "grad_norm",
    "rollout_seconds", "rollout_tokens", "rows",
  }  # fmt: skip
  assert names <= lines[0].keys()
  assert [line["step"] for line in lines if "meter/total" in line] == [1, 9]
  assert all(line["mismatch/abs_dlogp"] < 1e-5 for line in lines)  # no noise, one policy
  assert all(line["ratio"] == 1 for line in lines)


def test_the_base_is_shared_and_never_written(packed_lm, trained):
  """One copy of the packed arrays serves the model, the trainer and every update."""
  trainer, params, _ = trained
  base = [w for w in jax.tree.leaves(packed_lm.params, is_leaf=weights.is_packed)
          if weights.is_packed(w)]  # fmt: skip
  after = [w.base for w in jax.tree.leaves(params, is_leaf=weights.is_leaf)
           if isinstance(w, weights.LoRA)]  # fmt: skip
  assert buffers(base) == buffers(after)
  assert set(buffers(base)) <= set(buffers(trainer.frozen))
  assert buffers(params["embed"]) == buffers(packed_lm.params["embed"])


def test_the_first_update_moves_b_and_the_norms_but_not_a(packed_lm):
  """O11: B is 0 at the start, so A has a gradient of exactly 0, and B has not."""
  trainer = tiny.trainer(packed_lm, aqn=None, prompts=8, steps=16, meter_every=8)
  work = trainer.source(0, trainer.state)
  before = {path: np.asarray(x) for path, x in trainer.state.trainable.items()}
  state, _ = trainer.train_step(trainer.state, trainer.frozen, work.batches[0], trainer.key)
  kinds = {"a": 0, "b": 0, "norm": 0}
  for path, x in state.trainable.items():
    assert x.dtype == jnp.float32
    moved = (np.asarray(x) != before[path]).mean()
    kind = path.rsplit("/", 1)[1] if "kernel" in path else "norm"
    kinds[kind] += 1
    assert moved == 0 if kind == "a" else moved > 0.9, path
  assert kinds == {"a": 7, "b": 7, "norm": 2}


# --- rounds of other sizes


def test_a_run_goes_on_when_a_rollout_teaches_nothing(packed_lm, workdir):
  trainer = tiny.trainer(packed_lm, reward=tiny.constant, drop_equal_groups=True)
  before = jax.tree.map(np.asarray, trainer.state.trainable)
  params = trainer.run(workdir)
  lines = metrics.read(workdir)
  assert [line["step"] for line in lines] == [1, 2, 3, 4]
  assert all("loss" not in line and line["groups_used"] == 0 for line in lines)
  assert tiny_train.same_bits(weights.partition(params, before.__contains__)[0], before)


def test_minibatches_and_iterations_are_updates(packed_lm, workdir):
  trainer = tiny.trainer(packed_lm, iterations=2, minibatches=2, steps=2, aqn=None)
  assert trainer.config.updates == 8
  steps = []
  trainer.run(workdir, on_round=lambda done, state, values: steps.append(int(state.step)))
  assert steps == [4, 8]
  lines = metrics.read(workdir)
  assert all(line["ratio"] != 1 for line in lines)  # later updates see another policy than before


# --- what is refused


def test_another_runs_workdir_is_refused(packed_lm, trained):
  _, _, workdir = trained
  data = rl_config.RLData(train=tiny.items(9), rewards=(tiny.even_digits,))
  other = loop.prepare(packed_lm, data, tiny.config(steps=16, aqn=None), 0)
  with pytest.raises(ValueError, match="a workdir belongs to one run.*items"):
    other.run(workdir)
  seeded = tiny.trainer(packed_lm, steps=16, aqn=None, seed=1)
  with pytest.raises(ValueError, match="a workdir belongs to one run.*key"):
    seeded.run(workdir)


def test_settings_that_contradict_each_other(lm):
  hot = tiny.config(sampling=sampling.SamplingConfig(max_new_tokens=6, temperature=0.7))
  data = rl_config.RLData(train=tiny.items(), rewards=(tiny.even_digits,))
  with pytest.raises(ValueError, match="temperature must be the rollout's; got 1.0 and 0.7"):
    loop.prepare(lm, data, hot, 0)
  stops = tiny.config(sampling=sampling.SamplingConfig(max_new_tokens=6, stop_strings=("a",)))
  with pytest.raises(ValueError, match="end ids only.*; got .*stop.strings.*'a'"):
    loop.prepare(lm, data, stops, 0)
  with pytest.raises(ValueError, match="has no tokenizer.json"):
    loop.prepare(dataclasses.replace(lm, tokenizer=None), data, tiny.config(), 0)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"samples": 1}, "a group needs at least 2 answers to compare; got 1"),
    ({"prompts": 0}, "RLConfig.prompts: must be at least 1; got 0"),
    ({"advantage": "rank"}, "must be one of group, batch, none, rloo; got 'rank'"),
    ({"max_rollouts": 3}, "needs max_groups and drop_equal_groups; got None and False"),
  ],
)
def test_errors_name_field_value_and_rule(change, message):
  with pytest.raises(ValueError) as error:
    dataclasses.replace(tiny.CONFIG_RL, **change)
  assert message in str(error.value)
