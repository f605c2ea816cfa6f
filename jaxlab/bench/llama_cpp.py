"""llama.cpp beside us, through llama-cpp-python: a GGUF file decoded in this process."""

import importlib
import itertools
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

TRIES = 2  # of each setup; the first one warms up


def require() -> Any:
  """The module `llama_cpp`. Raises: ValueError with the way to install it."""
  try:
    return importlib.import_module("llama_cpp")
  except ImportError as error:
    raise ValueError(
      f"bench: the baseline needs llama-cpp-python ({error}). pip install 'jaxlab[bench]', which "
      "compiles it for this CPU, or set fp4_decode_rows.llama_cpp = False."
    ) from error


class LlamaCpp:
  """A model of llama.cpp's, set up as it is fastest here for one prompt.

  Tried are one thread and one for each core, with and without flash attention. Its threads wait for
  each other by spinning, as OpenMP has it by default: OMP_WAIT_POLICY=PASSIVE, which spares other
  busy processes, halves its speed on a quiet machine (SmolLM2 with two threads: 101 to 47
  tokens/s, one thread 77 with both). On a busy machine one thread wins, for spinning costs more.
  """

  def __init__(self, path: pathlib.Path, prompt: Sequence[int], new_tokens: int):
    self._prompt, self._new_tokens = list(prompt), new_tokens
    pinned = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if pinned else os.cpu_count() or 1
    tried = [(t, flash) for t in sorted({1, cores}) for flash in (False, True)]
    models = {setup: self._load(path, *setup) for setup in tried}
    seconds = {
      setup: min(self._time(model) for _ in range(TRIES)) for setup, model in models.items()
    }
    self.threads, self.flash_attention = best = min(seconds, key=seconds.get)
    self._model = models[best]
    said = ", ".join(
      f"{t} threads{' flash' * flash}: {s:.2f} s" for (t, flash), s in seconds.items()
    )
    logging.info("llama.cpp: %s; the fastest is measured", said)

  def _load(self, path: pathlib.Path, threads: int, flash_attention: bool) -> Any:
    return require().Llama(
      str(path), n_ctx=len(self._prompt) + self._new_tokens, n_threads=threads,
      n_threads_batch=threads, flash_attn=flash_attention, verbose=False,
    )  # fmt: skip

  def _time(self, model: Any) -> float:
    start = time.perf_counter()
    self._decode(model)
    return time.perf_counter() - start

  def decode(self) -> list[int]:
    """Greedy: exactly `new_tokens` tokens, the prompt is read again each time.

    What llama-cpp-python adds in Python is within a hundredth of calling `llama_decode` itself.
    """
    return self._decode(self._model)

  def _decode(self, model: Any) -> list[int]:
    model.reset()
    said = model.generate(self._prompt, temp=0.0, top_k=1)
    return list(itertools.islice(said, self._new_tokens))
