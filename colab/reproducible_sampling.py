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
# Speculative sampling, as it is usually done, keeps the *distribution* of the text: run it with another draft, and the same
# seed writes something else. specjax's default rule, `match`, keeps the *text*. The token at position t is
#
# $$x_t = \arg\max_v\ \big(\ell_t(v) + g_t(v)\big)$$
#
# with the target's logits ℓ and Gumbel noise g that comes from the row's key and the position t alone. That is an exact
# sample of the softmax (the Gumbel-max trick), and nothing in it knows of a draft. The draft guesses with the same noise, so
# it often guesses right.
#
# **Runtime:** any; everything here runs on the checkpoints that ship.

# %%
import pathlib
import sys

if "google.colab" in sys.modules:
    # !git clone -q https://github.com/specjax/specjax
    # !pip install -q ./specjax
    checkpoints = pathlib.Path("specjax/checkpoints")
else:
    checkpoints = (
        next(p for p in pathlib.Path.cwd().joinpath("x").parents if (p / "checkpoints").is_dir())
        / "checkpoints"
    )

# %%
import specjax

target = specjax.load(checkpoints / "pycode" / "target")
draft = specjax.load(checkpoints / "pycode" / "draft")
ways = {
    "no draft": {},
    "draft, 2 guesses": {"draft": draft, "num_drafts": 2},
    "draft, 6 guesses": {"draft": draft, "num_drafts": 6},
    "prompt lookup": {"proposer": specjax.NGram(4)},
}
prompts = ["def main(", "import os\n", "class Node:"]
options = {"max_new_tokens": 48, "temperature": 1.0, "seed": 7}

# %% [markdown]
# ## One key, one text

# %%
texts = {
    name: specjax.generate(target, prompts, **options, **how).tokens for name, how in ways.items()
}
for name, tokens in texts.items():
    print(f"{name:<18} same as without a draft: {tokens == texts['no draft']}")

# %% [markdown]
# ## In a batch or alone
# A row's text does not depend on its neighbours either: each prompt has its own key.

# %%
seeds = [11, 12, 13]
together = specjax.generate(target, prompts, **{**options, "seed": seeds}, draft=draft)
alone = [
    specjax.generate(target, [p], **{**options, "seed": [s]}, draft=draft)
    for p, s in zip(prompts, seeds, strict=True)
]
print("alone = in a batch:", together.tokens == [one.tokens[0] for one in alone])

# %% [markdown]
# ## Rejection sampling beside it
# `Rejection()` is the rule of Leviathan et al. and Chen et al. It accepts a little more on a chain, is as exact in
# distribution, and gives another text for every draft.

# %%
for name, rule in (("match", specjax.Match()), ("rejection", specjax.Rejection())):
    found = [
        specjax.generate(target, prompts, rule=rule, **options, **how)
        for how in list(ways.values())[:3]
    ]
    alpha = found[2].stats.acceptance_rate
    same = all(out.tokens == found[0].tokens for out in found)
    print(
        f"{name:<10} exact: {found[0].exact}   one text for all drafts: {same}   alpha {alpha:.2f}"
    )

# %% [markdown]
# ## The auditor
# It holds a decoder to what it claims: greedy text, text of the same key, bits, and the distribution of the first tokens.

# %%
ids = [target.tokenizer.encode(prompt).ids for prompt in prompts]
proposer = specjax.DraftModel(draft.model, target.model.vocab_size, 4)
decoder = specjax.Decoder(target.model, proposer, specjax.Rejection(), target.eos, capacity=64)
params = specjax.Params(target.params, draft.params)
print(specjax.audit(decoder, params, ids, samples=256, max_new_tokens=16))
