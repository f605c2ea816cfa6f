"""One of two processes that train together; rows and updates are spread over all devices."""

import os
import pathlib
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.train import fit, signals
from tests.train import tiny


def main(process: int, port: int, workdir: pathlib.Path, trained) -> None:
  """Trains until it is told to stop; `trained` is released once after some steps."""
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
  with signals.Interrupt() as stop:
    jax.distributed.initialize(
      f"127.0.0.1:{port}", num_processes=2, process_id=process, initialization_timeout=60,
      heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10,
    )  # fmt: skip
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(tree, *spec):
      """The same host values in every process, as arrays over all of them."""
      sharding = NamedSharding(mesh, PartitionSpec(*spec))
      return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i, x=x: np.asarray(x)[i]),
        tree,
      )

    current, frozen = tiny.start()
    key = jax.random.wrap_key_data(place(jax.random.key_data(jax.random.key(3))))

    def rounds(index, state):
      time.sleep(0.02)
      batch = {k: np.concatenate([v, v])[:16] for k, v in tiny.batch_of(index).items()}
      return fit.Round([place(batch, "data")])

    def on_round(done, state, values):
      if done == 5:
        trained.release()

    try:
      fit.fit(
        tiny.make_step(), place(current), place(frozen), rounds, steps=10_000, key=key,
        workdir=workdir, save_every_steps=4, fingerprint=tiny.FINGERPRINT, on_round=on_round,
        stop=stop,
      )  # fmt: skip
    except signals.Interrupted as stopped:
      (workdir / f"stopped.{process}").write_text(str(stopped))
      sys.exit(stopped.exit_code)
