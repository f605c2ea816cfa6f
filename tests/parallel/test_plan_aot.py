"""What the compilers of an H100 and a v6e make of QeRL's programs: nothing large is made twice.

Qwen2.5-7B, whose layers are one loop, with few and short rows. `make aot` runs it.
"""

import math
import os
from typing import NamedTuple

import pytest

from jaxlab.decode import sampling
from jaxlab.models import presets
from jaxlab.objectives import policy_gradient
from jaxlab.parallel import flops, hlo, plan, targets
from jaxlab.parallel import mesh as meshes
from jaxlab.quant import fp4
from jaxlab.rl import config as rl_config
from jaxlab.rl import programs
from pallas_kernels import target

pytestmark = pytest.mark.aot
MODEL = presets.qwen2p5_7b()
LAYERS, VOCAB = MODEL["num_hidden_layers"], MODEL["vocab_size"]
KERNEL = MODEL["hidden_size"] * MODEL["intermediate_size"]  # elements of the largest of a layer
SQUARE = MODEL["hidden_size"] ** 2  # of q and o; more than a layer's share of cache or block inputs
LAYER = (  # weights of its linears
  MODEL["hidden_size"] * (2 * MODEL["hidden_size"] + 3 * MODEL["intermediate_size"])
  + 2 * SQUARE * MODEL["num_key_value_heads"] // MODEL["num_attention_heads"]
)
PACKED = LAYER * 9 // 16  # bytes, with scales
TARGETS = {"cuda": "h100x1", "tpu": "v6e:2x2"}
# A prefill of 4096 rows and an update of 2048 are for XLA's product on a GPU.
KERNELS = {
  "cuda": {"rollout_prefill": "xla", "rollout_decode": "triton", "train_step": "xla"},
  "tpu": dict.fromkeys(("rollout_prefill", "rollout_decode", "train_step"), "mosaic_tpu"),
}
PROMPT, ANSWER, CHUNK, GROUPS, SAMPLES = 128, 384, 256, 4, 8
MB = 2**20


class Made(NamedTuple):
  """What a program's text, its compiler and its trace say; temporaries in bytes."""

  analysis: hlo.Analysis
  temporaries: int
  flops: float
  implementations: dict[str, str]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Made]:
  """Of each program, for the platform of this run."""
  platform = os.environ.get("JAXLAB_AOT")
  if platform not in TARGETS:
    pytest.skip("needs JAXLAB_AOT=tpu or cuda, and its compiler")
  chosen = targets.parse(TARGETS[platform])
  config = rl_config.RLConfig(
    prompts=GROUPS, samples=SAMPLES, micro_rows=4, max_prompt_tokens=PROMPT,
    sampling=sampling.SamplingConfig(max_new_tokens=ANSWER),
    loss=policy_gradient.PolicyGradientConfig(chunk_tokens=CHUNK),
  )  # fmt: skip
  mesh = meshes.make_mesh(meshes.MeshConfig(), targets.devices(chosen)[:1])
  with target.use_target(target.Target(platform, chosen.device.kind)):
    recipe = programs.recipe(MODEL, config, fp4.quantize_params, mesh)
    return {p.name: _compile(p) for p in recipe.programs}


def _compile(program: plan.Program) -> Made:
  traced = program.function.trace(*program.args, **program.kwargs)
  compiled = traced.lower().compile()
  found = Made(
    hlo.analyse(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes,
    sum(flops.count(traced.jaxpr.jaxpr).values()), plan.implementations(traced.jaxpr.jaxpr),
  )  # fmt: skip
  print(
    f"\n{program.name}: {found.implementations}, {found.temporaries / 1e6:.0f} MB of temporaries"
  )
  print(f"  {found.analysis.bytes / 1e9:.2f} GB of traffic, {found.flops:.3g} operations")
  return found


def elements(result: hlo.Result) -> list[int]:
  dims = result.instruction.shape.partition("[")[2].rstrip("]")
  return [int(n) for n in dims.split(",") if n]


def new(analysis: hlo.Analysis, at_least: float) -> list[hlo.Result]:
  return [r for r in analysis.results if not r.in_place and r.instruction.bytes >= at_least]


def test_no_more_than_a_layer_is_dequantised_at_a_time(compiled):
  for name, (analysis, temporaries, *_) in compiled.items():
    remat = 2 * LAYERS * 4 * (PROMPT + ANSWER) * MODEL["hidden_size"] * (name == "train_step")
    # A TPU changes the layout of the packed stack, once a call: 0.3 of what it would be decoded.
    assert temporaries - remat < 0.75 * LAYERS * 3 * KERNEL * 2, name
    stacks = [r for r in analysis.results if elements(r)[:1] == [LAYERS]]
    dense = [r for r in stacks if not r.instruction.shape.startswith(("u8", "f8"))]
    assert all(math.prod(elements(r)[1:]) < SQUARE for r in dense), name


def test_the_kernel_is_named(compiled):
  found = {name: made.implementations for name, made in compiled.items()}
  chosen = KERNELS[os.environ["JAXLAB_AOT"]]
  assert found == {name: {"fp4_matmul": kernel} for name, kernel in chosen.items()}


def test_decoding_copies_no_codes(compiled):
  """At a token, of a layer or of all: they are read where they are, each once."""
  made = compiled["rollout_decode"]
  copied = [r for r in new(made.analysis, MB) if r.instruction.shape.startswith(tuple(hlo.PACKED))]
  assert not copied
  assert made.temporaries < PACKED
  cache = 2 * 2 * GROUPS * SAMPLES * (PROMPT + ANSWER) * SQUARE // MODEL["hidden_size"]
  print(cache)


def test_no_logits_of_all_tokens(compiled):
  for name, (analysis, *_) in compiled.items():
    rows = max(CHUNK, GROUPS * SAMPLES)
    largest = max(
      (r.instruction.bytes for r in analysis.results if VOCAB in elements(r)
       and "embed" not in r.instruction.source), default=0,
    )  # fmt: skip
    table = MODEL["hidden_size"] * VOCAB * 2
    assert largest <= max(2 * 4 * rows * VOCAB, table), name


def test_the_cache_is_written_in_place(compiled):
  analysis = compiled["rollout_decode"].analysis
  heads, width = MODEL["num_key_value_heads"], MODEL["hidden_size"] // MODEL["num_attention_heads"]
  rows, slots = GROUPS * SAMPLES, PROMPT + ANSWER - 1
  half = 2 * LAYERS * rows * heads * slots * width  # keys, in bytes
  written = [r for r in analysis.results if r.in_place and r.instruction.bytes >= half]
  assert len(written) >= 2  # keys and values
  assert not [r for r in new(analysis, half / 2) if slots in elements(r)]
