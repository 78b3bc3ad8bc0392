# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Drafts from documents
#
# In retrieval-augmented generation, in code and in forms, much of a text was written before. A *datastore* finds what followed
# the last tokens in a corpus. Its tokens lie sorted on the device, so a look-up costs little and no model drafts.
#
# **Runtime:** any. In Colab, first enter the URL of the repository that this notebook came from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[hub] @ git+{REPOSITORY}@{RELEASE}"

# %%
import pathlib

import specjax

target = specjax.load(specjax.shipped("pycode/target"))
options = {"max_new_tokens": 64, "temperature": 0.0}

# %% [markdown]
# ## A datastore of a code base
# The corpus is a room of specjax itself. `specjax datastore build` does the same on the command line.

# %%
corpus = sorted((pathlib.Path(specjax.__file__).parent / "rules").glob("*.py"))
store = specjax.Datastore.build(corpus, target)
print(f"{store.size} tokens of {len(corpus)} files, room for {store.capacity}")

prompt = corpus[0].read_text()[:160]
plain = specjax.generate(target, prompt, **options, proposer="none")
fast = specjax.generate(target, prompt, **options, drafter=store.drafter(target, num_drafts=4))
print("the same tokens:", plain.tokens == fast.tokens)
print(f"passes of the target: {plain.stats.target_passes} without, {fast.stats.target_passes} with")

# %% [markdown]
# ## The corpus is data
# Here the store learns what the target has just written. The arrays have the same shapes, so nothing compiles, and the next
# text that goes the same way takes fewer passes.

# %%
more = store.extended([prompt + plain.text[0]], target)
again = specjax.generate(target, prompt, **options, drafter=more.drafter(target, num_drafts=4))
print("the same tokens:", plain.tokens == again.tokens)
print(f"passes {again.stats.target_passes}, compiled in {again.stats.compile_seconds} s")

# %% [markdown]
# ## Documents of a request
# What was retrieved for a prompt can be passed with it. Prompt lookup then also drafts from these documents, which the target
# does not read: they change the speed and not the text.

# %%
document = prompt + plain.text[0]
for name, documents in (("without documents", None), ("with the right one", [document])):
    output = specjax.generate(
        target, prompt, **options, proposer="ngram", num_drafts=4, documents=documents
    )
    print(f"{name:<20} {output.stats.target_passes} passes", end="   ")
    print("the same tokens:", output.tokens == plain.tokens)
