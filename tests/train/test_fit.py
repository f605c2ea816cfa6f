"""The loop: the same numbers however it was cut off, and what it refuses."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.io import orbax
from jaxlab.train import fit, flight_recorder, guard, metrics, signals, state, step
from tests.train import tiny

STEPS = 12
TRAIN_STEP = tiny.make_step()  # compiled once for this file
ROUNDS = {"supervised": tiny.supervised, "rl": tiny.rl_like}


class Cut(Exception):
  """What ends a run in the middle."""


def train(workdir, **settings):
  return tiny.train(workdir, **({"train_step": TRAIN_STEP, "steps": STEPS} | settings))


def cut_at(done):
  """Ends a run after `done` steps, before they are written down or saved."""

  def on_round(step, current, values):
    if step == done:
      raise Cut

  return on_round


def run_with_cuts(workdir, cuts, **settings):
  for done in cuts:
    with pytest.raises(Cut):
      train(workdir, on_round=cut_at(done), **settings)
  return train(workdir, **settings)


def assert_same_run(workdir, final, want_workdir, want_final):
  """Every logged number as float.hex(), every row id, all parameters and optimiser states."""
  lines, want_lines = metrics.read(workdir), metrics.read(want_workdir)
  assert [line["step"] for line in lines] == [line["step"] for line in want_lines]
  for line, want in zip(lines, want_lines, strict=True):
    for values in (line, want):
      del values["seconds"]
    assert tiny.exact(line) == tiny.exact(want)
  assert tiny.same_bits(final, want_final)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
  """{kind: (workdir, final state)} of runs that nobody disturbed."""
  runs = {}
  for kind, rounds in ROUNDS.items():
    workdir = tmp_path_factory.mktemp(kind)
    runs[kind] = workdir, train(workdir, rounds=rounds)
  return runs


# --- resume


@pytest.mark.parametrize("kind", ROUNDS)
@pytest.mark.parametrize("cuts", [[2], [7], [5, 4, 10, 11], [12]])
def test_resume_gives_the_same_numbers(workdir, unbroken, kind, cuts):
  final = run_with_cuts(workdir, cuts, rounds=ROUNDS[kind])
  assert_same_run(workdir, final, *unbroken[kind])


def without(part):
  """`restore_latest` as if `part` had been left out of the checkpoint."""
  restore = orbax.CheckpointStore.restore_latest

  def patched(store, target, check=None):
    found = restore(store, target, check)
    if found is None:
      return None
    fresh, restored = target["state"], dict(found.state)
    match part:
      case "data position":
        return found._replace(meta=found.meta | {"position": 0})
      case "key":
        restored["key"] = jax.random.key(99)
      case "optimiser state":
        restored["state"] = dataclasses.replace(found.state["state"], opt_state=fresh.opt_state)
      case "step":
        restored["state"] = dataclasses.replace(found.state["state"], step=fresh.step)
    return found._replace(state=restored)

  return patched


@pytest.mark.parametrize("part", ["data position", "key", "optimiser state", "step"])
def test_broken_controls(workdir, unbroken, monkeypatch, part):
  """The test above sees it when anything is left out of the checkpoint."""
  monkeypatch.setattr(orbax.CheckpointStore, "restore_latest", without(part))
  with pytest.raises(Cut):
    train(workdir, on_round=cut_at(7))
  final = train(workdir, save_every_steps=100)  # a step that is made again has no number free
  with pytest.raises(AssertionError):
    assert_same_run(workdir, final, *unbroken["supervised"])


def test_nothing_broken_is_seen_as_broken(workdir, unbroken, monkeypatch):
  monkeypatch.setattr(orbax.CheckpointStore, "restore_latest", without("nothing"))
  assert_same_run(workdir, run_with_cuts(workdir, [7]), *unbroken["supervised"])


def test_a_finished_run_and_a_longer_one(workdir, unbroken):
  want_workdir, want = unbroken["supervised"]
  train(workdir, steps=5)
  assert orbax.CheckpointStore(workdir / "checkpoints").steps() == [3, 5]
  assert tiny.same_bits(train(workdir), want)
  assert tiny.same_bits(train(workdir), want)  # already there: no step is made again
  assert len(metrics.read(workdir)) == STEPS


def test_a_damaged_checkpoint_costs_one_interval(workdir, unbroken, caplog):
  with pytest.raises(Cut):
    train(workdir, on_round=cut_at(8))
  for path in (workdir / "checkpoints" / "6" / "state" / "d").iterdir():
    path.write_bytes(b"")
  final = train(workdir)
  assert "set aside as damaged.6" in caplog.text
  assert_same_run(workdir, final, *unbroken["supervised"])


# --- another run's workdir


@pytest.mark.parametrize(
  "change, text",
  [
    ({"fingerprint": tiny.FINGERPRINT | {"rows": 13}}, "rows: 12 -> 13"),
    ({"key": jax.random.key(4)}, r"key: \[0, 3\] -> \[0, 4\]"),
    (
      {"config_text": "a.lr = 2\nb.x = \\\n   [1,\n   3]"},
      r"a.lr: 1 -> 2, b.x: \[1, 2\] -> \[1, 3\]",
    ),
  ],
)
def test_another_runs_workdir_is_refused(workdir, change, text):
  settings = {"steps": 2, "config_text": "# first\na.lr = 1\nb.x = [1, 2]\n"}
  train(workdir, **settings)
  with pytest.raises(ValueError, match=f"fit: a workdir belongs to one run; .*{text}. Use another"):
    train(workdir, **(settings | {"steps": 3} | change))
  train(workdir, **(settings | {"steps": 3}))  # and is unharmed


def test_a_change_that_is_asked_for(workdir):
  train(workdir, steps=2)
  wider = tiny.FINGERPRINT | {"rows": 13}
  assert train(workdir, steps=3, fingerprint=wider, allow_changed=["rows"]).step == 3


def test_another_model_is_refused(workdir):
  train(workdir, steps=2)
  other = guard.guarded(optax.sgd(0.1))
  with pytest.raises(ValueError, match="must be of the same model"):
    current, frozen = tiny.start(other)
    fit.fit(
      step.make_train_step(tiny.objective, other), current, frozen, tiny.supervised,
      steps=3, key=jax.random.key(3), workdir=workdir, save_every_steps=3,
      fingerprint=tiny.FINGERPRINT,
    )  # fmt: skip


def test_errors_name_the_values(workdir):
  with pytest.raises(ValueError, match="must be at least 1; got 0, 3"):
    train(workdir, steps=0)
  with pytest.raises(ValueError, match="none of them 'key'; got .'a.lr'"):
    train(workdir, config_text="a.lr = 1", fingerprint={"a.lr": 1})
  current, frozen = tiny.start(optax.adam(1e-2))
  with pytest.raises(ValueError, match="must be guarded"):
    fit.fit(
      TRAIN_STEP, current, frozen, tiny.supervised, steps=3, key=jax.random.key(3),
      workdir=workdir, save_every_steps=3, fingerprint={},
    )  # fmt: skip


# --- what a run leaves


def test_the_lines_of_a_run(workdir):
  def on_round(done, current, values):
    return {"evaluated": done / 3} if done % 2 == 0 else None

  train(workdir, rounds=tiny.rl_like, steps=4, on_round=on_round)
  lines = metrics.read(workdir)
  assert [line["step"] for line in lines] == [1, 2, 3, 4]
  # Round 0 and 3 have no batches: the step counts, and has no loss.
  assert ["loss" in line for line in lines] == [False, True, True, False]
  assert all("reward" in line and "seconds" in line for line in lines)
  assert [line.get("evaluated") for line in lines] == [None, 2 / 3, None, 4 / 3]
  assert lines[1]["bad_steps"] == 0 and lines[1]["worst"] > 0


def test_only_one_compilation(workdir):
  train_step = tiny.make_step()
  train(workdir, train_step=train_step, steps=3)
  train(workdir, train_step=train_step, steps=6)
  assert train_step._cache_size() <= 2  # restored arrays may be laid out anew once


# --- bad steps


def bad_rounds(bad):
  """The data set with the rows of some steps (from 1) multiplied by a factor."""

  def rounds(index, current):
    work = tiny.supervised(index, current)
    return work._replace(batches=[tiny.batch_of(index, dict(bad).get(index + 1, 1.0))])

  return rounds


def test_a_bad_step_is_skipped_told_and_never_saved(workdir, caplog):
  final = train(workdir, rounds=bad_rounds({6: np.nan, 7: np.nan}))
  lines = metrics.read(workdir)
  assert [line["bad_steps"] for line in lines][4:8] == [0, 1, 2, 2]
  assert lines[5]["loss"] == "nan" and np.isnan(float(lines[5]["loss"]))
  assert "Step 6: an update was skipped; loss nan" in caplog.text
  assert all(np.isfinite(x).all() for x in final.trainable.values())
  with orbax.CheckpointStore(workdir / "checkpoints") as store:
    assert store.steps() == [8, 9, 12]  # due at 6, done at the first good step


def test_a_bad_last_step_is_not_saved(workdir, caplog):
  train(workdir, rounds=bad_rounds({12: np.inf}))
  assert "The last step, 12, was a bad one and is not saved" in caplog.text
  with orbax.CheckpointStore(workdir / "checkpoints") as store:
    assert store.steps() == [3, 6, 9]


def test_ten_bad_steps_in_a_row_stop_the_run(workdir):
  bad = dict.fromkeys(range(5, 99), np.nan)
  rows = r"\[156, 157"  # of batch 13
  with pytest.raises(
    ValueError, match=f"10 updates in a row .* loss nan .* at step 14, rows {rows}"
  ):
    train(workdir, steps=30, rounds=bad_rounds(bad))
  with orbax.CheckpointStore(workdir / "checkpoints") as store:
    assert store.steps() == [3]
  # One good step in between, and the count starts again.
  assert train(workdir, steps=20, rounds=bad_rounds(bad | {12: 1.0})).step == 20


# --- the flight recorder


def test_a_bad_step_can_be_replayed(workdir):
  train(
    workdir, rounds=bad_rounds({6: np.nan}), config_text="model.token = 'hf_CanaryCanaryCanary'"
  )
  folder = workdir / "flight" / "6"
  assert json.loads((folder / "why.json").read_text())["why"] == "bad step"
  assert (folder / "config.gin").read_text() == "model.token = '[redacted]'"
  _, frozen = tiny.start()
  after, values = flight_recorder.replay(folder, TRAIN_STEP, frozen, tiny.OPTIMIZER)
  assert after.step == 6 and np.isnan(values["loss"]) and values["bad_in_a_row"] == 1
  # With the rows mended, the loss is that of the healthy run at this step.
  arrays, _ = orbax.load_params(folder / "arrays")
  arrays["batch"]["scale"] = jnp.ones(tiny.ROWS)
  orbax.save_params(folder / "arrays", arrays, {})
  _, values = flight_recorder.replay(folder, TRAIN_STEP, frozen, tiny.OPTIMIZER)
  train(workdir / "healthy")
  assert values["loss"].hex() == metrics.read(workdir / "healthy")[5]["loss"].hex()


def test_a_crash_is_recorded_and_comes_out(workdir):
  def rounds(index, current):
    batch = tiny.batch_of(index)
    return fit.Round([{k: v[:5] if index == 4 and k == "x" else v for k, v in batch.items()}])

  with pytest.raises(ValueError, match="must have the same rows; got {12, 5}|{5, 12}"):
    train(workdir, rounds=rounds)
  why = json.loads((workdir / "flight" / "5" / "why.json").read_text())
  assert why["why"] == "crash" and "must have the same rows" in why["detail"]
  arrays, _ = orbax.load_params(workdir / "flight" / "5" / "arrays")
  assert arrays["batch"]["x"].shape == (5, tiny.DIM) and arrays["step"] == 4
  final = train(workdir)  # with the bug mended, the same command goes on
  assert final.step == STEPS


def test_a_crash_without_parameters_says_so(workdir):
  recorder = flight_recorder.FlightRecorder(workdir, "", limit=1)
  current, frozen = tiny.start()
  TRAIN_STEP(current, frozen, tiny.batch_of(0), jax.random.key(3))  # donated: gone
  folder = recorder.record("crash", 1, current, tiny.batch_of(0), jax.random.key(3))
  with pytest.raises(ValueError, match="must hold parameters; they were lost in the crash"):
    flight_recorder.replay(folder, TRAIN_STEP, frozen, tiny.OPTIMIZER)
  assert recorder.record("crash", 2, current, None, jax.random.key(3)) is None  # past the limit


def test_a_broken_recorder_does_not_hide_the_crash(workdir, monkeypatch, caplog):
  def record(*args, **kwargs):
    raise OSError("no space left")

  monkeypatch.setattr(flight_recorder.FlightRecorder, "record", record)
  with pytest.raises(Cut):
    train(workdir, rounds=lambda index, current: (_ for _ in ()).throw(Cut))
  assert "The flight recorder failed at step 1" in caplog.text


# --- told to stop


def test_a_signal_saves_and_the_rerun_gives_the_same_numbers(workdir, unbroken):
  stop = signals.Interrupt()

  def on_round(done, current, values):
    if done == 4:
      stop.signum = 15

  with pytest.raises(signals.Interrupted, match=r"Stopped by SIGTERM after step 4 \(saved\)") as e:
    train(workdir, on_round=on_round, stop=stop)
  assert e.value.exit_code == 143 and e.value.saved
  with orbax.CheckpointStore(workdir / "checkpoints") as store:
    assert store.steps() == [3, 4]
  with pytest.raises(signals.Interrupted, match="after step 4"):  # before the first new step
    train(workdir, stop=stop)
  assert_same_run(workdir, train(workdir), *unbroken["supervised"])


def test_a_signal_in_a_bad_step_saves_nothing(workdir):
  stop = signals.Interrupt()

  def on_round(done, current, values):
    if done == 5:
      stop.signum = 2

  with pytest.raises(signals.Interrupted, match=r"SIGINT after step 5 \(not saved") as stopped:
    train(workdir, on_round=on_round, stop=stop, rounds=bad_rounds({5: np.nan}))
  assert stopped.value.exit_code == 130 and not stopped.value.saved


def test_a_state_is_a_pytree_for_specs_too():
  current, _ = tiny.start()
  shapes = jax.eval_shape(lambda s: s, current)
  assert isinstance(shapes, state.TrainState)
  assert jax.tree.structure(jax.tree.map(lambda x: True, shapes)) == jax.tree.structure(current)


def test_no_noise(workdir, caplog):
  caplog.set_level(logging.INFO, "absl")
  train(workdir)
  assert all("rbax" not in message for message in caplog.messages)
