"""The other side of each pair: transformers, torch and peft on the same weights.

The only file of the library that imports torch, and only when a benchmark asks for it.
"""

import importlib
import os
import pathlib
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlab import lm as lm_lib
from jaxlab.io import export as exports
from jaxlab.rl import batch as packing


def require() -> tuple[Any, Any]:
  """(torch, transformers). Raises: ValueError with the way to install them."""
  # Spinning OpenMP threads beside another busy process cost a factor of 4 to 16.
  os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
  try:
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
  except ImportError as error:
    raise ValueError(
      f"bench: the baseline needs torch and transformers ({error}). pip install 'jaxlab[parity]'."
    ) from error
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  return torch, transformers


def torch_model(lm: lm_lib.LM) -> Any:
  """The same float32 weights in transformers, through an export."""
  torch, transformers = require()
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "model")
    with exports.new_folder(path) as part:
      exports.write_folder(lm, part, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
  return model.eval()


def generate(model: Any, prompts_BP: np.ndarray, new_tokens: int) -> np.ndarray:
  """Greedy `generate` of exactly `new_tokens` tokens."""
  torch, _ = require()
  ids = torch.tensor(prompts_BP)
  with torch.inference_mode():
    out = model.generate(
      ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
      min_new_tokens=new_tokens,
    )  # fmt: skip
  return out[:, prompts_BP.shape[1] :].numpy()


class GRPOUpdate:
  """One update of GRPO's token-mean loss with peft's LoRA and AdamW, on one sequence a row.

  The head runs on answer positions only, as ours does. `run()` returns the loss as a float.
  """

  def __init__(
    self, model: Any, data: packing.PackedBatch, *, rank: int, lr: float, clip_norm: float
  ):
    self._torch, _ = require()
    peft = importlib.import_module("peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names, lora_dropout=0.0)
    self._model = peft.get_peft_model(model, config).train()
    self._trainable = [p for p in self._model.parameters() if p.requires_grad]
    self._optimizer = self._torch.optim.AdamW(self._trainable, lr=lr, weight_decay=0.0)
    self._clip_norm = clip_norm
    tensor = lambda x: self._torch.tensor(np.asarray(x))
    self._tokens = tensor(data.tokens_RS).long()
    self._visible = tensor(data.positions_RS >= 0).long()
    self._source = tensor(jnp.take_along_axis(data.source_RK, data.pair_RQT[:, 0], 1)).long()
    self._target = tensor(jnp.take_along_axis(data.target_RK, data.pair_RQT[:, 0], 1)).long()
    self._mask, self._advantage = tensor(data.mask_RQT[:, 0]), tensor(data.advantage_RQ)

  def run(self) -> float:
    torch = self._torch
    inner = self._model.get_base_model()
    hidden = inner.model(self._tokens, attention_mask=self._visible).last_hidden_state
    rows = hidden.gather(1, self._source[..., None].expand(-1, -1, hidden.shape[-1]))
    logits = inner.lm_head(rows)
    targets = self._tokens.gather(1, self._target)
    logp = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    ratio = torch.exp(logp - logp.detach())
    loss = -(ratio * self._advantage * self._mask).sum() / self._mask.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self._trainable, self._clip_norm)
    self._optimizer.step()
    self._optimizer.zero_grad()
    return float(loss)
