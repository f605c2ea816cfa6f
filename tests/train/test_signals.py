"""Signals and kills on real processes, alone and in pairs."""

import os
import random
import re
import signal
import socket
import time

import jax
import pytest

from jaxlab.io import orbax
from jaxlab.train import metrics, signals
from tests import forkserver
from tests.train import tiny, two_processes

STEPS = 30


@pytest.fixture(scope="module")
def fork():
  return forkserver.context()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("unbroken")
  tiny.train(workdir, steps=STEPS)
  return workdir


def start(fork, workdir, **settings):
  started = fork.Event()
  settings = {"steps": STEPS, "pause": 0.02} | settings
  process = fork.Process(target=tiny.child, args=(workdir, started), kwargs=settings)
  process.start()
  return process, started


def disturb(fork, workdir, signum, seed, times):
  """Sends a signal at random moments of a run, starting it again each time; then lets it end."""
  rng, codes = random.Random(seed), []
  for _ in range(times):
    process, started = start(fork, workdir)
    assert started.wait(60)
    time.sleep(rng.random() * 0.5)
    os.kill(process.pid, signum)
    process.join(30)
    codes.append(process.exitcode)
    if codes[-1] == 0:  # it had finished
      break
  process, _ = start(fork, workdir)
  process.join(60)
  return [*codes, process.exitcode]


def final_state(workdir):
  current, _ = tiny.start()
  with orbax.CheckpointStore(workdir / "checkpoints") as store:
    return store.restore_latest({"state": current, "key": jax.random.key(3)})


def assert_same_run(workdir, want):
  lines, want_lines = metrics.read(workdir), metrics.read(want)
  for line in (*lines, *want_lines):
    del line["seconds"]
  assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
  assert tiny.exact(lines) == tiny.exact(want_lines)
  got, expected = final_state(workdir), final_state(want)
  assert got.step == expected.step == STEPS and tiny.same_bits(got.state, expected.state)


def test_kill_9_and_the_same_command_again(fork, workdir, unbroken):
  codes = disturb(fork, workdir, signal.SIGKILL, 0, 3)
  assert codes[0] == -signal.SIGKILL and codes[-1] == 0
  assert_same_run(workdir, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_kill_9_twelve_times(fork, workdir, unbroken, seed):
  assert disturb(fork, workdir, signal.SIGKILL, seed, 12)[-1] == 0
  assert_same_run(workdir, unbroken)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves(fork, workdir, unbroken, signum):
  codes = disturb(fork, workdir, signum, 1, 1)
  assert codes[0] == 128 + signum and codes[-1] == 0
  assert_same_run(workdir, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_signals_at_twelve_moments(fork, workdir, unbroken, seed):
  codes = disturb(fork, workdir, signal.SIGTERM, seed, 12)
  assert set(codes[:-1]) <= {143, 0} and codes[-1] == 0
  assert_same_run(workdir, unbroken)


def test_it_leaves_within_a_step_and_the_second_signal_at_once(fork, workdir):
  process, started = start(fork, workdir, pause=5.0)
  assert started.wait(60)  # the second step has begun, and takes 5 s
  time.sleep(0.2)
  os.kill(process.pid, signal.SIGTERM)
  time.sleep(0.3)
  assert process.is_alive()  # finishing the step
  begin = time.monotonic()
  os.kill(process.pid, signal.SIGTERM)
  process.join(10)
  assert process.exitcode == -signal.SIGTERM and time.monotonic() - begin < 2


def test_interrupt_alone():
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with signals.Interrupt() as stop:
    assert not stop
    stop.raise_if_set()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop and stop.signum == signal.SIGINT
    with pytest.raises(signals.Interrupted, match="SIGINT") as stopped:
      stop.raise_if_set(7)
  assert stopped.value.step == 7 and stopped.value.exit_code == 130
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
  assert signals.exit_code(signal.SIGTERM) == 143
  assert signals.Interrupted(None, 3, saved=True).exit_code == 0


# --- two processes


def pair(fork, workdir):
  """Two processes of four virtual devices each, connected over loopback; both are training."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  trained = fork.Semaphore(0)
  processes = [
    fork.Process(target=two_processes.main, args=(i, port, workdir, trained)) for i in range(2)
  ]
  for process in processes:
    process.start()
  if not (trained.acquire(timeout=60) and trained.acquire(timeout=60)):
    end(processes, 0)
    raise AssertionError("the two processes never trained")
  return processes


def end(processes, seconds):
  """Exit codes of both; what is left after the time is killed."""
  deadline = time.monotonic() + seconds
  for process in processes:
    process.join(max(0.0, deadline - time.monotonic()))
    process.kill()
    process.join()
  return [process.exitcode for process in processes]


def stop_pair(fork, workdir, told):
  """Sends SIGTERM to one of two; returns the step that both saved."""
  processes = pair(fork, workdir)
  os.kill(processes[told].pid, signal.SIGTERM)
  assert end(processes, 60) == [0, 0]
  said = {(workdir / f"stopped.{i}").read_text() for i in range(2)}
  assert len(said) == 1
  found = re.search(r"a preemption notice after step (\d+) \(saved\)", said.pop())
  return int(found[1])


def test_a_preemption_notice_to_one_of_two_processes(fork, workdir):
  """Both save the same step and exit 0; one process can restore it."""
  step = stop_pair(fork, workdir, told=1)
  assert [line["step"] for line in metrics.read(workdir)] == list(range(1, step + 1))
  restored = final_state(workdir)
  assert restored.step == step and restored.state["state"].step == step


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_other_and_the_rerun_resumes(fork, workdir, victim):
  processes = pair(fork, workdir)
  processes[victim].kill()
  survivor = processes[1 - victim]
  survivor.join(30)  # heartbeat 10 s, and 5 s
  assert survivor.exitcode not in (None, 0)
  before = len(metrics.read(workdir))
  assert stop_pair(fork, workdir, told=0) >= min(5, before)
  steps = [line["step"] for line in metrics.read(workdir)]
  assert steps == list(range(1, len(steps) + 1))
