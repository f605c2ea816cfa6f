"""The tiny model, loaded once for all tests of this folder."""

import pytest

import jaxlab
from tests.rl import tiny


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
  """A model folder with tokenizer and chat template."""
  return tiny.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def lm(model_folder):
  """The tiny model with dense kernels."""
  return jaxlab.load(model_folder)


@pytest.fixture(scope="session")
def packed_lm(lm):
  """The tiny model in NVFP4."""
  return tiny.quantized(lm)
