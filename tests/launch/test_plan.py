"""`launch.plan`: what it writes, what it finds where nothing fits, and a user's mistakes."""

import dataclasses
import json
import pathlib
import sys

import jax
import pytest

from jaxlab.parallel import advise, compilers, plan, targets
from jaxlab.parallel import mesh as meshes
from launch import common, recipes, registry
from launch import plan as verb
from pallas_kernels.fp4_gemm import cpu
from tests.launch import small_train, verbs
from tests.rl import killed, tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

RECIPE_7B = "configs/qerl/qwen2p5_7b_gsm8k.gin"  # its model and its data are not here


ON_CPU = "xla" if cpu.why_no_library() else "cpu"
BATCH = ("--gin_bindings=AccuracyConfig.batch_size = 4",)
DECODES = {"recipe": "greedy.gin"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Small recipes, and of a model its config alone: no weight is read."""
  made = tmp_path_factory.mktemp("plan")
  (made / "tiny").mkdir()
  (made / "tiny" / "config.json").write_text(json.dumps(tiny.CONFIG | {"num_hidden_layers": 1}))
  recipe = killed.gin(made, made / "tiny")
  more = (
    "RLConfig.loss = @PolicyGradientConfig()", "PolicyGradientConfig.chunk_tokens = 64",
    "RLConfig.aqn = None",
  )  # fmt: skip
  recipe.write_text("\n".join([recipe.read_text(), *more]))
  (made / "greedy.gin").write_text("SamplingConfig.max_new_tokens = 8\n")
  return made


@pytest.fixture
def run(folder, capsys, monkeypatch, workdir):
  """Plans the small recipe, or the one that the words name, on this machine's devices."""
  monkeypatch.setattr(verb, "CACHE", folder / "cache")
  monkeypatch.setattr(sys, "argv", ["plan"])

  def run(*words: str, target: str | None = "cpu", recipe: str = "killed.gin") -> verbs.Done:
    there = [f"--gin_file={folder / recipe}", f"--workdir={workdir}"]
    named = [f"--target={target}"] if target is not None else []
    return verbs.call("plan", [*there, *named, *words], capsys)

  return run


def written(workdir: pathlib.Path) -> dict:
  return json.loads((workdir / "plan.json").read_text())


def programs(workdir: pathlib.Path) -> dict[str, dict]:
  return {program["name"]: program for program in written(workdir)["programs"]}


@pytest.fixture
def no_compiler(monkeypatch):
  """As on a machine without `make aot-venv`."""
  monkeypatch.delenv(verb.STARTED_FOR, raising=False)
  monkeypatch.setattr(compilers, "missing", lambda platform: f"Get the one for {platform}.")
  monkeypatch.setattr(compilers, "other_python", lambda platform: None)
  monkeypatch.setattr("os.execve", lambda *args: pytest.fail("started another process"))


def device_of(monkeypatch, memory_bytes: int) -> None:
  """Makes the machine smaller."""
  device = dataclasses.replace(targets.KNOWN["cpu"], memory_bytes=memory_bytes)
  parse = lambda text: targets.Target(text, device, "", 1)
  monkeypatch.setattr(targets, "parse", parse)


def a_run(workdir: pathlib.Path) -> common.Run:
  return common.Run("plan", verb.FLAGS(["plan", f"--workdir={workdir}"]) and verb.FLAGS, [])


# --- a plan


def test_what_a_plan_says(run, workdir):
  done = run()
  assert done.code == 0, done.err
  whole = written(workdir)
  assert whole["verb"] == "rl" and whole["target"] == "cpu" and whole["devices"] == 1
  assert whole["fits"] is True and whole["compiled"] is True and whole["remedies"] == []
  assert whole["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
  assert whole["device_bytes"] == targets.parse("cpu").device.memory_bytes
  assert whole["implementations"] == {"fp4_matmul": ON_CPU}
  found = programs(workdir)
  assert list(found) == ["rollout_prefill", "rollout_decode", "train_step"]
  assert whole["peak_bytes"] == max(p["peak_bytes"] for p in found.values())
  for program in found.values():
    own = program["argument_bytes"] + program["output_bytes"] - program["alias_bytes"]
    own += program["temp_bytes"] + program["code_bytes"]
    assert program["peak_bytes"] == own + program["resident_bytes"]
    assert program["flops"]["float32"] > 0 and program["traffic_bytes"] > program["argument_bytes"]
    assert program["seconds"] == max(
      program[f"{part}_seconds"] for part in ("compute", "memory", "network")
    )
    assert program["bound"] in ("compute", "hbm") and program["buffers"][0]["bytes"] > 0
    assert program["collective_bytes"] == {}
  assert found["train_step"]["formula_bytes"] > 0
  step = sum(p["seconds"] * p["runs"] for p in found.values())
  assert whole["step_seconds"] == pytest.approx(step)
  text = (workdir / "plan.md").read_text()
  for part in (
    "## Memory",
    "## Time",
    "## Largest buffers",
    "| train_step |",
    f"fp4_matmul: {ON_CPU}",
  ):
    assert part in text
  assert "## What would fit" not in text and "## Search" not in text
  assert (workdir / "plots" / "memory.png").stat().st_size > 1000
  result = verbs.result(workdir)
  assert {k: result[k] for k in ("fits", "peak_bytes", "target")} == {
    k: whole[k] for k in ("fits", "peak_bytes", "target")
  }
  assert "fits. Peak" in done.out and "A step takes at least" in done.out


def test_what_does_not_fit_is_an_answer_with_what_would(run, workdir, monkeypatch):
  assert run().code == 0
  whole = programs(workdir)
  # Half of the rows at a time: the next that is tried, after remat and a chunk that are there.
  device_of(monkeypatch, int(0.97 * whole["train_step"]["peak_bytes"] / plan.FITS))
  done = run("--budget=1")
  assert done.code == 0, done.err
  found = written(workdir)
  assert all(program["cached"] for program in found["programs"])  # they are the same programs
  assert found["fits"] is False and "does not fit" in done.out
  assert found["peak_bytes"] > plan.FITS * found["device_bytes"]
  [remedy] = found["remedies"]
  assert remedy["changes"] == {"RLConfig.micro_rows": 2}
  assert remedy["fits"] and remedy["peak_bytes"] <= plan.FITS * found["device_bytes"]
  assert "What would fit:" in done.out and "RLConfig.micro_rows = 2: peak" in done.out
  assert "## What would fit" in (workdir / "plan.md").read_text()
  assert verbs.result(workdir)["remedies"] == found["remedies"]


def test_nothing_fits_a_thimble(run, folder, workdir, monkeypatch):
  device_of(monkeypatch, 1000)
  monkeypatch.setattr(advise, "hopeless", lambda recipe, memory: True)  # so that none is compiled
  done = run(f"--model={folder / 'tiny'}", "--prompt_tokens=20", *BATCH, **DECODES)
  assert done.code == 0 and "What would fit: nothing that was tried." in done.out
  assert written(workdir)["fits"] is False and written(workdir)["remedies"] == []
  assert "Nothing that was tried fits." in (workdir / "plan.md").read_text()


# --- meshes


def test_a_mesh_of_the_devices_and_a_search_for_another(run, folder, workdir):
  words = (f"--model={folder / 'tiny'}", "--prompt_tokens=20", *BATCH)
  done = run(*words, "--mesh=tensor=2,data=-1", "--search", "--budget=1", **DECODES, target="cpux4")
  assert done.code == 0, done.err
  whole = written(workdir)
  assert whole["mesh"] == {"data": 2, "fsdp": 1, "tensor": 2, "sequence": 1}
  assert programs(workdir)["generate_decode"]["collective_bytes"]["all-reduce"] > 0
  [found] = whole["ranking"]  # the first that is tried: rows over all devices
  assert found["changes"] == {"MeshConfig.data": 4} and found["fits"]
  assert "## Search" in (workdir / "plan.md").read_text()
  assert "The quickest that fit:" in done.out


@pytest.mark.parametrize(
  "words, target, message",
  [
    ((), None, ["--target: must be given", "h100x1", "v5p:8x8x8"]),
    ((), "h10x1", ["must be one of h100, h200, b200", "got 'h10x1'", "Did you mean h100?"]),
    ((), "v5e:3x4", ["2x2 chips", "Use v5e:4x4"]),
    ((), "cpux99", ["no more devices than this process", "device_count=99"]),
    (("--mesh=fsdp",), "cpux8", ["--mesh: must be like data=2,fsdp=4", "got 'fsdp'"]),
    (("--mesh=rows=8",), "cpux8", ["of data, fsdp, tensor, sequence; got 'rows=8'"]),
    (("--mesh=data=2;fsdp=4",), "cpux8", ["--mesh: must be like", "got 'data=2;fsdp=4'"]),
    (("--mesh=data=2,data=4",), "cpux8", ["--mesh: must be like", "got 'data=2,data=4'"]),
    (("--mesh=fsdp=0,data=8",), "cpux8", ["sizes must be at least 1"]),
    (("--mesh=data=3",), "cpux8", ["must multiply to the number of devices", "8 devices"]),
    (("--mesh=data=-1,fsdp=3",), "cpux8", ["its fixed axes must divide"]),
    (("--mesh=tensor=8",), "cpux8", ["attention heads must be a multiple of tensor", "4 over 8"]),
    (
      ("--mesh=fsdp=8",), "cpux8",
      ["layers/", "kernel", "whole nvfp4 blocks of 16", "in = 64 over fsdp = 8"],
    ),
    (("--budget=0",), "cpu", ["budget"]),
    (("--gin_bindings=RLConfig.model = 'no/such'",), "cpu", ["'no/such' does not exist", "demo"]),
    (("--gin_bindings=RLConfig.promts = 3",), "cpu", ["Did you mean prompts?"]),
    (("--gin_bindings=quantize.format = 'nvfp5'",), "cpu", ["unknown format", "nvfp5"]),
  ],
)  # fmt: skip
def test_a_users_mistake_is_one_line(run, workdir, words, target, message):
  error = run(*words, target=target).error
  assert all(part in error for part in message), error
  assert not (workdir / "plan.json").exists()


# --- other recipes


def test_a_model_that_decodes(run, folder, workdir):
  assert "--model: must be given" in run(*BATCH, **DECODES).error
  assert "'no/such' does not exist" in run(*BATCH, "--model=no/such", **DECODES).error
  words = (f"--model={folder / 'tiny'}", "--prompt_tokens=20", *BATCH)
  assert run(*words, **DECODES).code == 0
  whole, found = written(workdir), programs(workdir)
  assert whole["verb"] == "generate" and list(found) == ["generate_prefill", "generate_decode"]
  assert found["generate_decode"]["runs"] == 1
  caches = 2 * 4 * 2 * (32 + 8 - 1) * 16 * 4  # k and v, rows, KV heads, slots, head, float32
  assert found["generate_prefill"]["output_bytes"] >= caches


def test_training(run, folder, workdir, no_compiler):
  small_train.gin(folder)
  (folder / "text.txt").unlink()  # data are not read
  words = ("--gin_bindings=TrainConfig.remat = False", "--mesh=fsdp=4")
  assert run(*words, recipe="small.gin", target="h100x4").code == 0
  assert written(workdir)["verb"] == "train" and list(programs(workdir)) == ["train_step"]
  error = run("--mesh=data=3", recipe="small.gin", target="h100x3").error
  assert "TrainConfig.rows: must be a multiple of the mesh's data * fsdp = 3; got 8" in error


def test_what_a_training_could_do_without(folder, workdir):
  small_train.gin(folder)
  bindings = ["TrainConfig.remat = False", f"TrainConfig.model = '{folder / 'tiny'}'"]
  registry.parse([str(folder / "small.gin")], bindings)
  found = recipes.choices(a_run(workdir))
  sizes = meshes.MeshConfig(data=2, fsdp=2)
  mesh = jax.sharding.AbstractMesh((2, 2, 1, 1), meshes.AXES)
  on = {"MeshConfig.data": 2, "MeshConfig.fsdp": 2}
  variants = list(found.smaller(sizes, mesh))
  assert [v.changes for v in variants] == [
    {"TrainConfig.remat": True, **on}, {"TrainConfig.micro_rows": 4, **on},
    {"MeshConfig.fsdp": 4}, {"TrainConfig.micro_rows": 4, "MeshConfig.fsdp": 4},
  ]  # fmt: skip
  assert variants[2].mesh == meshes.MeshConfig(fsdp=4)
  searched = [(v.changes["TrainConfig.micro_rows"], v.mesh) for v in found.searched(2)]
  on_two = [meshes.MeshConfig(**{axis: 2}) for axis in ("data", "fsdp", "tensor")]
  assert searched == [(rows, mesh) for mesh in on_two for rows in (8, 4)]


def test_a_model_that_the_run_would_train_first_is_not_trained(workdir):
  registry.parse(["configs/qerl/tiny_cpu.gin"], [])
  config = registry.get("RLConfig")()
  found = recipes._rl_model(config, a_run(workdir))
  assert found["hidden_size"] == 64 and not workdir.exists()


# --- without a compiler


def test_without_a_compiler_it_plans_by_formulas_and_says_so(run, workdir, no_compiler):
  done = run("--mesh=data=-1", target="v5e:2x2")
  assert done.code == 0, done.err
  assert "No compiler for tpu" in done.err and "Get the one for tpu." in done.err
  whole = written(workdir)
  assert (whole["compiled"], whole["fits"]) == (False, True)
  assert whole["implementations"] == {"fp4_matmul": "mosaic_tpu"}
  assert "by formula: no compiler here" in done.out
  assert all(p["flops"]["bfloat16"] > 0 for p in whole["programs"])


def test_a_recipe_without_its_files_is_planned(capsys, workdir, no_compiler, monkeypatch, tmp_path):
  """Neither the model nor the parquet files of it are here; the sizes are its preset's."""
  monkeypatch.chdir(tmp_path)
  words = [f"--gin_file={RECIPE_7B}", f"--workdir={workdir}", "--target=h100x1"]
  done = verbs.call("plan", words, capsys)
  assert done.code == 0, done.err
  assert written(workdir)["fits"] and 20e9 < written(workdir)["peak_bytes"] < 40e9
  assert list(programs(workdir)) == [
    "rollout_prefill", "rollout_decode", "train_step", "evaluation_prefill", "evaluation_decode",
  ]  # fmt: skip


def test_the_compiler_of_another_environment_is_used(run, monkeypatch):
  """The same command in the other Python, with what its compiler wants to find."""
  monkeypatch.delenv(verb.STARTED_FOR, raising=False)
  monkeypatch.setattr(compilers, "other_python", lambda platform: pathlib.Path("/there/python"))
  started = []

  def execve(path, arguments, environment):
    started.append((path, arguments, environment))
    raise SystemExit(0)

  monkeypatch.setattr("os.execve", execve)
  monkeypatch.setattr(sys, "argv", ["plan.py", "--target=v5e:2x2", "--search"])
  assert run(target="v5e:2x2").code == 0
  [(path, arguments, environment)] = started
  assert path == "/there/python"
  assert arguments == [path, "-m", "launch.plan", "--target=v5e:2x2", "--search"]
  assert environment[verb.STARTED_FOR] == "tpu" and environment["JAX_PLATFORMS"] == "cpu"
  monkeypatch.setenv(verb.STARTED_FOR, "tpu")  # which does not start itself again
  assert verb._start_where_the_compiler_is("tpu") and len(started) == 1
