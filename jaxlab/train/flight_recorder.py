"""On a bad step or a crash: keep what replays that one step. Dims: none.

`workdir/flight/<step>/` holds `arrays/` (batch, key, trainable, step), `config.gin` and `why.json`.
The optimiser's state is left out (twice the size, and no part of the loss or the gradient), and so
is `frozen`: it is the model, which the config names.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging

from jaxlab import redaction
from jaxlab.io import orbax
from jaxlab.train import state as train_state

PyTree = Any


class FlightRecorder:
  """Writes flight folders of one run.

  Args:
    workdir: of the run.
    config_text: the run's configuration; secrets are replaced.
    limit: how many folders a run may write. The first ones are telling, and disks are finite.
  """

  def __init__(self, workdir: str | os.PathLike[str], config_text: str, *, limit: int = 3):
    self._folder = pathlib.Path(workdir) / "flight"
    self._config_text = redaction.redact(config_text)
    self._left = limit

  def record(
    self,
    why: str,
    step: int,
    state: train_state.TrainState,
    batch: PyTree,
    key: jax.Array,
    *,
    detail: str = "",
  ) -> pathlib.Path | None:
    """Writes `flight/<step>/`; None past the limit or over several processes.

    Args:
      why: "bad step", "crash", or a word of the caller ("collapse").
      step: as in metrics.jsonl; names the folder.
      state: whose `trainable` and `step` the update started from.
      batch: of that update.
      key: the run's key.
      detail: a traceback or the metrics; secrets are replaced.
    """
    if self._left <= 0 or jax.process_count() > 1:
      return None
    self._left -= 1
    folder = self._folder / str(step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.gin").write_text(self._config_text, encoding="utf-8")
    text = {"why": why, "step": step, "detail": redaction.redact(detail)}
    (folder / "why.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
    arrays = {"batch": jax.tree.map(jnp.asarray, batch), "key": key}
    kept = {"step": state.step, "trainable": state.trainable}
    # A crash inside an update may have taken the donated buffers with it.
    if not any(x.is_deleted() for x in jax.tree.leaves(kept)):
      arrays |= kept
    orbax.save_params(folder / "arrays", arrays, text, require_finite=False)
    logging.warning("Kept batch, key, config and parameters of this step in %s.", folder)
    return folder


def replay(
  path: str | os.PathLike[str],
  train_step: Any,
  frozen: PyTree,
  optimizer: optax.GradientTransformation,
  place: Callable[[PyTree], PyTree] = lambda tree: tree,
) -> tuple[train_state.TrainState, dict[str, Any]]:
  """Runs the recorded step again.

  Loss, gradient norm and the objective's metrics are those of the recorded step. The optimiser
  starts fresh, so its update and the guard's verdict on a spike are not.

  Args:
    path: a `flight/<step>` folder.
    train_step: of `step.make_train_step`, as in the run.
    frozen: the other half of the model, as in the run.
    optimizer: the one in `train_step`.
    place: puts (state, batch, key) where the run had them, if that was a mesh.
  Returns: (state after the step, its metrics as Python numbers).
  Raises: ValueError if the crash left no parameters to start from, or `path` is no flight folder.
  """
  arrays, _ = orbax.load_params(pathlib.Path(path) / "arrays")
  if "trainable" not in arrays:
    raise ValueError(
      f"replay: {path} must hold parameters; they were lost in the crash. "
      "Resume the run: the same step comes again from its last checkpoint."
    )
  state = train_state.TrainState.create(arrays["trainable"], optimizer)
  state = train_state.TrainState(arrays["step"], state.trainable, state.opt_state)
  state, batch, key = place((state, arrays["batch"], arrays["key"]))
  state, metrics = train_step(state, frozen, batch, key)
  return state, {name: value.item() for name, value in jax.device_get(metrics).items()}
