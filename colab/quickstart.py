# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # specjax: the same text, faster
#
# A language model writes one token at a time. Here a cheap *proposer* guesses the next few, the model itself checks all of
# them in one pass, and what it would have said anyway is kept: the same text in fewer passes.
#
# **Runtime:** any. A CPU runs the small model of Python code that ships with the repository; on a TPU (v5e-1, v6e-1) or a
# T4 the last section loads Qwen3.

# %%
import pathlib
import sys

if "google.colab" in sys.modules:  # installs from the repository, and leaves Colab's jax alone
    # !git clone -q https://github.com/specjax/specjax
    # !pip install -q ./specjax
    checkpoints = pathlib.Path("specjax/checkpoints")
else:
    checkpoints = (
        next(p for p in pathlib.Path.cwd().joinpath("x").parents if (p / "checkpoints").is_dir())
        / "checkpoints"
    )

# %%
import jax

import specjax

print("jax", jax.__version__, "on", jax.devices()[0].device_kind)

# %% [markdown]
# ## Load a target and a draft
# Both are ordinary Hugging Face folders (safetensors). These two were trained by this project.

# %%
target = specjax.load(checkpoints / "pycode" / "target")
draft = specjax.load(checkpoints / "pycode" / "draft")
print(f"target {target.num_params / 1e6:.1f} M parameters, draft {draft.num_params / 1e6:.1f} M")

# %% [markdown]
# ## Generate, and compare
# `acceptance_rate` (α) is the share of guesses that the target confirms; `mean_accepted_length` (τ) is the number of tokens
# per pass of the target, 1 without speculation.

# %%
prompt = "def fibonacci(n):"
options = {"max_new_tokens": 64}
plain = specjax.generate(target, prompt, **options)
fast = specjax.generate(target, prompt, draft=draft, num_drafts=4, **options)
print(prompt + fast.text[0])
print("\nthe same tokens:", fast.tokens == plain.tokens)
print(f"alpha {fast.stats.acceptance_rate:.2f}, tau {fast.stats.mean_accepted_length:.2f}")
print(
    f"passes of the target: {plain.stats.target_passes} without, {fast.stats.target_passes} with speculation"
)

# %% [markdown]
# The first call of a kind compiles. Now both are warm:

# %%
for name, speculation in (
    ("plain", {}),
    ("draft", {"draft": draft}),
    ("prompt lookup", {"proposer": specjax.NGram()}),
):
    specjax.generate(target, prompt, **options, **speculation)
    stats = specjax.generate(target, prompt, **options, **speculation).stats
    print(
        f"{name:<14} {stats.tokens_per_second:7.0f} tokens/s   tau {stats.mean_accepted_length:.2f}"
    )

# %% [markdown]
# ## Stream

# %%
for piece in specjax.generate(target, "class Stack:", draft=draft, stream=True, **options):
    print(piece, end="", flush=True)

# %% [markdown]
# ## How many guesses?
# More guesses are more often wrong, and each costs a little. The best number is where the curve is highest.

# %%
import matplotlib.pyplot as plt

guesses = [1, 2, 4, 6, 8]
taus = {}
for name in ("draft", "prompt lookup"):
    taus[name] = []
    for gamma in guesses:
        how = (
            {"draft": draft, "num_drafts": gamma}
            if name == "draft"
            else {"proposer": specjax.NGram(gamma)}
        )
        taus[name].append(
            specjax.generate(target, prompt, **options, **how).stats.mean_accepted_length
        )
for name, tau in taus.items():
    plt.plot(guesses, tau, marker="o", label=name)
plt.xlabel("guesses per pass (γ)")
plt.ylabel("tokens per pass of the target (τ)")
plt.legend()
plt.show()

# %% [markdown]
# ## Sampling: one key, one text
# At any temperature the text depends on the seed alone, not on the draft.

# %%
for seed in (1, 2):
    texts = [
        specjax.generate(target, prompt, temperature=1.0, seed=seed, **options, **how).tokens
        for how in (
            {},
            {"draft": draft},
            {"draft": draft, "num_drafts": 2},
            {"proposer": specjax.NGram()},
        )
    ]
    print(
        f"seed {seed}: {len(texts)} ways, all the same: {all(text == texts[0] for text in texts)}"
    )

# %% [markdown]
# ## A bigger pair
# On an accelerator with a network, Qwen3-0.6B drafts for Qwen3-4B in bfloat16 (about 10 GB).

# %%
if jax.default_backend() == "cpu":
    print("no accelerator here: choose a TPU or GPU runtime to run this cell")
else:
    target = specjax.load("Qwen/Qwen3-4B", dtype="bfloat16")
    draft = specjax.load("Qwen/Qwen3-0.6B", dtype="bfloat16")
    messages = [{"role": "user", "content": "Write a haiku about speculation."}]
    for how in ({}, {"draft": draft}):
        specjax.generate(target, messages=messages, max_new_tokens=128, temperature=0.0, **how)
        out = specjax.generate(
            target, messages=messages, max_new_tokens=128, temperature=0.0, **how
        )
        print(
            out.text[0],
            f"\n{out.stats.tokens_per_second:.0f} tokens/s, tau {out.stats.mean_accepted_length:.2f}\n",
        )
