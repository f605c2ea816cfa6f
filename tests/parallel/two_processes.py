"""One of two processes that compute logits and gradients together; process 0 writes them.

Run as `python -m tests.parallel.two_processes FILE` with the three variables of
`mesh.initialize_processes` set.
"""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules


def main(file: str) -> None:
  assert meshes.initialize_processes()
  assert meshes.initialize_processes()  # again: nothing to do
  from tests.parallel import tiny  # its constants would start JAX before the processes meet

  mesh = meshes.make_mesh(meshes.MeshConfig(data=2, fsdp=2, tensor=-1))
  assert jax.process_count() == 2 and mesh.devices.shape == (2, 2, 2, 1)
  assert {d.process_index for d in mesh.devices[1].flat} == {1}  # only `data` crosses over
  params = rules.shard_params(tiny.params("dense"), mesh, num_kv_heads=2)
  batch = rules.shard_rows(tiny.batch(), mesh)
  again = rules.shard_params(params, mesh, num_kv_heads=2)  # of global arrays
  found = tiny.logits_and_grads(*tiny.split(again), batch, rules.Placement(mesh, 2))
  logits, grads = multihost_utils.process_allgather(found, tiled=True)
  if jax.process_index() == 0:
    np.savez(file, logits=logits, **{path.replace("/", "."): x for path, x in grads.items()})
  multihost_utils.sync_global_devices("written")


if __name__ == "__main__":
  main(sys.argv[1])
