"""One of two processes that train together: `python -m tests.train.two_processes ID PORT WORKDIR`.

Rows and parameters are spread over all devices; prints "training" after some steps.
"""

import pathlib
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.train import fit, signals
from tests.train import tiny


def main(process: int, port: str, workdir: pathlib.Path) -> int:
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
        print("training", flush=True)

    try:
      fit.fit(
        tiny.make_step(), place(current), place(frozen), rounds, steps=10_000, key=key,
        workdir=workdir, save_every_steps=4, fingerprint=tiny.FINGERPRINT, on_round=on_round,
        stop=stop,
      )  # fmt: skip
    except signals.Interrupted as stopped:
      print(stopped, flush=True)
      return stopped.exit_code
  return 0


if __name__ == "__main__":
  sys.exit(main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])))
