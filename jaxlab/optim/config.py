"""An optimiser as numbers, for recipes; builds `adamw` on a schedule under the guard."""

import dataclasses

import optax

from jaxlab.optim import adamw, schedules

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW and its learning rate over the updates of a run."""

  lr: float = 1e-5  # [paper Table 4, for NVFP4 and NF4]
  schedule: str = "cosine"  # [code NVlabs/QeRL scripts]
  warmup: int | float = 0.1  # [code NVlabs/QeRL scripts]; a share (float) or updates (int)
  b1: float = 0.9  # [code NVlabs/QeRL scripts]
  b2: float = 0.99  # [code NVlabs/QeRL scripts]
  eps: float = 1e-8  # [code NVlabs/QeRL scripts]
  weight_decay: float = 0.1  # [code NVlabs/QeRL scripts]; never on norms and biases
  clip_norm: float | None = 0.2  # [code NVlabs/QeRL training scripts]

  def __post_init__(self):
    if self.schedule not in SCHEDULES:
      raise ValueError(
        f"OptimizerConfig.schedule: must be one of {', '.join(SCHEDULES)}; got {self.schedule!r}."
      )

  def build(self, total_updates: int) -> optax.GradientTransformation:
    """The optimiser for a run of `total_updates`."""
    match self.schedule:
      case "constant":
        lr = schedules.constant(self.lr, total_updates, self.warmup)
      case "linear":
        lr = schedules.linear_to_zero(self.lr, total_updates, self.warmup)
      case _:
        lr = schedules.warmup_cosine(self.lr, total_updates, self.warmup)
    return adamw.adamw(
      lr,
      b1=self.b1,
      b2=self.b2,
      eps=self.eps,
      weight_decay=self.weight_decay,
      clip_norm=self.clip_norm,
    )
