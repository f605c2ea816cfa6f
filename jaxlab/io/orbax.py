"""Checkpoints that survive kill -9, damage, a full disk and a change of mesh.

The only file that imports Orbax. What Orbax alone does not give, and this file adds: a digest of
every array and the structure of the tree, compared on restore (`seal`); old steps renamed before
they are deleted, so that a kill never leaves half a step listed; a step counted as saved only once
it is committed and flushed; damaged steps set aside by name, and the one before used, loudly.

A step holds two items: `state`, a flat {path: array}, and `meta`, sealed JSON. Dims: none.
"""

import contextlib
import gc
import logging as std_logging
import os
import pathlib
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from jaxlab import errors
from jaxlab.io import seal

PyTree = Any

FORMAT = 1  # of our meta item; raised when a reader of the old one would misread the new one
REFUSED_DTYPES = ("uint4", "int2", "uint2")  # Orbax cannot write them
NOT_DAMAGE = (MemoryError, PermissionError)  # the file is well, this process is not


class Restored(NamedTuple):
  """A whole checkpoint: its step, the pytree in the target's structure, and the caller's meta."""

  step: int
  state: PyTree
  meta: dict[str, Any]


class CheckpointStore:
  """The checkpoints of one folder. One writer (of one or several processes) at a time.

  Call `check` at every step and `wait` (or leave the `with` block) at the end: only then does a
  save count.

  Args:
    root: the folder; made if absent.
    keep: how many of the newest steps stay.
  """

  def __init__(self, root: str | os.PathLike[str], *, keep: int = 3):
    if keep < 1:
      raise ValueError(f"CheckpointStore: keep must be at least 1; got {keep}.")
    _silence_orbax()
    self.root = pathlib.Path(root).absolute()
    self._trash = self.root / "trash"
    self._pending: int | None = None  # a step handed to Orbax and not yet flushed
    self._empty_trash()
    self._manager = ocp.CheckpointManager(
      self.root,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        todelete_subdir=self._trash.name,  # rename first: a kill leaves no half-deleted step
        cleanup_tmp_directories=True,
      ),
    )

  def __enter__(self) -> "CheckpointStore":
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def steps(self) -> list[int]:
    """The committed steps, oldest first."""
    return sorted(self._manager.all_steps())

  def save(
    self, step: int, state: PyTree, meta: dict[str, Any], *, require_finite: bool = True
  ) -> None:
    """Starts to save in the background; the arrays may be donated or changed at once.

    Args:
      step: its number, larger than every saved one.
      state: pytree of arrays of any dtype (also typed keys), on any mesh.
      meta: JSON values of the caller.
      require_finite: refuse a NaN or an infinity anywhere in `state`.
    Raises: ValueError for a leaf that is no array or cannot be written, for numbers that are not
      finite, and if the disk refused this save or the one before.
    """
    self.wait()
    leaves = seal.flatten(state)
    _check_writable(leaves)
    table, not_finite = seal.inspect(leaves)
    if require_finite and not_finite:
      raise ValueError(
        f"CheckpointStore.save: a checkpoint must hold finite numbers; got NaN or inf in "
        f"{len(not_finite)} arrays of step {step}, first {not_finite[0]!r}. Older steps are kept."
      )
    versions = {"jax": jax.__version__, "orbax": ocp.__version__}
    body = {"format": FORMAT, "step": step, "user": meta, "leaves": table, "versions": versions}
    sealed = seal.sealed(body | {"nodes": seal.describe(state)})
    items = ocp.args.Composite(state=ocp.args.StandardSave(leaves), meta=ocp.args.JsonSave(sealed))
    with _disk_errors(step):
      if not self._manager.save(step, args=items, force=True):
        raise ValueError("Orbax declined to save it")
    self._pending = step

  def check(self) -> None:
    """To be called at every step: announces a finished save, raises the error of a failed one."""
    if self._pending is not None and not self._manager.is_saving_in_progress():
      self.wait()

  def wait(self) -> None:
    """Waits for the save in progress, flushes it to the disk and says so.

    Raises: ValueError if it failed; the steps before are whole and the next save may work.
    """
    if self._pending is None:
      return
    step, self._pending = self._pending, None
    with _disk_errors(step):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
      if jax.process_index() == 0:
        seal.flush(self.root / str(step))
    self._empty_trash()
    logging.info("Saved step %d.", step)

  def reached_preemption(self, step: int) -> bool:
    """True, in all processes at the same step, once a preemption notice reached any of them."""
    return self._manager.reached_preemption(step)

  def restore_latest(
    self, target: PyTree, check: Callable[[dict[str, Any]], str] | None = None
  ) -> Restored | None:
    """The newest whole checkpoint, or None if there is none at all.

    Damaged steps are renamed to `damaged.N`, with one warning each.

    Args:
      target: pytree of arrays or `ShapeDtypeStruct`s with the wanted structure and shardings (any
        mesh, any number of processes).
      check: looks at the caller's meta before any array is read; returns a complaint, or "".
    Raises: ValueError if the checkpoint is of another model (names the leaves) or `check`
      complains. CorruptFile if there were checkpoints and every one is damaged.
    """
    found = self.steps()
    for step in reversed(found):
      restored, reason = _attempt(lambda step=step: self._restore(step, target, check))
      if not _any_process(reason is not None):
        return restored
      self._set_aside(step, reason or "another process could not read it")
    if found:
      raise errors.CorruptFile(
        self.root,
        f"steps {found}",
        "every checkpoint is damaged, and was set aside as damaged.N",
        "Check the disk; the same command again starts from step 0.",
      )
    return None

  def close(self) -> None:
    """Waits for the save in progress and releases Orbax's threads."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def _restore(self, step: int, target: PyTree, check) -> Restored:
    meta = _read_meta(self._manager, step)
    if check and (complaint := check(meta["user"])):
      raise _Mistake(complaint)
    leaves = seal.flatten(target)
    _check_same_model(step, meta, leaves, seal.describe(target))
    arrays = _read_arrays(self._manager, step, meta, {p: _sharding(x) for p, x in leaves.items()})
    free = [seal.to_device(arrays[path], like) for path, like in leaves.items()]
    return Restored(step, jax.tree.unflatten(jax.tree.structure(target), free), meta["user"])

  def _set_aside(self, step: int, reason: str) -> None:
    logging.warning(
      "Checkpoint %d in %s is damaged (%s); set aside as damaged.%d, using the one before.",
      step, self.root, reason, step,
    )  # fmt: skip
    if jax.process_index() == 0:
      aside = self.root / f"damaged.{step}"
      shutil.rmtree(aside, ignore_errors=True)  # of an earlier time with the same step
      (self.root / str(step)).rename(aside)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoint set aside")
    self._manager.reload()

  def _empty_trash(self) -> None:
    if jax.process_index() == 0:
      shutil.rmtree(self._trash, ignore_errors=True)


def save_params(
  path: str | os.PathLike[str], params: PyTree, meta: dict[str, Any], *, require_finite: bool = True
) -> None:
  """Writes parameters (any leaf type of `weights`) as a checkpoint folder of our own.

  Args:
    path: the folder; what it held before stays until the new checkpoint is whole.
    params: nested dicts, lists and tuples of arrays and of jaxlab's pytree dataclasses.
    meta: JSON values to go with them (the model's config).
    require_finite: refuse a NaN or an infinity.
  """
  with CheckpointStore(path, keep=1) as store:
    store.save(max(store.steps(), default=-1) + 1, params, meta, require_finite=require_finite)


def load_params(
  path: str | os.PathLike[str],
  sharding: Callable[[str], jax.sharding.Sharding] | None = None,
) -> tuple[PyTree, dict[str, Any]]:
  """Reads what `save_params` wrote.

  Args:
    path: the folder.
    sharding: where each array goes, by its path; None puts all on the default device.
  Returns: (params, meta), params in the structure that was saved.
  Raises: ValueError if the folder is no checkpoint, CorruptFile if it is damaged.
  """

  def read(manager, step):
    meta = _read_meta(manager, step)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = {p: sharding(p) if sharding else default for p in meta["leaves"]}
    arrays = _read_arrays(manager, step, meta, places)
    return seal.rebuild(meta["nodes"], arrays), meta["user"]

  return _read_newest(path, read)


def params_shapes(path: str | os.PathLike[str]) -> PyTree:
  """The parameters of `load_params` as `ShapeDtypeStruct`s; no array is read.

  Raises: as `load_params`.
  """

  def read(manager, step):
    meta = _read_meta(manager, step)
    leaves = {
      path: jax.ShapeDtypeStruct(shape, seal.dtype_of(dtype))
      for path, (_, dtype, shape) in meta["leaves"].items()
    }
    return jax.eval_shape(lambda leaves: seal.rebuild(meta["nodes"], leaves), leaves)

  return _read_newest(path, read)


def _read_newest(path: str | os.PathLike[str], read: Callable[[Any, int], Any]) -> Any:
  """`read(manager, newest step)` of a folder written by `save_params`."""
  if not is_checkpoint(path):
    raise ValueError(
      f"load_params: {path} must be a folder written by save_params; it holds no finished step. "
      "Check the path."
    )
  _silence_orbax()
  root = pathlib.Path(path).absolute()
  options = ocp.CheckpointManagerOptions(read_only=True)
  with ocp.CheckpointManager(root, options=options) as manager:
    step = max(manager.all_steps())
    result, reason = _attempt(lambda: read(manager, step))
  if reason is not None:
    raise errors.CorruptFile(root / str(step), "checkpoint", reason)
  return result


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
  """Whether a folder holds at least one finished step of ours."""
  root = pathlib.Path(path)
  if not root.is_dir():
    return False
  return any(p.name.isdigit() and (p / "meta").is_dir() for p in root.iterdir())


def _check_writable(leaves: dict[str, Any]) -> None:
  for path, x in leaves.items():
    if x.size == 0 or str(x.dtype) in REFUSED_DTYPES:
      raise ValueError(
        f"CheckpointStore.save: an array must be neither empty nor {'/'.join(REFUSED_DTYPES)}; got "
        f"{x.dtype}{list(x.shape)} at {path!r}. Leave it out, or store it as uint8."
      )
    if not isinstance(x, jax.Array) and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
      raise ValueError(
        f"CheckpointStore.save: a host array must have a dtype of JAX; got {x.dtype} at {path!r}. "
        "Cast it to 32 bits."
      )


def _read_meta(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
  items = ocp.args.Composite(meta=ocp.args.JsonRestore())
  meta = seal.unsealed(manager.restore(step, args=items).meta)
  if meta["step"] != step:
    raise RuntimeError(f"the folder of step {step} holds step {meta['step']}")
  if meta["format"] != FORMAT:
    raise _Mistake(
      f"checkpoint: step {step} must have format {FORMAT}; got {meta['format']}. "
      "Read it with the version of jaxlab that wrote it."
    )
  return meta


def _check_same_model(
  step: int, meta: dict[str, Any], leaves: dict[str, Any], nodes: dict[str, dict]
) -> None:
  have = {path: entry[1:] for path, entry in meta["leaves"].items()}
  want = {path: seal.array_type(x) for path, x in leaves.items()}
  changed = seal.differences(have, want) or seal.differences(meta["nodes"], nodes)
  if changed:
    raise _Mistake(
      f"restore_latest: checkpoint {step} must be of the same model; got other parts: {changed}. "
      "Use another workdir, or the settings that this one was started with."
    )


def _read_arrays(
  manager: ocp.CheckpointManager,
  step: int,
  meta: dict[str, Any],
  places: dict[str, jax.sharding.Sharding],
) -> dict[str, jax.Array]:
  """All arrays of a step, checked against their digests."""
  target = {
    path: jax.ShapeDtypeStruct(shape, seal.dtype_of(dtype), sharding=places[path])
    for path, (_, dtype, shape) in meta["leaves"].items()
  }
  items = ocp.args.Composite(state=ocp.args.StandardRestore(target))
  arrays = manager.restore(step, args=items).state
  found, _ = seal.inspect(arrays)
  wrong = [path for path in target if found[path] != meta["leaves"][path]]
  if wrong:
    raise RuntimeError(f"{len(wrong)} arrays differ from their digests, first {wrong[0]}")
  return arrays


def _sharding(like: Any) -> jax.sharding.Sharding:
  sharding = getattr(like, "sharding", None)
  return sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


class _Mistake(ValueError):
  """The caller wants something that the checkpoint is not; no reason to set it aside."""


def _attempt(read: Callable[[], Any]) -> tuple[Any, str | None]:
  """(result, None), or (None, the reason why the files cannot be trusted).

  Anything may come out of a reader of damaged files, so everything is caught but what is known to
  be something else.
  """
  with _quiet():
    try:
      return read(), None
    except (_Mistake, *NOT_DAMAGE):
      raise
    except Exception as error:
      first_line = (str(error).splitlines() or [""])[0]
      if "RESOURCE_EXHAUSTED" in first_line:  # out of device memory
        raise
      reason = f"{type(error).__name__}: {first_line[:200]}"
    # Half-read arrays are coroutines that complain when they end or are collected: here, unheard.
    time.sleep(0.02)
    gc.collect(1)  # they are young; a whole collection takes 0.1 s
  return None, reason


@contextlib.contextmanager
def _quiet():
  asyncio_log = std_logging.getLogger("asyncio")
  hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
  asyncio_log.disabled = True
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      yield
  finally:
    sys.unraisablehook, asyncio_log.disabled = hook, False


def _any_process(flag: bool) -> bool:
  """Whether the flag is set in any process; the same answer in all."""
  if jax.process_count() == 1:
    return flag
  return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


@contextlib.contextmanager
def _disk_errors(step: int):
  try:
    yield
  except (OSError, ValueError) as error:
    found = re.search(r": ([^:\[]+) \[os_error_code", str(error))  # of TensorStore
    reason = found[1] if found else (str(error).splitlines() or [type(error).__name__])[0][:300]
    raise ValueError(
      f"CheckpointStore.save: step {step} could not be written; got {reason.strip()}. Free disk "
      "space or choose another workdir; the steps before are whole."
    ) from error


class _NotOrbax(std_logging.Filter):
  """Drops Orbax's records (thousands for a damaged step): what matters in them is raised, too."""

  def filter(self, record: std_logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}checkpoint{os.sep}" not in record.pathname


_NOT_ORBAX = _NotOrbax()


def _silence_orbax() -> None:
  logging.get_absl_logger().addFilter(_NOT_ORBAX)  # adding it again changes nothing
