"""Two real processes on one host, four devices each, give the numbers of one."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np

from tests.parallel import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOGITS, GRADS = 1e-4, 2e-4  # as in test_rules
LIMIT_S = 120  # about 10 s on two quiet cores
OTHERS = ("JAX_COORDINATOR", "JAX_LOCAL_DEVICE", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_")


def start(index: int, port: int, folder: pathlib.Path) -> subprocess.Popen:
  """A worker that knows of no other coordinator; it writes to a file, never to a full pipe."""
  environment = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)} | {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": str(index),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
  }
  command = [sys.executable, "-m", "tests.parallel.two_processes", str(folder / "found.npz")]
  with open(folder / f"{index}.log", "wb") as log:
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def test_two_processes_compute_what_one_does(tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  workers = [start(index, port, tmp_path) for index in range(2)]
  try:
    found = tiny.logits_and_grads(*tiny.split(tiny.params("dense")), tiny.batch())
    logits, grads = jax.device_get(found)
    codes = [worker.wait(LIMIT_S) for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
  assert codes == [0, 0], "\n".join((tmp_path / f"{i}.log").read_text()[-3000:] for i in range(2))
  got = np.load(tmp_path / "found.npz")
  np.testing.assert_allclose(got["logits"], logits, rtol=0, atol=LOGITS)
  for path, grad in grads.items():
    atol = GRADS * np.abs(grad).max()
    np.testing.assert_allclose(got[path.replace("/", ".")], grad, rtol=0, atol=atol, err_msg=path)
