"""States and child processes of the checkpoint tests; imported by the children too."""

import os
import pathlib
import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.io import orbax, seal

SPECS = {
  "w": PartitionSpec("fsdp", "tensor"), "e": PartitionSpec(("fsdp", "tensor"), None),
  "b": PartitionSpec(), "h": PartitionSpec("tensor"), "step": PartitionSpec(),
}  # fmt: skip


def make(step: int, size: int = 128):
  """A state that is a function of the step, of numpy only: children compile nothing for it."""
  rng = np.random.default_rng(step)
  return {
    "p": {f"w{j}": jnp.asarray(rng.normal(size=(64, size)), jnp.float32) for j in range(3)},
    "b": jnp.asarray(rng.normal(size=33).astype(np.float32)).astype(jnp.bfloat16),
    "n": jnp.asarray(np.int32(step)),
  }


def same(state, step: int, size: int = 128) -> bool:
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(make(step, size)), strict=True)
  return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def save_for_ever(root: pathlib.Path, ready) -> None:
  """Saves a step after the other until it is killed."""
  with orbax.CheckpointStore(root, keep=2) as store:
    first = max(store.steps(), default=0) + 1
    seal.inspect(seal.flatten(make(0, 4096)))  # compiled before the clock runs
    ready.set()
    for step in range(first, first + 10_000):
      store.save(step, make(step, 4096), {"step": step})


def check_every_step(root: pathlib.Path) -> tuple[list[int], list[int]]:
  """Restores each listed step, not only the newest; returns (steps, wrong ones)."""
  with orbax.CheckpointStore(root, keep=2) as store:
    steps = store.steps()
  wrong = []
  for step in reversed(steps):
    with orbax.CheckpointStore(root, keep=2) as store:
      restored = store.restore_latest(make(0, 4096))
    if restored is None or (restored.step, restored.meta) != (step, {"step": step}):
      wrong.append(step)
    elif not same(restored.state, step, 4096):
      wrong.append(step)
    (root / str(step)).rename(root / f"checked.{step}")
  for step in steps:
    (root / f"checked.{step}").rename(root / str(step))
  return steps, wrong


def fill_the_disk(root: pathlib.Path, results) -> None:
  """Saves 1; fails to save 2 with files limited to 1 MiB; saves 3. Sends what happened."""
  big = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(1 << 20,)), jnp.float32)}
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  with orbax.CheckpointStore(root) as store:
    store.save(1, big, {})
    store.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    error = None
    try:
      store.save(2, big, {})
      store.wait()
    except ValueError as caught:
      error = str(caught)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    steps = store.steps()
    store.save(3, big, {})
    store.wait()
    restored = store.restore_latest(big)
    results.put((error, steps, restored.step, bool((restored.state["w"] == big["w"]).all())))


def sharded(mesh: jax.sharding.Mesh):
  """Arrays of several shapes, laid out over the mesh."""
  rng = np.random.default_rng(0)
  arrays = {
    "w": rng.normal(size=(64, 128)).astype(np.float32),
    "e": rng.normal(size=(48, 16)).astype(jnp.bfloat16),
    "b": np.arange(7, dtype=np.float32),
    "h": rng.normal(size=(10, 3)).astype(np.float32),
    "step": np.int32(5),
  }
  return {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in arrays.items()}


def reshard(root: pathlib.Path, devices: int, results) -> None:
  """Saves (8 devices) or restores (fewer) on a mesh; sends digests and whether all is equal."""
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((devices // 2, 2), ("fsdp", "tensor"), axis_types=auto)
  want = sharded(mesh)
  digests, _ = seal.inspect(want)
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
  with orbax.CheckpointStore(root) as store:
    if devices == 8:
      store.save(1, want, {})
      store.wait()
    got = store.restore_latest(target).state
  equal = all(
    np.asarray(got[k]).tobytes() == np.asarray(want[k]).tobytes()
    and got[k].sharding == want[k].sharding
    for k in want
  )
  results.put((jax.device_count(), digests, equal))
