"""Makes causal_lm.npz: logits of transformers on the tiny models of tests/models/tiny.py.

Run with the parity extra installed: python -m tests.goldens.make_causal_lm_goldens
The file in the repository: transformers 5.24.0, torch 2.13.0 (CPU), seed 0, 2026-11-30.
"""

import pathlib

import numpy as np

from tests.models import tiny

PATH = pathlib.Path(__file__).with_name("causal_lm.npz")


def main() -> None:
  arrays = {}
  for name in tiny.GOLDENS:
    model = tiny.torch_model(tiny.CASES[name])
    arrays[name] = tiny.torch_logits(model, tiny.tokens()).astype(np.float32)
  np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
  main()
