"""A plan as text for people (`plan.md`), as data (`plan.json`), and as a picture."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlab import plots
from jaxlab.parallel import advise, plan


def as_dict(made: plan.Plan) -> dict[str, Any]:
  """Everything of a plan, in JSON's types."""
  return {
    "target": made.target.text,
    "device": made.target.device.kind,
    "devices": made.target.count,
    "mesh": dict(made.mesh),
    "fits": made.fits,
    "compiled": all(p.compiled for p in made.programs),
    "peak_bytes": made.peak_bytes,
    "device_bytes": made.device_bytes,
    "step_seconds": made.step_seconds,
    "implementations": {k: v for p in made.programs for k, v in p.implementations.items()},
    "programs": [
      {**dataclasses.asdict(p), "seconds": p.seconds, "bound": p.bound} for p in made.programs
    ],
  }


def summary(made: plan.Plan) -> str:
  """Two lines for a terminal."""
  worst = max(made.programs, key=lambda p: p.peak_bytes)
  how = "by formula" if worst.formula_bytes else "arguments alone"
  how = "" if worst.compiled else f" ({how}: no compiler here)"
  verdict = "fits" if made.fits else "does not fit"
  devices = f"{made.target.count} x {made.target.device.kind}"
  memory = f"Peak {_gb(made.peak_bytes)} of {_gb(made.device_bytes)} a device in {worst.name}{how}."
  unknown = made.unknown_traffic
  times = [f"{p.name} {_seconds(p.seconds * p.runs)} ({p.bound})" for p in made.programs if p.runs]
  return (
    f"{made.target.text}: {devices}, mesh {_mesh(made.mesh)}: {verdict}. {memory}\n"
    f"A step takes at least {_seconds(made.step_seconds)}: {', '.join(times)}."
    + (f" Memory traffic unknown: {', '.join(unknown)}." if unknown else "")
  )


def markdown(
  made: plan.Plan, remedies: Sequence[advise.Found], ranked: Sequence[advise.Found], command: str
) -> str:
  """The whole plan; bytes and times are of one device."""
  parts = [
    f"# {made.target.text}", f"`{command}`", summary(made).replace("\n", "\n\n"),
    f"Device figures: {made.target.device.source}", "## Memory",
    _table(
      ("program", "arguments", "outputs", "aliased", "temporaries", "code", "beside", "peak",
       "by formula"),
      [
        (p.name, *map(_gb, (
          p.argument_bytes, p.output_bytes, p.alias_bytes, p.temp_bytes, p.code_bytes,
          p.resident_bytes, p.peak_bytes,
        )), "" if p.formula_bytes is None else _gb(p.formula_bytes))
        for p in made.programs
      ],
    ),
    "## Time",
    _table(
      ("program", "runs a step", "TFLOP", "memory traffic", "sent", "compute", "memory", "network",
       "bound", "implementations"),
      [
        (p.name, f"{p.runs:g}", f"{sum(p.flops.values()) / 1e12:.3g}", _maybe_gb(p.traffic_bytes),
         _sent(p), _seconds(p.compute_seconds), _unless_none(p.traffic_bytes, p.memory_seconds),
         _unless_none(p.collective_bytes, p.network_seconds),
         p.bound, ", ".join(f"{k}: {v}" for k, v in p.implementations.items()))
        for p in made.programs
      ],
    ),
    "## Largest buffers", "What to shard, or to compute again. Times: writes in one run.",
    _table(
      ("program", "made by", "shape", "size", "times"),
      [
        (p.name, f"`{b.source[-90:]}`", b.shape, _gb(b.bytes), f"{b.times:g}")
        for p in made.programs for b in p.buffers
      ],
    ),
  ]  # fmt: skip
  if remedies:
    parts += ["## What would fit", _found(remedies)]
  elif not made.fits:
    parts.append("Nothing that was tried fits.")
  if ranked:
    parts += ["## Search", "Those that fit, the quickest first.", _found(ranked)]
  return "\n\n".join(parts) + "\n"


def plot(made: plan.Plan, path: pathlib.Path) -> None:
  """Memory by program, stacked, with the device's memory as a line."""
  parts = {
    "arguments": lambda p: p.argument_bytes,
    "new outputs": lambda p: p.output_bytes - p.alias_bytes,
    "temporaries": lambda p: p.temp_bytes,
    "code": lambda p: p.code_bytes,
    "beside": lambda p: p.resident_bytes,
  }
  names, left = [p.name for p in made.programs], [0.0] * len(made.programs)
  with plots.png(path, width=7.0) as axes:
    for label, size in parts.items():
      widths = [max(size(p), 0) / 1e9 for p in made.programs]
      axes.barh(names, widths, left=left, label=label)
      left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(made.device_bytes / 1e9, color="black", linestyle="--", label="device")
    axes.set_xlabel("GB a device")
    axes.set_title(f"{made.target.text}, mesh {_mesh(made.mesh)}")
    axes.legend(fontsize="small")


def _found(found: Sequence[advise.Found]) -> str:
  return _table(
    ("change", "mesh", "peak", "step"),
    [
      (f"`{advise.describe(f.variant.changes)}`", _mesh(f.plan.mesh), _gb(f.plan.peak_bytes),
       _seconds(f.plan.step_seconds))
      for f in found
    ],
  )  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mesh(mesh) -> str:
  return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "of one device"


def _sent(program: plan.ProgramPlan) -> str:
  if program.collective_bytes is None:
    return "unknown"
  return ", ".join(f"{k} {_gb(v)}" for k, v in program.collective_bytes.items()) or "nothing"


def _unless_none(known: object, seconds: float) -> str:
  return "unknown" if known is None else _seconds(seconds)


def _maybe_gb(size: float | None) -> str:
  return "unknown" if size is None else _gb(size)


def _gb(size: int | float) -> str:
  return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _seconds(seconds: float) -> str:
  return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
