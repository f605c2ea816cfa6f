"""metrics.jsonl, TensorBoard, progress, and no secrets anywhere."""

import io
import json
import logging
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.train import metrics
from tests.train import tiny

CANARIES = {
  "HF_TOKEN": "hf_CanaryCanaryCanary",
  "OPENAI_API_KEY": "sk-canary-9876543210",
  "MY_SECRET": "an ordinary sentence",  # known by the variable's name only
}


def write(workdir, steps, restored_step=0, **values):
  with metrics.MetricsLog(workdir, restored_step=restored_step) as log:
    for step in steps:
      log.write(step, {"loss": step / 3} | values)


def test_full_precision_comes_back(workdir):
  values = {"a": np.float32(0.1), "b": jnp.float32(1e-30), "c": 2**53 + 1, "d": np.float64(1 / 3)}
  with metrics.MetricsLog(workdir) as log:
    log.write(1, values, rows=[3, "id-7"])
  (line,) = metrics.read(workdir)
  for name, value in values.items():
    want = value if isinstance(value, int) else float(value)
    assert line[name] == want and type(line[name]) is type(want)
  assert line["rows"] == [3, "id-7"] and line["step"] == 1


def test_what_json_has_no_number_for(workdir):
  write(workdir, [1], x=np.float32(np.nan), y=-np.inf)
  text = (workdir / metrics.FILE).read_text()
  line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
  assert np.isnan(float(line["x"])) and float(line["y"]) == -np.inf


def test_resume_cuts_back_and_appends(workdir):
  write(workdir, [1, 2, 3, 4, 5])
  write(workdir, [4, 5, 6], restored_step=3, new=1)
  lines = metrics.read(workdir)
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
  assert ["new" in line for line in lines] == [False] * 3 + [True] * 3
  write(workdir, [], restored_step=9)
  assert len(metrics.read(workdir)) == 6


@pytest.mark.parametrize("left", [1, 5, 20])
def test_a_torn_last_line_is_dropped(workdir, left):
  write(workdir, [1, 2, 3])
  path = workdir / metrics.FILE
  whole = path.read_bytes()
  path.write_bytes(whole[: len(whole) - left])
  assert [line["step"] for line in metrics.read(workdir)] == [1, 2]
  write(workdir, [3], restored_step=2)
  assert path.read_bytes() == whole


def events(workdir):
  """{(tag, step)} of the event files, read as the records of their format."""
  from tensorboardX.proto import event_pb2

  found = set()
  for path in (workdir / "tensorboard").iterdir():
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack("<Q", data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      found |= {(value.tag, event.step) for value in event.summary.value}
      data = data[12 + length + 4 :]
  return found


def test_tensorboard_has_the_same_numbers(workdir):
  write(workdir, [1, 2], bad=np.nan)
  assert events(workdir) == {("loss", 1), ("loss", 2)}


def test_plain_lines_where_there_is_no_terminal(caplog, monkeypatch):
  caplog.set_level(logging.INFO, "absl")
  monkeypatch.setattr(sys, "stderr", io.StringIO())
  with metrics.Progress(4, seconds=1e9) as progress:
    for done in (1, 2, 3, 4):
      progress.update(done, {"loss": 0.5, "reward": 1})
  (line,) = caplog.messages  # the last step has one whatever the time
  assert line.startswith("step 4/4 loss 0.5 reward 1 ") and line.endswith("steps/s 0 s left")
  assert "\r" not in sys.stderr.getvalue()  # no bar; a launcher's log handler may write the line


def test_a_bar_on_a_terminal(caplog, monkeypatch):
  caplog.set_level(logging.INFO, "absl")
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, "stderr", terminal)
  with metrics.Progress(4, done=2) as progress:
    progress.update(3, {"loss": 0.25})
    progress.update(4, {})
  assert "4/4" in terminal.getvalue() and not caplog.messages


def test_no_canary_in_a_run(workdir, monkeypatch):
  """Config text, data and an error that all carry secrets; nothing of it is in the workdir."""
  for name, value in CANARIES.items():
    monkeypatch.setenv(name, value)
  all_of_them = " ".join(CANARIES.values())

  def rounds(index, current):
    if index == 2:
      raise ValueError(f"cannot log in with {all_of_them}")
    return tiny.supervised(index, current)

  with pytest.raises(ValueError, match="cannot log in"):
    tiny.train(workdir, rounds=rounds, save_every_steps=1, config_text=f"a.b = '{all_of_them}'")
  files = [p for p in workdir.rglob("*") if p.is_file()]
  assert len(files) > 10
  for path in files:
    for canary in CANARIES.values():
      assert canary.encode() not in path.read_bytes(), path
  assert "[redacted]" in (workdir / "flight" / "3" / "why.json").read_text()
