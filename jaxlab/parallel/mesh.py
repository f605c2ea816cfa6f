"""The device mesh, and programs that run as several processes: their start, and what they share.

Axes, outermost first: `data` (rows of a batch; parameters copied), `fsdp` (rows; parameters split),
`tensor` (heads and MLP width), `sequence` (positions of long contexts). Neighbouring devices share
the inner axes, which exchange the most.
"""

import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import mesh_utils, multihost_utils

AXES = ("data", "fsdp", "tensor", "sequence")
COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # host:port of process 0
PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
ASK = "JAXLAB_DISTRIBUTED"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis; at most one axis may be -1, "all that are left".

  data: copies of the parameters, each with its own rows [ours: one device by default].
  fsdp: parts of the parameters, each also with its own rows [ours].
  tensor: parts of heads and MLP width [ours].
  sequence: parts of the positions [ours].
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  sequence: int = 1

  def __post_init__(self):
    sizes = dataclasses.astuple(self)
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
      raise ValueError(
        f"MeshConfig: sizes must be at least 1, one of them may be -1; got {self}. "
        "Use -1 for the axis that takes the remaining devices."
      )

  def shape(self, devices: int) -> tuple[int, int, int, int]:
    """The sizes with -1 replaced.

    Raises: ValueError unless their product is `devices`.
    """
    sizes = dataclasses.astuple(self)
    rule = "its fixed axes must divide" if -1 in sizes else "it must multiply to"
    fixed = math.prod(size for size in sizes if size != -1)
    sizes = tuple(devices // fixed if size == -1 else size for size in sizes)
    if math.prod(sizes) != devices:
      raise ValueError(
        f"make_mesh: {rule} the number of devices; got {self}, which makes {fixed}, and {devices} "
        "devices. Change one axis, or give it -1 for the rest."
      )
    return sizes


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
  """The mesh with axes (data, fsdp, tensor, sequence); XLA derives the communication.

  Args:
    devices: default all devices of all processes.
  Raises: ValueError if the sizes do not multiply to the number of devices, or if `tensor` or
    `sequence` would have to reach across groups of devices without fast links.
  """
  devices = jax.devices() if devices is None else list(devices)
  shape = config.shape(len(devices))
  kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if slices == 1:
    # Axes of a TPU's torus may be split: "data 2, fsdp 64, tensor 4" on 8x8x8.
    laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  else:
    laid = lay_slices(shape, slices, devices)
  return jax.sharding.Mesh(laid, AXES, axis_types=kinds)


def lay_slices(shape: tuple[int, ...], slices: int, devices: Sequence[Any]) -> np.ndarray:
  """Devices of several slices (TPU pods, hosts of GPUs) as an array of `shape`.

  Links are fast within a slice only: slices are laid along `data`, what is left of them along
  `fsdp`.
  """
  along_data = math.gcd(shape[0], slices)
  across = (along_data, slices // along_data, 1, 1)
  if shape[1] % across[1]:
    raise ValueError(
      f"make_mesh: data * fsdp must hold whole slices of devices; got data={shape[0]}, "
      f"fsdp={shape[1]} and {slices} slices. Only data and fsdp may reach across them."
    )
  within = tuple(size // count for size, count in zip(shape, across))
  return mesh_utils.create_hybrid_device_mesh(
    within, across, devices, allow_split_physical_axes=True
  )


def initialize_processes(environment: Mapping[str, str] = os.environ) -> bool:
  """Connects the processes of one run, if the environment says that there are several.

  Must come before anything else asks JAX for devices. Under SLURM, Open MPI, TPUs on GKE and, with
  `jax[k8s]` installed, indexed Kubernetes jobs JAX finds the processes itself; on plain TPU VMs,
  whose environment tells nothing, JAXLAB_DISTRIBUTED=1 asks it to. Elsewhere set
  JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  Returns: whether the processes are connected; False for a program that runs alone.
  Raises: ValueError if only some of the three variables are set, or are no numbers.
  """
  if jax.distributed.is_initialized():
    return True
  if environment.get(COORDINATOR):
    count, index = _number(environment, PROCESSES), _number(environment, PROCESS)
    jax.distributed.initialize(environment[COORDINATOR], count, index)
  elif detects_processes(environment):
    jax.distributed.initialize()
  else:
    return False
  logging.info("Process %d of %d.", jax.process_index(), jax.process_count())
  return True


def connect_processes() -> bool:
  """`initialize_processes` for a launcher: whether this process writes the run's files."""
  return not initialize_processes() or leads()


def leads() -> bool:
  """True in one process of a run: the one that writes files."""
  return jax.process_index() == 0


def detects_processes(environment: Mapping[str, str]) -> bool:
  """Whether a launcher that JAX knows started several processes, or the user says so."""
  asked = environment.get(ASK, "0") != "0"
  slurm = "SLURM_STEP_NODELIST" in environment and environment.get("SLURM_NTASKS", "1") != "1"
  open_mpi = environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1"
  tpu = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
  tpu_slices = "MEGASCALE_COORDINATOR_ADDRESS" in environment
  indexed_job = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
  job = indexed_job and importlib.util.find_spec("kubernetes") is not None
  return asked or slurm or open_mpi or tpu or tpu_slices or job


def to_host(tree: Any) -> Any:
  """The arrays as NumPy, whole; with several processes in each of them, so all must call it."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  gather = lambda x: multihost_utils.process_allgather(x, tiled=True)
  elsewhere = lambda x: isinstance(x, jax.Array) and not x.is_fully_addressable
  return jax.tree.map(lambda x: gather(x) if elsewhere(x) else jax.device_get(x), tree)


def from_all(value: Any) -> list[Any]:
  """The JSON `value` of every process, in their order; all must call it.

  As text, so that float64, None and names come through.
  """
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(text.size))
  longest = 1 << int(sizes.max() - 1).bit_length()  # a power of two: few programs are compiled
  rows = multihost_utils.process_allgather(np.pad(text, (0, longest - text.size)))
  return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def _number(environment: Mapping[str, str], name: str) -> int:
  value = environment.get(name, "")
  if not value.isdecimal():
    raise ValueError(
      f"initialize_processes: {COORDINATOR} needs {PROCESSES} and {PROCESS}, whole numbers; got "
      f"{name}={value!r}. Set all three, or none to run alone."
    )
  return int(value)
