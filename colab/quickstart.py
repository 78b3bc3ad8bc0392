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
# **Runtime:** a TPU (v5e-1, v6e-1) or a GPU with 16 GB, for Qwen3.5-4B. On a CPU, or without a network, the notebook uses the
# small model of Python code that comes with specjax. In Colab, first enter the URL of the repository that this notebook came
# from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[hub,chat,plot] @ git+{REPOSITORY}@{RELEASE}"

# %%
import jax

import specjax

accelerator = (
    jax.default_backend() != "cpu"
)  # False also works on an accelerator, and needs no network
print("jax", jax.__version__, "on", jax.devices()[0].device_kind)

# %% [markdown]
# ## Load a target and its drafter
# A target is a Hugging Face model folder (safetensors), or a name on the Hub. In bfloat16 Qwen3.5-4B takes 9 GB, which fit
# into the 16 GB of a v5e-1; in float32 they would not fit. Its folder brings a drafter: a layer of multi-token prediction
# (MTP), which `load_mtp` reads. The shipped target has none, so a smaller model drafts for it. Qwen3.5 thinks before it answers
# unless its chat template is told not to, and `chat_template_kwargs` passes that on.
#
# A drafter is a way to draft with its weights. These two draft chains of at most 8 tokens; `num_drafts` says how many of them
# are used. `generate(..., proposer="mtp")` and `generate(..., draft=draft)` make such drafters by themselves.

# %%
if accelerator:
    target = specjax.load("Qwen/Qwen3.5-4B", dtype="bfloat16")
    drafter = specjax.load_mtp(target, specjax.Chain, num_drafts=8)
    ask = {
        "messages": [{"role": "user", "content": "Write a Python class for a stack."}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
else:
    target = specjax.load(specjax.shipped("pycode/target"))
    draft = specjax.load(specjax.shipped("pycode/draft"))
    drafter = specjax.make_drafter(target, draft, num_drafts=8)
    ask = {"prompts": "def fibonacci(n):"}
print(f"target: {target.num_params / 1e6:.1f} M parameters; {drafter.name} drafts")

# %% [markdown]
# ## Generate, and compare
# `acceptance_rate` (α) is the share of the verified draft tokens that the target accepts. Draft tokens after a rejected one
# are not counted. `mean_accepted_length` (τ) is the number of tokens per pass of the target; it is 1 without speculation. In
# float32 the tokens are always the same. In bfloat16 a pass over five tokens rounds differently from one over one, so two
# tokens that are almost equally probable can change places.


# %%
options = {"max_new_tokens": 64, "temperature": 0.0}
plain = specjax.generate(target, **ask, **options, proposer="none")
fast = specjax.generate(target, **ask, **options, drafter=drafter, num_drafts=4)
print(fast.text[0])
print("\nthe same tokens:", fast.tokens == plain.tokens)
print(f"alpha {fast.stats.acceptance_rate:.2f}, tau {fast.stats.mean_accepted_length:.2f}")
print(
    f"passes of the target: {plain.stats.target_passes} without, {fast.stats.target_passes} with speculation"
)

# %% [markdown]
# The first call of each way compiles, which its figures leave out. Here is the speed of a second call. Drafting pays where a
# pass of the target takes long. With the small models on a CPU it takes about a millisecond, so there the draft model costs
# more than it saves.

# %%
for name, how in (
    ("plain", {"proposer": "none"}),
    ("drafter", {"drafter": drafter, "num_drafts": 4}),
):
    stats = specjax.generate(target, **ask, **options, **how).stats
    print(
        f"{name:<8} {stats.tokens_per_second:7.0f} tokens/s   tau {stats.mean_accepted_length:.2f}"
    )

# %% [markdown]
# Without any argument `generate` chooses by itself: in every step it drafts what promises the most tokens a second, or
# nothing. It measures what steps cost in its first call. `specjax.tune` writes such measurements to a file.
#
# ## How many draft tokens?
# Later draft tokens are accepted less often, and each one costs a little time. So τ grows more and more slowly with the
# number of draft tokens, and beyond some number the speed falls. The depth is data: all points of a line run one program.

# %%
import matplotlib.pyplot as plt

lookaheads = [1, 2, 4, 6, 8]
lookup = specjax.NGram(8)
for name, how in (("drafter", {"drafter": drafter}), ("prompt lookup", {"proposer": lookup})):
    outputs = [
        specjax.generate(target, **ask, **options, **how, num_drafts=gamma) for gamma in lookaheads
    ]
    taus = [output.stats.mean_accepted_length for output in outputs]
    plt.plot(lookaheads, taus, marker="o", label=name)
plt.xlabel("draft tokens per pass (γ)")
plt.ylabel("tokens per pass of the target (τ)")
plt.legend()
plt.show()

# %% [markdown]
# ## Sampling: one key, one text
# At any temperature the text depends on the seed and not on the draft. A new temperature or seed compiles nothing.

# %%
sampled = {**options, "temperature": 1.0}
for seed in (1, 2):
    texts = [
        specjax.generate(target, **ask, **sampled, **how, seed=seed).tokens
        for how in (
            {"proposer": "none"},
            {"drafter": drafter},
            {"drafter": drafter, "num_drafts": 2},
            {"proposer": lookup},
        )
    ]
    print(
        f"seed {seed}: {len(texts)} ways, all the same: {all(text == texts[0] for text in texts)}"
    )

# %% [markdown]
# ## Stream

# %%
for piece in specjax.generate(target, **ask, **options, drafter=drafter, stream=True):
    # A conversation of several turns would come as a list of pieces.
    print(piece, end="", flush=True)
