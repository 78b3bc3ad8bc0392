# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Medusa heads: drafts from the target's own hidden states
#
# Medusa needs no second model. A few small heads on the target's last hidden state draft the next tokens, with several
# candidates for each position. The candidates form a tree, which the target verifies in one pass. Each prompt of a batch can
# use its own heads, or none.
#
# **Runtime:** any. In Colab, first enter the URL of the repository that this notebook came from.

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
from specjax.training.jobs import medusa

steps = int(os.environ.get("SPECJAX_STEPS", "300"))
runs = pathlib.Path(os.environ.get("SPECJAX_RUNS", "runs"))
target = specjax.load(specjax.shipped("pycode/target"))

# %% [markdown]
# ## Fit heads
# The target is frozen. Whenever the job saves the heads, it also chooses the tree with the greatest expected accepted length
# on text that the target generates itself.

# %%
out = runs / "notebook-medusa"
arguments = {
    "target": specjax.shipped("pycode/target"),
    "data": pathlib.Path(specjax.__file__).parent,
    "pattern": "*.py",
    "out": out,
    "steps": steps,
    "warmup-steps": max(1, steps // 10),
    "num-heads": 3,
    "tree-nodes": 8,
    "sequence-length": 128,
    "batch-size": 8,
    "eval-batches": 2,
    "eval-every": max(1, steps // 2),
    "learning-rate": 2e-3,
    "written-sequences": 8,
}
medusa.main([str(word) for name, value in arguments.items() for word in (f"--{name}", value)])

# %% [markdown]
# ## The chosen tree
# The number on an edge is the acceptance rate of that draft token where its parent was accepted.

# %%
# %matplotlib inline
from specjax import plot, tree

heads = specjax.load_medusa(out / "model", target)
choices = heads.proposer.choices
figure = plot.tree(
    tree.from_choices(choices),
    (1.0, *heads.acceptance),
    ["pending", *(str(choice[-1] + 1) for choice in choices)],
)
figure

# %% [markdown]
# ## The same text, and an adapter for each prompt

# %%
prompts = ["def main(", "class Node:"]
plain = specjax.generate(target, prompts, proposer="none", max_new_tokens=32)
fast = specjax.generate(target, prompts, proposer=heads, max_new_tokens=32)
print(
    "the same tokens:", plain.tokens == fast.tokens, f"  tau {fast.stats.mean_accepted_length:.2f}"
)

bank = specjax.MedusaBank.create(
    {"python": heads}, capacity=4
)  # room for three more, without a new program
mixed = specjax.generate(
    target, prompts, proposer=bank, adapter=["python", None], max_new_tokens=32
)
print("the same tokens with heads for one prompt only:", plain.tokens == mixed.tokens)
