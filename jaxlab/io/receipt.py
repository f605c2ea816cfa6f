"""What an exported model should answer, written beside it, and a script that checks it there.

`receipt.json` holds eight prompts as token ids, the greedy continuation of each, the top logits
after each prompt and a hash of each weight file; `verify.py` needs only transformers (and what that
needs to read the weights). Made from the
written files, not from the model in memory: a rounding or naming mistake of the export would show.
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.io import huggingface
from jaxlab.io import tokenizer as tokenizers
from jaxlab.models import zoo
from jaxlab.nn import weights
from pallas_kernels.fp4_gemm import codec

RECEIPT, VERIFY = "receipt.json", "verify.py"
NEW_TOKENS = 8  # enough to leave the prompt behind; full forward passes, so not many
TOP = 5
PROMPTS = (
  "The capital of France is",
  "Water boils at a temperature of",
  "def add(a, b):\n  return",
  "Once upon a time, there was a",
  "1, 2, 3, 4, 5,",
  "The opposite of hot is",
  "Dear Sir or Madam,\n\nI am writing to",
  "La vie est",
)
TOLERANCE = 2e-3  # of a logit; both sides add float32 numbers, in different orders

VERIFIER = '''"""Does this copy of the model answer as when it was exported? Needs transformers."""
import hashlib, json, pathlib, sys
import torch
import transformers

here = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
here = here if here.is_dir() else here.parent
receipt = json.loads((here / "receipt.json").read_text())
failed = 0
for name, digest in receipt["sha256"].items():
  with open(here / name, "rb") as file:
    same = hashlib.file_digest(file, "sha256").hexdigest() == digest
  failed += not same
  print(f"{name}: {'same bytes' if same else 'OTHER BYTES'}")
model = transformers.AutoModelForCausalLM.from_pretrained(here, dtype=torch.float32).eval()
with torch.autocast("cpu"):
  model(torch.tensor([[0]]))  # packed weights are decoded at the first call, to bfloat16
torch.nn.Module.float(model)  # exact: the receipt is float32 arithmetic on the stored numbers
for module in model.modules():
  module.quantization_enabled = False  # weights are compared, activations are not rounded
quantization = json.loads((here / "config.json").read_text()).get("quantization_config") or {}
if rotations := quantization.get("transform_config"):  # of inputs, which transformers leaves out
  from compressed_tensors.transform import TransformConfig, apply_transform_config
  for group in rotations["config_groups"].values():
    group["apply"] = [a for a in group["apply"] if a["location"] == "input"]
  apply_transform_config(model, TransformConfig.model_validate(rotations))
for row in receipt["prompts"]:
  ids = torch.tensor([row["ids"] + row["greedy"]])
  with torch.no_grad():
    logits = model(ids).logits[0, len(row["ids"]) - 1 :].float()
  found = logits.argmax(-1)[: len(row["greedy"])].tolist()
  gap = (logits[0, row["top_ids"]] - torch.tensor(row["top_logits"])).abs().max().item()
  same = found == row["greedy"] and gap <= receipt["tolerance"]
  failed += not same
  print(f"{row['text']!r}: {'same' if same else 'DIFFERENT'} tokens, logits within {gap:.1e}")
print("verified" if not failed else f"{failed} differences")
sys.exit(bool(failed))
'''


def write_receipt(
  folder: pathlib.Path, prompts: Sequence[str] = PROMPTS, *, new_tokens: int = NEW_TOKENS
) -> dict[str, Any]:
  """Loads the exported folder and writes `receipt.json` and `verify.py` into it.

  Args:
    prompts: texts; a model without tokenizer gets random ids in their place.
    new_tokens: length of each greedy continuation.
  Returns: the receipt.
  """
  config = huggingface.load_config(folder)
  module = zoo.from_config(config)
  params = huggingface.load_params(folder, module, jnp.float32)
  params = weights.map_leaves(lambda _, w: as_served(w), params)
  rows = prompt_rows(huggingface.load_tokenizer(folder), prompts, module.config.vocab_size)
  continued = greedy(module, params, [row["ids"] for row in rows], new_tokens)
  for row, (tokens, logits_V) in zip(rows, continued, strict=True):
    top = np.argsort(-logits_V, kind="stable")[:TOP]
    row |= {
      "greedy": tokens,
      "top_ids": top.tolist(),
      "top_logits": [round(float(logits_V[i]), 6) for i in top],
    }
  receipt = {
    "prompts": rows,
    "sha256": {p.name: _sha256(p) for p in sorted(folder.glob("*.safetensors"))},
    "tolerance": TOLERANCE,
    "numerics": "float32 arithmetic on the weights as written (packed ones decoded to bfloat16), "
    "activations not rounded",
  }
  (folder / RECEIPT).write_text(json.dumps(receipt, indent=1, ensure_ascii=False) + "\n", "utf-8")
  (folder / VERIFY).write_text(VERIFIER, "utf-8")
  return receipt


def as_served(w: Any) -> Any:
  """A packed kernel as compressed-tensors decodes it: q * (s / g) in float32, then bfloat16.

  Our own order is (q * s) / g. Exact ties between two bfloat16 are common (weights and e4m3 scales
  have few bits), so the last float32 bit decides; XLA's division would change it, NumPy's is exact.
  Rotations are undone afterwards. Activations are not rounded, here or by the verifier: the last
  bit of a weight would move numbers across rounding steps, and right copies would differ.
  """
  if not isinstance(w, weights.FP4Array):
    return w
  tensor_scale = np.asarray(w.tensor_scale)[..., None, None]
  divisor = tensor_scale if w.scale_is_divisor else np.float32(1) / tensor_scale
  scale = np.asarray(codec.decode_scale(w.scale)) / divisor
  values = codec.scale_blocks(codec.unpack_codes(w.codes), jnp.asarray(scale))
  w_OI = values.astype(jnp.bfloat16).astype(jnp.float32)
  if w.rotation_matrix is not None:
    w_OI = codec.rotate_by(w_OI, jnp.swapaxes(w.rotation_matrix, -1, -2).astype(jnp.float32))
  else:
    w_OI = codec.rotate(w_OI, w.rotation)
  return jnp.swapaxes(w_OI, -1, -2)


def prompt_rows(
  tokenizer: tokenizers.Tokenizer | None, prompts: Sequence[str], vocab_size: int
) -> list[dict[str, Any]]:
  """[{"text": ..., "ids": ...}]."""
  if tokenizer is not None:
    return [{"text": text, "ids": tokenizer.encode(text)} for text in prompts]
  rng = np.random.default_rng(0)
  return [
    {"text": f"random ids {i}", "ids": rng.integers(vocab_size, size=6 + i).tolist()}
    for i in range(len(prompts))
  ]


def greedy(
  module: Any, params: Any, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[tuple[list[int], np.ndarray]]:
  """(greedy tokens, logits after the prompt) of each prompt, by full forward passes in one batch.

  The plainest decoding there is: no cache, no stop. It is the check, so it shares no code with the
  sampler.
  """
  lengths = np.array([len(p) for p in prompts])
  tokens_BT = np.zeros((len(prompts), lengths.max() + new_tokens), np.int32)
  for row, prompt in zip(tokens_BT, prompts, strict=True):
    row[: len(prompt)] = prompt

  @jax.jit
  def next_logits(params, tokens_BT, last_B):
    hidden_BTD, _ = module.apply({"params": params}, tokens_BT, method="hidden")
    rows_BD = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)[:, 0]
    return module.apply({"params": params}, rows_BD, method="head")

  first_BV = None
  rows = np.arange(len(prompts))
  for step in range(new_tokens):
    logits_BV = np.asarray(next_logits(params, tokens_BT, lengths + step - 1))
    first_BV = logits_BV if first_BV is None else first_BV
    tokens_BT[rows, lengths + step] = logits_BV.argmax(-1)
  ends = lengths + new_tokens
  return [(tokens_BT[i, lengths[i] : ends[i]].tolist(), first_BV[i]) for i in range(len(prompts))]


def _sha256(path: pathlib.Path) -> str:
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()
