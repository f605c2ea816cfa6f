"""Continues prompts, answers questions, or chats in the terminal.

  --prompt=TEXT        one prompt, printed as it is written
  --prompts_file=FILE  one prompt a line, or .jsonl rows with "prompt" or "messages"
  neither              a chat on a terminal; else the prompt is read from standard input

A model with a chat template is asked, one without continues the text. How to sample is set by
gin: --gin_bindings="SamplingConfig.temperature=0.7". Answers go to WORKDIR/generations.jsonl.

python -m launch.generate --model=demo --prompt="What is the capital of France?" """

import dataclasses
import json
import time

import jax
from absl import flags

from jaxlab.decode import sampling, text
from jaxlab.eval import generation
from launch import common, model, prompts, registry, terminal

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("adapter", None, "PEFT folder to attach to the model.", FLAGS)
flags.DEFINE_string("prompt", None, "One prompt.", FLAGS)
flags.DEFINE_string("prompts_file", None, "File of prompts.", FLAGS)
flags.DEFINE_integer("samples", 1, "Answers to each prompt.", 1, flag_values=FLAGS)
flags.DEFINE_bool("raw", False, "Continue the text even if there is a chat template.", FLAGS)


def main(run: common.Run) -> dict:
  """Answers what the flags ask for; a chat without any."""
  config = registry.get("SamplingConfig")()
  asked = prompts.read(run.flags.prompt, run.flags.prompts_file)
  path = model.required(run.flags.model)
  run.start(resumes=False)
  longest = max(map(prompts.num_characters, asked)) if asked else 0
  rows = min(len(asked or [""]) * run.flags.samples, generation.BATCH)
  work = model.decoding(rows, config.max_new_tokens, longest)
  lm = model.load(path, work=work, adapter=run.flags.adapter)
  if asked is None:
    lm = dataclasses.replace(lm, params=text.serving_params(lm.params))
    turns = terminal.talk(lm, config, run.seed, run.workdir / "generations.jsonl")
    return {"model": path, "turns": turns}
  templated = text.require_tokenizer(lm).chat_template is not None and not run.flags.raw
  items = prompts.as_items(asked, as_messages=templated)
  return answer(run, lm, config, items)


def answer(run: common.Run, lm, config: sampling.SamplingConfig, items) -> dict:
  """Answers all items, streaming a single one; a rerun takes what is there."""
  samples, start = run.flags.samples, time.monotonic()
  stream = len(items) * samples == 1
  answerer = generation.Answerer(
    text.make_sampler(lm, config), lm.tokenizer, text.serving_params(lm.params),
    model=generation.fingerprint(lm.params),
    batch_size=min(len(items) * samples, generation.BATCH), add_bos=True,
  )  # fmt: skip
  streamed = []
  responses = answerer.answer(
    items, jax.random.key(run.seed), samples=samples, path=run.workdir / "responses.jsonl",
    others_allowed=True, on_batch=None if stream else model.progress("answers"),
    on_text=(lambda row, piece: streamed.append(terminal.show(piece))) if stream else None,
  )  # fmt: skip
  rows = [
    {"prompt": prompts.of_item(items[i // samples]), "sample": i % samples, "text": r.text,
     "finish": r.finish, "tokens": r.num_tokens, "logprob": r.logprob}
    for i, r in enumerate(responses)
  ]  # fmt: skip
  lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
  common.write_atomically(run.workdir / "generations.jsonl", lines)
  if not streamed:
    terminal.show("\n---\n".join(r.text for r in responses))
  terminal.show("\n")
  return {
    "model": run.flags.model, "prompts": len(items), "answers": len(rows),
    "new_tokens": sum(row["tokens"] for row in rows),
    "stopped": sum(row["finish"] == "stop" for row in rows) / len(rows),
    "generate_seconds": round(time.monotonic() - start, 3),
  }  # fmt: skip


def run(argv: list[str] | None = None) -> None:
  """Entry of `jaxlab generate`."""
  common.run_verb(main, FLAGS, argv)


if __name__ == "__main__":
  run()
