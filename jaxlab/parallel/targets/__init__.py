"""Devices to plan for, whether they are here or not: their names, figures and stand-ins.

GPUs are counted, eight to a host: "h100x1", "b200x8", "h100x16". TPUs are slices of so many chips,
as JAX names its topologies: "v5e:4x4", "v5p:8x8x8"; a chip is one JAX device, two on tpu7x. "cpu"
and "cpux8" are devices of this process. devices.toml holds the figures; *.txtpb describe the GPUs
to XLA.
"""

import dataclasses
import difflib
import math
import os
import pathlib
import re
import tomllib
import types
from collections.abc import Mapping
from typing import Any

from jaxlab.parallel import compilers

FOLDER = pathlib.Path(__file__).parent
EXAMPLES = "h100x1, b200x8, h100x16, v5e:4x4, v6e:16x16, v5p:8x8x8, tpu7x:2x2x1, cpux8"
AXES = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}  # of a slice
CORES = {"v5e": 1, "v6e": 1, "v5p": 1, "tpu7x": 2}  # of a chip, as JAX devices


@dataclasses.dataclass(frozen=True)
class Device:
  """What one JAX device is and can do at most; devices.toml says how each figure is counted."""

  name: str  # "h100", "v5e", ...; `pallas_kernels.target.use_target` takes it too
  platform: str  # "cpu", "cuda" or "tpu"
  kind: str  # as `jax.Device.device_kind` spells it
  memory_bytes: int  # what the programs on it may use together
  hbm: float  # bytes a second from and to its memory
  flops: Mapping[str, float]  # a second, dense, of "f32", "bf16" and, with a unit, "f8", "f4"
  network: float  # bytes a second that it can send to devices nearby while it receives as much
  per_host: int  # devices of a host
  source: str  # where the figures come from


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices of one kind."""

  text: str  # as the user named them
  device: Device
  topology: str  # for the compiler: "v5e:4x4"; slices x hosts x GPUs of a host: "1x2x8"
  count: int  # of JAX devices


def _read(path: pathlib.Path) -> Mapping[str, Device]:
  tables = tomllib.loads(path.read_text(encoding="utf-8"))
  for table in tables.values():
    table["flops"] = types.MappingProxyType(table["flops"])
  return types.MappingProxyType({name: Device(name=name, **tables[name]) for name in tables})


KNOWN = _read(FOLDER / "devices.toml")


def parse(text: str) -> Target:
  """The target that a user names; needs no compiler.

  Raises: ValueError for an unknown device (with the known and the nearest), a shape that no slice
    has, or GPUs that fill no whole hosts.
  """
  words = re.fullmatch(rf"({'|'.join(KNOWN)})([:x].*)?", text)
  if words is None:
    near = difflib.get_close_matches(re.split("[:x]", text)[0], KNOWN, 1, 0.5)
    raise ValueError(
      f"target: the device must be one of {', '.join(KNOWN)}; got {text!r}. "
      + "".join(f"Did you mean {name}? " for name in near)
      + f"Examples: {EXAMPLES}."
    )
  device, size = KNOWN[words[1]], words[2] or ""
  return _slice(text, device, size) if device.platform == "tpu" else _hosts(text, device, size)


def _slice(text: str, device: Device, size: str) -> Target:
  """TPU chips; `size` is ":4x4"."""
  axes = AXES[device.name]
  shape = [int(chips) for chips in re.findall(r"\d+", size)]
  if size != ":" + "x".join(map(str, shape)) or len(shape) != axes or 0 in shape:
    raise ValueError(
      f"target: a slice of {device.name} must have {axes} positive numbers of chips; got {text!r}. "
      f"Write it as {device.name}:{'x'.join('4' * axes)}."
    )
  if math.prod(shape) > 1 and (shape[0] % 2 or shape[1] % 2):
    even = [chips + chips % 2 for chips in shape[:2]] + shape[2:]
    raise ValueError(
      f"target: a slice of {device.name} must be one chip, or consist of hosts with 2x2 chips; "
      f"got {text!r}. Use {device.name}:{'x'.join(map(str, even))}."
    )
  return Target(text, device, text, math.prod(shape) * CORES[device.name])


def _hosts(text: str, device: Device, size: str) -> Target:
  """GPUs, or CPU devices of this process; `size` is "x8", or empty for one."""
  if not re.fullmatch(r"x[1-9]\d*", size or "x1"):
    raise ValueError(
      f"target: the number of {device.name} must be positive; got {text!r}. "
      f"Write it as {device.name}x8."
    )
  count = int(size[1:] or 1)
  if device.platform == "cpu":
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    part = dataclasses.replace(  # of one machine
      device,
      memory_bytes=memory // count,
      hbm=device.hbm / count,
      flops={dtype: rate / count for dtype, rate in device.flops.items()},
      network=device.network / count,
    )
    return Target(text, part, "", count)
  hosts = math.ceil(count / device.per_host)
  if hosts > 1 and count % device.per_host:
    raise ValueError(
      f"target: more than {device.per_host} {device.name} must fill hosts of {device.per_host}; "
      f"got {text!r}. Use {device.name}x{hosts * device.per_host}."
    )
  return Target(text, device, f"1x{hosts}x{count // hosts}", count)


def devices(target: Target) -> list[Any]:
  """The JAX devices of a target: from the compiler, with nothing behind them; CPUs as they are.

  Raises: ValueError if this process lacks the compiler, or has too few CPU devices.
  """
  import jax  # late: `parse` tells a launcher in which environment JAX must start
  from jax.experimental import topologies

  platform = target.device.platform
  if platform == "cpu":
    found = jax.devices("cpu")
    if len(found) < target.count:
      raise ValueError(
        f"target: {target.text} must have no more devices than this process; got {len(found)}. "
        f"Set XLA_FLAGS=--xla_force_host_platform_device_count={target.count}."
      )
    return found[: target.count]
  if (advice := compilers.missing(platform)) is not None:
    raise ValueError(
      f"target: {target.text} must have a compiler for {platform}; got a Python without. {advice}"
    )
  options = {}
  if platform == "cuda":
    config = (FOLDER / f"{target.device.name}.txtpb").read_text(encoding="utf-8")
    options = {"topology": target.topology, "target_config": config}
  elif target.count == CORES[target.device.name]:  # libtpu takes hosts of 2x2 chips unless told
    options = {"chips_per_host_bounds": (1, 1, 1)}
  return list(topologies.get_topology_desc(target.topology, platform, **options).devices)
