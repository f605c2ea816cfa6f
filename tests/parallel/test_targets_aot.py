"""Every target's devices come from its compiler, which compiles for them (make aot)."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlab.parallel import targets

pytestmark = pytest.mark.aot
PLATFORM = os.environ.get("JAXLAB_AOT")
GPUS = ("h100x1", "h100x8", "h100x16", "h200x1", "h200x8", "b200x1", "b200x8", "b200x16")
TPUS = ("v5e:1x1", "v5e:4x4", "v6e:1x1", "v6e:16x16", "v5p:1x1x1", "v5p:8x8x8", "tpu7x:2x2x1")
TPUS += ("tpu7x:1x1x1",)
MIB, GIB = 2**20, 2**30


def of_platform(*texts):
  """A case for each target; those of the other environment's compiler are skipped."""
  other = lambda text: targets.parse(text).device.platform != PLATFORM
  skip = lambda text: pytest.mark.skipif(other(text), reason="JAXLAB_AOT names another compiler")
  return pytest.mark.parametrize("text", [pytest.param(text, marks=skip(text)) for text in texts])


def compile_for(devices, function, shape):
  """A function of one array, whose rows are spread over `devices` like those of the result."""
  rows = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
  program = jax.jit(function, in_shardings=rows, out_shardings=rows)
  return program.lower(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).compile()


@of_platform(*GPUS, *TPUS)
def test_devices_and_a_product(text):
  target = targets.parse(text)
  devices = targets.devices(target)
  assert len(devices) == target.count
  assert {device.device_kind for device in devices} == {target.device.kind}
  hosts = len({device.process_index for device in devices})
  assert hosts == max(1, target.count // target.device.per_host)
  rows = 2048
  compiled = compile_for(devices, lambda x: x @ x.T, (rows, 256))
  memory = compiled.memory_analysis()
  assert memory.argument_size_in_bytes >= rows * 256 * 2 // target.count
  assert memory.output_size_in_bytes >= rows * rows * 2 // target.count
  # TPUs gather a few rows each by a sum.
  assert bool(re.search("all-(gather|reduce)", compiled.as_text())) == (target.count > 1)


@of_platform("v5e:1x1", "v6e:1x1", "v5p:1x1x1", "tpu7x:1x1x1")
def test_memory_is_what_the_compiler_has(text):
  """A product of 298 GiB is refused with what there is."""
  target = targets.parse(text)
  with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
    compile_for(targets.devices(target)[:1], lambda x: x @ x.T @ x, (400_000, 1024))
  available = float(re.search(r"available HBM \(([\d.]+)G\)", str(error.value))[1])
  # Of which a program's own reserve takes up to 10 MiB.
  assert target.device.memory_bytes == pytest.approx(available * GIB, abs=2 * 10 * MIB)
