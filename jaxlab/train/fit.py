"""The one training loop: rounds of updates, resumed to the same numbers. Dims: none.

A round is what one step of the loop updates on: the next batch of a data set, or a rollout with its
rewards cut into minibatches (RL). Everything random is `fold_in(key, step)` and the data position
is the count of rounds, so a checkpoint (state, key, count) says all about what comes next.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from absl import logging

from jaxlab import redaction
from jaxlab.io import orbax, seal
from jaxlab.train import flight_recorder, guard, signals
from jaxlab.train import metrics as metrics_log
from jaxlab.train.state import TrainState

PyTree = Any

MAX_BAD_IN_A_ROW = 10  # [ours: a run that skips this often learns nothing]


class Round(NamedTuple):
  """The work of one step.

  `batches` may be empty (all groups of a rollout dropped): the step still counts. `metrics` go
  into the step's line as they are; `rows` are the ids of the data used, to find a bad one again.
  """

  batches: Iterable[PyTree]
  metrics: Mapping[str, Any] = {}
  rows: Collection[int | str] = ()


@dataclasses.dataclass
class _Run:
  """What does not change over the steps of one call of `fit`."""

  train_step: Callable[..., Any]
  frozen: PyTree
  rounds: Callable[[int, TrainState], Round]
  key: jax.Array
  steps: int
  save_every_steps: int
  on_round: Callable[..., Mapping[str, Any] | None]
  stop: signals.Interrupt
  identity: dict[str, Any]
  store: orbax.CheckpointStore
  log: metrics_log.MetricsLog
  progress: metrics_log.Progress
  recorder: flight_recorder.FlightRecorder


def fit(
  train_step: Callable[..., Any],
  state: TrainState,
  frozen: PyTree,
  rounds: Callable[[int, TrainState], Round],
  *,
  steps: int,
  key: jax.Array,
  workdir: str | os.PathLike[str],
  save_every_steps: int,
  keep: int = 3,
  fingerprint: Mapping[str, Any],
  config_text: str = "",
  allow_changed: Collection[str] = (),
  on_round: Callable[[int, TrainState, dict[str, Any]], Mapping[str, Any] | None] | None = None,
  stop: signals.Interrupt | None = None,
) -> TrainState:
  """Trains to `steps`, from the newest whole checkpoint in `workdir` if there is one.

  The same call again gives the same numbers, whenever and however the run was cut off. Checkpoints
  are written in the background every `save_every_steps`, at the end and when told to stop; never of
  a step whose loss or gradient was not finite (the next good step is saved instead).

  Args:
    train_step: of `step.make_train_step`, its optimiser wrapped by `guard.guarded`.
    state: a fresh `TrainState`; donated.
    frozen: the arrays that do not train, handed to `train_step`.
    rounds: `(step, state) -> Round`, a pure function of both; step counts from 0.
    steps: rounds in all, those of earlier calls included.
    key: the run's key, a typed key.
    workdir: gets `checkpoints/`, `metrics.jsonl`, TensorBoard events and `flight/`.
    save_every_steps: rounds between two checkpoints.
    keep: newest checkpoints that stay.
    fingerprint: JSON values that must not change in a workdir (data, seed, global batch).
    config_text: the run's configuration, lines of `name = value`; compared in the same way.
    allow_changed: names of fingerprint and config entries that may differ on resume.
    on_round: `(finished steps, state, values)` after each round; may return values to log.
    stop: the launcher's `Interrupt`; None installs one for the length of the call.
  Returns: the state after `steps` rounds.
  Raises: ValueError if the workdir is of another run (names the entries) or ten updates in a row
    are bad; signals.Interrupted after a signal, the last step saved unless it was a bad one.
  """
  _check_arguments(state, steps, save_every_steps)
  identity = _identity(fingerprint, config_text, key)
  workdir = pathlib.Path(workdir)
  with contextlib.ExitStack() as stack:
    stop = stop if stop is not None else stack.enter_context(signals.Interrupt())
    store = stack.enter_context(orbax.CheckpointStore(workdir / "checkpoints", keep=keep))
    state, key, done = _resume(store, state, key, identity, allow_changed)
    run = _Run(
      train_step, frozen, rounds, key, steps, save_every_steps,
      on_round=on_round or (lambda done, state, values: None),
      stop=stop, identity=identity, store=store,
      log=stack.enter_context(metrics_log.MetricsLog(workdir, restored_step=done)),
      progress=stack.enter_context(metrics_log.Progress(steps, done)),
      recorder=flight_recorder.FlightRecorder(workdir, config_text),
    )  # fmt: skip
    return _loop(run, state, done)


def _loop(run: _Run, state: TrainState, done: int) -> TrainState:
  run.stop.raise_if_set(done)
  due, healthy = False, True  # a checkpoint is due; the last update was good
  while done < run.steps:
    state, values, rows, healthy = _one_round(run, state, done, healthy)
    done += 1
    values |= run.on_round(done, state, values) or {}
    run.log.write(done, values, rows)
    run.progress.update(done, values)
    run.store.check()
    stopping = _told_to_stop(run, done)
    due = due or stopping or done % run.save_every_steps == 0 or done == run.steps
    if due and healthy:
      run.log.sync()
      meta = {"position": done, "identity": run.identity}
      run.store.save(done, {"state": state, "key": run.key}, meta)
      due = False
    if stopping:
      run.store.wait()
      signum = run.stop.signum if jax.process_count() == 1 else None
      raise signals.Interrupted(signum, done, saved=not due)
  if due:
    logging.warning("The last step, %d, was a bad one and is not saved.", done)
  return state


def _told_to_stop(run: _Run, done: int) -> bool:
  # Of several processes one may have the signal; all must leave after the same step.
  return bool(run.stop) if jax.process_count() == 1 else run.store.reached_preemption(done)


def _one_round(
  run: _Run, state: TrainState, done: int, healthy: bool
) -> tuple[TrainState, dict[str, Any], Collection[int | str], bool]:
  """(state, values to log, row ids, whether the last update was good) after one more round.

  Raises: ValueError after too many bad updates in a row.
  """
  start, step = time.monotonic(), done + 1  # steps are called as in metrics.jsonl
  batch, updates = None, []
  try:
    work = run.rounds(done, state)
    for batch in work.batches:
      state, values = run.train_step(state, run.frozen, batch, run.key)
      updates.append({name: x.item() for name, x in jax.device_get(values).items()})
      healthy = updates[-1]["bad_in_a_row"] == 0
      if not healthy:
        _report_bad(run, step, state, batch, updates[-1])
      if updates[-1]["bad_in_a_row"] >= MAX_BAD_IN_A_ROW:
        break
  except Exception:
    _record(run, "crash", step, state, batch, traceback.format_exc())
    raise
  if updates and updates[-1]["bad_in_a_row"] >= MAX_BAD_IN_A_ROW:
    raise ValueError(
      f"fit: {MAX_BAD_IN_A_ROW} updates in a row must not all be bad; got loss "
      f"{updates[-1]['loss']} and gradient norm {updates[-1]['grad_norm']} at step {step}, rows "
      f"{list(work.rows)}. The last good checkpoint is kept; lower the learning rate, or look at "
      "the flight folder."
    )
  values = {**_mean(updates), **work.metrics, "seconds": time.monotonic() - start}
  return state, values, work.rows, healthy


def _report_bad(run, step, state, batch, values):
  """The guard left the parameters as they were: they are those the update started from."""
  logging.warning(
    "Step %d: an update was skipped; loss %s, gradient norm %s.",
    step, values["loss"], values["grad_norm"],
  )  # fmt: skip
  before = dataclasses.replace(state, step=state.step - 1)
  _record(run, "bad step", step, before, batch, json.dumps(values))


def _record(run, why, step, state, batch, detail):
  try:
    run.recorder.record(why, step, state, batch, run.key, detail=detail)
  except Exception:  # neither may a full disk end the run, nor hide the crash that is recorded
    logging.exception("The flight recorder failed at step %d.", step)


def _mean(updates: list[dict[str, Any]]) -> dict[str, Any]:
  """Means over the updates of a round; counters are those of the last one."""
  if not updates:
    return {}
  mean = {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
  return mean | {name: updates[-1][name] for name in ("bad_steps", "bad_in_a_row")}


def _resume(
  store: orbax.CheckpointStore,
  state: TrainState,
  key: jax.Array,
  identity: dict[str, Any],
  allow_changed: Collection[str],
) -> tuple[TrainState, jax.Array, int]:
  """(state, key, finished rounds) of the newest checkpoint, or as given with 0."""

  def same_run(meta: dict[str, Any]) -> str:
    have, want = (
      {name: v for name, v in d.items() if name not in allow_changed}
      for d in (meta["identity"], identity)
    )
    changed = seal.differences(have, want)
    return changed and (
      f"fit: a workdir belongs to one run; {store.root.parent} has other settings: {changed}. "
      "Use another workdir, or the settings that this one was started with."
    )

  restored = store.restore_latest({"state": state, "key": key}, same_run)
  if restored is None:
    return state, key, 0
  logging.info("Resuming from step %d.", restored.step)
  return restored.state["state"], restored.state["key"], restored.meta["position"]


def _identity(fingerprint: Mapping[str, Any], config_text: str, key: jax.Array) -> dict[str, Any]:
  """What must be the same on resume, as flat JSON values."""
  settings = parse_config(redaction.redact(config_text))
  clash = sorted(settings.keys() & fingerprint.keys())
  if clash or "key" in fingerprint:
    raise ValueError(
      f"fit: fingerprint and config must have different names, none of them 'key'; got "
      f"{clash or ['key']}. Rename the fingerprint's."
    )
  own = {"key": jax.random.key_data(key).tolist()}
  return json.loads(json.dumps({**settings, **fingerprint, **own}))


def parse_config(text: str) -> dict[str, str]:
  """{name: value} of a gin config's text; values over several lines are joined."""
  entries, name = {}, None
  for line in text.splitlines():
    found = re.match(r"([\w./@%]+)\s*=\s*(.*)", line)
    if found:
      name, entries[found[1]] = found[1], found[2].strip().rstrip("\\").strip()
    elif name and line.strip() and not line.startswith("#"):
      entries[name] = f"{entries[name]} {line.strip()}".strip()
  return entries


def _check_arguments(state: TrainState, steps: int, save_every_steps: int) -> None:
  if steps < 1 or save_every_steps < 1:
    raise ValueError(
      f"fit: steps and save_every_steps must be at least 1; got {steps}, {save_every_steps}."
    )
  if not guard.counters(state.opt_state):
    raise ValueError(
      "fit: the optimiser must be guarded, or one NaN ends in the parameters; got a state without "
      "a guard. Wrap it: guard.guarded(optimizer)."
    )
