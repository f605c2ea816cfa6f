#!/bin/bash
# Starts a verb on several hosts of a SLURM cluster. One task a GPU: JAX finds coordinator, processes
# and its GPU in the variables that srun sets, so all GPUs of a host must stay visible to its tasks
# (gpus-per-node, not gpus-per-task). Run it in the clone, on a file system that all hosts share:
#   sbatch launch/cluster/slurm.sh --gin_file=configs/train/NAME.gin --workdir=runs/NAME
#   VERB=rl sbatch launch/cluster/slurm.sh --gin_file=configs/qerl/NAME.gin --workdir=runs/NAME
#SBATCH --job-name=jaxlab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

VERB="${VERB:-train}"                # or rl
PYTHON="${PYTHON:-.venv/bin/python}" # the same path on every host

cd "${SLURM_SUBMIT_DIR:?slurm.sh: start it with sbatch}"
# From Slurm 22.05 on a step does not take the CPUs of a task from its job.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 "$PYTHON" -m "launch.$VERB" "$@"
