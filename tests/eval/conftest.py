"""A tiny model with tokenizer, loaded once for the tests of this folder."""

import pytest

import jaxlab
from tests.decode import tiny


@pytest.fixture(scope="session")
def lm(tmp_path_factory):
  return jaxlab.load(tiny.write_model(tmp_path_factory.mktemp("model")))
