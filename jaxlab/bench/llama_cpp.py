"""llama.cpp beside us, through llama-cpp-python: a GGUF file decoded in this process."""

import importlib
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any


def require() -> Any:
  """The module `llama_cpp`. Raises: ValueError with the way to install it."""
  # Its two threads spin while they wait for each other: beside other busy processes it becomes ten
  # times slower, which would flatter us. As `baselines.require` does for torch.
  os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
  try:
    return importlib.import_module("llama_cpp")
  except ImportError as error:
    raise ValueError(
      f"bench: the baseline needs llama-cpp-python ({error}). pip install 'jaxlab[bench]', which "
      "compiles it for this CPU, or set fp4_decode_rows.llama_cpp = False."
    ) from error


class LlamaCpp:
  """A model of llama.cpp's with as many threads as there are cores, as its own benchmark takes."""

  def __init__(self, path: pathlib.Path, slots: int):
    threads = len(os.sched_getaffinity(0))
    self._model = require().Llama(
      str(path), n_ctx=slots, n_threads=threads, n_threads_batch=threads, verbose=False
    )

  def decode(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy: exactly `new_tokens` tokens, the prompt is read again each time."""
    self._model.reset()
    said = self._model.generate(list(prompt), temp=0.0, top_k=1)
    return list(itertools.islice(said, new_tokens))
