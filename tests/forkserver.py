"""Child processes that have paid for their imports; JAX itself starts only in the child."""

import multiprocessing
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRELOAD = [
  "jax", "optax", "orbax.checkpoint", "tensorboardX",
  "tests.io.checkpoints", "tests.train.two_processes", "tests.rl.killed",
]  # fmt: skip


def context():
  """One server for all tests of a process: what it imports is fixed when it starts."""
  # The server does not take over sys.path, and skips without a word what it cannot import.
  os.environ["PYTHONPATH"] = str(ROOT)
  fork = multiprocessing.get_context("forkserver")
  fork.set_forkserver_preload(PRELOAD)
  return fork
