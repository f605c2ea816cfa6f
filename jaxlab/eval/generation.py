"""Answers to many items: fixed batches, shared prefix, files that a killed run goes on with.

A request has a key made of the model, the prompt's tokens, the settings and the sample's number; a
file of responses is append-only, and what it holds is not asked again. A row's random numbers come
from its item's id and its sample's number, so that neither order, batch nor restart changes an
answer. Dims: none (host code around the sampler).
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

import jax
import numpy as np
from absl import logging
from jaxtyping import Array, Key

from jaxlab import errors
from jaxlab.decode import autoregressive, text
from jaxlab.eval import records
from jaxlab.io import seal
from jaxlab.io import tokenizer as tokenizers

PyTree = Any
BATCH = 32  # sequences decoded together


class Journal(Generic[records.Record]):
  """Records in an append-only JSONL file, flushed to the disk with each call; one writer.

  Opening it cuts off a torn last line (a killed writer) and reads the rest into `records`.

  Args:
    path: the file, made with its folder if absent; None keeps the records in memory only.
    kind: the class of its records.
  Raises: CorruptFile for a whole line that is no such record.
  """

  def __init__(self, path: str | os.PathLike[str] | None, kind: type[records.Record]):
    self.path = None if path is None else pathlib.Path(path)
    self.records: list[records.Record] = []
    if self.path is not None:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      self.path.touch()
      self.records = read_records(self.path, kind)

  def append(self, new: Sequence[records.Record]) -> None:
    """Adds records and waits until the disk has them."""
    self.records.extend(new)
    if self.path is not None:
      with self.path.open("ab") as file:
        file.write("".join(records.to_json(record) + "\n" for record in new).encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(
  path: str | os.PathLike[str], kind: type[records.Record], *, cut: bool = True
) -> list[records.Record]:
  """The records of a JSONL file without a torn last line, which is also cut off if `cut`.

  Raises: CorruptFile for a whole line that is no such record.
  """
  found, end = [], 0
  with open(path, "rb") as file:
    for number, line in enumerate(file, 1):
      if not line.endswith(b"\n"):
        break
      try:
        found.append(records.from_json(kind, line.decode()))
      except ValueError as error:
        raise errors.CorruptFile(path, f"row {number}", str(error), "Remove that line.") from error
      end += len(line)
  if cut and end < os.path.getsize(path):
    logging.info("Cut a torn last line off %s.", path)
    os.truncate(path, end)
  return found


@dataclasses.dataclass(frozen=True)
class Answerer:
  """A model that answers items.

  sampler, tokenizer, params: as for `jaxlab.decode.text.complete`.
  model: identity of the parameters, part of every request's key; see `fingerprint`.
  batch_size: sequences decoded together; the last batch is filled up, so that all have one shape.
  system_prompt: put before conversations that have no system message.
  add_bos: an item's own text is a plain one, and gets what the tokenizer puts in front.
  """

  sampler: autoregressive.Sampler
  tokenizer: tokenizers.Tokenizer
  params: PyTree
  model: str = ""
  batch_size: int = BATCH
  system_prompt: str | None = None
  add_bos: bool = False

  def __post_init__(self):
    if self.batch_size < 1:
      raise ValueError(f"Answerer.batch_size: must be at least 1; got {self.batch_size}.")

  def answer(
    self,
    items: Sequence[records.Item],
    key: Key[Array, ""],
    *,
    samples: int = 1,
    path: str | os.PathLike[str] | None = None,
    others_allowed: bool = False,
    on_batch: Callable[[int, int], None] | None = None,
    on_text: Callable[[int, str], None] | None = None,
  ) -> list[records.Response]:
    """`samples` answers to every item, item-major.

    Args:
      path: file of responses; those it holds are taken from it, new ones are added to it.
      others_allowed: the file may hold answers to other requests too.
      on_batch: called with (answers there, answers wanted) at the start and after each batch.
      on_text: as in `text.complete`, with the rows of the present batch.
    Raises: ValueError without items, for a prompt that does not fit, or if the file holds answers
      to other requests.
    """
    if not items:
      raise ValueError("answer: there is no item; the data set is empty. Give at least one.")
    prompts = self._encode(items)
    keys = [
      [self._request_key(prompt, key, item, k) for k in range(samples)]
      for item, prompt in zip(items, prompts, strict=True)
    ]
    journal = Journal(path, records.Response)
    there = {response.key: response for response in journal.records}
    wanted = set(itertools.chain.from_iterable(keys))
    if (other := there.keys() - wanted) and not others_allowed:
      raise ValueError(
        f"answer: {path} holds {len(other)} answers of another model, or to other items or "
        "settings. Choose another --workdir."
      )
    report = on_batch or (lambda done, total: None)
    report(len(wanted & there.keys()), len(wanted))
    open_items = [i for i, row in enumerate(keys) if not there.keys() >= set(row)]
    for batch, prefix in self._batches(open_items, prompts, samples):
      new = self._answer_batch(batch, prefix, items, prompts, keys, key, on_text)
      new = [response for response in new if response.key not in there]
      there |= {response.key: response for response in new}
      journal.append(new)
      report(len(wanted & there.keys()), len(wanted))
    return [there[k] for row in keys for k in row]

  def _encode(self, items: Sequence[records.Item]) -> list[list[int]]:
    """An item's own text has its special tokens spelt out; messages go through the template."""

    def conversation(item):
      has_system = item.messages[0]["role"] == "system"
      system = self.system_prompt
      own = [] if system is None or has_system else [{"role": "system", "content": system}]
      return own + list(item.messages)

    mine = lambda item: conversation(item) if item.prompt is None else item.prompt
    through = [item.prompt is None or self.add_bos for item in items]
    encoded = iter(
      text.encode_prompts(
        self.tokenizer, [mine(item) for item, yes in zip(items, through, strict=True) if yes]
      )
    )
    return [
      next(encoded) if yes else self.tokenizer.encode(item.prompt)
      for item, yes in zip(items, through, strict=True)
    ]

  def _request_key(self, prompt: list[int], key, item: records.Item, sample: int) -> str:
    settings = dataclasses.asdict(self.sampler.config) | {"stop_ids": self.sampler.stop_ids}
    seed = np.asarray(jax.random.key_data(key)).tolist()
    content = [records.SCHEMA, self.model, item.id, prompt, settings, seed, sample]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

  def _batches(
    self, indices: Sequence[int], prompts: Sequence[list[int]], samples: int
  ) -> Iterator[tuple[list[int], int]]:
    """(items of a batch, tokens of their common prefix); long prompts first, one shape a bucket."""
    prefix = autoregressive.shared_prefix(prompts)
    limit = self.sampler.module.config.max_positions
    bucket = lambda i: autoregressive.prompt_bucket(len(prompts[i]), limit)
    per_batch = max(1, self.batch_size // samples)
    for _, group in itertools.groupby(sorted(indices, key=bucket, reverse=True), bucket):
      group = list(group)
      for start in range(0, len(group), per_batch):
        batch = group[start : start + per_batch]
        yield batch + [batch[-1]] * (per_batch - len(batch)), prefix

  def _answer_batch(
    self, batch, prefix, items, prompts, keys, key, on_text
  ) -> list[records.Response]:
    """The responses of a batch without those of the rows that fill it up."""
    samples = len(keys[0])
    generated = text.complete(
      self.sampler, self.tokenizer, self.params, [prompts[i] for i in batch], key,
      samples=samples, prefix=prefix, on_text=on_text,
      row_ids=[row_id(items[i].id, k) for i in batch for k in range(samples)],
    )  # fmt: skip
    out = generated.completions
    responses = {}
    for row, (i, k) in enumerate(itertools.product(batch, range(samples))):
      ids = out.ids(row)
      responses.setdefault(
        keys[i][k],
        records.Response(
          key=keys[i][k],
          text=generated.texts[row],
          token_ids=tuple(ids),
          logprob=float(out.logp_NT[row, : len(ids)].sum(dtype=np.float64)),
          finish="stop" if out.stopped_N[row] else "length",
          usage={"in": len(prompts[i]), "out": len(ids)},
        ),
      )
    return list(responses.values())


def row_id(item_id: str, sample: int) -> int:
  """32 bits that name a row's random numbers."""
  return int.from_bytes(hashlib.sha256(f"{item_id}#{sample}".encode()).digest()[:4], "big")


def fingerprint(params: PyTree) -> str:
  """16 hex digits that change with any word of any parameter, or its type."""
  table, _ = seal.inspect(seal.flatten(params))
  content = [sorted(table.items()), seal.describe(params)]
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
