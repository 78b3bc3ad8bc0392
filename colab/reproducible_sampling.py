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
# **Runtime:** any. The notebook uses only the checkpoints that ship with the repository.

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
    "no draft": {"proposer": "none"},
    "draft, 2 tokens": {"draft": draft, "num_drafts": 2},
    "draft, 6 tokens": {"draft": draft, "num_drafts": 6},
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
# The text of a row does not depend on the other rows of the batch either, because each row has its own key.

# %%
seeds = [11, 12, 13]
together = specjax.generate(target, prompts, **{**options, "seed": seeds}, draft=draft)
alone = [
    specjax.generate(target, [p], **{**options, "seed": [s]}, draft=draft)
    for p, s in zip(prompts, seeds, strict=True)
]
print("alone = in a batch:", together.tokens == [one.tokens[0] for one in alone])

# %% [markdown]
# ## Comparison with rejection sampling
# `Rejection()` is the rule of Leviathan et al. and Chen et al. On a chain it accepts slightly more draft tokens than
# `match`. It keeps the distribution just as exactly, but it gives another text for each draft.

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
# `specjax.audit` compares a decoder with plain decoding. Here it checks that greedy texts are equal, that the logits after
# equal texts agree in every bit, and that the first tokens have the same distribution. Under `match` it also checks that
# texts with the same key are equal.

# %%
ids = [target.tokenizer.encode(prompt).ids for prompt in prompts]
proposer = specjax.DraftModel(draft.model, target.model.vocab_size, 4)
decoder = specjax.Decoder(target.model, proposer, specjax.Rejection(), target.eos, capacity=64)
params = specjax.Params(target.params, draft.params)
print(specjax.audit(decoder, params, ids, samples=256, max_new_tokens=16))
