"""The cluster recipes: their form, and what they start, run as two real processes on this host.

The script runs with a stand-in for `srun` that sets what SLURM sets; the manifest's own command
runs with the manifest's own variables, two hosts for 128 and this host's address for a pod's.
"""

import functools
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import yaml

import jaxlab
from jaxlab.train import metrics
from tests.launch import small_train, verbs

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "launch" / "cluster"
PROCESSES = 2
LIMIT_S = 150  # about 20 s on two quiet cores
LOSS = 2e-5  # another order of summation in float32; losses of about 5
OTHERS = ("JAX_COORDINATOR", "JAX_LOCAL_DEVICE", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "VERB")
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
tasks = [
  subprocess.Popen(command, env=os.environ | {{
    "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "{PROCESSES}",
    "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i),
  }})
  for i in range({PROCESSES})
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture(scope="module")
def manifest():
  return yaml.safe_load((CLUSTER / "jobset.yaml").read_text())


@pytest.fixture(scope="module")
def job(manifest):
  [replicated] = manifest["spec"]["replicatedJobs"]
  return replicated


@pytest.fixture(scope="module")
def container(job):
  [container] = job["template"]["spec"]["template"]["spec"]["containers"]
  return container


@pytest.fixture
def environment(tmp_path):
  """Four virtual devices a process, and no coordinator of somebody else."""
  kept = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
  return kept | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PYTHONPATH": str(ROOT),
    "PATH": f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
  }


def free_port() -> str:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return str(free.getsockname()[1])


def wait(processes: list[subprocess.Popen]) -> list[int]:
  try:
    return [process.wait(LIMIT_S) for process in processes]
  finally:
    for process in processes:  # with all that they started
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
  """The workdir of the same recipe in this process, on its eight devices."""
  folder = tmp_path_factory.mktemp("one")
  recipe = small_train.gin(folder, *small_train.MESH)
  assert verbs.execute("train", [f"--gin_file={recipe}", f"--workdir={folder / 'run'}"]) == 0
  return folder / "run"


def assert_same_run(workdir: pathlib.Path, want: pathlib.Path, log: str):
  found, expected = metrics.read(workdir), metrics.read(want)
  assert [line["step"] for line in found] == list(range(1, small_train.STEPS + 1)), log
  for line, other in zip(found, expected, strict=True):
    assert line["loss"] == pytest.approx(other["loss"], abs=LOSS)
  assert verbs.result(workdir)["devices"] == 8
  params, others = (jaxlab.load(folder / "model").params for folder in (workdir, want))
  np.testing.assert_allclose(params["embed"], others["embed"], rtol=0, atol=2e-3)


# --- SLURM


def script_options() -> dict[str, str]:
  found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (CLUSTER / "slurm.sh").read_text(), re.M)
  return dict(found)


def test_the_script_is_bash():
  done = subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"], capture_output=True, text=True)
  assert done.returncode == 0 and not done.stderr
  if shutil.which("shellcheck"):
    subprocess.run(["shellcheck", CLUSTER / "slurm.sh"], check=True)


def test_the_script_starts_one_task_a_gpu_and_asks_for_a_signal():
  """JAX gives the task with SLURM_LOCALID i the GPU number i of its host."""
  options = script_options()
  assert options["ntasks-per-node"] == options["gpus-per-node"] and "gpus-per-task" not in options
  assert options["signal"].startswith("TERM@") and "requeue" in options
  # Directives end where commands begin.
  text = (CLUSTER / "slurm.sh").read_text()
  assert text.rfind("#SBATCH") < text.find("set -euo pipefail")


@pytest.mark.slow
def test_the_script_trains(environment, tmp_path, one_process):
  (tmp_path / "srun").write_text(SRUN)
  (tmp_path / "srun").chmod(0o755)
  recipe, workdir = small_train.gin(tmp_path, *small_train.MESH), tmp_path / "run"
  own = {"SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": sys.executable}
  own["JAX_COORDINATOR_PORT"] = free_port()
  command = [CLUSTER / "slurm.sh", f"--gin_file={recipe}", f"--workdir={workdir}"]
  with open(tmp_path / "log", "wb") as log:
    process = subprocess.Popen(
      ["bash", *command], env=environment | own, stdout=log, stderr=log, start_new_session=True
    )
  codes = wait([process])
  text = (tmp_path / "log").read_text()[-4000:]
  assert codes == [0], text
  assert_same_run(workdir, one_process, text)


def test_the_script_passes_the_verb_on(environment, tmp_path):
  (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$SRUN_CPUS_PER_TASK" "$@"\n')
  (tmp_path / "srun").chmod(0o755)
  own = {"SLURM_SUBMIT_DIR": str(ROOT), "VERB": "rl", "PYTHON": "python"}
  own["SLURM_CPUS_PER_TASK"] = "8"  # which srun does not read
  command = ["bash", str(CLUSTER / "slurm.sh"), "--gin_file=a b.gin"]
  done = subprocess.run(command, env=environment | own, capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-4:] == ["python", "-m", "launch.rl", "--gin_file=a b.gin"]
  assert done.stdout.splitlines()[0] == "8"


# --- JobSet


def variables(container) -> dict[str, str | dict]:
  return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_every_host_is_a_process(manifest, job, container):
  assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  spec = job["template"]["spec"]
  hosts = spec["completions"]
  assert spec["parallelism"] == hosts and variables(container)["JAX_NUM_PROCESSES"] == str(hosts)
  assert spec["completionMode"] == "Indexed" and job["replicas"] == 1
  index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  assert variables(container)["JAX_PROCESS_ID"] == {"fieldRef": {"fieldPath": index}}
  # The name that Kubernetes gives pod 0 of job 0, in the subdomain that JobSet makes.
  host, port = variables(container)["JAX_COORDINATOR_ADDRESS"].split(":")
  name = manifest["metadata"]["name"]
  assert host == f"{name}-{job['name']}-0-0.{name}" and manifest["spec"]["network"]
  assert {"containerPort": int(port)} in container["ports"]


def test_hosts_make_the_slice_and_restart_together(manifest, job, container):
  spec = job["template"]["spec"]
  pod = spec["template"]["spec"]
  sizes = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
  chips = container["resources"]["limits"]["google.com/tpu"]
  assert container["resources"]["requests"]["google.com/tpu"] == chips
  assert np.prod([int(size) for size in sizes]) == chips * spec["completions"]
  assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
  assert manifest["spec"]["failurePolicy"]["maxRestarts"] > 0
  assert pod["terminationGracePeriodSeconds"] >= 60
  volumes = {volume["name"] for volume in pod["volumes"]}
  [mount] = container["volumeMounts"]
  assert mount["name"] in volumes
  assert variables(container)["WORKDIR"].startswith(mount["mountPath"])
  assert (ROOT / variables(container)["GIN_FILE"]).is_file()


def start_pods(container, environment, folder, **changes) -> list[subprocess.Popen]:
  """The container's command with its variables, once a host, two hosts in all."""
  own = variables(container) | changes | {"JAX_NUM_PROCESSES": str(PROCESSES)}
  processes = []
  for index in range(PROCESSES):
    mine = {k: str(index) if isinstance(v, dict) else v for k, v in own.items()}
    with open(folder / f"{index}.log", "wb") as log:
      start = functools.partial(subprocess.Popen, cwd=folder, stdout=log, stderr=log)
      command = [*container["command"], *container["args"]]
      processes.append(start(command, env=environment | mine, start_new_session=True))
  return processes


@pytest.mark.slow
def test_the_manifest_trains(container, environment, tmp_path, one_process):
  changes = {
    "GIN_FILE": str(small_train.gin(tmp_path, *small_train.MESH)), "WORKDIR": str(tmp_path / "run"),
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
  }  # fmt: skip
  codes = wait(start_pods(container, environment, tmp_path, **changes))
  log = "\n".join((tmp_path / f"{i}.log").read_text()[-3000:] for i in range(PROCESSES))
  assert codes == [0] * PROCESSES, log
  assert_same_run(tmp_path / "run", one_process, log)


def test_a_preempted_host_is_no_success(container, environment, tmp_path):
  """The verb leaves with 0 and no result.json: the container must not."""
  stub = tmp_path / "python"
  stub.write_text("#!/bin/bash\nexit 0\n")
  stub.chmod(0o755)
  own = environment | {"VERB": "train", "GIN_FILE": "a.gin", "WORKDIR": shlex.quote(str(tmp_path))}
  command = [*container["command"], *container["args"]]
  assert subprocess.run(command, env=own).returncode == 1
  (tmp_path / "result.json").write_text("{}")
  assert subprocess.run(command, env=own).returncode == 0
