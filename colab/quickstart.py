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
# A language model generates one token per pass. In speculative decoding a cheap *proposer* drafts the next few tokens, and
# the model itself, the target, verifies all of them in one pass. It accepts the draft tokens that it would have generated
# anyway, so the text is the same and needs fewer passes.
#
# **Runtime:** any. On a CPU the notebook uses the small model of Python code that ships with the repository. On a TPU
# (v5e-1, v6e-1) or a T4 the last section also loads Qwen3.

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
# Both are Hugging Face model folders (safetensors). These two were trained by this project.

# %%
target = specjax.load(checkpoints / "pycode" / "target")
draft = specjax.load(checkpoints / "pycode" / "draft")
print(f"target {target.num_params / 1e6:.1f} M parameters, draft {draft.num_params / 1e6:.1f} M")

# %% [markdown]
# ## Generate, and compare
# `acceptance_rate` (α) is the share of the verified draft tokens that the target accepts. Draft tokens after a rejected one
# are not counted. `mean_accepted_length` (τ) is the number of tokens per pass of the target; it is 1 without speculation.

# %%
prompt = "def fibonacci(n):"
options = {"max_new_tokens": 64}
plain = specjax.generate(target, prompt, proposer="none", **options)
fast = specjax.generate(target, prompt, draft=draft, num_drafts=4, **options)
print(prompt + fast.text[0])
print("\nthe same tokens:", fast.tokens == plain.tokens)
print(f"alpha {fast.stats.acceptance_rate:.2f}, tau {fast.stats.mean_accepted_length:.2f}")
print(
    f"passes of the target: {plain.stats.target_passes} without, {fast.stats.target_passes} with speculation"
)

# %% [markdown]
# The first call with a new proposer compiles. So each way is called twice here, and the figures are from the second call:

# %%
for name, speculation in (
    ("plain", {"proposer": "none"}),
    ("draft", {"draft": draft, "num_drafts": 4}),
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
# ## How many draft tokens?
# Later draft tokens are accepted less often, and each one costs a little time. So τ grows more and more slowly with the
# number of draft tokens, and beyond some number the speed falls. `specjax bench` measures the speed.

# %%
import matplotlib.pyplot as plt

lookaheads = [1, 2, 4, 6, 8]
taus = {}
for name in ("draft", "prompt lookup"):
    taus[name] = []
    for gamma in lookaheads:
        how = (
            {"draft": draft, "num_drafts": gamma}
            if name == "draft"
            else {"proposer": specjax.NGram(gamma)}
        )
        taus[name].append(
            specjax.generate(target, prompt, **options, **how).stats.mean_accepted_length
        )
for name, tau in taus.items():
    plt.plot(lookaheads, tau, marker="o", label=name)
plt.xlabel("draft tokens per pass (γ)")
plt.ylabel("tokens per pass of the target (τ)")
plt.legend()
plt.show()

# %% [markdown]
# ## Sampling: one key, one text
# At any temperature the text depends on the seed and not on the draft.

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
# If there is an accelerator and a network, this cell loads Qwen3-4B as the target and Qwen3-0.6B as the draft, both in
# bfloat16 (about 10 GB).

# %%
if jax.default_backend() == "cpu":
    print("no accelerator here: choose a TPU or GPU runtime to run this cell")
else:
    target = specjax.load("Qwen/Qwen3-4B", dtype="bfloat16")
    draft = specjax.load("Qwen/Qwen3-0.6B", dtype="bfloat16")
    messages = [{"role": "user", "content": "Write a haiku about speculation."}]
    for how in ({"proposer": "none"}, {"draft": draft}):
        specjax.generate(target, messages=messages, max_new_tokens=128, temperature=0.0, **how)
        out = specjax.generate(
            target, messages=messages, max_new_tokens=128, temperature=0.0, **how
        )
        print(
            out.text[0],
            f"\n{out.stats.tokens_per_second:.0f} tokens/s, tau {out.stats.mean_accepted_length:.2f}\n",
        )
