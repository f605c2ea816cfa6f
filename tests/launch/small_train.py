"""A recipe of `launch.train` that takes seconds, for one process or several."""

import pathlib

STEPS = 4


def gin(folder: pathlib.Path, *more: str) -> pathlib.Path:
  """The recipe, with its text, in `folder`."""
  text = folder / "text.txt"
  text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(200)))
  path = folder / "small.gin"
  recipe = f"""
TrainConfig.model = @byte_model
TrainConfig.init = 'random'
TrainConfig.data = @TextData()
TrainConfig.optimizer = @OptimizerConfig()
TrainConfig.steps = {STEPS}
TrainConfig.rows = 8
TrainConfig.tokens = 32
TrainConfig.save_every = 2
TrainConfig.chunk_tokens = 64
TextData.paths = ('{text}',)
OptimizerConfig.lr = 1e-2
OptimizerConfig.warmup = 1
byte_model.width = 32
byte_model.layers = 2
byte_model.mlp_width = 64
byte_model.positions = 32
"""
  path.write_text(recipe + "".join(f"{line}\n" for line in more))
  return path


MESH = (
  "TrainConfig.mesh = @MeshConfig()", "MeshConfig.data = 2", "MeshConfig.fsdp = 2",
  "MeshConfig.tensor = 2",
)  # fmt: skip
