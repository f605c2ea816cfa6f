# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # QeRL: RL on a 4-bit model, step by step
# SmolLM2-135M-Instruct is rounded to NVFP4, gets LoRA adapters, and is trained by group-relative RL with
# adaptive quantisation noise (arXiv 2510.11696). On Colab: `!pip install git+<your fork>` first.
# The short mode (`JAXLAB_NOTEBOOK_SHORT=1`) makes two small steps, to show that every cell runs.

# %%
import dataclasses
import os
import tempfile

import matplotlib.pyplot as plt

import jaxlab
from jaxlab import noise
from jaxlab.data import tasks
from jaxlab.decode import sampling
from jaxlab.lora import LoRAConfig
from jaxlab.nn import weights
from jaxlab.optim.config import OptimizerConfig
from jaxlab.quant import fp4
from jaxlab.rl import loop, rewards
from jaxlab.rl.config import AQNConfig, RLConfig, RLData
from jaxlab.train import metrics

SHORT = bool(os.environ.get("JAXLAB_NOTEBOOK_SHORT"))
STEPS = 2 if SHORT else 40

# %% [markdown]
# ## 1. The model, and its weights at 4 bits
# A kernel leaf is a dense array or a packed pytree; the module never asks which.

# %%
lm = jaxlab.load("demo")
packed = dataclasses.replace(lm, params=fp4.quantize_params(lm.params, "nvfp4"))
print(fp4.weight_bytes(packed.params))
print(packed.params["layers"]["q"]["kernel"].codes.shape)

# %%
original = lm.params["layers"]["q"]["kernel"]
rounded = weights.dense(packed.params["layers"]["q"]["kernel"])
print("relative RMS error", float(((rounded - original) ** 2).mean() ** 0.5 / original.std()))

# %% [markdown]
# ## 2. The noise schedule (eq. 8)
# Stage 0 has quantisation noise alone; then the added noise falls from 1e-2 to 5e-4.

# %%
plt.figure(figsize=(5, 3))
plt.step(range(10), noise.sigma_table(stages=10, sigma_start=1e-2, sigma_end=5e-4))
plt.xlabel("stage")
plt.ylabel("sigma")
plt.yscale("symlog", linthresh=1e-4)

# %% [markdown]
# ## 3. The task
# The largest of five two-digit numbers; a reward is 1 for the number, else 0.

# %%
train, test = tasks.largest_of_five(2000), tasks.largest_of_five(50, split="test")
print(train[0].messages[-1]["content"], "->", train[0].target)

# %% [markdown]
# ## 4. Group-relative RL
# Each step: 12 prompts, 8 answers each, advantages within a group, one update of the adapters.

# %%
config = RLConfig(
  steps=STEPS,
  prompts=2 if SHORT else 12,
  samples=4 if SHORT else 8,
  max_groups=2 if SHORT else 8,
  drop_equal_groups=True,
  sequences_per_row=64,
  remat=False,
  sampling=sampling.SamplingConfig(max_new_tokens=6),
  lora=LoRAConfig(rank=16),
  optimizer=OptimizerConfig(
    lr=3e-4, schedule="constant", warmup=1 if SHORT else 3, weight_decay=0.0, clip_norm=1.0
  ),
  aqn=AQNConfig(stages=10),
)
data = RLData(train=train, rewards=(rewards.exact_match,))
trainer = loop.prepare(packed, data, config, seed=0)
workdir = tempfile.mkdtemp()
params = trainer.run(workdir)

# %%
rows = metrics.read(workdir)
plt.figure(figsize=(5, 3))
plt.plot([r["step"] for r in rows], [r["reward"] for r in rows], label="reward")
plt.plot([r["step"] for r in rows], [r["entropy_rollout"] for r in rows], label="entropy (nats)")
plt.xlabel("step")
plt.legend()

# %% [markdown]
# ## 5. Ask the tuned model
# `params` are the packed base with the trained adapters: the same arrays that were trained.

# %%
tuned = dataclasses.replace(packed, params=params)
greedy = sampling.SamplingConfig(max_new_tokens=6, temperature=0.0)
for model in (packed, tuned):
  print(model.generate([test[0].prompt], greedy).texts, "wanted", test[0].target)
