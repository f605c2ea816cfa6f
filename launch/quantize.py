"""Writes a model with 4-bit weights, rounded to nearest.

quantize.format = 'nvfp4' writes a compressed-tensors folder that transformers and vLLM load (and
jaxlab); 'mxfp4', 'nf4' and 'bf16' write a checkpoint that only jaxlab loads.

python -m launch.quantize --model=demo --output=DIR --gin_bindings="quantize.format='nvfp4'"
"""

import dataclasses
import pathlib

import jax
from absl import flags, logging

import jaxlab
from jaxlab import lm as language_model
from jaxlab.io import huggingface
from jaxlab.models import zoo
from jaxlab.nn import stack
from jaxlab.quant import fp4, report
from jaxlab.train import budget
from launch import common, model, registry

FLAGS = common.define_flags()
flags.DEFINE_string("model", None, "Model folder, .gguf file, checkpoint, or 'demo'.", FLAGS)
flags.DEFINE_string("output", None, "Folder to write; new or empty.", FLAGS)
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # those of one share a scale


def main(run: common.Run) -> dict:
  """Loads, quantises group by group, writes; returns sizes and errors."""
