"""Names of targets, the figures of their devices, and what is refused."""

import os
import re

import jax
import pytest

from jaxlab.parallel import compilers, targets
from pallas_kernels import target as kernels


@pytest.mark.parametrize(
  "text, name, topology, count",
  [
    ("h100", "h100", "1x1x1", 1),
    ("h100x1", "h100", "1x1x1", 1),
    ("h200x4", "h200", "1x1x4", 4),
    ("b200x8", "b200", "1x1x8", 8),
    ("h100x16", "h100", "1x2x8", 16),
    ("v5e:4x4", "v5e", "v5e:4x4", 16),
    ("v6e:16x16", "v6e", "v6e:16x16", 256),
    ("v6e:1x1", "v6e", "v6e:1x1", 1),
    ("v5p:8x8x8", "v5p", "v5p:8x8x8", 512),
    ("tpu7x:2x2x1", "tpu7x", "tpu7x:2x2x1", 8),  # two cores a chip
    ("cpu", "cpu", "", 1),
    ("cpux8", "cpu", "", 8),
  ],
)
def test_names(text, name, topology, count):
  target = targets.parse(text)
  assert (target.text, target.topology, target.count) == (text, topology, count)
  assert target.device.name == name


@pytest.mark.parametrize(
  "text, message",
  [
    ("h10x1", "must be one of h100, h200, b200, v5e, v5p, v6e, tpu7x, cpu; got 'h10x1'. Did you"),
    ("H200x8", "Did you mean h200? Examples: h100x1"),
    ("v5ee:4x4", "got 'v5ee:4x4'. Did you mean v5e?"),
    ("", "got ''. Examples: h100x1, b200x8"),
    ("quantum", "got 'quantum'. Examples"),
    ("h100:8", "the number of h100 must be positive; got 'h100:8'. Write it as h100x8."),
    ("b200x0", "the number of b200 must be positive; got 'b200x0'"),
    ("h100x8x2", "got 'h100x8x2'"),
    ("cpux-1", "the number of cpu must be positive"),
    ("h100x12", "more than 8 h100 must fill hosts of 8; got 'h100x12'. Use h100x16."),
    ("v5e", "a slice of v5e must have 2 positive numbers of chips; got 'v5e'. Write it as v5e:4x4"),
    ("v6e:4x4x4", "v6e must have 2 positive"),
    ("v6e:4x-4", "v6e must have 2 positive"),
    ("v6ex8", "v6e must have 2 positive"),
    ("v5e:0x4", "v5e must have 2 positive"),
    ("v5p:8x8", "v5p must have 3 positive numbers of chips; got 'v5p:8x8'. Write it as v5p:4x4x4."),
    ("tpu7x:2x2", "tpu7x must have 3 positive"),
    ("v5e:3x4", "one chip, or consist of hosts with 2x2 chips; got 'v5e:3x4'. Use v5e:4x4."),
    ("v5p:1x1x4", "Use v5p:2x2x4."),
  ],
)
def test_bad_names(text, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    targets.parse(text)


def test_every_suggestion_and_example_is_a_target():
  suggested = targets.EXAMPLES.split(", ")
  for text in ("v5e:3x5", "v5p:1x1x4", "tpu7x:7x2x3", "h100x12", "v5e", "v5p:2", "cpu:3", "h200x"):
    with pytest.raises(ValueError) as error:
      targets.parse(text)
    suggested.append(re.search(r"(?:Use|Write it as) (\S+)\.$", str(error.value))[1])
  assert all(targets.parse(text).count for text in suggested)


def test_kernels_know_every_device():
  assert {name: (d.platform, d.kind) for name, d in targets.KNOWN.items()} == {
    name: (target.platform, target.device_kind) for name, target in kernels.TARGETS.items()
  }


@pytest.mark.parametrize("name", [n for n, d in targets.KNOWN.items() if d.platform != "cpu"])
def test_figures_of_accelerators(name):
  device = targets.KNOWN[name]
  assert 15 * 2**30 < device.memory_bytes < 192 * 2**30
  assert 0.5e12 < device.hbm < 10e12 and 0.05e12 < device.network < device.hbm
  # Half the bits, at most twice the work; nothing is slower for having fewer.
  rates = [device.flops[key] for key in ("f32", "bf16", "f8", "f4") if key in device.flops]
  assert len(rates) >= 2 and all(a <= b <= 2.1 * a for a, b in zip(rates, rates[1:]))
  # So many operations to a byte of memory: what makes all of them bound by memory in decoding.
  assert 100 < device.flops["bf16"] / device.hbm < 700
  assert "https://" in device.source


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_gpu_figures_agree_with_what_the_compiler_reads(name):
  text = (targets.FOLDER / f"{name}.txtpb").read_text(encoding="utf-8")
  device = targets.KNOWN[name]
  size, speed = (
    int(re.search(rf"{key}: (\d+)", text)[1]) for key in ("device_memory_size", "memory_bandwidth")
  )
  assert 0.9 * size < device.memory_bytes < size
  assert device.hbm == pytest.approx(speed, rel=0.001)
  assert f'"{device.kind}"' in text


def test_cpu_devices_share_the_machine():
  one, eight = targets.parse("cpu").device, targets.parse("cpux8").device
  total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  assert one.memory_bytes == total and eight.memory_bytes == total // 8
  assert eight.hbm * 8 == one.hbm and eight.network * 8 == one.network
  assert {dtype: rate * 8 for dtype, rate in eight.flops.items()} == one.flops


def test_cpu_devices_are_those_of_the_process():
  assert targets.devices(targets.parse("cpux4")) == jax.devices()[:4]
  with pytest.raises(ValueError, match=r"got 8\. Set XLA_FLAGS=.*device_count=99\."):
    targets.devices(targets.parse("cpux99"))


@pytest.mark.parametrize("text", ["v5e:4x4", "h100x8"])
def test_a_missing_compiler_is_named(text, monkeypatch):
  monkeypatch.setattr(compilers, "missing", lambda platform: f"Get the one for {platform}.")
  platform = targets.parse(text).device.platform
  with pytest.raises(
    ValueError, match=f"{text} must have a compiler for {platform}; got .*Get the"
  ):
    targets.devices(targets.parse(text))
