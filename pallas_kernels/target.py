"""The device a program is made for: the running one, or one named by `use_target`.

Code that asks `jax.default_backend()` takes the CPU branch while it is compiled for a TPU that is
not there. Every rule about platforms in the library therefore reads `current_target()`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Target:
  """A platform ("cpu", "cuda" or "tpu") and a device kind as `jax.Device.device_kind` spells it."""

  platform: str
  device_kind: str


TARGETS = {
  "cpu": Target("cpu", "cpu"),
  "h100": Target("cuda", "NVIDIA H100 80GB HBM3"),
  "h200": Target("cuda", "NVIDIA H200"),
  "b200": Target("cuda", "NVIDIA B200"),
  "v5e": Target("tpu", "TPU v5 lite"),
  "v5p": Target("tpu", "TPU v5"),
  "v6e": Target("tpu", "TPU v6 lite"),
  "tpu7x": Target("tpu", "TPU7x"),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What kernels are cut by: NVIDIA's compute capability, and the number of multiprocessors."""

  capability: tuple[int, int]
  multiprocessors: int


# By the start of the device kind, the first that fits. Multiprocessors: H100 SXM, H200 and B200 as
# XLA's descriptions in jaxlab/parallel/targets have them, the others by NVIDIA's data sheets.
GPUS = {
  "NVIDIA A100": Gpu((8, 0), 108),
  "NVIDIA A10": Gpu((8, 6), 72),
  "NVIDIA GeForce RTX 3090": Gpu((8, 6), 82),
  "NVIDIA L4 ": Gpu((8, 9), 58),
  "NVIDIA L40": Gpu((8, 9), 142),
  "NVIDIA GeForce RTX 4090": Gpu((8, 9), 128),
  "NVIDIA H100 PCIe": Gpu((9, 0), 114),
  "NVIDIA H100": Gpu((9, 0), 132),
  "NVIDIA H200": Gpu((9, 0), 132),
  "NVIDIA GH200": Gpu((9, 0), 132),
  "NVIDIA B200": Gpu((10, 0), 148),
  "NVIDIA GB200": Gpu((10, 0), 148),
  "NVIDIA GeForce RTX 5090": Gpu((12, 0), 170),
  "NVIDIA RTX PRO 6000": Gpu((12, 0), 188),
  "Tesla V100": Gpu((7, 0), 80),
  "Tesla T4": Gpu((7, 5), 40),
}


def gpu(device: Target) -> Gpu | None:
  """The GPU behind a target; None for what is none, or is not in the table."""
  if device.platform != "cuda":
    return None
  kind = f"{device.device_kind} "  # "NVIDIA L4 " is no L40
  return next((found for start, found in GPUS.items() if kind.startswith(start)), None)


# A jax context rather than a contextvar: it is thread-local too, and part of jit's cache key, so
# that a function traced for the CPU is traced again, not reused, inside `use_target("v6e")`.
_override = jax.make_user_context(default_value=None)


def current_target() -> Target:
  """The target set by `use_target`, else the device on which this thread computes by default.

  Raises: ValueError if that device is neither CPU, CUDA nor TPU.
  """
  return _override.value or _running_target()


def _running_target() -> Target:
  device = jax.config.jax_default_device
  if device is None or isinstance(device, str):
    device = jax.devices(device)[0]
  platform = device.platform
  if platform == "gpu" and "rocm" not in device.client.platform_version.lower():
    platform = "cuda"  # jax says "gpu" for NVIDIA and AMD alike
  if platform not in ("cpu", "cuda", "tpu"):
    raise ValueError(
      f"current_target: the platform must be cpu, cuda or tpu; got {platform} ({device}). "
      "Set JAX_PLATFORMS=cpu."
    )
  return Target(platform, device.device_kind)


@contextlib.contextmanager
def use_target(name: str | Target) -> Iterator[Target]:
  """Makes `current_target()` answer `name` in this thread, for compiling for absent hardware.

  Args:
    name: one of "cpu", "h100", "h200", "b200", "v5e", "v5p", "v6e", "tpu7x", or a Target.
  Raises: ValueError for another name.
  """
  if isinstance(name, str) and name not in TARGETS:
    raise ValueError(f"use_target: unknown target; got {name!r}. Use one of {', '.join(TARGETS)}.")
  target = TARGETS[name] if isinstance(name, str) else name
  with _override(target):
    yield target
