"""Trains a causal language model on text: from random weights, all weights, or adapters (LoRA).

TrainConfig says what (model, data, steps, rows, tokens, optimizer, mesh); see configs/train. The
model lands in WORKDIR/model, which every verb takes; launch.export writes it for other programs.
Rerunning the command resumes. On several hosts start the same command on each (launch/cluster).

python -m launch.train --gin_file=configs/train/tiny_cpu.gin"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from absl import logging

import jaxlab
from jaxlab.io import huggingface
from jaxlab.models import zoo
from jaxlab.parallel import mesh as meshes
from jaxlab.train import config as train_config
from jaxlab.train import pretrain, signals
from launch import common, registry

FLAGS = common.define_flags()


def main(run: common.Run) -> dict:
  """Builds the run from gin, trains, saves the model; returns the figures of result.json."""
  config = registry.get("TrainConfig")()
  run.start()
  with signals.Interrupt() as stop:
    mesh = None if config.mesh is None else meshes.make_mesh(config.mesh)
    path = config.model_path(run.workdir)
    trainer = pretrain.prepare(pretrain.read_model_config(path), config, mesh)
    lm = load(path, config, mesh)
    params, figures = pretrain.run(
      trainer, lm.params, lm.tokenizer, workdir=run.workdir, seed=run.seed,
      config_text=registry.operative_config(), stop=stop,
    )  # fmt: skip
    if config.lora is None:  # from the float32 masters, which checkpoints/ keeps
      params = jax.tree.map(lambda x: x.astype(lm.module.param_dtype), params)
    jaxlab.save(dataclasses.replace(lm, params=params), run.workdir / "model")
  logging.info("Wrote %s.", run.workdir / "model")
  return {"model": path, **figures}


def load(path: str, config: train_config.TrainConfig, mesh: jax.sharding.Mesh | None) -> jaxlab.LM:
  """The model on the mesh; without parameters for a random start.

  Raises: ValueError for a model that is not there, or has no tokenizer.
  """
  if config.init == "checkpoint":
    # Adapters leave the base as it is; what trains is cast where it is used.
    dtype = None if config.lora is None else pretrain.compute_dtype(config)
    lm = jaxlab.load(path, dtype, mesh)
  else:
    raw = pretrain.read_model_config(path)
    there = pathlib.Path(path).exists()
    tokenizer = huggingface.load_tokenizer(path) if there else None
    source = huggingface.Source(pathlib.Path(path), dtypes={})
    lm = jaxlab.LM(zoo.from_config(raw, jnp.float32), None, raw, tokenizer, path, source)
  if lm.tokenizer is None:
    raise ValueError(
      f"TrainConfig.model: {path} has no tokenizer.json. Put the model's own files there: "
      f"hf download {path} --local-dir {path}"
    )
  return lm


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab train`."""
  common.run_verb(main, FLAGS, argv, connect=meshes.connect_processes)


if __name__ == "__main__":
  run()
