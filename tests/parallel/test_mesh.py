"""The mesh's shape and its errors, devices in slices, and what counts as several processes."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxlab.parallel import mesh as meshes


@pytest.mark.parametrize(
  "config, shape",
  [
    (meshes.MeshConfig(data=8), (8, 1, 1, 1)),
    (meshes.MeshConfig(data=2, fsdp=-1), (2, 4, 1, 1)),
    (meshes.MeshConfig(data=-1, fsdp=2, tensor=2), (2, 2, 2, 1)),
    (meshes.MeshConfig(tensor=4, sequence=-1), (1, 1, 4, 2)),
    (meshes.MeshConfig(fsdp=8, tensor=-1), (1, 8, 1, 1)),
  ],
)
def test_shapes(config, shape):
  mesh = meshes.make_mesh(config)
  assert mesh.axis_names == ("data", "fsdp", "tensor", "sequence")
  assert mesh.devices.shape == shape
  assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]


def test_some_of_the_devices():
  assert meshes.make_mesh(meshes.MeshConfig(tensor=2), jax.devices()[2:4]).size == 2


def test_errors_have_the_numbers():
  with pytest.raises(ValueError, match="data=2, fsdp=2.*which makes 4, and 8 devices"):
    meshes.make_mesh(meshes.MeshConfig(data=2, fsdp=2))
  with pytest.raises(ValueError, match="must divide .*which makes 3, and 8 devices"):
    meshes.make_mesh(meshes.MeshConfig(data=3, tensor=-1))
  with pytest.raises(ValueError, match="must divide .*which makes 16, and 8 devices"):
    meshes.make_mesh(meshes.MeshConfig(data=16, tensor=-1))
  for sizes in ({"data": 0}, {"fsdp": -2}, {"data": -1, "tensor": -1}):
    with pytest.raises(ValueError, match="MeshConfig: sizes must be at least 1"):
      meshes.MeshConfig(**sizes)


@dataclasses.dataclass(frozen=True)
class Device:
  """What the layout asks of a device: four GPUs on each host."""

  id: int
  platform: str = "gpu"
  device_kind: str = "gpu"

  @property
  def slice_index(self):
    return self.id // 4

  process_index = slice_index


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 4, 2, 1), (2, 1, 4, 1), (1, 2, 4, 1)])
def test_only_data_and_fsdp_reach_across_slices(shape):
  grid = meshes.lay_slices(shape, 2, [Device(i) for i in range(8)])
  assert grid.shape == shape
  assert sorted(device.id for device in grid.flat) == list(range(8))
  owner = np.vectorize(lambda device: device.slice_index)(grid)
  assert (owner == owner[:, :, :1, :1]).all()
  if shape[0] == 2:
    assert (owner[0] == 0).all() and (owner[1] == 1).all()


def test_tensor_across_slices_is_refused():
  with pytest.raises(ValueError, match="got data=1, fsdp=1 and 2 slices"):
    meshes.lay_slices((1, 1, 8, 1), 2, [Device(i) for i in range(8)])


SLURM = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
  "environment, several",
  [
    ({}, False),
    (SLURM, True),
    (SLURM | {"SLURM_NTASKS": "1"}, False),
    ({"SLURM_NTASKS": "8"}, False),  # inside sbatch, before srun
    ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ({"JAXLAB_DISTRIBUTED": "1"}, True),
    ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, True),
  ],
)
def test_the_environment_says_whether_there_are_several_processes(environment, several):
  assert meshes.detects_processes(environment) is several


def test_a_program_alone_connects_to_nobody():
  assert meshes.initialize_processes({}) is False
  assert not jax.distributed.is_initialized()


def test_half_set_variables_are_named():
  only = {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "2"}
  with pytest.raises(ValueError, match="JAX_PROCESS_ID=''.*Set all three"):
    meshes.initialize_processes(only)
  with pytest.raises(ValueError, match="JAX_NUM_PROCESSES='two'"):
    meshes.initialize_processes(only | {"JAX_NUM_PROCESSES": "two"})
