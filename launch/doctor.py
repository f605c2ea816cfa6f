"""Looks at a model before anyone loads it: format and dialect, bits per parameter, missing or
misshapen tensors, scales, tied weights, vocabulary, end of text, chat template.

  python -m launch.doctor DIR        (a Hugging Face folder, a .gguf file, or 'demo')

Prints one line a finding; exits with 2 if the model is broken."""

from jaxlab.data import assets
from jaxlab.io import doctor
from launch import common

FLAGS = common.define_flags()
MARKS = {"ok": "ok      ", "note": "note    ", "warning": "WARNING ", "broken": "BROKEN  "}


def main(run: common.Run) -> dict:
  """Prints the findings and returns them for result.json."""
  if len(run.arguments) != 1:
    raise ValueError(f"doctor: name one model; got {list(run.arguments)}. See --help.")
  (model,) = run.arguments
  findings = doctor.examine(assets.model_path(model))
  for finding in findings:
    print(MARKS[finding.level] + finding.text)
  broken = [f.text for f in findings if f.level == "broken"]
  result = {"model": model, "broken": len(broken), "findings": [f._asdict() for f in findings]}
  if broken:
    common.write_result(run.workdir, result)
    raise ValueError(f"doctor: {model} is broken: {broken[0]}")
  return result


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab doctor`."""
  common.run_verb(main, FLAGS, argv, arguments="DIR")


if __name__ == "__main__":
  run()
