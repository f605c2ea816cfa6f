"""Two real processes on one host, several devices each, give the numbers of one."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from jaxlab.train import metrics
from tests.parallel import tiny
from tests.rl import killed
from tests.rl import tiny as tiny_rl

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOGITS, GRADS = 1e-4, 2e-4  # as in test_rules
LIMIT_S = 240  # about 10 s on two quiet cores; 30 s for a run of the launcher
OTHERS = ("JAX_COORDINATOR", "JAX_LOCAL_DEVICE", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_")


def start(
  words: Sequence[str], log: pathlib.Path, *, devices: int, index: int = 0, port: int | None = None
) -> subprocess.Popen:
  """`python -m words` as one of two processes, or alone without a port.

  It knows of no other coordinator, and writes to a file, never to a full pipe.
  """
  environment = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)} | {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
  }
  if port is not None:
    environment |= {
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": "2",
      "JAX_PROCESS_ID": str(index),
    }
  with open(log, "wb") as file:
    return subprocess.Popen(
      [sys.executable, "-m", *words], cwd=ROOT, env=environment, stdout=file, stderr=file
    )


def start_two(words: Sequence[str], folder: pathlib.Path, devices: int) -> list[subprocess.Popen]:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  return [
    start(words, folder / f"{index}.log", devices=devices, index=index, port=port)
    for index in range(2)
  ]


def finish(workers: list[subprocess.Popen], folder: pathlib.Path) -> None:
  try:
    codes = [worker.wait(LIMIT_S) for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
  logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*.log")))
  assert codes == [0] * len(workers), logs


def test_two_processes_compute_what_one_does(tmp_path):
  file = str(tmp_path / "found.npz")
  workers = start_two(["tests.parallel.two_processes", file], tmp_path, devices=4)
  try:
    found = tiny.logits_and_grads(*tiny.split(tiny.params("dense")), tiny.batch())
    logits, grads = jax.device_get(found)
  finally:
    finish(workers, tmp_path)
  got = np.load(file)
  np.testing.assert_allclose(got["logits"], logits, rtol=0, atol=LOGITS)
  for path, grad in grads.items():
    atol = GRADS * np.abs(grad).max()
    np.testing.assert_allclose(got[path.replace("/", ".")], grad, rtol=0, atol=atol, err_msg=path)


# --- the launcher

STEPS = 3
MESH = """
RLConfig.mesh = @MeshConfig()
RLConfig.remat = False
LoRAConfig.targets = ('q', 'down')
MeshConfig.data = 2
MeshConfig.fsdp = 2
RLData.test = @test/two_digit_sum()
test/two_digit_sum.n = 5
test/two_digit_sum.split = 'test'
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Workdirs of one recipe on four devices: of one process, and of two that share it."""
  folder = tmp_path_factory.mktemp("runs")
  recipe = killed.gin(folder, tiny_rl.write_model(folder / "model"))
  recipe.write_text(recipe.read_text() + MESH)
  words = ["launch.rl", f"--gin_file={recipe}", f"--gin_bindings=RLConfig.steps = {STEPS}"]
  alone = start([*words, f"--workdir={folder / 'one'}"], folder / "alone.log", devices=4)
  finish([alone], folder)
  finish(start_two([*words, f"--workdir={folder / 'two'}"], folder, devices=2), folder)
  return folder / "one", folder / "two"


@pytest.mark.slow
def test_two_processes_train_as_one_does(runs):
  one, two = map(metrics.read, runs)
  assert [line["step"] for line in two] == list(range(1, STEPS + 1))
  assert len({line["reward"] for line in one}) > 1  # there is something to compare
  for a, b in zip(one, two, strict=True):
    assert a.keys() == b.keys() and a["rows"] == b["rows"]
    for name in a.keys() - {"rows", "seconds", "rollout_seconds"}:
      assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_one_process_writes_the_files_of_both(runs):
  one, two = runs
  names = lambda folder: {str(p.relative_to(folder)) for p in folder.rglob("*.*")}
  ours = lambda folder: {
    n for n in names(folder) if n.split("/")[0] not in ("checkpoints", "tensorboard")
  }
  assert ours(one) == ours(two)
  assert {"result.json", "held_out.jsonl", "samples.jsonl", "config.gin"} < ours(two)
  assert (two / "held_out.jsonl").read_text() == (one / "held_out.jsonl").read_text()
  a, b = (json.loads((folder / "result.json").read_text()) for folder in runs)
  for name in ("accuracy_before", "accuracy_after", "weight_bytes_fp4", "reward_last"):
    assert a[name] == b[name], name
  assert "--workdir" in b["command"] and str(two) in b["command"]
