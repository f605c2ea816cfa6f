"""The launcher, killed at random moments and started again, against the run that nobody disturbed.

That the same comparison fails when something is left out of a checkpoint is shown in
tests/train/test_fit.py (the broken controls), on the loop that RL shares.
"""

import json
import random
import re
import signal

import pytest

from jaxlab.train import metrics
from tests import forkserver
from tests.rl import killed
from tests.train import tiny as tiny_train

SECONDS = 0.03  # of a rollout or an update of the tiny run; a save takes about five times as long
TIMING = re.compile(r"seconds|tokens_per_s|command|versions|peak_bytes")


@pytest.fixture(scope="module")
def fork():
  return forkserver.context()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, model_folder):
  return killed.gin(tmp_path_factory.mktemp("recipe"), model_folder)


def start(fork, *arguments):
  process = fork.Process(target=killed.run, args=arguments)
  process.start()
  return process


def finish(process, seconds=180):
  process.join(seconds)
  if process.exitcode is None:
    process.kill()
  return process.exitcode


@pytest.fixture(scope="module")
def unbroken(fork, recipe, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("unbroken")
  assert finish(start(fork, recipe, workdir)) == 0
  return workdir


def without_timing(value):
  """JSON with every float as its bits, and what may differ taken out."""
  if isinstance(value, dict):
    return {k: without_timing(v) for k, v in value.items() if not TIMING.search(k)}
  return [without_timing(v) for v in value] if isinstance(value, list) else tiny_train.exact(value)


def digests(workdir):
  """{path: [digest, dtype, shape]} of the last checkpoint: adapters, norms, optimiser, key."""
  meta = workdir / "checkpoints" / str(killed.STEPS) / "meta" / "metadata"
  return json.loads(meta.read_text())["leaves"]


def assert_same_run(workdir, want):
  """All that both runs wrote: metrics, figures, adapters, optimiser states."""
  lines, want_lines = (without_timing(metrics.read(w)) for w in (workdir, want))
  assert [line["step"] for line in lines] == list(range(1, killed.STEPS + 1))
  assert lines == want_lines
  assert digests(workdir) == digests(want)
  for name in ("adapter/adapter_model.safetensors", "samples.jsonl"):
    assert (workdir / name).read_bytes() == (want / name).read_bytes(), name
  got, expected = (json.loads((w / "result.json").read_text()) for w in (workdir, want))
  assert without_timing(got) == without_timing(expected)


def test_killed_in_every_phase_and_told_to_stop(fork, recipe, workdir, unbroken):
  """Each start goes on from the last whole checkpoint; the signalled one saves its last step."""
  rng = random.Random(0)
  kills = [
    ("rollout", 2, rng.random() * SECONDS), ("update", 5, rng.random() * SECONDS),
    ("save", 1, rng.random() * SECONDS * 5),
  ]  # fmt: skip
  codes = [finish(start(fork, recipe, workdir, *kill)) for kill in kills]
  assert codes == [-signal.SIGKILL] * 3
  assert finish(start(fork, recipe, workdir, "stop", 2)) == 128 + signal.SIGTERM
  done = metrics.read(workdir)[-1]["step"]
  assert 2 <= done < killed.STEPS and (workdir / "checkpoints" / str(done)).is_dir()
  assert not (workdir / "result.json").exists()
  assert finish(start(fork, recipe, workdir)) == 0
  assert_same_run(workdir, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_killed_ten_times(fork, recipe, workdir, unbroken, seed):
  rng = random.Random(seed + 1)
  codes = []
  for _ in range(10):
    kill = rng.choice(killed.PHASES), rng.randint(1, 4), rng.random() * SECONDS * 3
    codes.append(finish(start(fork, recipe, workdir, *kill)))
  codes.append(finish(start(fork, recipe, workdir)))
  # A run that was killed late may end before its next kill comes.
  assert codes.count(-signal.SIGKILL) >= 3 and set(codes) <= {0, -signal.SIGKILL} and not codes[-1]
  assert_same_run(workdir, unbroken)
