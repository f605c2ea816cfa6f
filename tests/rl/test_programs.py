"""The programs of a plan are those of the run: same text, same memory, from shapes alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.decode import autoregressive
from jaxlab.models import causal_lm, presets, zoo
from jaxlab.objectives import policy_gradient
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import plan, rules, targets
from jaxlab.quant import model as quant
from jaxlab.rl import base, batch, config, experiment, loop, programs, rollout
from jaxlab.train import budget
from pallas_kernels import target
from tests.rl import tiny

NVFP4 = functools.partial(quant.quantize, format="nvfp4")
DENSE = functools.partial(quant.quantize, format="bf16")
# Several minibatches and a KL term, so that every program is there and every array of a batch.
CHANGES = {
  "minibatches": 2, "micro_rows": 4, "sequences_per_row": 2,
  "loss": policy_gradient.PolicyGradientConfig(chunk_tokens=64, kl_coef=0.1),
}  # fmt: skip
MESH = meshes.MeshConfig(data=2, fsdp=2, tensor=2)


@dataclasses.dataclass(frozen=True)
class Run:
  """A prepared run, and its programs with the arrays that it calls them with."""

  trainer: loop.Trainer

  @property
  def _placement(self) -> rules.Placement | None:
    return self.trainer.lm.module.placement

  @property
  def sampler(self) -> autoregressive.Sampler:
    return dataclasses.replace(self.trainer.source.sampler, stop_ids=(0,))._programs

  @functools.cached_property
  def policy(self):
    return self.trainer.source.serving.params(self.trainer.state.trainable)

  @functools.cached_property
  def _key_and_noise(self):
    noise = self.trainer.source._noise(0.1, self.trainer.key)
    pair = (self.trainer.key, noise)
    return pair if self._placement is None else rules.replicate(pair, self._placement.mesh)

  @functools.cached_property
  def packed(self) -> batch.PackedBatch:
    """Answers of the full length to prompts of the full length that have nothing in common."""
    c = self.trainer.config
    tokens = c.sampling.max_new_tokens
    samples = [
      batch.Sample([i] * c.max_prompt_tokens, [1] * tokens, np.zeros(tokens), 1.0, True)
      for i in range(c.groups // c.minibatches * c.samples)
    ]
    made = batch.pack(
      samples, per_row=c.sequences_per_row, max_answer=tokens, row_multiple=c.micro_rows or 1
    )
    kl, several = made.logp_rollout_RQT, c.iterations * c.minibatches > 1
    made = dataclasses.replace(
      made, logp_old_RQT=kl if several else None, logp_ref_RQT=kl if c.loss.kl_coef else None
    )
    return made if self._placement is None else rules.shard_rows(made, self._placement.mesh)

  def prefill(self):
    c = self.trainer.config
    prompts = (
      np.ones((c.prompts, 16), np.int32), np.full(c.prompts, 16, np.int32),
      np.arange(c.prompts * c.samples, dtype=np.uint32),
    )  # fmt: skip
    if self._placement is not None:
      prompts = rules.replicate(jax.tree.map(jnp.asarray, prompts), self._placement.mesh)
    args = (self.sampler, self.policy, *prompts, *self._key_and_noise)
    return autoregressive.prefill, args, {"samples": c.samples, "prefix": 0}

  def decode(self):
    program, args, named = self.prefill()
    state = program(*args, **named)
    steps = {"steps": jnp.int32(5), "uniform": False}
    if self._placement is not None:
      steps["steps"] = rules.replicate(steps["steps"], self._placement.mesh)
    return autoregressive.decode, (self.sampler, self.policy, state, *self._key_and_noise), steps

  def train_step(self):
    t = self.trainer
    return t.train_step, (t.state, t.frozen, self.packed, t.key), {}

  def score(self):
    t = self.trainer
    args = (t.source.sampler.module, t.config.loss, t.state.trainable, t.frozen, self.packed)
    return rollout.score_step, args, {"micro_rows": t.config.micro_rows}


def recipe_of(trainer: loop.Trainer, quantize, **more) -> dict[str, plan.Program]:
  mesh = meshes.make_mesh(meshes.MeshConfig(), jax.devices()[:1])
  if trainer.lm.module.placement is not None:
    mesh = trainer.lm.module.placement.mesh
  made = programs.recipe(tiny.CONFIG, trainer.config, quantize, mesh, **more)
  return {program.name: program for program in made.programs}


def lowered(function, args, kwargs) -> jax.stages.Lowered:
  return function.trace(*args, **kwargs).lower()


def memory(function, args, kwargs) -> tuple[int, ...]:
  m = lowered(function, args, kwargs).compile().memory_analysis()
  return (
    m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes
  )  # fmt: skip


def text_on_one_device(function, args, kwargs) -> str:
  """Without the note that an array is on a mesh of size 1."""

  def bare(x):
    known = isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if known else x

  args, kwargs = jax.tree.map(bare, (args, dict(kwargs)))
  return lowered(function, args, kwargs).as_text()


def of(program: plan.Program) -> tuple:
  return program.function, program.args, program.kwargs


# --- the programs


NAMES = {
  "rollout_prefill": "prefill", "rollout_decode": "decode", "train_step": "train_step",
  "score": "score",
}  # fmt: skip


@pytest.fixture(scope="module")
def one(packed_lm):
  trainer = tiny.trainer(packed_lm, **CHANGES)
  return Run(trainer), recipe_of(trainer, NVFP4)


@pytest.mark.parametrize("name", NAMES)
def test_on_one_device_they_are_the_runs_own(one, name):
  run, planned = one
  assert set(planned) == set(NAMES)
  real = getattr(run, NAMES[name])()
  assert text_on_one_device(*of(planned[name])) == text_on_one_device(*real)


def test_the_planned_bytes_are_those_of_the_running_programs(one, quick_compilation):
  run, planned = one
  mesh = meshes.make_mesh(meshes.MeshConfig(), jax.devices()[:1])
  resident = programs.recipe(tiny.CONFIG, run.trainer.config, NVFP4, mesh).resident
  names = ("rollout_decode", "score")
  recipe = plan.Recipe([planned[name] for name in names], resident)
  made = plan.make(recipe, targets.parse("cpu"), mesh, compiles=True)
  for name, found in zip(names, made.programs):
    assert memory(*getattr(run, NAMES[name])()) == (
      found.argument_bytes, found.output_bytes, found.alias_bytes, found.temp_bytes
    )  # fmt: skip
  own = sum(x.nbytes for x in jax.tree.leaves((run.trainer.state, run.trainer.frozen)))
  served = sum(x.nbytes for x in jax.tree.leaves(run.policy))
  reference = sum(x.nbytes for x in jax.tree.leaves(run.trainer.source.reference))
  assert plan.device_bytes(resident) == own + served + reference


@pytest.fixture(scope="module")
def spread(packed_lm):
  trainer = tiny.trainer(packed_lm, mesh=MESH, **CHANGES)
  return Run(trainer), recipe_of(trainer, NVFP4)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_mesh_they_are_the_runs_own_and_live_where_its_arrays_do(spread, name):
  """The text has the place of every argument: the compiler makes the same of it."""
  run, planned = spread
  real = lowered(*getattr(run, NAMES[name])()).as_text()
  assert lowered(*of(planned[name])).as_text() == real
  assert '"data"=2, "fsdp"=2, "tensor"=2' in real


@pytest.mark.parametrize(
  "quantize, changes",
  [
    (NVFP4, {"aqn": None, "micro_rows": None}),
    (DENSE, {"remat": False, "drop_equal_groups": True, "max_groups": 2}),
  ],
)
def test_an_update_without_all_that(lm, quantize, changes):
  """One update of a rollout: no older policy, no reference; other precisions."""
  trainer = tiny.trainer(dataclasses.replace(lm, params=quantize(lm.params)), **changes)
  planned = recipe_of(trainer, quantize)
  assert set(planned) == set(NAMES) - {"score"}
  assert text_on_one_device(*of(planned["train_step"])) == text_on_one_device(
    *Run(trainer).train_step()
  )


def test_how_often_they_run(packed_lm):
  trainer = tiny.trainer(packed_lm, **CHANGES, iterations=3)
  planned = recipe_of(trainer, NVFP4, evaluates=True)
  runs = {name: program.runs for name, program in planned.items()}
  assert planned["rollout_decode"].trips == trainer.config.sampling.max_new_tokens - 1
  assert runs == {
    "rollout_prefill": 1, "rollout_decode": 1, "train_step": 2 * 3,
    "score": 2 + 2,  # of each minibatch the policy before, and the reference
    "evaluation_prefill": 0, "evaluation_decode": 0,
  }  # fmt: skip
  rows = {
    name: planned[f"{name}_decode"].args[2].tokens_NT.shape[0] for name in ("rollout", "evaluation")
  }
  assert rows == {"rollout": 16, "evaluation": experiment.EVAL_ROWS}


def test_an_evaluation_has_whole_rows_of_every_device():
  mesh = jax.sharding.AbstractMesh((2, 2, 2, 1), meshes.AXES)
  with target.use_target("h100"):
    made = programs.recipe(tiny.CONFIG, tiny.config(mesh=MESH), NVFP4, mesh, evaluates=True)
  [found] = [p for p in made.programs if p.name == "evaluation_prefill"]
  assert found.args[2].shape[0] == 52  # 50, and two more for four parts


# --- what needs less


def peaks(settings: config.RLConfig, quantize, architecture) -> tuple[int, int]:
  """Bytes of an update and of a rollout by formula."""
  shapes = zoo.param_shapes(causal_lm.CausalLM(architecture))
  format = base.format_of(jax.eval_shape(quantize, shapes))
  work = base.work(settings, format, 1)
  of = lambda **none: budget.memory_budget(architecture, format, dataclasses.replace(work, **none))
  return of(rollout_sequences=0)["peak"], of(train_sequences=0)["peak"]


def test_what_needs_less_is_valid_and_needs_less():
  architecture = zoo.causal_lm_config(presets.qwen2p5_7b())
  settings = config.RLConfig(prompts=16, samples=8, micro_rows=16, remat=False)
  mesh = jax.sharding.AbstractMesh((1, 1, 1, 1), meshes.AXES)
  found = list(programs.smaller(settings, DENSE, mesh))
  changes = [change for change, _, _ in found]
  assert changes[:10] == [
    {"RLConfig.remat": True}, {"PolicyGradientConfig.chunk_tokens": 1024},
    *({"RLConfig.micro_rows": n} for n in (8, 4, 2, 1)),
    *({"RLConfig.prompts": n} for n in (8, 4, 2)),
    {"RLConfig.prompts": 1, "RLConfig.micro_rows": 8},
  ]  # fmt: skip
  assert changes[10] == {"quantize.format": "nvfp4"}
  assert changes[-1] == {
    "RLConfig.prompts": 1, "RLConfig.micro_rows": 1, "RLConfig.remat": True,
    "PolicyGradientConfig.chunk_tokens": 1024, "quantize.format": "nvfp4",
  }  # fmt: skip
  with target.use_target("h100"):
    before = peaks(settings, DENSE, architecture)
    after = [peaks(smaller, quantize, architecture) for _, smaller, quantize in found]
  for change, now in zip(changes, after):
    assert all(a <= b for a, b in zip(now, before)), change
    # What is saved by computing again, the formulas have already.
    assert now < before or set(change) == {"RLConfig.remat"}, change
  assert min(after) == after[-1] and min(a[1] for a in after) == after[-1][1]
  for change, smaller, _ in found:
    rows = programs.packed_rows(smaller)
    assert smaller.micro_rows <= rows and rows % smaller.micro_rows == 0
    named = {f"RLConfig.{f}": getattr(smaller, f) for f in ("remat", "micro_rows", "prompts")}
    given = {f"RLConfig.{f}": getattr(settings, f) for f in ("remat", "micro_rows", "prompts")}
    assert {k: v for k, v in named.items() if v != given[k]} == {
      k: v for k, v in change.items() if k in given
    }  # what the user is told is all that was changed


def test_packed_rows_are_halved_in_whole_rows_of_every_device():
  """256 answers, 24 to a row, are eleven rows: twelve on four devices, then 4 at a time."""
  settings = config.RLConfig(prompts=32, samples=8, sequences_per_row=24)
  assert programs.packed_rows(settings) == 11
  mesh = jax.sharding.AbstractMesh((2, 2, 1, 1), meshes.AXES)
  assert programs.packed_rows(settings, 4) == 12
  found = [change for change, _, _ in programs.smaller(settings, DENSE, mesh)]
  micro = [c["RLConfig.micro_rows"] for c in found if set(c) == {"RLConfig.micro_rows"}]
  assert micro == []  # 12 / 2 = 6 are no whole rows of four devices
  two = jax.sharding.AbstractMesh((2, 1, 1, 1), meshes.AXES)
  found = [change for change, _, _ in programs.smaller(settings, DENSE, two)]
  assert {"RLConfig.micro_rows": 6} in found


# --- what is refused


@pytest.mark.parametrize(
  "sizes, message",
  [
    ((1, 8, 1, 1), "layers/.*blocks of 16; got in = 64 over fsdp = 8"),
    ((1, 1, 8, 1), "attention heads must be a multiple of tensor; got 4 over 8"),
    ((8, 1, 1, 1), r"RLConfig.micro_rows must be a multiple of data \* fsdp; got 4 over 8"),
  ],
)
def test_a_mesh_that_does_not_divide(sizes, message):
  settings = tiny.config(mesh=meshes.MeshConfig(*sizes), micro_rows=4 if sizes[0] > 1 else None)
  mesh = jax.sharding.AbstractMesh(sizes, meshes.AXES)
  with target.use_target("h100"), pytest.raises(ValueError, match=message):
    programs.recipe(tiny.CONFIG, settings, NVFP4, mesh)


def test_an_architecture_that_we_do_not_have():
  mesh = jax.sharding.AbstractMesh((1, 1, 1, 1), meshes.AXES)
  with pytest.raises(ValueError, match="'gpt2' is not supported"):
    programs.recipe({"model_type": "gpt2"}, tiny.config(), NVFP4, mesh)
