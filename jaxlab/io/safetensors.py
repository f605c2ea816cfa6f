"""safetensors checkpoints: a file is a u64 header length, a JSON header, then bytes.

The header maps names to a dtype tag, a shape and data_offsets; a checkpoint is one such file, or
several with an index that maps names to files.
Source: https://github.com/huggingface/safetensors (README "Format"; `safetensors/src/tensor.rs`).
"""

from jaxlab.io.safetensors_read import DTYPES, INDEX, SINGLE, SafetensorsFolder
from jaxlab.io.safetensors_write import (
  PT_METADATA,
  TensorSpec,
  write_safetensors,
  write_sharded,
)

__all__ = [
  "DTYPES",
  "INDEX",
  "PT_METADATA",
  "SINGLE",
  "SafetensorsFolder",
  "TensorSpec",
  "write_safetensors",
  "write_sharded",
]
