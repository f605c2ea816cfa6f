"""Learning rates as functions of the update count; Optax does the work. Dims: none.

`warmup` is a number of updates (an int) or a share of `total_steps` (a float in [0, 1)); it rises
linearly from 0, so the very first update has rate 0, as in transformers' schedules of these names.
"""

import optax


def constant(lr: float, total_steps: int = 0, warmup: int | float = 0) -> optax.Schedule:
  """`lr` after the warm-up.

  Args:
    lr: the rate, >= 0.
    total_steps: only needed to turn a share into a number of updates.
    warmup: see the module.
  Raises: ValueError for values out of range.
  """
  steps = _warmup_steps(lr, total_steps, warmup)
  return _joined(lr, steps, optax.constant_schedule(lr))


def linear_to_zero(lr: float, total_steps: int, warmup: int | float = 0) -> optax.Schedule:
  """Linear from `lr` after the warm-up to 0 at `total_steps`.

  Args:
    lr: the peak rate, >= 0.
    total_steps: updates in all, > warm-up.
    warmup: see the module.
  Raises: ValueError for values out of range.
  """
  steps = _warmup_steps(lr, total_steps, warmup)
  return _joined(lr, steps, optax.linear_schedule(lr, 0.0, _rest(total_steps, steps)))


def warmup_cosine(
  lr: float,
  total_steps: int,
  warmup: int | float = 0.1,  # [code NVlabs/QeRL scripts: 10 %, linear]
  final: float = 0.0,  # [ours: decay to zero, as transformers does]
) -> optax.Schedule:
  """Half a cosine from `lr` after the warm-up to `final * lr` at `total_steps`.

  Args:
    lr: the peak rate, >= 0.
    total_steps: updates in all, > warm-up.
    warmup: see the module.
    final: share of the peak that is left at the end, in [0, 1].
  Raises: ValueError for values out of range.
  """
  if not 0 <= final <= 1:
    raise ValueError(f"warmup_cosine: final must be in [0, 1]; got {final}.")
  steps = _warmup_steps(lr, total_steps, warmup)
  cosine = optax.cosine_decay_schedule(lr, _rest(total_steps, steps), alpha=final)
  return _joined(lr, steps, cosine)


def _joined(lr, warmup_steps, after):
  if warmup_steps == 0:
    return after
  return optax.join_schedules([optax.linear_schedule(0.0, lr, warmup_steps), after], [warmup_steps])


def _rest(total_steps, warmup_steps):
  if total_steps <= warmup_steps:
    raise ValueError(
      f"schedule: total_steps must be larger than the warm-up; got {total_steps=} and "
      f"{warmup_steps} steps of warm-up. Shorten the warm-up."
    )
  return total_steps - warmup_steps


def _warmup_steps(lr, total_steps, warmup):
  if lr < 0:
    raise ValueError(f"schedule: lr must be >= 0; got {lr}.")
  if isinstance(warmup, float):
    if not 0 <= warmup < 1:
      raise ValueError(
        f"schedule: a float warmup is a share in [0, 1); got {warmup}. Write an int for updates."
      )
    return round(warmup * total_steps)
  if warmup < 0:
    raise ValueError(f"schedule: warmup must be >= 0; got {warmup}.")
  return warmup
