"""A round of RL on a mesh of eight (virtual) devices is the one on a single device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.decode import autoregressive
from jaxlab.parallel import mesh as meshes
from jaxlab.rl import base, loop, rollout
from jaxlab.rl import config as rl_config
from jaxlab.train import flight_recorder
from launch import common, rl
from pallas_kernels import target
from tests.rl import killed, tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

# All four axes; the last one splits four query heads and leaves the two KV heads whole.
MESHES = [
  meshes.MeshConfig(data=2, fsdp=2, tensor=2),
  meshes.MeshConfig(fsdp=2, sequence=4),
  meshes.MeshConfig(tensor=4, sequence=2),
]
# A second minibatch needs the log-probabilities of the policy before the first.
CHANGES = {"minibatches": 2, "mask_truncated": False, "micro_rows": 4}


@dataclasses.dataclass(frozen=True)
class Round:
  """One step of a run, on the host."""

  tokens: list[tuple[int, ...]]
  logp: np.ndarray
  logp_old: np.ndarray
  metrics: dict[str, float]  # of the rollout and the first update
  gradient: dict[str, np.ndarray]
  trained: dict[str, np.ndarray]
  programs: list[int]  # compiled in a second round: of prefill, decode, score and the update


def one_round(trainer: loop.Trainer) -> Round:
  compiled = lambda: np.asarray(
    [
      autoregressive.prefill._cache_size(),
      autoregressive.decode._cache_size(),
      rollout.score_step._cache_size(),
      trainer.train_step._cache_size(),
    ]
  )
  work = trainer.source(0, trainer.state)
  answers = [answer for group in trainer.source.seen for answer in group.answers]
  state, metrics = trainer.train_step(trainer.state, trainer.frozen, work.batches[0], trainer.key)
  trained, moment = jax.device_get((state.trainable, optax.tree.get(state.opt_state, "mu")))
  before = compiled()
  again = trainer.source(1, state)
  trainer.train_step(state, trainer.frozen, again.batches[0], trainer.key)
  ours = {k: v for k, v in work.metrics.items() if "seconds" not in k}
  return Round(
    [answer.response.token_ids for answer in answers],
    np.concatenate([answer.logp for answer in answers]),
    np.asarray(work.batches[1].logp_old_RQT),
    ours | {name: float(x) for name, x in metrics.items()},
    moment, trained, (compiled() - before).tolist(),
  )  # fmt: skip


@pytest.fixture(scope="module")
def alone(packed_lm):
  return one_round(tiny.trainer(packed_lm, **CHANGES))


@pytest.mark.parametrize(
  "mesh", [MESHES[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[1:])], ids=str
)
def test_a_round_is_that_of_one_device(packed_lm, alone, mesh):
  trainer = tiny.trainer(packed_lm, mesh=mesh, **CHANGES)
  for path, x in trainer.state.trainable.items():  # the optimiser's moments are where they belong
    moments = optax.tree.get(trainer.state.opt_state, "mu")
    assert moments[path].sharding == x.sharding, path
  found = one_round(trainer)
  assert found.tokens == alone.tokens
  np.testing.assert_allclose(found.logp, alone.logp, atol=1e-5)
  np.testing.assert_allclose(found.logp_old, alone.logp_old, atol=1e-5)
  for name, value in alone.metrics.items():
    assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
  for path, gradient in alone.gradient.items():
    size = np.abs(gradient).max()
    np.testing.assert_allclose(found.gradient[path], gradient, atol=5e-5 * size, err_msg=path)
    # Adam's first step is nearly lr * sign(gradient): entries next to 0 are left out.
    clear = np.abs(gradient) > 1e-2 * size
    np.testing.assert_allclose(
      found.trained[path][clear], alone.trained[path][clear], atol=1e-4, err_msg=path
    )
  assert found.programs == alone.programs == [0, 0, 0, 0]


def test_the_base_is_spread_and_rollouts_keep_it_so(packed_lm):
  trainer = tiny.trainer(packed_lm, mesh=MESHES[0], **CHANGES)
  parts = lambda x: {shard.data.size for shard in x.addressable_shards}
  q = trainer.frozen["layers"]["q"]["kernel"].base
  assert parts(q.codes) == {q.codes.size // 4} and parts(q.scale) == {q.scale.size // 4}
  served = trainer.source.serving.params(trainer.state.trainable)
  layer = served["layers"][0]["down"]["kernel"]
  kernel = jax.tree.leaves(layer.base)[0]  # codes where native code multiplies, else unpacked
  assert parts(kernel) == {kernel.size // 4}
  assert parts(layer.a) == {layer.a.size // 2} == parts(layer.b)
  assert parts(served["embed"]) == {served["embed"].size // 4}


def test_a_kept_update_is_replayed_on_the_mesh(packed_lm, workdir):
  trainer = tiny.trainer(packed_lm, mesh=MESHES[0], **CHANGES)
  batch = trainer.source(0, trainer.state).batches[0]
  recorder = flight_recorder.FlightRecorder(workdir, "")
  folder = recorder.record("bad step", 1, trainer.state, batch, trainer.key)
  _, replayed = flight_recorder.replay(
    folder, trainer.train_step, trainer.frozen, trainer.optimizer, trainer.place
  )
  _, metrics = trainer.train_step(trainer.state, trainer.frozen, batch, trainer.key)
  assert replayed["loss"] == float(metrics["loss"])
  assert trainer.train_step._cache_size() == 1


# --- memory


def test_the_budget_is_one_devices():
  config = tiny.config(prompts=16, samples=8, micro_rows=32)
  whole = base.work(config, "nvfp4")
  with target.use_target("h100"):
    spread = dataclasses.replace(config, mesh=meshes.MeshConfig(data=2, fsdp=2, sequence=2))
    part = base.work(spread, "nvfp4")
  assert (part.rollout_sequences, part.train_sequences) == (128 / 4, 32 / 4)
  assert part.train_tokens == whole.train_tokens / 2
  assert (part.kernel_shards, part.head_shards) == (2, 1)
  on_cpu = base.work(spread, "nvfp4")  # virtual devices share one memory
  assert on_cpu == whole


# --- what is refused


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"mesh": meshes.MeshConfig(data=3)}, "it must multiply to the number.*data=3.*and 8 devices"),
    (
      {"mesh": meshes.MeshConfig(data=8), "prompts": 3},
      r"prompts \* samples must be a multiple of data \* fsdp; got 12 over 8 in .*data=8",
    ),
    ({"mesh": meshes.MeshConfig(data=8), "micro_rows": 4}, "micro_rows must be .*; got 4 over 8"),
    ({"mesh": meshes.MeshConfig(tensor=8)}, "heads must be a multiple of tensor; got 4 over 8"),
  ],
)
def test_a_mesh_that_does_not_fit(packed_lm, changes, message):
  with pytest.raises(ValueError, match=message):
    tiny.trainer(packed_lm, **changes)


def test_a_mesh_that_would_split_a_block(packed_lm):
  thin = dataclasses.replace(
    packed_lm.params["layers"]["o"]["kernel"],
    codes=jnp.zeros((2, 64, 24), jnp.uint8),
    scale=jnp.zeros((2, 64, 3), jnp.float8_e4m3fn),
  )
  layers = packed_lm.params["layers"] | {"o": {"kernel": thin}}
  lm = dataclasses.replace(packed_lm, params=packed_lm.params | {"layers": layers})
  with pytest.raises(ValueError, match="layers/o/kernel: .* blocks of 16; got in = 48 over tensor"):
    base.on_mesh(lm, meshes.MeshConfig(data=2, fsdp=2, tensor=2))


def test_the_launcher_says_so_in_one_line(model_folder, tmp_path, capfd):
  recipe = killed.gin(tmp_path, model_folder)
  words = [
    "rl", f"--gin_file={recipe}", f"--workdir={tmp_path / 'run'}",
    "--gin_bindings=RLConfig.mesh = @MeshConfig()", "--gin_bindings=MeshConfig.tensor = 8",
  ]  # fmt: skip
  assert common.execute(rl.main, rl.FLAGS, words) == 2
  error = capfd.readouterr().err.splitlines()[-1]
  assert error.startswith("error: RLConfig.mesh: the model's attention heads must be a multiple")
  assert "got 4 over 8" in error


def test_a_model_made_for_the_run_needs_one_process(monkeypatch, tmp_path):
  config = rl_config.RLConfig(model=lambda folder: str(folder))
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ValueError, match="needs one process; got 2 processes and no .*base"):
    config.model_path(tmp_path)
  (tmp_path / "base").mkdir()
  assert config.model_path(tmp_path) == str(tmp_path / "base")
