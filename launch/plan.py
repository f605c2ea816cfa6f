"""Says whether a recipe fits a device that is not there, and how fast it can be at best.

Compiles the recipe's own programs by the real compilers of TPUs and NVIDIA GPUs (`make aot-venv`);
nothing is allocated, no data is read. Where it does not fit, changes that do are compiled too.
Writes plan.json, plan.md and a plot. Targets: h100x1, h200x1, b200x8, v5e:4x4, v6e:16x16,
v5p:8x8x8, tpu7x:2x2x1, cpu.

python -m launch.plan --gin_file=configs/qerl/qwen2p5_7b_gsm8k.gin --target=h100x1"""

import functools
import json
import os
import pathlib
import re
import resource
import shlex
import sys

import jax
from absl import flags, logging

from jaxlab.parallel import advise, compilers, plan, plan_report, rules, targets
from jaxlab.parallel import mesh as meshes
from launch import common, model, recipes
from pallas_kernels import target as kernels

FLAGS = common.define_flags()
flags.DEFINE_string("target", None, "Devices to plan for: h100x1, v5e:4x4, ...", FLAGS)
flags.DEFINE_string("mesh", None, "Their mesh: data=2,fsdp=4; default the recipe's.", FLAGS)
flags.DEFINE_string("model", None, "The model, for recipes that take it as a flag.", FLAGS)
flags.DEFINE_integer("prompt_tokens", 512, "Prompts, where no recipe says.", 1, flag_values=FLAGS)
flags.DEFINE_bool("search", False, "Tries meshes and micro-batches; ranks what fits.", FLAGS)
flags.DEFINE_integer("budget", 12, "Variants compiled at most.", 1, flag_values=FLAGS)

STARTED_FOR = "JAXLAB_COMPILER"  # set in the process that was started for a platform
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxlab" / "plans"


def main(run: common.Run) -> dict:
  """Plans the recipe, looks for remedies or the best mesh, writes what was found."""
  target = _target(run.flags.target)
  compiles = _start_where_the_compiler_is(target.device.platform)
  devices = targets.devices(target) if compiles else None
  with kernels.use_target(kernels.Target(target.device.platform, target.device.kind)):
    found = recipes.choices(run)
    run.start(resumes=False, reads_all=False)
    sizes = _sizes(run.flags.mesh, found.mesh, target)
    make = functools.partial(_make, target=target, devices=devices)
    made = make(advise.Variant({}, found.recipe, sizes), always=True)
    print(plan_report.summary(made), flush=True)
    remedies, ranked = [], []
    if not made.fits:
      variants = found.smaller(sizes, _mesh(sizes, target, devices))
      remedies = advise.remedies(variants, make, budget=run.flags.budget)
      _print("What would fit:", remedies)
    if run.flags.search:
      variants = list(found.searched(target.count))
      ranked = advise.search(
        variants, make, budget=run.flags.budget, on_done=model.progress("variants")
      )
      _print("The quickest that fit:", ranked[:5])
  return _write(run, found.verb, made, remedies, ranked)


def _target(text: str | None) -> targets.Target:
  if not text:
    raise ValueError(f"--target: must be given; known are {targets.EXAMPLES}. See --help.")
  return targets.parse(text)


def _start_where_the_compiler_is(platform: str) -> bool:
  """Starts this command again in the environment that can compile for `platform`, if it is made.

  Returns: whether this process has the compiler; without, the plan is by lowering and formulas.
  """
  if platform == "cpu" or os.environ.get(STARTED_FOR) == platform:
    return True
  python = compilers.other_python(platform)
  why_not = compilers.missing(platform)
  if why_not is None or python is not None:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # what does not fit is reported by us, once
    environment = os.environ | compilers.environment(platform) | quiet | {STARTED_FOR: platform}
    python = str(python or sys.executable)
    os.execve(python, [python, "-m", "launch.plan", *sys.argv[1:]], environment)
  logging.warning("No compiler for %s: planning by lowering and formulas. %s", platform, why_not)
  return False


def _sizes(
  text: str | None, own: meshes.MeshConfig | None, target: targets.Target
) -> meshes.MeshConfig:
  """The mesh of --mesh, else of the recipe, else all rows apart (`data`)."""
  if text is None:
    config = own or meshes.MeshConfig(data=-1)
  else:
    pairs = [re.fullmatch(r"(\w+)=(-?\d+)", part) for part in text.split(",")]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(sizes) < len(pairs) or not set(sizes) <= set(meshes.AXES):
      raise ValueError(
        f"--mesh: must be like data=2,fsdp=4, of {', '.join(meshes.AXES)}; got {text!r}."
      )
    config = meshes.MeshConfig(**sizes)
  return meshes.MeshConfig(*config.shape(target.count))


def _mesh(sizes: meshes.MeshConfig, target: targets.Target, devices) -> rules.Mesh:
  if devices is not None:
    return meshes.make_mesh(sizes, devices)
  return jax.sharding.AbstractMesh(sizes.shape(target.count), meshes.AXES)


def _make(
  variant: advise.Variant, *, target: targets.Target, devices, always: bool = False
) -> plan.Plan | None:
  """Plans a variant; None for one that its formulas rule out, or that its own checks refuse."""
  mesh = _mesh(variant.mesh, target, devices)
  try:
    recipe = variant.build(mesh)
  except ValueError as error:
    if always:
      raise
    logging.info("%s: %s", advise.describe(variant.changes), error)
    return None
  if not always and advise.hopeless(recipe, target.device.memory_bytes):
    return None
  return plan.make(
    recipe, target, mesh, compiles=devices is not None, cache=CACHE, stops=not always
  )


def _print(title: str, found: list[advise.Found]) -> None:
  print(title if found else f"{title} nothing that was tried.")
  for one in found:
    peak, step = one.plan.peak_bytes / 1e9, one.plan.step_seconds
    print(f"  {advise.describe(one.variant.changes)}: peak {peak:.1f} GB, a step {step:.3g} s")


def _write(run: common.Run, verb: str, made: plan.Plan, remedies, ranked) -> dict:
  """plan.json, plan.md, the plot; returns the figures of result.json."""
  listed = lambda found: [
    {"changes": dict(f.variant.changes), "mesh": dict(f.plan.mesh), "fits": f.plan.fits,
     "peak_bytes": f.plan.peak_bytes, "step_seconds": f.plan.step_seconds}
    for f in found
  ]  # fmt: skip
  command = f"python -m launch.plan {shlex.join(sys.argv[1:])}"
  whole = {"verb": verb, "command": command, **plan_report.as_dict(made)}
  whole |= {"remedies": listed(remedies), "ranking": listed(ranked)}
  whole["planner_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  common.write_atomically(run.workdir / "plan.json", json.dumps(whole, indent=2) + "\n")
  text = plan_report.markdown(made, remedies, ranked, command)
  common.write_atomically(run.workdir / "plan.md", text)
  plan_report.plot(made, run.workdir / "plots" / "memory.png")
  print(f"Wrote {run.workdir / 'plan.md'}.")
  kept = (
    "target", "devices", "fits", "compiled", "peak_bytes", "device_bytes", "step_seconds",
    "planner_bytes",
  )  # fmt: skip
  return {name: whole[name] for name in kept} | {"remedies": whole["remedies"]}


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab plan`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
