"""One RL recipe in several arms and seeds, and what the comparison says about 4-bit weights.

Every arm and seed is an ordinary run of `rl.experiment` in a folder of its own, so an interrupted
comparison goes on where it was. Source: arXiv 2510.11696 §3.2-3.3 (claims about entropy and noise),
Table 3 (bytes). Dims: none.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxlab import lm as lm_lib
from jaxlab.decode import autoregressive
from jaxlab.io import files
from jaxlab.rl import arms_report, base, batch, experiment, loop, meter
from jaxlab.rl import config as rl_config
from jaxlab.train import metrics as metrics_log
from jaxlab.train import signals

PyTree = Any
FIGURES = "figures.json"  # of a finished run
FIRST_SHARE = 5  # "early" is the first fifth of training
SIGMAS = (0.0, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A variant of the recipe: its settings, and what is done to the base."""

  name: str
  config: rl_config.RLConfig
  quantize: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class ArmsConfig:
  """What is compared. The criteria set every other arm against `baseline`."""

  arms: Sequence[Any]  # of Arm
  seeds: int = 3  # runs of an arm [spec qerl 7]
  baseline: str = "bf16"  # the arm with 16-bit weights [ours: its name]
  quantized: str = "nvfp4"  # the arm whose entropy, bytes and mismatch are judged [ours: its name]
  sigmas: tuple[float, ...] = SIGMAS  # [ours: none to ten times the paper's]

  def __post_init__(self):
    names = [arm.name for arm in self.arms]
    if len(set(names)) != len(names) or not {self.baseline, self.quantized} <= set(names):
      raise ValueError(
        "ArmsConfig.arms: names must differ and hold baseline and quantized; got "
        f"{', '.join(names)} with {self.baseline!r} and {self.quantized!r}."
      )
    if self.seeds < 1:
      raise ValueError(f"ArmsConfig.seeds: must be at least 1; got {self.seeds}.")


class Criterion(NamedTuple):
  """One claim, whether it held, and the numbers."""

  name: str
  held: bool
  found: str


def run(
  comparison: ArmsConfig,
  data: rl_config.RLData,
  *,
  workdir: str | os.PathLike[str],
  seed: int,
  config_text: str,
  stop: signals.Interrupt,
) -> dict[str, Any]:
  """Runs all arms with seeds `seed`, `seed + 1`, ...; returns the figures of result.json.

  Writes `ARM/SEED/` (a run each), `report.md` and `plots/`. Nothing is asserted: a criterion that
  does not hold is reported as such.
  """
  workdir = pathlib.Path(workdir)
  rows, curves = [], {}
  for arm in comparison.arms:
    lm = base.load(arm.config.model_path(workdir), arm.quantize, arm.config)
    for k in range(seed, seed + comparison.seeds):
      stop.raise_if_set()
      folder = workdir / arm.name / str(k)
      logging.info("arm %s, seed %d, in %s", arm.name, k, folder)
      figures = _one_run(arm, lm, data, folder, seed=k, config_text=config_text, stop=stop)
      steps = metrics_log.read(folder)
      rows.append({"arm": arm.name, "seed": k, **summary(figures, steps)})
      curves.setdefault(arm.name, []).append(steps)
  judged = next(arm for arm in comparison.arms if arm.name == comparison.quantized)
  lm = base.load(judged.config.model_path(workdir), judged.quantize, judged.config)
  lm = base.quantized(lm, judged.quantize, judged.config.mesh)
  trainer = loop.prepare(lm, data, judged.config, seed)
  mismatch = {sigma: mismatch_at(trainer, sigma) for sigma in comparison.sigmas}
  found = criteria(rows, mismatch, baseline=comparison.baseline, quantized=comparison.quantized)
  arms_report.write(workdir, rows, mismatch, found)
  arms_report.plot(curves, workdir / "plots")
  return {
    "rows": rows,
    "mismatch": [{"sigma": sigma, "abs_dlogp": value} for sigma, value in mismatch.items()],
    **{c.name: c.held for c in found},
    "criteria_held": sum(c.held for c in found),
    "criteria": len(found),
    "found": {c.name: c.found for c in found},
  }


def _one_run(
  arm: Arm, lm: lm_lib.LM, data: rl_config.RLData, folder: pathlib.Path, **kwargs: Any
) -> dict[str, Any]:
  """The figures of one run, from its folder if it is finished."""
  path = folder / FIGURES
  if path.exists():
    return json.loads(path.read_text())
  figures = experiment.run(lm, data, arm.config, arm.quantize, workdir=folder, **kwargs)
  text = json.dumps(figures)
  files.write_atomically(path, lambda f: f.write(text.encode()))
  return json.loads(text)


def summary(figures: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """One flat row of a run: entropy of its rollouts, rewards, greedy accuracy, bytes.

  Args:
    figures: of `experiment.run`.
    steps: its lines of metrics.jsonl.
  """
  early = steps[: max(1, len(steps) // FIRST_SHARE)]
  mean = lambda name, rows: float(np.nanmean([float(row[name]) for row in rows]))
  flat = {}
  for name in ("accuracy_before", "accuracy_after"):
    estimate = figures[name]
    flat |= {name: estimate["value"]}
    flat |= {f"{name}_{part}": estimate[part] for part in ("ci_low", "ci_high", "n")}
  return {
    "entropy_start": mean("entropy_rollout", steps[:1]),
    "entropy_early": mean("entropy_rollout", early),
    "reward_start": mean("reward", steps[:1]),
    "reward_early": mean("reward", early),
    "reward_run": mean("reward", steps),
    **flat,
    "weight_bytes_bf16": figures["weight_bytes_bf16"],
    "weight_bytes": figures["weight_bytes_fp4"],
    "seconds": mean("seconds", steps) * len(steps),
  }


def mismatch_at(trainer: loop.Trainer, sigma: float) -> float:
  """Mean |log mu - log pi_old| over the tokens of one rollout of the untrained policy, in nats.

  mu samples with noise of scale sigma, pi_old is the trainer without; the random numbers of the
  rollout and of the noise are the same for every sigma.
  """
  source, config = trainer.source, trainer.config
  items = [i % len(source.prompts.items) for i in range(config.prompts)]
  _, ids = source.prompts.take(items)
  drawn = autoregressive.Noise(jnp.float32(sigma), jax.random.fold_in(trainer.key, 1))
  out = source.sampler(
    source.serving.params(source.reference), ids, jax.random.fold_in(trainer.key, 0),
    samples=config.samples, prefix=source.prompts.prefix, noise=drawn,
  )  # fmt: skip
  answers = [
    batch.Sample(ids[row // config.samples], tokens, out.logp_NT[row, : len(tokens)], 0.0, True)
    for row in range(len(out.length_N))
    for tokens in [out.ids(row)]
  ]
  packed = batch.pack(
    answers, per_row=config.sequences_per_row, max_answer=config.sampling.max_new_tokens
  )
  found = meter.measure(
    source.sampler.module, config.loss, source.reference, source.frozen, packed, drawn,
    unpacked=source.serving.unpacked,
  )  # fmt: skip
  return found["meter/total"]


def criteria(
  rows: Sequence[Mapping[str, Any]],
  mismatch: Mapping[float, float],
  *,
  baseline: str,
  quantized: str,
  accuracy_margin: float = 0.02,  # [spec qerl 7]
  bits: float = 4.5,  # of an NVFP4 weight with its share of a block's scale
  exact: float = 1e-5,  # nats; float32 rounding of two programs [spec qerl 7]
) -> list[Criterion]:
  """The four claims of the small experiment, on means over the seeds. Source: spec qerl 7.

  Args:
    rows: of `summary`, with their arm and seed.
    mismatch: {sigma: mean |log mu - log pi_old|}.
  """
  arms = dict.fromkeys(row["arm"] for row in rows)
  mean = {
    arm: lambda name, arm=arm: float(np.mean([r[name] for r in rows if r["arm"] == arm]))
    for arm in arms
  }
  dense, packed = mean[baseline], mean[quantized]
  entropy = [(packed(name), dense(name)) for name in ("entropy_start", "entropy_early")]
  by_seed = [{r["seed"]: r for r in rows if r["arm"] == arm} for arm in (quantized, baseline)]
  wins = lambda name: sum(by_seed[0][k][name] > by_seed[1][k][name] for k in by_seed[0])
  # Rounded, so that a gap of the very margin passes: 0.995 - 0.975 > 0.02 in floating point.
  gap = lambda arm: round(mean[arm]("accuracy_after") - dense("accuracy_after"), 9)
  gaps = {arm: gap(arm) for arm in arms}
  del gaps[baseline]
  ratio = packed("weight_bytes_bf16") / packed("weight_bytes")
  by_sigma = [mismatch[sigma] for sigma in sorted(mismatch)]
  rises = all(a < b for a, b in zip(by_sigma, by_sigma[1:]))
  return [
    Criterion(
      "entropy_is_higher",
      all(high > low for high, low in entropy),
      f"{quantized} {entropy[0][0]:.4f} against {baseline} {entropy[0][1]:.4f} at step 0, "
      f"{entropy[1][0]:.4f} against {entropy[1][1]:.4f} over the first fifth (nats a token); "
      f"higher in {wins('entropy_start')} and {wins('entropy_early')} of {len(by_seed[0])} seeds",
    ),
    Criterion(
      "accuracy_is_kept",
      all(abs(gap) <= accuracy_margin for gap in gaps.values()),
      f"{baseline} {dense('accuracy_after'):.4f}; "
      + ", ".join(f"{arm} {gap:+.4f}" for arm, gap in gaps.items())
      + f" (at most {accuracy_margin} apart)",
    ),
    Criterion(
      "bytes_are_4p5_bits",
      round(16 / ratio, 2) == bits,
      f"{packed('weight_bytes_bf16'):.0f} / {packed('weight_bytes'):.0f} bytes = {ratio:.3f}, "
      f"{16 / ratio:.3f} bits a weight",
    ),
    Criterion(
      "mismatch_rises_with_noise",
      rises and mismatch.get(0.0, np.inf) < exact,
      ", ".join(f"{mismatch[s]:.2e} at {s:g}" for s in sorted(mismatch)),
    ),
  ]
