"""current_target and use_target."""

import threading

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import target


def test_the_running_device_is_the_default():
  assert target.current_target() == target.Target("cpu", "cpu")
  with jax.default_device(jax.devices("cpu")[1]):
    assert target.current_target().platform == "cpu"


def test_an_override_nests_and_ends():
  with target.use_target("v6e") as outer:
    assert target.current_target() == outer == target.Target("tpu", "TPU v6 lite")
    with target.use_target("h100"):
      assert target.current_target().platform == "cuda"
    assert target.current_target() == outer
  assert target.current_target().platform == "cpu"


def test_an_override_ends_with_an_exception():
  with pytest.raises(RuntimeError), target.use_target("b200"):
    raise RuntimeError
  assert target.current_target().platform == "cpu"


def test_another_thread_does_not_see_it():
  seen = []
  with target.use_target("tpu7x"):
    thread = threading.Thread(target=lambda: seen.append(target.current_target().platform))
    thread.start()
    thread.join()
  assert seen == ["cpu"]


def test_jit_traces_again_for_another_target():
  traced = []

  @jax.jit
  def f(x):
    traced.append(target.current_target().platform)
    return x + 1

  f(jnp.ones(2))
  with target.use_target("v5e"):
    jax.eval_shape(f, jnp.ones(2))
  f(jnp.ones(2))
  assert traced == ["cpu", "tpu"]


def test_kinds_are_the_ones_that_jax_knows():
  from jax.experimental.pallas import tpu as pltpu  # the table of chips is behind get_tpu_info

  for name, known in target.TARGETS.items():
    if known.platform == "tpu":
      assert known.device_kind.startswith("TPU"), name
  assert hasattr(pltpu, "get_tpu_info")


def test_the_table_of_gpus():
  find = lambda kind: target.gpu(target.Target("cuda", kind))
  assert find("NVIDIA H100 80GB HBM3") == target.Gpu((9, 0), 132)
  assert find("NVIDIA H100 PCIe").multiprocessors == 114
  assert (find("NVIDIA L4").multiprocessors, find("NVIDIA L40S").multiprocessors) == (58, 142)
  assert find("NVIDIA A100-SXM4-80GB").capability == (8, 0)
  assert find("NVIDIA A10G").capability == (8, 6)
  assert find("NVIDIA of next year") is None and target.gpu(target.TARGETS["cpu"]) is None
  assert all(target.gpu(known) for known in target.TARGETS.values() if known.platform == "cuda")


def test_an_unknown_name_lists_the_known_ones():
  with pytest.raises(ValueError, match=r"got 'a100'.*h100.*v6e"), target.use_target("a100"):
    pass
