"""Training a causal LM on text, assembled: module, sharded state, objective, batches -> `fit`.

Master weights are float32; products run in `TrainConfig.dtype`, to which weights are cast where
they are used (gains stay float32, as norms are). Over a mesh every array lives where `rules` say:
a random model is made there, so that no device ever holds all of it, and the optimiser's moments
lie beside their parameters. `abstract_step` gives the same program from shapes alone, for a plan.
Dims: B rows, T tokens.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from jaxlab import lora
from jaxlab.data import assets, text
from jaxlab.io import huggingface
from jaxlab.io import tokenizer as tokenizers
from jaxlab.models import presets, zoo
from jaxlab.nn import weights
from jaxlab.objectives import clm
from jaxlab.parallel import plan, rules
from jaxlab.train import budget, fit, guard, report, signals, step
from jaxlab.train import config as train_config
from jaxlab.train import state as train_state
from pallas_kernels import target

PyTree = Any
Mesh = rules.Mesh


@dataclasses.dataclass(frozen=True)
class Trainer:
  """What a run compiles; it holds no arrays. Build it with `prepare`."""

  module: nn.Module  # without placement, float32: what initialises
  config: train_config.TrainConfig
  mesh: Mesh | None
  optimizer: optax.GradientTransformation
  train_step: Callable[..., Any]

  def abstract(self, params: PyTree = None) -> tuple[PyTree, PyTree, PyTree, Any]:
    """(state, frozen, batch, key) of `train_step` as shapes that know where they live.

    Args:
      params: of the checkpoint, arrays or shapes; None for a dense model as it is initialised.
    """
    if params is None:
      params = jax.eval_shape(self._initial, jax.random.key(0))
    params = self._placed(jax.eval_shape(self._adapted, params, jax.random.key(0)))
    trainable, frozen = weights.partition(params, self._trains)
    state = train_state.abstract(trainable, self.optimizer, self.mesh)
    shape = (self.config.rows, self.config.tokens)
    batch = jax.eval_shape(
      lambda: clm.TokenBatch(jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool))
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    if self.mesh is not None:
      batch = plan.place(batch, rules.batch_spec(), self.mesh)
      key = plan.place(key, PartitionSpec(), self.mesh)
    return state, frozen, batch, key

  def start(
    self, params: PyTree, key: jax.Array
  ) -> tuple[train_state.TrainState, PyTree, jax.Array]:
    """(state, frozen, the run's key), as arrays where `abstract` says.

    Args:
      params: of the checkpoint, on the mesh; None initialises at random.
      key: a typed key; all that is random comes from it.
    """
    init_key, run_key = (jax.random.fold_in(key, i) for i in range(2))
    if self.mesh is not None:
      data = rules.replicate(jax.random.key_data(run_key), self.mesh)
      run_key = jax.random.wrap_key_data(data)
    if params is None:
      state, frozen, *_ = self.abstract()
      made = jax.jit(self._random, out_shardings=self._shardings(state))(init_key)
      return made, frozen, run_key
    state, *_ = self.abstract(params)
    params = self._adapted(params, init_key)
    if self.mesh is not None:
      params = rules.shard_params(params, self.mesh, num_kv_heads=self.module.config.num_kv_heads)
    trainable, frozen = weights.partition(params, self._trains)
    made = jax.jit(self._create, out_shardings=self._shardings(state))(trainable)
    return made, frozen, run_key

  def rounds(
    self, rows_NT: Int[np.ndarray, "N T"], seed: int
  ) -> Callable[[int, train_state.TrainState], fit.Round]:
    """The rounds of `fit`: one batch each; a process makes the rows that its devices hold."""
    rows, shape = self.config.rows, (self.config.rows, self.config.tokens)
    shards = _row_shards(self.mesh)
    data = text.batches(rows_NT, rows // shards, seed)

    def batch(index: int) -> clm.TokenBatch:
      if self.mesh is None:
        return clm.TokenBatch(jnp.asarray(data[index]), jnp.ones(shape, bool))
      shard = functools.cache(lambda s: data[index * shards + s])  # of several devices, made once
      place = functools.partial(
        jax.make_array_from_callback, shape, NamedSharding(self.mesh, rules.batch_spec())
      )
      piece = lambda at: shard((at[0].start or 0) * shards // rows)[:, at[1]]
      return clm.TokenBatch(place(piece), place(lambda at: np.ones_like(piece(at), bool)))

    def round_(index: int, state: train_state.TrainState) -> fit.Round:
      del state
      return fit.Round([batch(index)], {"epoch": (index + 1) * rows / len(rows_NT)})

    return round_

  def _trains(self, path: str) -> bool:
    return self.config.lora is None or lora.is_trainable(self.config.lora)(path)

  def _init(self, key):
    return self.module.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

  def _initial(self, key):
    """The dense model of a plan: in the dtype of products where it is frozen."""
    dtype = jnp.float32 if self.config.lora is None else compute_dtype(self.config)
    return jax.tree.map(lambda x: x.astype(dtype), self._init(key))

  def _adapted(self, params, key):
    return params if self.config.lora is None else lora.attach(params, self.config.lora, key)

  def _create(self, trainable):
    return train_state.TrainState.create(trainable, self.optimizer)

  def _random(self, key):
    return self._create(weights.partition(self._init(key), self._trains)[0])

  def _placed(self, params):
    """Shapes of parameters with the shardings of `rules`."""
    if self.mesh is None:
      return params
    return plan.place_params(params, self.mesh, self.module.config.num_kv_heads)

  def _shardings(self, shapes):
    return None if self.mesh is None else jax.tree.map(lambda x: x.sharding, shapes)


def prepare(
  model: Mapping[str, Any], config: train_config.TrainConfig, mesh: Mesh | None = None
) -> Trainer:
  """Builds module, optimiser, objective and train step; allocates and compiles nothing.

  Args:
    model: the model's config.json, of `read_model_config`.
    mesh: of real devices or of a topology that is not there; None for one device.
  Raises: ValueError for an architecture that we do not have, or sizes that do not fit the mesh.
  """
  module = zoo.from_config(dict(model), jnp.float32)
  _check_sizes(config, module, mesh)
  placement = None if mesh is None else rules.Placement(mesh, module.config.num_kv_heads)
  running = module.clone(remat=config.remat, placement=placement)
  objective = clm.make_objective(running, chunk_tokens=config.chunk_tokens)
  sigmas = {"sigmas": guard.SIGMAS_FROM_NOISE} if config.init == "random" else {}
  optimizer = guard.guarded(config.optimizer.build(config.steps), **sigmas)
  in_dtype = _cast_where_used(objective, compute_dtype(config))
  train_step = step.make_train_step(in_dtype, optimizer, micro_batch=config.micro_rows)
  return Trainer(module, config, mesh, optimizer, train_step)


def abstract_step(
  model: Mapping[str, Any], config: train_config.TrainConfig, mesh: Mesh | None = None
) -> tuple[Callable[..., Any], tuple[PyTree, PyTree, PyTree, Any]]:
  """(train_step, (state, frozen, batch, key)): `train_step.lower(*args)` is a run's own program.

  Allocates nothing and reads no file. The arguments are ShapeDtypeStructs with the shardings of a
  run. Raises: as `prepare`; ValueError naming the parameter that a mesh does not divide.
  """
  trainer = prepare(model, config, mesh)
  return trainer.train_step, trainer.abstract()


def formula_bytes(model: Mapping[str, Any], config: train_config.TrainConfig, mesh: Mesh) -> int:
  """The peak of `abstract_step` on a device by `budget.full_training_bytes`."""
  module = zoo.from_config(dict(model), jnp.float32)
  shards = rules.row_shards(mesh) * mesh.shape["sequence"]
  return budget.full_training_bytes(
    module.config,
    sum(x.size for x in jax.tree.leaves(zoo.param_shapes(module))),
    shards=mesh.shape["fsdp"] * mesh.shape["tensor"],
    head_shards=mesh.shape["tensor"],
    tokens=(config.micro_rows or config.rows) * config.tokens // shards,
    chunk_tokens=config.chunk_tokens // shards,
    dtype_bytes=compute_dtype(config).itemsize,
  )


def read_model_config(path: str) -> dict[str, Any]:
  """config.json of a model that is named: a folder or GGUF file, "demo", or a preset's name.

  Raises: ValueError for a model that is neither here nor known.
  """
  if (found := assets.model_path(path)).exists():
    return huggingface.load_config(found)
  if path in presets.BY_NAME:
    return presets.BY_NAME[path]()
  raise ValueError(
    f"model: {path!r} does not exist. Give a model folder, a .gguf file, 'demo', or "
    f"one of {', '.join(presets.BY_NAME)}."
  )


def compute_dtype(config: train_config.TrainConfig) -> jnp.dtype:
  """Of products and activations: as configured, else float32 on a CPU and bfloat16 elsewhere."""
  default = "float32" if target.current_target().platform == "cpu" else "bfloat16"
  return jnp.dtype(config.dtype or default)


def run(
  trainer: Trainer,
  params: PyTree,
  tokenizer: tokenizers.Tokenizer,
  *,
  workdir: str | os.PathLike[str],
  seed: int,
  config_text: str,
  stop: signals.Interrupt,
) -> tuple[PyTree, dict[str, Any]]:
  """Trains, or resumes, in `workdir`.

  Args:
    trainer: of `prepare`.
    params: of the checkpoint, on the mesh; None for a random start. Where all of it trains its
      arrays are deleted, once their float32 masters are there.
    config_text: the run's configuration; see `fit.fit`.
  Returns: (the trained parameters, on the mesh; the figures of result.json).
  Raises: ValueError if the data cannot be used or the state does not fit into memory.
  """
  config = trainer.config
  rows_NT = text.read_rows(config.data, tokenizer, config.tokens)
  _check_vocabulary(rows_NT, trainer.module.config.vocab_size)
  logging.info("%d rows of %d tokens; a step takes %d.", *rows_NT.shape, config.rows)
  _check_memory(*trainer.abstract(params)[:2], trainer.mesh)
  state, frozen, key = trainer.start(params, jax.random.key(seed))
  if config.lora is None:
    jax.tree.map(lambda x: x.delete(), params)
  trained = sum(x.size for x in state.trainable.values())
  final = fit.fit(
    trainer.train_step, state, frozen, trainer.rounds(rows_NT, seed), steps=config.steps, key=key,
    workdir=workdir, save_every_steps=config.save_every, fingerprint={"tokens": _digest(rows_NT)},
    config_text=config_text, stop=stop,
  )  # fmt: skip
  figures = report.figures(workdir, config.rows * config.tokens)
  devices = 1 if trainer.mesh is None else trainer.mesh.size
  sizes = {"trained_parameters": trained, "devices": devices}
  return weights.merge(final.trainable, frozen), {**figures, **sizes}


def _cast_where_used(objective: step.Objective, dtype: jnp.dtype) -> step.Objective:
  """The objective on weights cast to `dtype`: gradients come back as float32, to the masters.

  Over a mesh XLA sums a micro-batch's gradients across devices before that, in `dtype`.
  """

  def cast(path, w):
    keeps = weights.is_leaf(w) or path.endswith("norm")  # adapters cast themselves
    return w if keeps else w.astype(dtype)

  return lambda params, batch, key: objective(weights.map_leaves(cast, params), batch, key)


def _row_shards(mesh: Mesh | None) -> int:
  return 1 if mesh is None else rules.row_shards(mesh)


def _check_sizes(config: train_config.TrainConfig, module: nn.Module, mesh: Mesh | None) -> None:
  if mesh is None and jax.process_count() > 1:
    raise ValueError(
      f"TrainConfig.mesh: {jax.process_count()} processes need a mesh over their devices; got "
      "None. Set it, for example to @MeshConfig() with MeshConfig.fsdp = -1."
    )
  if config.tokens > module.config.max_positions:
    raise ValueError(
      f"TrainConfig.tokens: a row must fit the context of {module.config.max_positions} tokens; "
      f"got {config.tokens}. Use shorter rows."
    )
  field = "rows" if config.micro_rows is None else "micro_rows"
  shards, rows = _row_shards(mesh), getattr(config, field)
  if rows % shards:
    raise ValueError(
      f"TrainConfig.{field}: must be a multiple of the mesh's data * fsdp = {shards}; got {rows}. "
      "Change the rows, or move devices to the tensor axis."
    )
  heads = module.config.num_heads
  if mesh is not None and heads % mesh.shape["tensor"]:
    raise ValueError(
      f"TrainConfig.mesh: tensor must divide the model's attention heads; got tensor = "
      f"{mesh.shape['tensor']} and {heads} heads. Choose a smaller tensor, and more fsdp."
    )
  if mesh is not None and config.tokens % mesh.shape["sequence"]:
    raise ValueError(
      f"TrainConfig.tokens: must be a multiple of the mesh's sequence = {mesh.shape['sequence']}; "
      f"got {config.tokens}. Change one of them."
    )


def _check_vocabulary(rows_NT: np.ndarray, vocab_size: int) -> None:
  if rows_NT.max() >= vocab_size:
    raise ValueError(
      f"TrainConfig.model: its tokenizer must not have more tokens than its table of {vocab_size}; "
      f"got token {rows_NT.max()}. Use the model's own tokenizer.json."
    )


def _check_memory(state: PyTree, frozen: PyTree, mesh: Mesh | None) -> None:
  """Refuses a run whose state and gradients alone are too much; activations come on top."""
  # Virtual devices of a CPU share its memory.
  on_cpu = target.current_target().platform == "cpu"
  sharing = len(mesh.local_devices) if mesh is not None and on_cpu else 1
  parts = {
    "state": plan.device_bytes(state),
    "gradients": plan.device_bytes(state.trainable),
    "frozen": plan.device_bytes(frozen),
  }
  parts = {name: n * sharing for name, n in parts.items()}
  logging.info("%s", budget.require_fits(parts | {"peak": sum(parts.values())}))


def _digest(rows_NT: np.ndarray) -> str:
  return hashlib.sha256(rows_NT).hexdigest()[:16]
