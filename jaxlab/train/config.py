"""Settings of `launch.train`: pre-training and fine-tuning of causal language models on text."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Literal

from jaxlab import lora as lora_lib
from jaxlab.data import text
from jaxlab.optim import config as optim
from jaxlab.parallel import mesh as meshes


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """One run. A step is one update on `rows` rows of `tokens` tokens, over all devices together."""

  data: text.TextData
  steps: int  # updates in all
  rows: int  # B, of a step, over all devices and processes
  tokens: int  # T, of a row
  # [ours] A folder, a .gguf file, a checkpoint of ours, "demo"; or a function that makes a folder
  # in the one it is given and returns its path. Only config.json and a tokenizer for "random".
  model: str | Callable[..., str] = "demo"  # [ours: the packaged model]
  init: Literal["checkpoint", "random"] = "checkpoint"  # [ours: fine-tuning is the commonest job]
  lora: lora_lib.LoRAConfig | None = None  # adapters over a frozen base; None trains everything
  micro_rows: int | None = None  # rows in memory at once, over all devices; None for all
  optimizer: optim.OptimizerConfig = optim.OptimizerConfig()  # [ours: its defaults]
  dtype: Literal["float32", "bfloat16"] | None = None  # of products; None: f32 on a CPU, else bf16
  remat: bool = True  # recompute blocks in the backward pass [ours: memory before time]
  chunk_tokens: int = 4096  # that meet the head at once [ours: as in RL]
  mesh: meshes.MeshConfig | None = None  # None for one device
  save_every: int = 1000  # steps between checkpoints [ours: what a crash may cost]

  def __post_init__(self):
    for field in ("steps", "rows", "tokens", "micro_rows", "chunk_tokens", "save_every"):
      value, least = getattr(self, field), 2 if field == "tokens" else 1
      if value is not None and value < least:
        raise ValueError(f"TrainConfig.{field}: must be at least {least}; got {value}.")
    if self.micro_rows is not None and self.rows % self.micro_rows:
      raise ValueError(
        f"TrainConfig.micro_rows: must divide the rows of a step; got rows={self.rows} and "
        f"micro_rows={self.micro_rows}. Choose a divisor of {self.rows}, or other rows."
      )
    if self.lora is not None and self.init == "random":
      raise ValueError(
        "TrainConfig.lora: adapters need a trained base; got init='random'. Use "
        "init='checkpoint', or lora=None to train everything."
      )

  def model_path(self, workdir: str | os.PathLike[str]) -> str:
    """Where the model is; one that is made for this run is kept in `workdir/base`."""
    return self.model if isinstance(self.model, str) else self.model(pathlib.Path(workdir) / "base")
