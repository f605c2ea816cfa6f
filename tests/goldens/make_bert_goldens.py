"""Makes bert.npz: outputs of transformers' BertModel on the model of tests/models/tiny_bert.py.

Run with the parity extra installed: python -m tests.goldens.make_bert_goldens
The file in the repository: transformers 5.24.0, torch 2.13.0 (CPU), seed 0, 2026-11-30.
"""

import pathlib
import tempfile

import numpy as np

from tests.models import tiny_bert

PATH = pathlib.Path(__file__).with_name("bert.npz")


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "model")
    tiny_bert.write_folder(path, tiny_bert.CONFIG)
    hidden, pooled = tiny_bert.torch_outputs(path, *tiny_bert.rows())
  np.savez_compressed(PATH, hidden=hidden.astype(np.float32), pooled=pooled.astype(np.float32))


if __name__ == "__main__":
  main()
