"""What every verb shares, tried with a verb made up here: exit codes, errors, workdir, signals."""

import dataclasses
import json
import os
import signal
import sys
import textwrap

import numpy as np
import pytest
from absl import flags, logging

import launch
from jaxlab.train import signals
from launch import __main__ as jaxlab_command
from launch import common, registry

CANARY = "hf_canaryCanary1234"


@dataclasses.dataclass(frozen=True)
class Toy:
  steps: int = 3
  name: str = "toy"


registry.register(Toy)


def write_figure(run):
  toy = registry.get("Toy")()
  run.start()
  return {"steps": toy.steps, "seed": run.seed}


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
  """Runs a `main` in an empty current folder; gives exit code, stdout, stderr."""
  monkeypatch.chdir(tmp_path)

  def call(main, *words, arguments=""):
    values = common.define_flags()
    flags.DEFINE_bool("fast", False, "A flag of this verb's own.", values)
    code = common.execute(main, values, ["toy", *words], arguments)
    out, err = capsys.readouterr()
    return code, out, err

  verbosity, handlers = logging.get_verbosity(), list(logging.get_absl_logger().root.handlers)
  yield call
  logging.set_verbosity(verbosity)
  logging.get_absl_logger().root.handlers[:] = handlers


def error_line(err: str) -> str:
  """The one error line: no traceback may stand beside it."""
  assert "Traceback" not in err
  lines = [line for line in err.splitlines() if line.startswith("error: ")]
  assert len(lines) == 1, err
  return lines[0]


def in_our_code(source: str):
  """A `main` whose body counts as ours, as if it stood in a file of launch/."""
  path = os.path.join(os.path.dirname(launch.__file__), "toy.py")
  names = {"__name__": __name__}
  exec(compile(f"def main(run):\n{textwrap.indent(source, '  ')}", path, "exec"), names)
  return names["main"]


# --- a run that succeeds


def test_a_run_leaves_its_config_and_its_result(call, workdir):
  words = [f"--workdir={workdir}", "--seed=7", "--gin_bindings=Toy.steps = 5"]
  code, _, err = call(write_figure, *words)
  assert code == 0, err
  config = (workdir / "config.gin").read_text().splitlines()
  assert {"Toy.steps = 5", "Toy.name = 'toy'", "# seed = 7"} <= set(config)
  result = json.loads((workdir / "result.json").read_text())
  assert (result["steps"], result["seed"]) == (5, 7)
  assert result["command"].startswith("python -m launch.test_common --workdir=")
  assert result["versions"]["jax"] and result["seconds"] >= 0
  assert sorted(p.name for p in workdir.iterdir()) == [".lock", "config.gin", "result.json"]


def test_the_written_config_starts_the_same_run(call, workdir, tmp_path):
  assert call(write_figure, f"--workdir={workdir}", "--gin_bindings=Toy.steps = 5")[0] == 0
  copy = tmp_path / "copy"
  words = [f"--workdir={copy}", f"--gin_file={workdir / 'config.gin'}"]
  assert call(write_figure, *words)[0] == 0
  assert (copy / "config.gin").read_text() == (workdir / "config.gin").read_text()


@pytest.mark.parametrize(
  "files, expected",
  [
    ([], "runs/toy"),
    (["configs/demo/qerl.gin"], "runs/demo/qerl"),
    (["/somewhere/configs/qerl/tiny_cpu.gin"], "runs/qerl/tiny_cpu"),
    (["first.gin", "own.gin"], "runs/own"),
  ],
)
def test_the_default_workdir_follows_the_config(files, expected):
  assert common.default_workdir("toy", files) == expected


def test_a_plan_of_a_recipe_has_another_default_than_its_run():
  files = ["configs/qerl/tiny_cpu.gin"]
  assert common.default_workdir("plan", files) == "runs/plan/qerl/tiny_cpu"
  assert common.default_workdir("rl", files) == "runs/qerl/tiny_cpu"


def test_independent_runs_leave_the_workdir_of_another_verb_alone(call, workdir):
  """They may differ among themselves; a plan must not take a training run's config.gin."""

  def plans(run):
    registry.get("Toy")()
    run.start(resumes=False)

  words = [f"--workdir={workdir}", "--gin_bindings=Toy.steps = 5"]
  assert call(plans, *words)[0] == 0
  assert call(plans, f"--workdir={workdir}", "--gin_bindings=Toy.steps = 6")[0] == 0
  config = workdir / "config.gin"
  config.write_text(before := config.read_text().replace("# verb = test_common", "# verb = rl"))
  code, _, err = call(plans, *words)
  assert code == 2 and "holds another run: verb was rl, is test_common" in err
  assert config.read_text() == before


def test_flags_may_follow_arguments(call, workdir):
  seen = []
  code, _, err = call(
    lambda run: seen.extend([*run.arguments, run.flags.fast]),
    "DIR", "--fast", f"--workdir={workdir}", arguments="DIR",
  )  # fmt: skip
  assert code == 0, err
  assert seen == ["DIR", True]


def test_figures_become_plain_json(workdir):
  workdir.mkdir()
  figures = {
    "f32": np.float32(0.5), "many": np.arange(2), "path": workdir, "nan": float("nan"),
    "estimate": {"value": 1.0, "ci_low": -float("inf")},
  }  # fmt: skip
  common.write_result(workdir, figures)
  assert json.loads((workdir / "result.json").read_text()) == {
    "f32": 0.5, "many": [0, 1], "path": str(workdir), "nan": None,
    "estimate": {"value": 1.0, "ci_low": None},
  }  # fmt: skip


# --- a user's mistakes: one line, exit code 2


@pytest.mark.parametrize(
  "words, message",
  [
    (["--gin_fil=x"], "Unknown command line flag 'gin_fil'. Did you mean: gin_file"),
    (["--seed=x"], "flag --seed=x: invalid literal"),
    (["word"], "a flag must start with --; got 'word'."),
    (["--gin_file=none.gin"], "--gin_file: no such file 'none.gin'."),
    (["--gin_bindings=Toy.stepz = 3"], "Toy has no argument 'stepz'. Did you mean steps?"),
    (["--gin_bindings=Toy.steps = 'x'"], "Toy.steps must be int; got 'x'."),
    (["--gin_bindings=q/Toy.steps = 3"], "q/Toy.steps has no effect"),
  ],
)
def test_a_mistyped_command(call, workdir, words, message):
  code, _, err = call(write_figure, f"--workdir={workdir}", *words)
  assert code == 2
  assert message in error_line(err)
  assert not (workdir / "result.json").exists()


@pytest.mark.parametrize(
  "source, message",
  [
    ("raise ValueError('Toy: a rule;\\n  got 1. Do this.')", "error: Toy: a rule; got 1. Do this."),
    ("raise NotImplementedError('toy: not here.')", "error: toy: not here."),
    ("open('none.txt')", "error: none.txt: No such file or directory"),
    ("open('.')", "error: .: Is a directory"),
    ("raise OSError(28, 'No space left on device')", "error: [Errno 28] No space left on device"),
    ("raise MemoryError('4 GB')", "error: out of memory: 4 GB. Make the batch"),
    ("raise RuntimeError('RESOURCE_EXHAUSTED: 4 GB')", "error: out of memory: RESOURCE_EXHAUSTED"),
  ],
)
def test_a_users_mistake_is_one_line(call, source, message):
  code, _, err = call(in_our_code(source))
  assert code == 2
  assert error_line(err).startswith(message)


@pytest.mark.parametrize(
  "source",
  ["raise KeyError('bug')", "import jax.numpy\njax.numpy.ones(2) + jax.numpy.ones(3)"],
)
def test_a_bug_keeps_its_traceback(call, source):
  code, _, err = call(in_our_code(source))
  assert code == 1
  assert "Traceback" in err and "error: " not in err


def test_a_traceback_can_be_asked_for(call, monkeypatch):
  monkeypatch.setenv("JAXLAB_TRACEBACK", "1")
  code, _, err = call(in_our_code("raise ValueError('Toy: no.')"))
  assert code == 2 and "Traceback" in err and "error: Toy: no." in err


# --- the workdir


def test_another_config_is_refused_by_naming_the_difference(call, workdir):
  assert call(write_figure, f"--workdir={workdir}", "--gin_bindings=Toy.steps = 5")[0] == 0
  assert call(write_figure, f"--workdir={workdir}", "--gin_bindings=Toy.steps = 5")[0] == 0
  code, _, err = call(write_figure, f"--workdir={workdir}", "--seed=1")
  assert code == 2
  assert error_line(err) == (
    f"error: --workdir: {workdir} holds another run: Toy.steps was 5, is 3; seed was 0, is 1. "
    "Choose another --workdir, or give the old values to resume."
  )


def test_two_writers_are_refused_and_a_dead_one_is_not(call, workdir):
  with common.hold(workdir):
    code, _, err = call(write_figure, f"--workdir={workdir}")
    assert code == 2
    assert f"got process {os.getpid()} on " in error_line(err)
  assert call(write_figure, f"--workdir={workdir}")[0] == 0, "a lock file alone locks nothing"


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "result.json"
  common.write_atomically(path, "old")
  monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
  with pytest.raises(OSError):
    common.write_atomically(path, "new")
  assert path.read_text() == "old"


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_outside_a_loop_leaves_at_once(call, workdir, number):
  after = []

  def main(run):
    signal.raise_signal(number)
    after.append("still here")

  code, _, err = call(main, f"--workdir={workdir}")
  assert (code, after) == (128 + number, [])
  assert number.name in err and "Traceback" not in err


def test_a_loop_that_was_told_to_stop_ends_with_its_code(call, workdir):
  def main(run):
    with signals.Interrupt() as stop:
      signal.raise_signal(signal.SIGTERM)
      if stop:
        raise signals.Interrupted(stop.signum, 3, saved=True)

  code, _, err = call(main, f"--workdir={workdir}")
  assert code == 128 + signal.SIGTERM
  assert "after step 3 (saved)" in err and "Traceback" not in err
  assert not (workdir / "result.json").exists()


def test_handlers_are_given_back(call, workdir):
  before = signal.getsignal(signal.SIGTERM)
  call(write_figure, f"--workdir={workdir}")
  assert signal.getsignal(signal.SIGTERM) is before


# --- help, and `jaxlab VERB`


def test_help_is_one_screen_in_the_verbs_own_words(call):
  code, out, _ = call(write_figure, "--help")
  assert code == 0
  assert out.startswith("usage: jaxlab test_common [--flag=value ...]\n")
  assert __doc__.strip() in out
  assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 100
  for flag in ("--gin_file", "--gin_bindings", "--workdir", "--seed", "--fast"):
    assert flag in out


def test_a_mistyped_verb_gets_the_nearest(monkeypatch, capsys):
  monkeypatch.setattr(jaxlab_command, "verbs", lambda: {"quantize": "Packs.", "rl": "Tunes."})
  monkeypatch.setattr(sys, "argv", ["jaxlab", "quantise"])
  with pytest.raises(SystemExit) as leaving:
    jaxlab_command.main()
  assert leaving.value.code == 2
  assert error_line(capsys.readouterr().err) == (
    "error: jaxlab: no verb 'quantise'. Did you mean quantize?"
  )
  monkeypatch.setattr(sys, "argv", ["jaxlab"])
  jaxlab_command.main()
  assert "quantize   Packs." in capsys.readouterr().out


def test_only_files_with_a_main_are_verbs():
  assert not {"common", "registry", "explain", "signatures"} & set(jaxlab_command.verbs())


# --- secrets


def test_no_secret_reaches_workdir_log_or_traceback(call, workdir, monkeypatch):
  monkeypatch.setenv("SOME_API_KEY", "canary-of-the-environment")

  def main(run):
    registry.get("Toy")()
    common.logging.warning("canary-of-the-environment and %s", CANARY)
    run.start()
    common.write_result(run.workdir, {"key": "canary-of-the-environment", "token": CANARY})
    raise KeyError(f"Bearer {CANARY}")

  words = [f"--workdir={workdir}", f"--gin_bindings=Toy.name = '{CANARY}'"]
  code, out, err = call(main, *words)
  everything = out + err + "".join(p.read_text() for p in workdir.iterdir())
  assert code == 1 and "[redacted]" in everything
  assert CANARY not in everything and "canary-of-the-environment" not in everything
