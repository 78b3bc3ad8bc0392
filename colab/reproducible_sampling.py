# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Same key, same tokens, with any draft or none
#
# Speculative sampling usually keeps only the *distribution* of the text: with another draft, the same seed gives another
# text. specjax's default rule, `match`, keeps the *text* itself. The token at position t is
#
# $$x_t = \arg\max_v\ \big(\ell_t(v) + g_t(v)\big)$$
#
# where ℓ are the target's logits, and g is Gumbel noise that depends only on the row's key and the position t. This is an
# exact sample from the softmax (the Gumbel-max trick), and it does not depend on the draft. The draft samples its tokens
# with the same noise, so they often equal the target's.
#
# **Runtime:** any. The notebook uses the smallest checkpoints that ship with specjax. In Colab, first enter the URL of the
# repository that this notebook came from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[hub] @ git+{REPOSITORY}@{RELEASE}"

# %%
import specjax

target = specjax.load(specjax.shipped("tiny/target"))
draft = specjax.load(specjax.shipped("tiny/draft"))
drafter = specjax.make_drafter(target, draft, num_drafts=6)
ways = {
    "no draft": {"proposer": "none"},
    "draft, 2 tokens": {"drafter": drafter, "num_drafts": 2},
    "draft, 6 tokens": {"drafter": drafter},
    "prompt lookup": {"proposer": specjax.NGram(4)},
}
prompts = ["def main(", "import os\n", "class Node:"]
options = {"max_new_tokens": 32, "temperature": 1.0}
seeds = [11, 12, 13]

# %% [markdown]
# ## One key, one text
# The first three ways need two programs, because the number of draft tokens is data, as are temperatures and seeds.

# %%
outputs = {
    name: specjax.generate(target, prompts, seed=seeds, **options, **how)
    for name, how in ways.items()
}
for name, output in outputs.items():
    same = output.tokens == outputs["no draft"].tokens
    print(f"{name:<18} same as without a draft: {same}   {output.stats.target_passes} passes")

# %% [markdown]
# ## In a batch or alone
# The text of a row does not depend on the other rows of the batch either, because each row has its own key.

# %%
alone = [
    specjax.generate(target, [p], seed=[s], **options, drafter=drafter).tokens[0]
    for p, s in zip(prompts, seeds, strict=True)
]
print("alone the same as in a batch:", alone == outputs["draft, 6 tokens"].tokens)

# %% [markdown]
# ## Comparison with rejection sampling
# `Rejection()` is the rule of Leviathan et al. and Chen et al. On a chain it accepts slightly more draft tokens than
# `match`. It keeps the distribution just as exactly, but it gives another text for each draft.

# %%
for name in ("match", "rejection"):
    found = [
        specjax.generate(target, prompts, seed=seeds, rule=name, **options, **ways[way])
        for way in ("draft, 2 tokens", "draft, 6 tokens")
    ]
    alpha, same = found[1].stats.acceptance_rate, found[0].tokens == found[1].tokens
    print(f"{name:<10} exact: {found[0].exact}   one text for both: {same}   alpha {alpha:.2f}")

# %% [markdown]
# `specjax.audit` checks all this for any target, proposer and rule, and the distribution as well: the notebook
# `write_a_drafter` shows the audit of a rule that wrongly claims to be exact.
