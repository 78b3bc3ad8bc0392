# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Distil a draft, and watch the accepted length rise
#
# A draft helps as much as the target accepts its tokens. The job `distill` trains a small model to imitate the target. During
# training it measures tau (tokens per pass of the target) with the real decoder. The result is a Hugging Face folder.
#
# **Runtime:** any. On a CPU the short run below takes a few minutes. A second run with more steps resumes where the first
# one stopped. In Colab, first enter the URL of the repository that this notebook came from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[train,plot] @ git+{REPOSITORY}@{RELEASE}"

# %%
import os
import pathlib

import specjax
from specjax.training.jobs import distill

steps = int(
    os.environ.get("SPECJAX_STEPS", "300")
)  # the first minutes of a run; the shipped draft took thousands
runs = pathlib.Path(os.environ.get("SPECJAX_RUNS", "runs"))
target = specjax.load(specjax.shipped("pycode/target"))

# %% [markdown]
# ## Train
# The training text is specjax's own source code. The target generates half of each batch. If the run is interrupted, the
# same command resumes from the last checkpoint. On the command line it is `specjax train distill --target ...`.

# %%
out = runs / "notebook-draft"
arguments = {
    "target": specjax.shipped("pycode/target"),
    "data": pathlib.Path(specjax.__file__).parent,
    "pattern": "*.py",
    "out": out,
    "steps": steps,
    "warmup-steps": max(1, steps // 10),
    "sampled-sequences": 32,
    "sequence-length": 128,
    "batch-size": 8,
    "eval-every": max(1, steps // 6),
    "eval-batches": 2,
    "eval-prompts": 16,
    "eval-tokens": 32,
    "learning-rate": 3e-3,
}
distill.main([str(word) for name, value in arguments.items() for word in (f"--{name}", value)])

# %% [markdown]
# ## Plot tau

# %%
import json

import matplotlib.pyplot as plt

lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
found = [(line["step"], line["tau"]) for line in lines if "tau" in line]
plt.plot(*zip(*found, strict=True), marker="o")
plt.xlabel("step")
plt.ylabel("tokens per pass of the target (tau)")
plt.show()

# %% [markdown]
# ## Use it
# The folder holds a Hugging Face model, which transformers, vLLM and others can load too.

# %%
draft = specjax.load(out / "model")
prompt = "def main("
plain = specjax.generate(target, prompt, proposer="none", max_new_tokens=48)
fast = specjax.generate(target, prompt, draft=draft, num_drafts=3, max_new_tokens=48)
print(prompt + fast.text[0])
print(
    "the same tokens:", plain.tokens == fast.tokens, f"  tau {fast.stats.mean_accepted_length:.2f}"
)
