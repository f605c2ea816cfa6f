"""What a receipt says, against float64 and hashlib. transformers' verdict: the parity tests."""

import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab import lm as language_model
from jaxlab.io import receipt
from tests.models import tiny


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  root = tmp_path_factory.mktemp("receipt")
  tiny.write_folder(root / "in", tiny.CASES["llama"], dtype=tiny.BF16)
  language_model.export(jaxlab.load(root / "in"), root / "out")
  return root / "out", json.loads((root / "out" / "receipt.json").read_text())


def test_eight_prompts_with_their_answers(exported):
  folder, said = exported
  lm = jaxlab.load(folder)
  assert len(said["prompts"]) == 8
  row = said["prompts"][3]
  ids = list(row["ids"])
  for i, token in enumerate(row["greedy"][:3]):
    logits = np.asarray(lm.module.apply({"params": lm.params}, jnp.asarray([ids])))[0, -1]
    assert int(logits.argmax()) == token
    if i == 0:
      assert row["top_ids"] == np.argsort(-logits)[: receipt.TOP].tolist()
      np.testing.assert_allclose(row["top_logits"], logits[row["top_ids"]], atol=1e-4)
    ids.append(token)
  assert len(row["greedy"]) == receipt.NEW_TOKENS


def test_hashes(exported):
  folder, said = exported
  digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
  assert said["sha256"] == {"model.safetensors": digest}


def test_it_describes_the_files_and_not_the_model_in_memory(tmp_path):
  """Weights that the export rounds: the receipt must be of the rounded ones."""
  tiny.write_folder(tmp_path / "in", tiny.CASES["llama"])
  lm = jaxlab.load(tmp_path / "in")
  language_model.export(lm, tmp_path / "out", dtype=jnp.bfloat16)
  row = json.loads((tmp_path / "out" / "receipt.json").read_text())["prompts"][0]
  logits = lambda lm: lm.module.apply({"params": lm.params}, jnp.asarray([row["ids"]]))[0, -1]
  top = jnp.asarray(row["top_ids"])
  written = jaxlab.load(tmp_path / "out")
  assert written.params["norm"].dtype == jnp.float32
  np.testing.assert_allclose(row["top_logits"], logits(written)[top], atol=1e-4)
  assert np.abs(np.array(row["top_logits"]) - logits(lm)[top]).max() > 1e-3


def test_the_script_is_forty_lines_and_needs_transformers_only():
  lines = receipt.VERIFIER.splitlines()
  assert len(lines) <= 40
  imports = {w.strip(",") for line in lines if line.startswith("import") for w in line.split()[1:]}
  assert imports == {"hashlib", "json", "pathlib", "sys", "torch", "transformers"}
  compile(receipt.VERIFIER, "verify.py", "exec")


def test_rows_of_a_batch_are_those_alone(exported):
  lm = jaxlab.load(exported[0])
  prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
  together = receipt.greedy(lm.module, lm.params, prompts, 4)
  alone = [receipt.greedy(lm.module, lm.params, [p], 4)[0] for p in prompts]
  for (tokens, logits), (tokens_alone, logits_alone) in zip(together, alone, strict=True):
    assert tokens == tokens_alone
    np.testing.assert_allclose(logits, logits_alone, atol=1e-5)
