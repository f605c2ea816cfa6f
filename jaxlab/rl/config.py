"""Settings of group-relative RL with a frozen, quantised base. Source: arXiv 2510.11696 (QeRL)."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxlab import lora as lora_lib
from jaxlab import noise
from jaxlab.decode import sampling as sampling_lib
from jaxlab.objectives import policy_gradient
from jaxlab.optim import config as optim
from jaxlab.parallel import mesh as meshes
from jaxlab.rl import advantages


@dataclasses.dataclass(frozen=True)
class AQNConfig:
  """Adaptive quantisation noise: the schedule of `jaxlab.noise.sigma_at`."""

  sigma_start: float = 1e-2  # [paper §3.3, Table 4]
  sigma_end: float = 5e-4  # [paper Table 4]
  stages: int = 10  # [paper Table 4]
  shape: str = "exponential"  # [paper Fig. 9]
  paper_form: bool = False  # [code NVlabs/QeRL: reaches sigma_end; eq. 8 does not]
  relative: bool = False  # [ours: an experiment for AWQ checkpoints]

  def __post_init__(self):
    self.sigma(0, 1)  # refuses a bad schedule before anything is loaded

  def sigma(self, step: int, total_steps: int) -> float:
    """Noise scale of a step, both counted from 0."""
    return float(
      noise.sigma_at(
        step,
        total_steps=total_steps,
        sigma_start=self.sigma_start,
        sigma_end=self.sigma_end,
        stages=self.stages,
        shape=self.shape,
        paper_form=self.paper_form,
      )
    )


@dataclasses.dataclass(frozen=True)
class RLData:
  """What is asked and how answers are scored."""

  train: Sequence[Any]  # of eval.records.Item
  test: Sequence[Any] = ()  # [ours: none] held-out items, scored without noise before and after
  rewards: Sequence[Any] = ()  # [ours: must be given] of (Item, Response) -> {part: float | None}
  weights: Mapping[str, float] | None = None  # of the parts; 1 unless given
  system_prompt: str | None = None  # put before items that have messages and no system message

  def __post_init__(self):
    if not self.train:
      raise ValueError("RLData.train: the data set is empty. Give at least one item.")
    if not self.rewards:
      raise ValueError("RLData.rewards: there is no reward. Give at least one function.")


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """The algorithm. A step samples `prompts` groups of `samples` answers and updates on them."""

  # [ours] A folder, a .gguf file, a checkpoint of ours, "demo"; or a function that makes one in the
  # folder it is given, or finds it there, and returns its path.
  model: str | Callable[..., str] = "demo"  # [ours: the packaged model]
  steps: int = 600  # [paper Fig. 4: GSM8K]
  prompts: int = 16  # [paper Table 4: 128 sequences an update]
  samples: int = 8  # G [paper Table 4, GSM8K]
  max_prompt_tokens: int = 256  # [code NVlabs/QeRL scripts]; longer ones keep their last tokens
  sampling: sampling_lib.SamplingConfig = sampling_lib.SamplingConfig()  # [ours: its defaults]
  loss: policy_gradient.PolicyGradientConfig = policy_gradient.PolicyGradientConfig()  # [ours]
  lora: lora_lib.LoRAConfig = lora_lib.LoRAConfig()  # [ours: its defaults]
  optimizer: optim.OptimizerConfig = optim.OptimizerConfig()  # [ours: its defaults]
  aqn: AQNConfig | None = AQNConfig()  # [paper §3.3]; None: quantisation noise alone
  advantage: str = "group"  # [paper eq. 2]; see rl.advantages.SCALES
  advantage_eps: float = 1e-4  # [code NVlabs/QeRL, TRL]
  iterations: int = 1  # passes over a rollout [code NVlabs/QeRL scripts]
  minibatches: int = 1  # updates a pass [ours: the whole rollout at once]
  micro_rows: int | None = None  # packed rows in memory at once; None for all
  sequences_per_row: int = 1  # [ours: apart] answers packed into one row, prefixes shared
  drop_equal_groups: bool = False  # leave groups without variance out of the loss [DAPO §3.2]
  max_groups: int | None = None  # [ours: all] at most this many groups in an update; None for all
  max_rollouts: int = 1  # sample again until max_groups groups have variance [VERL: 10 for DAPO]
  mask_truncated: bool = True  # [code NVlabs/QeRL]: answers without a stop token do not train
  overlong_buffer: int = 0  # [ours: off] last tokens over which a penalty grows to -1 [DAPO]
  remat: bool = True  # recompute blocks in the backward pass [ours: memory before time]
  save_every: int = 20  # steps between checkpoints [ours]
  meter_every: int = 0  # steps between off-policy meter readings; 0 is off [ours]
  mesh: meshes.MeshConfig | None = None  # devices along each axis [ours: one device]

  def __post_init__(self):
    at_least_one = ("steps", "prompts", "max_prompt_tokens", "iterations", "minibatches",
                    "sequences_per_row", "max_rollouts", "save_every")  # fmt: skip
    for field in at_least_one:
      if getattr(self, field) < 1:
        raise ValueError(f"RLConfig.{field}: must be at least 1; got {getattr(self, field)}.")
    if self.advantage not in advantages.SCALES:
      raise ValueError(
        f"RLConfig.advantage: must be one of {', '.join(advantages.SCALES)}; got "
        f"{self.advantage!r}."
      )
    if self.samples < 2:
      raise ValueError(
        f"RLConfig.samples: a group needs at least 2 answers to compare; got {self.samples}. "
        "Every group-relative advantage would be 0. Use 4 to 16."
      )
    if self.max_rollouts > 1 and (self.max_groups is None or not self.drop_equal_groups):
      raise ValueError(
        f"RLConfig.max_rollouts: sampling again ({self.max_rollouts}) needs max_groups and "
        f"drop_equal_groups; got {self.max_groups} and {self.drop_equal_groups}. Set both."
      )

  def model_path(self, workdir: str | os.PathLike[str]) -> str:
    """Where the model is; one that is made for this run is kept in `workdir/base`.

    Raises: ValueError for one that several processes would have to make.
    """
    if isinstance(self.model, str):
      return self.model
    folder = pathlib.Path(workdir) / "base"
    if jax.process_count() > 1 and not folder.exists():
      raise ValueError(
        f"RLConfig.model: a model that is made for the run needs one process; got "
        f"{jax.process_count()} processes and no {folder}. Make it first, and give its path."
      )
    return self.model(folder)

  @property
  def updates(self) -> int:
    """Optimiser updates of the whole run."""
    return self.steps * self.iterations * self.minibatches

  @property
  def update_answers(self) -> int:
    """Answers of one update at most."""
    return -(-self.groups // self.minibatches) * self.samples

  @property
  def groups(self) -> int:
    """Groups of one update round at most."""
    return self.max_groups or self.prompts
