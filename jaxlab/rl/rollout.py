"""From a policy to training batches: sample groups, score them, pack what has a gradient.

Everything is a function of (settings, key, step, adapters): after a crash the same step gives the
same rollout, so none is ever stored. Dims: P prompts, G samples of each, T answer tokens.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import noise
from jaxlab.decode import autoregressive, text
from jaxlab.eval import records
from jaxlab.nn import stack, weights
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from jaxlab.rl import advantages, batch, meter, rewards
from jaxlab.rl import config as rl_config
from jaxlab.train import fit, state
from pallas_kernels import target

PyTree = Any


class Answer(NamedTuple):
  """One sampled answer with its scores."""

  item: records.Item
  response: records.Response
  parts: dict[str, float | None]  # what each reward measured
  reward: float  # weighted sum, NaN if nothing was measured
  logp: np.ndarray  # float32 [tokens]


class Group(NamedTuple):
  """The answers to one prompt and their advantages."""

  prompt: list[int]
  answers: list[Answer]
  advantage: np.ndarray  # float32 [G]
  has_variance: bool


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Tokenised items; `prefix` tokens are common to all and computed once a rollout."""

  items: Sequence[records.Item]
  ids: Sequence[list[int]]
  prefix: int

  def take(self, index: Sequence[int]) -> tuple[list[records.Item], list[list[int]]]:
    return [self.items[i] for i in index], [self.ids[i] for i in index]


def tokenize(items, tokenizer, *, max_tokens: int, system_prompt: str | None = None) -> Prompts:
  """Renders every item (its own text, or the chat template) and keeps the last `max_tokens`."""
  conversations = [_conversation(item, system_prompt) for item in items if item.prompt is None]
  rendered = iter(tokenizer.apply_chat_templates(conversations) if conversations else [])
  texts = [next(rendered) if item.prompt is None else item.prompt for item in items]
  ids = [tokenizer.encode(text)[-max_tokens:] for text in texts]
  return Prompts(items, ids, autoregressive.shared_prefix(ids))


def _conversation(item: records.Item, system_prompt: str | None) -> list[dict[str, str]]:
  has_system = item.messages[0]["role"] == "system"
  own = (
    [] if system_prompt is None or has_system else [{"role": "system", "content": system_prompt}]
  )
  return own + list(item.messages)


class Serving:
  """The parameters as the sampler wants them, by the rule of `text.serving_params`.

  On a CPU the frozen base is unpacked and unstacked once, openly, and put on the mesh again;
  elsewhere the trainer's own arrays serve.
  """

  def __init__(self, frozen: PyTree, placement: rules.Placement | None = None):
    self.unpacked = target.current_target().platform == "cpu"
    self._placement = placement
    self._frozen = self._placed(text.serving_params(frozen))

  def params(self, trainable: dict[str, jax.Array]) -> PyTree:
    """The policy with the given adapters and norms."""
    return self._placed(
      weights.merge(stack.unstack_paths(trainable) if self.unpacked else trainable, self._frozen)
    )

  def _placed(self, params: PyTree) -> PyTree:
    if self._placement is None or not self.unpacked:
      return params
    kv_heads = self._placement.num_kv_heads
    return rules.shard_params(params, self._placement.mesh, num_kv_heads=kv_heads)


@dataclasses.dataclass(frozen=True)
class RolloutSource:
  """`rounds` of `train.fit`: `source(step, state) -> Round`, a pure function of both.

  Only `seen` remembers: the groups of the last call, for a table of samples.
  """

  sampler: autoregressive.Sampler
  tokenizer: Any
  prompts: Prompts
  data: rl_config.RLData
  config: rl_config.RLConfig
  frozen: PyTree
  reference: dict[str, jax.Array]  # the trainable arrays before training, for the KL term
  serving: Serving
  key: jax.Array
  seen: list[Group] = dataclasses.field(default_factory=list)

  def __call__(self, step: int, train_state: state.TrainState) -> fit.Round:
    start = time.monotonic()
    sigma = 0.0 if self.config.aqn is None else self.config.aqn.sigma(step, self.config.steps)
    key = jax.random.fold_in(self.key, step)
    drawn = self._noise(sigma, key)
    params = self.serving.params(train_state.trainable)
    groups, outs = [], []
    for attempt in range(self.config.max_rollouts):
      new, out = self._sample(params, step, attempt, key, drawn)
      groups += new
      outs.append(out)
      if self._enough(groups):
        break
    seconds = time.monotonic() - start
    self.seen[:] = groups
    used = self._select(groups)
    metrics = summarize(groups, used) | {
      "entropy_rollout": float(np.mean([o.entropy_NT.sum() / o.length_N.sum() for o in outs])),
      "aqn/sigma": sigma,
      "rollout_seconds": seconds,
      "rollout_tokens": int(sum(o.length_N.sum() for o in outs)),
    }
    if drawn is not None:
      metrics["aqn/effective_std"] = self._effective_std(params, drawn)
    batches = self._batches(used, train_state)
    if self.config.meter_every and step % self.config.meter_every == 0 and batches:
      metrics |= meter.measure(
        self.sampler.module, self.config.loss, train_state.trainable, self.frozen, batches[0],
        drawn, unpacked=self.serving.unpacked, micro_rows=self.config.micro_rows,
      )  # fmt: skip
    return fit.Round(batches, metrics, [g.answers[0].item.id for g in used])

  def _noise(self, sigma: float, key: jax.Array) -> autoregressive.Noise | None:
    """The noise of a rollout; None only where the run has none, so that one program serves all."""
    if self.config.aqn is None:
      return None
    noise_key = jax.random.fold_in(key, 1)
    sigma = jnp.float32(sigma)
    if (placement := self.sampler.module.placement) is not None:
      sigma = rules.replicate(sigma, placement.mesh)
    return autoregressive.Noise(sigma, noise_key, self.config.aqn.relative)

  def _effective_std(self, params: PyTree, drawn: autoregressive.Noise) -> float:
    noisy = noise.perturb(params, drawn.sigma, drawn.key, relative=drawn.relative)
    return float(noise.effective_std(params, noisy))

  def _sample(self, params, step: int, attempt: int, key, drawn: autoregressive.Noise | None):
    """One batch of groups; no attempt repeats the row ids or item positions of another."""
    p, g = self.config.prompts, self.config.samples
    index = item_index(
      len(self.prompts.items), p, step, attempt, self.config.max_rollouts, self.key
    )
    items, ids = self.prompts.take(index)
    out = self.sampler(
      params,
      ids,
      jax.random.fold_in(key, 0),
      samples=g,
      prefix=self.prompts.prefix,
      noise=drawn,
      row_ids=range(attempt * p * g, (attempt + 1) * p * g),
    )
    items = [item for item in items for _ in range(g)]
    answered = [self._response(item, out, row, step) for row, item in enumerate(items)]
    answers = [
      Answer(
        item,
        response,
        parts,
        rewards.weighted_sum(parts, self.data.weights),
        out.logp_NT[row, : len(response.token_ids)],
      )
      for row, (item, response, parts) in enumerate(
        zip(items, answered, self._score_answers(items, answered), strict=True)
      )
    ]
    return self._groups(ids, answers), out

  def _response(
    self, item: records.Item, out: autoregressive.Completions, row: int, step: int
  ) -> records.Response:
    ids = out.ids(row)
    stopped = bool(out.stopped_N[row])
    return records.Response(
      key=f"{item.id}#{step}.{row}",
      text=self.tokenizer.decode(ids[:-1] if stopped else ids),
      token_ids=tuple(ids),
      finish="stop" if stopped else "length",
    )

  def _score_answers(
    self, items: Sequence[records.Item], responses: Sequence[records.Response]
  ) -> list[dict[str, float | None]]:
    """What each reward measured. Of several processes each scores its share, and all get all: one
    that scored again what another did could see another result (a time limit)."""
    first, count = jax.process_index(), jax.process_count()
    mine = [self._score_answer(*x) for x in list(zip(items, responses, strict=True))[first::count]]
    shares = meshes.from_all(mine)
    return [shares[row % count][row // count] for row in range(len(items))]

  def _score_answer(
    self, item: records.Item, response: records.Response
  ) -> dict[str, float | None]:
    parts = rewards.score_all(self.data.rewards, item, response)
    if self.config.overlong_buffer:
      limit, buffer = self.config.sampling.max_new_tokens, self.config.overlong_buffer
      parts |= rewards.overlong(item, response, max_tokens=limit, buffer_tokens=buffer)
    return parts

  def _groups(self, ids, answers: list[Answer]) -> list[Group]:
    c = self.config
    reward_PG = np.asarray([a.reward for a in answers], np.float64).reshape(c.prompts, c.samples)
    advantage_PG = advantages.group_advantage(reward_PG, scale=c.advantage, eps=c.advantage_eps)
    variance_P = advantages.has_variance(reward_PG)
    return [
      Group(
        ids[p], answers[p * c.samples : (p + 1) * c.samples], advantage_PG[p], bool(variance_P[p])
      )
      for p in range(c.prompts)
    ]

  def _enough(self, groups: list[Group]) -> bool:
    return sum(g.has_variance for g in groups) >= self.config.groups

  def _select(self, groups: list[Group]) -> list[Group]:
    if self.config.drop_equal_groups:
      groups = [g for g in groups if g.has_variance]
    return groups[: self.config.groups]

  def _batches(self, groups: list[Group], train_state: state.TrainState) -> list[batch.PackedBatch]:
    """Minibatches of whole groups, repeated `iterations` times, with what the loss needs beside."""
    c = self.config
    if not any(self._trains(answer) for group in groups for answer in group.answers):
      return []  # an update without a gradient would still move by momentum and weight decay
    share = -(-len(groups) // c.minibatches)
    parts = [groups[i : i + share] for i in range(0, len(groups), share)]
    packed = [self._pack(part) for part in parts]
    if c.iterations * len(packed) > 1:  # later updates see another policy than the one that sampled
      packed = [
        dataclasses.replace(b, logp_old_RQT=self._score(train_state.trainable, b)) for b in packed
      ]
    if c.loss.kl_coef:
      packed = [dataclasses.replace(b, logp_ref_RQT=self._score(self.reference, b)) for b in packed]
    return packed * c.iterations

  def _trains(self, answer: Answer) -> bool:
    return answer.response.finish == "stop" or not self.config.mask_truncated

  def _pack(self, groups: list[Group]) -> batch.PackedBatch:
    samples = [
      batch.Sample(
        group.prompt,
        answer.response.token_ids,
        answer.logp,
        float(advantage),
        self._trains(answer),
      )
      for group in groups
      for answer, advantage in zip(group.answers, group.advantage, strict=True)
    ]
    placement = self.sampler.module.placement
    shards = 1 if placement is None else rules.row_shards(placement.mesh)
    packed = batch.pack(
      samples,
      per_row=self.config.sequences_per_row,
      max_answer=self.config.sampling.max_new_tokens,
      row_multiple=math.lcm(self.config.micro_rows or 1, shards),
      most=self.config.update_answers,
    )
    return packed if placement is None else rules.shard_rows(packed, placement.mesh)

  def _score(self, trainable, packed: batch.PackedBatch) -> jax.Array:
    module, c = self.sampler.module, self.config
    return score_step(module, c.loss, trainable, self.frozen, packed, micro_rows=c.micro_rows)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="micro_rows")
def score_step(
  module, loss, trainable, frozen, packed: batch.PackedBatch, *, micro_rows: int | None = None
) -> jax.Array:
  """Log-probabilities of packed answers under the given trainable arrays."""
  params = weights.merge(trainable, frozen)
  return batch.map_rows(lambda rows: batch.score(module, params, rows, loss)[0], packed, micro_rows)


def item_index(
  num_items: int, count: int, step: int, attempt: int, attempts: int, key: jax.Array
) -> list[int]:
  """Which items a rollout asks: a new shuffle every epoch, position = a count, no state.

  First attempts run through the data; further ones have a shuffle of their own, so that resampling
  does not skip items.
  """
  seed = np.asarray(jax.random.key_data(key)).tolist()
  lane = 0 if attempt == 0 else 1
  at = step if attempt == 0 else step * (attempts - 1) + attempt - 1

  def item(position: int) -> int:
    epoch, offset = divmod(position, num_items)
    return int(_shuffle(num_items, (*seed, lane, epoch))[offset])

  return [item(at * count + j) for j in range(count)]


@functools.lru_cache(maxsize=4)
def _shuffle(n: int, seed: tuple[int, ...]) -> np.ndarray:
  return np.random.default_rng(seed).permutation(n)


def summarize(groups: list[Group], used: list[Group]) -> dict[str, float]:
  """Rewards (each part and the sum), lengths and the shares that tell whether there is a signal."""
  answers = [a for g in groups for a in g.answers]
  names = answers[0].parts.keys()
  mean = lambda xs: float(np.nanmean(xs)) if np.isfinite(xs).any() else float("nan")
  values = lambda name: np.asarray(
    [np.nan if a.parts[name] is None else a.parts[name] for a in answers]
  )
  length = np.asarray([len(a.response.token_ids) for a in answers])
  return {
    "reward": mean(np.asarray([a.reward for a in answers])),
    **{f"reward/{name}": mean(values(name)) for name in names},
    "length": float(length.mean()),
    "length_max": int(length.max()),
    "truncated": float(np.mean([a.response.finish == "length" for a in answers])),
    "zero_variance": 1.0 - float(np.mean([g.has_variance for g in groups])),
    "groups_used": len(used),
  }
