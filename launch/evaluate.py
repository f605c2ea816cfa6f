"""Measures a model: accuracy on a task with a reward, or perplexity of a text.

The task is set by gin: AccuracyConfig.items = @largest_of_five() or @read_items() (a local .jsonl
or .parquet file), AccuracyConfig.rewards = (@exact_match,). Greedy answers, and `samples` drawn
ones an item. Answers are kept in WORKDIR/greedy and WORKDIR/sampled: a rerun goes on there.

python -m launch.evaluate --model=demo --gin_file=configs/evaluate/largest_of_five.gin
python -m launch.evaluate --model=demo --perplexity=FILE"""

import pathlib

import jax
from absl import flags, logging

import jaxlab
from jaxlab.decode import text
from jaxlab.eval import accuracy, generation, perplexity
from jaxlab.train import budget
from launch import common, model, prompts, registry
from pallas_kernels import target

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("adapter", None, "PEFT folder to attach to the model.", FLAGS)
flags.DEFINE_string("perplexity", None, "Text or .jsonl file: its perplexity, no task.", FLAGS)
flags.DEFINE_string("compare", None, "Workdir of another run on the same items.", FLAGS)


def main(run: common.Run) -> dict:
  """Perplexity or accuracy, and the comparison with another run."""
  if run.flags.perplexity:
    return {"model": run.flags.model, **measure_perplexity(run)}
  config = registry.get("AccuracyConfig")()
  drawn = registry.get("SamplingConfig")()
  path = model.required(run.flags.model)
  run.start()
  arms = config.arms(drawn)
  if run.flags.compare:
    for arm in arms:
      accuracy.require_scores(pathlib.Path(run.flags.compare) / arm)
  longest = max(prompts.num_characters(prompts.of_item(item)) for item in config.items)
  work = model.decoding(config.batch_size, drawn.max_new_tokens, longest)
  lm = model.load(path, work=work, adapter=run.flags.adapter)
  figures = {}
  for arm, figures_of_arm in measure_accuracy(run, lm, config, arms):
    figures |= {arm_name(arm) + name: figure for name, figure in figures_of_arm.items()}
  return {"model": path, **figures}


def arm_name(arm: str) -> str:
  """What stands before an arm's figures in result.json."""
  return "" if arm == "greedy" else f"{arm}_"


def measure_accuracy(run: common.Run, lm: jaxlab.LM, config: accuracy.AccuracyConfig, arms):
  """(arm, its figures) one after the other; prints each."""
  identity, params = generation.fingerprint(lm.params), text.serving_params(lm.params)
  for arm, (how, samples) in arms.items():
    answerer = generation.Answerer(
      text.make_sampler(lm, how), lm.tokenizer, params, identity, config.batch_size,
      config.system_prompt,
    )  # fmt: skip
    folder = run.workdir / arm
    found = accuracy.evaluate_items(
      answerer, config.items, config.rewards, jax.random.key(run.seed),
      samples=samples, folder=folder, on_batch=model.progress("answers"),
    )  # fmt: skip
    print(accuracy.describe(found.summary["accuracy"], f"{arm}: accuracy"))
    figures = found.summary
    if run.flags.compare:
      against = accuracy.compare(folder, pathlib.Path(run.flags.compare) / arm)
      print(f"{arm}: against {run.flags.compare}: {accuracy.describe_comparison(against)}")
      figures = figures | against
    yield arm, figures


def measure_perplexity(run: common.Run) -> dict:
  """Perplexity of the file of --perplexity."""
  config = registry.get("PerplexityConfig")()
  path = model.required(run.flags.model)
  documents = perplexity.read_documents(run.flags.perplexity, config.field)
  run.start()
  work = budget.Work(
    dtype_bytes=budget.default_dtype_bytes(),
    train_sequences=config.batch_size,
    train_tokens=config.window,
    chunk_tokens=perplexity.CHUNK_TOKENS,
    unpacked_copy=target.current_target().platform == "cpu",
  )
  lm = model.load(path, work=work, adapter=run.flags.adapter, dtype=config.dtype)
  found = perplexity.perplexity(lm, documents, config, on_batch=model.progress("windows"))
  logging.info("%d tokens in %d windows", found.nll.n, found.windows)
  figures = found.as_dict()
  low, high = figures["perplexity"]["ci_low"], figures["perplexity"]["ci_high"]
  interval = "no interval" if low is None else f"95 %: {low:.4g} to {high:.4g}"
  print(f"perplexity {found.value:.4g} ({interval}, n = {found.nll.n} tokens)")
  return figures | {"window": config.window, "file": run.flags.perplexity}


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab evaluate`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
